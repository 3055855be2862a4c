"""The steps of grouped-query attention, and windowed pools under them: what is written, seen, and held."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
import oracle
from mla_attn import metadata as build
from mla_attn import steps
from mla_attn.cache import KVPool, PageAllocator, write_kv
from mla_attn.ops import gqa_attention
from mla_attn.specs import GQASpec

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 8, 4
SPEC = GQASpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5)
WINDOWED = GQASpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=DIM**-0.5, window=20)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def rows(seed, count):
    rng = np.random.default_rng(seed)
    shapes = (count, HEADS, DIM), (count, KV_HEADS, DIM), (count, KV_HEADS, DIM)
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


def expected(q, k, v, spec=SPEC, sinks=None):
    """Of one request whose last rows are those of ``q``."""
    lens = {"q_starts": [0], "q_lens": [len(q)], "kv_starts": [0], "kv_lens": [len(k)]}
    return oracle.ragged_oracle(q, k, v, **lens, scale=spec.scale, window=spec.window, sinks=sinks)[0]


def test_every_mode():
    """A prompt whole and in parts, a decode row, a verify call, drafting: all see what was written before them."""
    table, sinks = ints([5, 2, 7, 0]), jnp.asarray([0.5, -jnp.inf, 1.0, 0.0])
    q, k, v = rows(0, 14)
    pool = KVPool.create(num_layers=2, num_pages=8, page_size=PAGE, spec=SPEC, dtype="float32", layout="hnd")
    want = expected(q, k, v, sinks=sinks)
    sizes = {"page_size": PAGE}
    calls = [
        (steps.gqa_prefill, build.for_extend(table, ints(5), ints(5), max_q_len=5, **sizes)),
        (steps.gqa_extend, build.for_extend(table, ints(8), ints(3), max_q_len=3, **sizes)),
        (steps.gqa_decode, build.for_decode(table, ints(9), **sizes)),
        (steps.gqa_target_verify, build.for_target_verify(table, ints(9), num_tokens=2, **sizes)),
        (steps.gqa_draft_extend, build.for_draft_extend(table, ints(13), ints(2), max_q_len=2, **sizes)),
        (steps.gqa_draft_decode, build.for_draft_decode(table, ints(13), 0, **sizes)),
    ]
    begin = 0
    for step, metadata in calls:
        part = slice(begin, begin + metadata.slots.shape[0])
        out, pool = step(q[part], k[part], v[part], pool, metadata, SPEC, layer=1, sinks=sinks)
        np.testing.assert_allclose(out, want[part], rtol=1e-5, atol=1e-5, err_msg=step.__name__)
        begin = part.stop
    assert begin == 14 and not pool.k[:8].any()
    with pytest.raises(ValueError, match="sinks with return_lse=True"):
        step(q[:1], k[:1], v[:1], pool, metadata, SPEC, sinks=sinks, return_lse=True)


def test_drafting_on_a_cache_of_another_model():
    """The recipe: ``gqa_attention`` alone reads what another model wrote, and writes nothing."""
    q, k, v = rows(1, 9)
    pool = KVPool.create(num_layers=1, num_pages=3, page_size=PAGE, spec=SPEC, dtype="float32")
    pool = write_kv(pool, k, v, jnp.arange(9))
    metadata = build.for_decode(ints([0, 1, 2]), ints(9), page_size=PAGE)
    np.testing.assert_allclose(gqa_attention(q[:1], pool, metadata, SPEC), expected(q[:1], k, v), rtol=1e-5, atol=1e-5)


@functools.partial(jax.jit, static_argnames="layout_of", compiler_options=helpers.OPTIMIZED, donate_argnums=(0, 1))
def both_groups(full, windowed, tables, offsets, prefix, q, k, v, *, layout_of):
    """One layer of each of two groups, from the same lengths in one program."""
    num_tokens, page_size = layout_of
    outs, pools = [], []
    for pool, table, kv_offsets in ((full, tables[0], None), (windowed, tables[1], offsets)):
        options = {"page_size": page_size, "max_len": 900, "kv_offsets": kv_offsets}
        metadata = build.for_target_verify(table, prefix, num_tokens=num_tokens, **options)
        step = functools.partial(steps.gqa_target_verify, batch_invariant=True)
        out, pool = step(q, k, v, pool, metadata, WINDOWED)
        outs.append(out)
        pools.append(pool)
    return outs, pools


SIZES = [(1, 4), (16, 4), (64, 1)]


@pytest.mark.parametrize(
    "page_size, rows_a_step",
    [s if s in SIZES else pytest.param(*s, marks=pytest.mark.slow) for s in itertools.product((1, 16, 64), (1, 4))],
)
def test_a_windowed_pool_is_as_good_as_a_full_one(page_size, rows_a_step):
    """200 steps with rejections: equal bits, no more pages than the formula says, and none of them left at the end."""
    rng, window = np.random.default_rng(2), WINDOWED.window
    columns = -(-(window + rows_a_step + page_size - 2) // page_size)
    widths = -(-1000 // page_size), columns
    pages = [PageAllocator(2 * width + 3, page_size, table_width=width) for width in widths]
    pools = [
        KVPool.create(num_layers=1, num_pages=p.num_pages, page_size=page_size, spec=SPEC, dtype="float32")
        for p in pages
    ]
    requests, committed = ("a", "b"), np.zeros(2, np.int32)
    for p, request in itertools.product(pages, requests):
        p.create(request)
    for step in range(200):
        for b, request in enumerate(requests):
            assert pages[1].release(request, int(committed[b]) - window + 1) == pages[1].offset(request)
            for p in pages:
                p.grow(request, int(committed[b]) + rows_a_step)
        assert pages[1].num_used <= 2 * columns
        tables = [jnp.asarray(p.table(requests)) for p in pages]
        offsets = jnp.asarray(pages[1].offsets(requests))
        new = rows(step, 2 * rows_a_step)
        (want, got), pools = both_groups(
            *pools, tables, offsets, jnp.asarray(committed), *new, layout_of=(rows_a_step, page_size)
        )
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
        committed += rng.integers(1, rows_a_step + 1, 2, dtype=np.int32)
        for p, (b, request) in itertools.product(pages, enumerate(requests)):
            p.truncate(request, int(committed[b]))
    for p, request in itertools.product(pages, requests):
        p.free(request)
    assert [p.num_used for p in pages] == [0, 0]
