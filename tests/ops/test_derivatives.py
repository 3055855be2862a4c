"""Derivatives of the ops, in and out of ``jax.jit``: those of the reference, whatever computes the values."""

import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
from mla_attn import steps
from mla_attn.dispatch import compiling_for
from mla_attn.metadata import RaggedMetadata
from mla_attn.ops import merge_states, mla_attention, ragged_attention
from mla_attn.ops.grouped_matmul import grouped_matmul
from mla_attn.support import H200

every_implementation = pytest.mark.parametrize("implementation", ["xla", "reference"])


def loss_of(op, weights):
    """A number of all that an op returns, rows that see no key left out of the log-sum-exps."""

    def loss(*arrays):
        out, lse = op(*arrays)
        return (out * weights).sum() + jnp.where(jnp.isneginf(lse), 0.0, lse).sum()

    return loss


def check(loss, arrays, step=1e-2):
    """Of every array along a random direction, both modes against a central difference, in and out of ``jit``."""
    rng = np.random.default_rng(0)
    directions = [
        jnp.where(jnp.isfinite(x), rng.standard_normal(x.shape, np.float32), 0.0) for x in arrays
    ]  # what is NaN stays as it is

    def along(ts):
        return loss(*(x + t * direction for x, t, direction in zip(arrays, ts, directions, strict=True)))

    value, forward = jax.jit(along), jax.jit(lambda t: jax.jvp(along, (jnp.zeros(len(arrays)),), (t,))[1])
    grad = jax.grad(loss, argnums=tuple(range(len(arrays))))
    eager = grad(*arrays)
    for compiled, x in zip(jax.jit(grad)(*arrays), eager, strict=True):
        np.testing.assert_allclose(compiled, x, rtol=1e-4, atol=1e-5)
    for t, x, direction in zip(jnp.eye(len(arrays)), eager, directions, strict=True):
        assert jnp.isfinite(x).all()
        want = (value(step * t) - value(-step * t)) / (2 * step)
        np.testing.assert_allclose((x * direction).sum(), want, rtol=2e-2, atol=2e-3)
        np.testing.assert_allclose(forward(t), want, rtol=2e-2, atol=2e-3)


@every_implementation
def test_mla_attention(implementation):
    """Of queries and cached rows; what nobody reads holds NaN, and changes nothing."""
    batch = helpers.poisoned_batch(0, kv_lens=[5, 0, 9], q_lens=[1, 1, 2], heads=2, kv_lora_rank=8, qk_rope_head_dim=4)
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(batch.q_latent.shape, np.float32))

    def op(q_latent, q_rope, data):
        pool = jax.tree.unflatten(jax.tree.structure(batch.pool), [data])
        options = {"return_lse": True, "implementation": implementation}
        return mla_attention(q_latent, q_rope, pool, batch.metadata, batch.spec, **options)

    check(loss_of(op, weights), (batch.q_latent, batch.q_rope, batch.pool.data))


@every_implementation
def test_ragged_attention(implementation):
    rng = np.random.default_rng(0)
    arrays = tuple(jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((4, 2, 6), (7, 1, 6), (7, 1, 5)))
    metadata = RaggedMetadata(
        q_starts=jnp.asarray([0, 2], jnp.int32),
        q_lens=jnp.asarray([2, 1], jnp.int32),
        kv_starts=jnp.asarray([0, 4], jnp.int32),
        kv_lens=jnp.asarray([4, 3], jnp.int32),
        max_q_len=2,
        max_kv_len=4,
    )
    op = functools.partial(
        ragged_attention, metadata=metadata, scale=0.4, soft_cap=2.0, return_lse=True, implementation=implementation
    )
    check(loss_of(op, jnp.asarray(rng.standard_normal((4, 2, 5), np.float32))), arrays)


@every_implementation
def test_grouped_matmul(implementation):
    rng = np.random.default_rng(0)
    rows, matrices, weights = (jnp.asarray(rng.standard_normal(s, np.float32)) for s in ((5, 3), (2, 3, 4), (5, 4)))
    sizes = jnp.asarray([2, 2], jnp.int32)

    def loss(rows, matrices):
        return (grouped_matmul(rows, matrices, sizes, implementation=implementation) * weights).sum()

    check(loss, (rows, matrices))


