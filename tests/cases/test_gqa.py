"""C07, C08, C10, C17, C20, C21, C22 and C23 for ``gqa_attention``; C05, C14 and C15 are with the pool and the op."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
from layouts import LAYOUTS
from mla_attn import metadata as build
from mla_attn import steps
from mla_attn.buckets import backend_compiles
from mla_attn.cache import KVPool, write_kv
from mla_attn.checks import INT32_MAX
from mla_attn.ops import gqa_attention, merge_states
from mla_attn.specs import GQASpec
from ops.batches import decode_rows

SPEC = GQASpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c07_no_index_of_elements(layout):
    """Of a pool of more than 2 ** 32 elements the programs see nothing whose indices would need more than 32 bits, and
    the step that is given it writes in place (C22)."""
    spec = GQASpec(num_heads=8, num_kv_heads=8, head_dim=128, scale=1.0)
    sizes = {"num_layers": 1, "num_pages": 2**18, "page_size": 16, "spec": spec, "layout": layout}
    pool = jax.eval_shape(lambda: KVPool.create(**sizes))
    assert sum(x.size for x in jax.tree.leaves(pool)) > 2**32
    metadata = build.for_target_verify(ints([3, 2**18 - 1]), ints(18), num_tokens=2, page_size=16)
    assert metadata.slots.tolist() == [(2**18 - 1) * 16 + 2, (2**18 - 1) * 16 + 3]
    rows = [jax.ShapeDtypeStruct((2, 8, 128), jnp.bfloat16)] * 3
    step = jax.jit(lambda pool, m, *rows: steps.gqa_target_verify(*rows, pool, m, spec), donate_argnums=0)
    compiled = step.lower(pool, metadata, *rows).compile()
    shapes = [[int(n) for n in shape.split(",")] for shape in set(re.findall(r"\w+\[([\d,]+)\]", compiled.as_text()))]
    assert all(max(shape) <= INT32_MAX for shape in shapes)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * sum(x.size for x in jax.tree.leaves(pool))
    assert memory.temp_size_in_bytes < 2**24


def test_c08_rows_without_keys():
    """Requests of 0, 1 and 65 keys: 0 and -inf, the one value, the oracle's; merging the first changes no bit."""
    batch = helpers.kv_batch(0, kv_lens=[0, 1, 65], q_lens=[1, 1, 1], page_size=64, heads=4, kv_heads=2, head_dim=16)
    out, lse = gqa_attention(batch.q, batch.pool, batch.metadata, batch.spec, return_lse=True)
    want, want_lse, v_max = batch.expected()
    helpers.assert_attention_close(out, lse, want, want_lse, visible_v_max=v_max, dtype="float32")
    assert (out[0] == 0).all() and np.isneginf(lse[0]).all()
    value = batch.pool.v[batch.metadata.page_table[1, 0], 0]
    assert (out[1] == jnp.repeat(value, 2, axis=0)).all()
    other = jnp.asarray(np.random.default_rng(1).standard_normal(out.shape, np.float32)), lse.at[0].set(0.5)
    merged = merge_states([out, other[0]], [lse, other[1]])
    assert np.asarray(merged[0][0]).tobytes() == np.asarray(other[0][0]).tobytes()


@pytest.mark.parametrize("heads, kv_heads", [(32, 8), (6, 1), (7, 7), (20, 4)])
def test_c10_heads(heads, kv_heads):
    """A KV head and its queries alone give what they give beside others."""
    batch = helpers.kv_batch(2, kv_lens=[65, 30], q_lens=[1, 4], heads=heads, kv_heads=kv_heads, head_dim=16)
    out, lse = gqa_attention(batch.q, batch.pool, batch.metadata, batch.spec, return_lse=True)
    assert out.shape == batch.out_shape
    group, spec = heads // kv_heads, dataclasses.replace(batch.spec, num_heads=heads // kv_heads, num_kv_heads=1)
    for kv_head in (0, kv_heads - 1):
        own = slice(kv_head * group, (kv_head + 1) * group)
        pool = jax.tree.map(lambda x, h=kv_head: x[:, :, h : h + 1], batch.pool)
        got, got_lse = gqa_attention(batch.q[:, own], pool, batch.metadata, spec, return_lse=True)
        np.testing.assert_allclose(got, out[:, own], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got_lse, lse[:, own], rtol=1e-5, atol=1e-6)


