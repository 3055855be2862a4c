"""Skip-softmax: key tiles that calls with ``skip_threshold`` leave out, and how far from exact the results may be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.cache import KVPool, LatentPool
from mla_attn.metadata import RaggedMetadata, for_target_verify
from mla_attn.ops import gqa, gqa_attention, mla, mla_attention, ragged, ragged_attention
from mla_attn.specs import GQASpec, MLASpec
from ops.lanes import shrink

OPS = {"mla_attention": mla, "gqa_attention": gqa, "ragged_attention": ragged}
PAGE = 16


def attend(op, q, k, v, kv_lens, **options):
    """``(out, lse)`` of queries [B, S, H, D] over keys [B, M, K, D] and values [B, M, K, V], the last rows of each
    request's ``kv_lens`` keys, by any op; M is a number of whole pages."""
    (batch, rows, heads, dim), (_, room, kv_heads, v_dim) = q.shape, v.shape
    q, lens = q.reshape(batch * rows, heads, dim), jnp.asarray(kv_lens, jnp.int32)
    q_lens, options = jnp.minimum(lens, rows), {**options, "return_lse": True}
    if op == "ragged_attention":
        k, v = (x.reshape(batch * room, kv_heads, -1) for x in (k, v))
        each = jnp.arange(batch, dtype=jnp.int32)
        places = {"q_starts": each * rows, "q_lens": q_lens, "kv_starts": each * room, "kv_lens": lens}
        metadata = RaggedMetadata(**places, max_q_len=rows, max_kv_len=room)
        return ragged_attention(q, k, v, metadata, scale=1.0, **options)
    pages = room // PAGE
    table = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
    metadata = for_target_verify(table, lens - q_lens, q_lens=q_lens, num_tokens=rows, page_size=PAGE)
    sizes = {"num_layers": 1, "num_pages": batch * pages, "page_size": PAGE, "dtype": q.dtype}
    if op == "gqa_attention":
        spec = GQASpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=v_dim, scale=1.0)
        k, v = (x.reshape(batch * pages, PAGE, kv_heads, -1) for x in (k, v))
        pool = dataclasses.replace(KVPool.create(spec=spec, **sizes), k=k, v=v)
        return gqa_attention(q, pool, metadata, spec, **options)
    # Rope channels hold the key, latent channels the value, which no query sees.
    spec = MLASpec(num_heads=heads, kv_lora_rank=v_dim, qk_rope_head_dim=dim, scale=1.0)
    data = jnp.concatenate([v, k], axis=-1).reshape(batch * pages, PAGE, v_dim + dim)
    pool = dataclasses.replace(LatentPool.create(spec=spec, **sizes), data=data)
    return mla_attention(jnp.zeros((*q.shape[:2], v_dim), q.dtype), q, pool, metadata, spec, **options)


@pytest.fixture(params=[1, 256], ids=["one lane", "lanes"])
def small(request, monkeypatch):
    """Tiles of 64 keys."""
    for module in OPS.values():
        shrink(monkeypatch, module, block_keys=64, max_lanes=request.param)


def plateau(first, others, dtype=jnp.float32):
    """Queries, keys and values of one row over 256 keys: scores 0 and values ``first`` in the first 64, -6 and
    ``others`` in the rest."""
    near = np.arange(256) < 64
    k, v = np.where(near, 0.0, -6.0), np.where(near, first, others)
    return jnp.ones((1, 1, 1, 1), dtype), *(jnp.asarray(x, dtype).reshape(1, 256, 1, 1) for x in (k, v))