def test_merge_states():
    """An empty partial holds NaN, which no derivative sees."""
    rng = np.random.default_rng(0)
    outs, lses = ([rng.standard_normal(s, np.float32) for _ in range(3)] for s in ((3, 2, 4), (3, 2)))
    outs[1][0], lses[1][0] = np.nan, -np.inf  # one of three is empty
    for out, lse in zip(outs, lses, strict=True):
        out[2], lse[2] = np.nan, -np.inf  # all are
    weights, sinks = jnp.asarray(rng.standard_normal((3, 2, 4), np.float32)), jnp.asarray([0.3, -0.5])
    outs, lses = jnp.asarray(np.stack(outs)), jnp.asarray(np.stack(lses))
    loss = loss_of(lambda outs, lses, sinks: merge_states([*outs], [*lses], sinks=sinks), weights)
    check(functools.partial(loss, outs), (lses, sinks))
    grad = jax.grad(loss)(outs, lses, sinks)
    assert ((grad == 0) == jnp.isneginf(lses)[..., None]).all()


def test_through_a_step():
    batch = helpers.poisoned_batch(0, kv_lens=[5], q_lens=[1], heads=2, kv_lora_rank=8, qk_rope_head_dim=4, poison=0.0)

    def loss(q_latent, implementation):
        rows = jnp.ones((1, 8)), jnp.ones((1, 4))
        pool = jax.tree.map(jnp.copy, batch.pool)
        arrays = (q_latent, batch.q_rope, *rows, pool, batch.metadata, batch.spec)
        return (steps.decode(*arrays, implementation=implementation)[0] ** 2).sum()

    got, want = (jax.grad(loss)(batch.q_latent, name) for name in ("xla", "reference"))
    assert jnp.abs(want).sum() > 0
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("step", ["prefill", "extend"])
def test_through_expanded_steps(step):
    """The prefix is read by chunks, as many as it has; pages that nobody holds are NaN."""
    batch = helpers.poisoned_batch(0, kv_lens=[7, 2], q_lens=[2, 2], heads=2, kv_lora_rank=8, qk_rope_head_dim=4)
    rng = np.random.default_rng(1)
    shapes = {"q": (4, 2, 10), "k": (4, 2, 10), "v": (4, 2, 5), "w_uk": (2, 6, 8), "w_uv": (2, 5, 8)}
    q, k, v, w_uk, w_uv = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes.values())
    weights = jnp.asarray(rng.standard_normal((4, 2, 5), np.float32))
    rows = jnp.ones((4, 8)), jnp.ones((4, 4))

    flat, unravel = jax.flatten_util.ravel_pytree((q, k, v, *((w_uk, w_uv) if step == "extend" else ())))

    def loss(flat):
        q, k, v, *expand = unravel(flat)
        pool = jax.tree.map(jnp.copy, batch.pool)
        arrays = (q, k, v, *rows, *expand, pool, batch.metadata, batch.spec)
        chunks = {"chunk_size": 3} if expand else {}
        return (getattr(steps, step)(*arrays, implementation="xla", **chunks)[0] * weights).sum()

    check(loss, (flat,), step=1e-3)


@pytest.mark.parametrize("op", ["mla_attention", "grouped_matmul"])
def test_kernels_have_none(op):
    """They say so, and what has one; a program that does not ask for it is none the worse."""
    sizes = {"heads": 16, "kv_lora_rank": 256, "qk_rope_head_dim": 64, "page_size": 64, "dtype": jnp.bfloat16}
    batch = helpers.poisoned_batch(0, kv_lens=[5, 70], q_lens=[1, 1], **sizes)
    matrices = jnp.ones((1, 64, 64), jnp.bfloat16)

    def loss(x):
        if op == "mla_attention":
            out = mla_attention(x, batch.q_rope, batch.pool, batch.metadata, batch.spec, implementation="mosaic_gpu")
        else:
            out = grouped_matmul(x, matrices, jnp.asarray([3], jnp.int32), implementation="mosaic_gpu")
        return out.astype(jnp.float32).sum()

    x = batch.q_latent if op == "mla_attention" else jnp.ones((8, 64), jnp.bfloat16)
    with compiling_for(H200):
        assert jax.eval_shape(loss, x).shape == ()
        with pytest.raises(
            NotImplementedError, match=f"{op} has no derivative by mosaic_gpu: use implementation='xla'"
        ):
            jax.eval_shape(jax.grad(loss), x)
