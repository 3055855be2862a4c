"""The ops inside ``jax.shard_map`` over two CPU devices, with and without JAX's check of what varies over the mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import helpers
from mla_attn import steps
from mla_attn.metadata import RaggedMetadata, for_extend
from mla_attn.ops import merge_states, mla_attention, ragged_attention
from mla_attn.ops.grouped_matmul import grouped_matmul
from ops.lanes import shrink

HEADS = P(None, "heads")
every_check = pytest.mark.parametrize("check_vma", [False, True])
both = pytest.mark.parametrize("implementation", ["xla", "reference"])


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((2,), ("heads",), axis_types=(kind,), devices=jax.devices("cpu")[:2])


def sharded(function, in_specs, out_specs, check_vma):
    return jax.jit(jax.shard_map(function, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma))


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def assert_near(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@both
@every_check
@pytest.mark.parametrize("max_lanes", [1, 256])
def test_mla_attention_over_heads(implementation, check_vma, max_lanes, monkeypatch):
    """Every device attends with its heads over the same pool; one lane, and several that are merged."""
    from mla_attn.ops import mla

    shrink(monkeypatch, mla, block_keys=8, max_lanes=max_lanes)
    batch = helpers.poisoned_batch(0, kv_lens=[9, 0, 30], q_lens=[2, 1, 3], heads=4)

    def attend(q_latent, q_rope, pool, metadata):
        spec = dataclasses.replace(batch.spec, num_heads=q_latent.shape[1])
        return mla_attention(q_latent, q_rope, pool, metadata, spec, return_lse=True, implementation=implementation)

    arrays = batch.q_latent, batch.q_rope, batch.pool, batch.metadata
    run = sharded(attend, (HEADS, HEADS, P(), P()), (HEADS, HEADS), check_vma)
    assert_near(run(*arrays), attend(*arrays))


@every_check
def test_mla_attention_over_pages(check_vma):
    """Every device attends over a pool of its own with the same queries, and the partials are merged."""
    batches = [helpers.poisoned_batch(seed, kv_lens=[9, 17], q_lens=[1, 2], num_pages=9) for seed in range(2)]
    q_latent, q_rope = batches[0].q_latent, batches[0].q_rope
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *((b.pool, b.metadata) for b in batches))
    spec = batches[0].spec

    def attend(q_latent, q_rope, pool_and_metadata):
        pool, metadata = jax.tree.map(lambda x: x[0], pool_and_metadata)
        part = mla_attention(q_latent, q_rope, pool, metadata, spec, return_lse=True, implementation="xla")
        outs, lses = (jax.lax.all_gather(x, "heads") for x in part)
        return jax.tree.map(lambda x: x[None], merge_states(list(outs), list(lses)))

    got = sharded(attend, (P(), P(), P("heads")), P("heads"), check_vma)(q_latent, q_rope, stacked)
    parts = [mla_attention(q_latent, q_rope, b.pool, b.metadata, spec, return_lse=True) for b in batches]
    want = merge_states(*map(list, zip(*parts, strict=True)))
    for device in range(2):
        assert_near(jax.tree.map(lambda x, device=device: x[device], got), want)


@both
@every_check
def test_ragged_attention_over_heads(implementation, check_vma):
    metadata = RaggedMetadata(
        q_starts=jnp.asarray([0, 3], jnp.int32),
        q_lens=jnp.asarray([3, 1], jnp.int32),
        kv_starts=jnp.asarray([0, 9], jnp.int32),
        kv_lens=jnp.asarray([9, 4], jnp.int32),
        max_q_len=3,
        max_kv_len=9,
    )
    arrays = random(0, 5, 4, 8), random(1, 13, 2, 8), random(2, 13, 2, 6), metadata

    def attend(*arrays):
        return ragged_attention(*arrays, scale=0.3, return_lse=True, implementation=implementation)

    run = sharded(attend, (HEADS, HEADS, HEADS, P()), (HEADS, HEADS), check_vma)
    assert_near(run(*arrays), attend(*arrays))


@every_check
@pytest.mark.parametrize("mode", ["prefill", "extend", "absorbed_extend"])
def test_prompts_over_heads(mode, check_vma):
    """Write, attend, also to a cached prefix; the pool stays the same on every device."""
    batch = helpers.poisoned_batch(0, kv_lens=[12, 3], q_lens=[3, 1], heads=4, poison=0.0)
    prefix = [0, 0] if mode == "prefill" else [9, 2]
    lens, rows = jnp.asarray(prefix, jnp.int32), jnp.asarray([3, 1], jnp.int32)
    metadata = for_extend(batch.metadata.page_table, lens + rows, rows, max_q_len=3, page_size=4)
    rank, rope = batch.spec.kv_lora_rank, batch.spec.qk_rope_head_dim
    latent, fresh = (random(0, 6, rank), random(1, 6, rope)), (random(2, 6, 4, 8 + rope), random(3, 6, 4, 8 + rope))
    weights = (random(4, 4, 8, rank), random(5, 4, 6, rank)) if mode == "extend" else ()
    queries = (*fresh, random(6, 6, 4, 6)) if mode != "absorbed_extend" else (batch.q_latent, batch.q_rope)

    def step(queries, latent, weights, pool, metadata):
        spec = dataclasses.replace(batch.spec, num_heads=queries[0].shape[1])
        out, _ = getattr(steps, mode)(*queries, *latent, *weights, pool, metadata, spec)
        return out

    arrays = queries, latent, weights
    run = sharded(step, (HEADS, P(), P("heads"), P(), P()), HEADS, check_vma)
    got = run(*arrays, batch.pool, metadata)
    assert_near(got, step(*arrays, jax.tree.map(jnp.copy, batch.pool), metadata))


@both
@every_check
def test_grouped_matmul_over_columns(implementation, check_vma):
    arrays = random(0, 6, 8), random(1, 3, 8, 4), jnp.asarray([2, 0, 3], jnp.int32)

    def multiply(*arrays):
        return grouped_matmul(*arrays, implementation=implementation)

    run = sharded(multiply, (P(), P(None, None, "heads"), P()), P(None, "heads"), check_vma)
    assert_near(run(*arrays), multiply(*arrays))


def test_explicit_axes_are_refused():
    """Sharding in types would need one for every intermediate: ``jax.shard_map`` has none of them."""
    batch = helpers.poisoned_batch(0, kv_lens=[9], q_lens=[1])
    explicit = mesh(AxisType.Explicit)
    q_latent, q_rope = (jax.device_put(x, NamedSharding(explicit, HEADS)) for x in (batch.q_latent, batch.q_rope))
    attend = jax.jit(lambda *q: mla_attention(*q, batch.pool, batch.metadata, batch.spec))
    with jax.set_mesh(explicit), pytest.raises(NotImplementedError, match=r"mla_attention .* call it inside jax.shard"):
        attend(q_latent, q_rope)