@pytest.mark.parametrize("op", OPS)
def test_tiles_that_are_left_out(monkeypatch, op):
    """At a threshold of 1 the limit is ln(1 / 256) = -5.5, at 0.01 it is -10.2; the scores are -6."""
    shrink(monkeypatch, OPS[op], block_keys=64, max_lanes=1)
    exact, first_tile = (1.0147627, 4.1662918), (1.0, 4.1588831)
    for threshold, want in ((None, exact), (0.01, exact), (1.0, first_tile), (1.1, first_tile), (256.0, exact)):
        got = attend(op, *plateau(1.0, 3.0), [256], implementation="xla", skip_threshold=threshold)
        np.testing.assert_allclose([x.item() for x in got], want, rtol=1e-6, err_msg=str(threshold))
    out, _ = attend(op, *plateau(1.0, 1e30), [256], implementation="xla", skip_threshold=1.0)
    assert out.item() == 1  # their values have no part in it
    out, lse = attend(op, *plateau(1.0, 3.0), [256], implementation="reference", skip_threshold=1.0)
    np.testing.assert_allclose((out.item(), lse.item()), exact, rtol=1e-6)  # allowed, not obliged


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("f", [0.01, 0.1, 0.5])
def test_bound(small, op, f):
    """336 requests a case, of lengths up to 512, whose tiles lie below and above the limit."""
    kv_heads = 1 if op == "mla_attention" else 2

    @functools.partial(jax.jit, static_argnames="skip_threshold")
    def run(q, k, v, kv_lens, skip_threshold):
        return attend(op, q, k, v, kv_lens, implementation="xla", skip_threshold=skip_threshold)

    left_out = 0
    for seed in range(6):
        rng = np.random.default_rng([seed, round(100 * f)])
        q, k = rng.standard_normal((56, 2, 4, 8)), rng.standard_normal((56, 512, kv_heads, 8)) * 0.1
        v, kv_lens = rng.standard_normal((56, 512, kv_heads, 4)), rng.integers(0, 513, 56)
        q[..., 0] = rng.choice([1, 0.5], q.shape[:-1], p=[0.8, 0.2])  # some rows need tiles that others do not
        levels = np.log(f / 512) + rng.choice([2, -0.5, -2], (56, 8, kv_heads))
        k[..., 0] += np.repeat(levels, 64, axis=1)
        k[:, rng.integers(0, 64), :, 0] = 0  # a key that outweighs whole tiles
        arrays = (*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), kv_lens)
        (exact, exact_lse), (out, lse) = (
            (np.asarray(x, np.float64) for x in run(*arrays, skip_threshold=threshold)) for threshold in (None, f)
        )
        seen = np.where((np.arange(512) < kv_lens[:, None])[:, :, None, None], np.abs(v), 0).max(axis=(1, 3))
        most = np.repeat(np.repeat(seen, 4 // kv_heads, axis=1), 2, axis=0)[:, :, None]
        rounding = 1e-5
        assert (np.abs(out - exact) <= 2 * f / (1 + f) * most + rounding).all()
        empty = np.isneginf(exact_lse)
        assert np.array_equal(empty, np.isneginf(lse))
        missing = exact_lse[~empty] - lse[~empty]
        assert (missing >= -rounding).all() and (missing <= np.log1p(f) + rounding).all()
        left_out += (missing > 2 * rounding).sum()
    assert left_out > 20  # or nothing was tested


@pytest.mark.parametrize("op", OPS)
def test_rows_with_nan_stay_nan(small, op):
    """A NaN score compares as larger than nothing, so that its tile looks like one to be left out."""
    q, k, v = plateau(1.0, 3.0)
    for key in (3, 200):
        for part in attend(op, q, k.at[0, key].set(jnp.nan), v, [256], implementation="xla", skip_threshold=1.0):
            assert np.isnan(part).all(), key


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("wrong", [0, -1.0, np.nan, np.inf, True, "1", 1e-46])
def test_errors(unchecked, op, wrong):
    with pytest.raises(ValueError, match=f"skip_threshold={wrong!r} must be a finite number above 0"):
        jax.eval_shape(lambda *arrays: attend(op, *arrays, [256], skip_threshold=wrong), *plateau(1.0, 3.0))