def test_c17_past_the_end():
    """Of four drafts at 62 to 65 of a longest request of 64 two are written, in their own page."""
    pool = KVPool.create(num_layers=1, num_pages=8, page_size=16, spec=SPEC, dtype="float32")
    metadata = build.for_target_verify(
        ints([1, 2, 3, 4], [5, 6, 7, 0]), ints(62, -1), num_tokens=4, page_size=16, max_len=64
    )
    rows = jnp.ones((8, 2, 16))
    written = (write_kv(pool, rows, rows, metadata.slots).k != 0).any(axis=(2, 3)).ravel()
    assert np.flatnonzero(written).tolist() == [4 * 16 + 14, 4 * 16 + 15] and metadata.kv_lens.tolist() == [64, 0]


@functools.partial(jax.jit, static_argnames="spec", compiler_options=helpers.OPTIMIZED)
def promised(q, pool, metadata, spec):
    return gqa_attention(q, pool, metadata, spec, return_lse=True, batch_invariant=True)


def test_c20_batch_mates():
    """A request of 1100 keys alone, beside others, and its row of a verify call as a decode row: equal bits."""
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": jnp.dtype("bfloat16")}
    batch = helpers.kv_batch(3, kv_lens=[700, 1100, 17], q_lens=[4, 4, 4], **sizes)
    want = [np.asarray(x)[4:8] for x in promised(batch.q, batch.pool, batch.metadata, batch.spec)]
    for j, requests in ((0, [1]), (2, [1]), (3, [2, 0, 1])):
        alone = decode_rows(batch, j, requests)
        got = promised(alone.q, alone.pool, alone.metadata, alone.spec)
        assert [np.asarray(x)[-1].tobytes() for x in got] == [x[j].tobytes() for x in want]


def test_c21_sinks_or_none():
    """A program each, whatever the lengths, the sinks and the kind of number that the scale is."""
    pool = KVPool.create(num_layers=1, num_pages=8, page_size=16, spec=SPEC, dtype="float32")

    @functools.partial(jax.jit, static_argnames="spec")
    def decode(pool, table, lens, sinks, *, spec):
        metadata = build.for_decode(table, lens, page_size=16)
        return gqa_attention(jnp.ones((2, 4, 16)), pool, metadata, spec, sinks=sinks)

    rng = np.random.default_rng(4)

    def run(sinks, scale=0.25):
        table, lens = rng.integers(8, size=(2, 4), dtype=np.int32), rng.integers(65, size=2, dtype=np.int32)
        given = rng.standard_normal(4).astype(np.float32) if sinks else None
        spec = GQASpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=scale)
        return decode(pool, table, lens, given, spec=spec)

    backend_compiles()
    run(True), run(False)
    before = backend_compiles()
    for i in range(60):
        run(bool(i % 2), np.float32(0.25) if i % 3 else 0.25)
    assert backend_compiles() == before and decode._cache_size() == 2


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 192, 256])
def test_c23_head_dims(head_dim):
    """Each is served and right; pages and dims that the pool has not are an error that names them."""
    page = {64: 1, 72: 16, 80: 48, 96: 64}.get(head_dim, 4)
    batch = helpers.kv_batch(5, kv_lens=[65], q_lens=[1], heads=4, kv_heads=2, head_dim=head_dim, page_size=page)
    out, lse = gqa_attention(batch.q, batch.pool, batch.metadata, batch.spec, return_lse=True, implementation="xla")
    want, want_lse, v_max = batch.expected()
    helpers.assert_attention_close(out, lse, want, want_lse, visible_v_max=v_max, dtype="float32")
    with pytest.raises(ValueError, match=f"head_dim={head_dim}, .* but spec has .* head_dim={head_dim + 1}"):
        spec = dataclasses.replace(batch.spec, head_dim=head_dim + 1)
        gqa_attention(jnp.pad(batch.q, [(0, 0), (0, 0), (0, 1)]), batch.pool, batch.metadata, spec)
