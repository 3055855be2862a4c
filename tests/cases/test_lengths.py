"""C02, C03 and C11: what a length counts, whose row a token is, and where a request's pages begin."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.paged import (
    RANK,
    WIDTH,
    as_claimed,
    assert_close,
    assert_expected,
    assert_same_bits,
    attend,
    counting_rows,
    every_implementation,
    expected,
    ints,
    make_pool,
    make_spec,
    random_rows,
    reason,
)  # fmt: skip
from mla_attn import metadata as build
from mla_attn import steps
from mla_attn.cache import LatentPool, write_latent
from mla_attn.cache.allocator import PageAllocator


@every_implementation
def test_c02_verify_sees_its_drafts(implementation):
    """Committed prefixes of 5 and 64 tokens, four draft tokens each, which the step itself writes."""
    table, prefix, spec = [[2, 4], [3, 1]], [5, 64], make_spec(2)
    pool = make_pool([counting_rows(n) for n in prefix], table, page_size=64, num_pages=5)
    metadata = build.for_target_verify(ints(table), ints(prefix), num_tokens=4, page_size=64)
    drafts = jnp.asarray(np.concatenate([counting_rows(n + 4)[n:] for n in prefix]), jnp.bfloat16)
    q = jnp.zeros((8, 2, WIDTH), jnp.bfloat16)
    with as_claimed(implementation, pool, metadata, spec):
        out, pool = steps.target_verify(
            q[..., :RANK], q[..., RANK:], drafts[:, :RANK], drafts[:, RANK:], pool, metadata, spec,
            implementation=implementation,
        )  # fmt: skip
    want = np.array([2.5, 3, 3.5, 4, 32, 32.5, 33, 33.5])
    assert (np.asarray(out).astype(float) == want[:, None, None]).all()
    # The second request's drafts are on its second page, and the first's second page is left alone.
    assert np.asarray(pool.data[1, :4, 0]).tolist() == [64, 65, 66, 67]
    assert jnp.isnan(pool.data[4]).all() and jnp.isnan(pool.data[1, 4:]).all()


TABLE3, LENS3, HEADS3 = np.array([[3, 9], [5, 1], [7, 2]]), np.array([10, 64, 65]), 8


@functools.cache
def three_rows():
    """Pool, and queries [3 requests, 3 rows, heads, channels]."""
    rows = np.asarray(random_rows(0, LENS3.sum()))
    pool = make_pool(np.split(rows, np.cumsum(LENS3)[:-1]), TABLE3, page_size=64, num_pages=10)
    return pool, random_rows(1, 3, 3, HEADS3, dtype="bfloat16")


def verify_three(implementation, order=(0, 1, 2), **options):
    """Three query tokens of each request, which are the last of its keys."""
    order, (pool, q) = np.array(order), three_rows()
    metadata = build.for_target_verify(ints(TABLE3[order]), ints(LENS3[order] - 3), num_tokens=3, page_size=64)
    q = q[order].reshape(9, HEADS3, WIDTH)
    return attend(implementation, q, pool, metadata, make_spec(HEADS3), out_dtype=jnp.float32, **options)


def decode_nine(implementation, lens, **options):
    """The same nine queries as requests of their own."""
    pool, q = three_rows()
    metadata = build.for_decode(ints(np.repeat(TABLE3, 3, axis=0)), ints(lens), page_size=64)
    q = q.reshape(9, HEADS3, WIDTH)
    got = attend(implementation, q, pool, metadata, make_spec(HEADS3), out_dtype=jnp.float32, **options)
    return got, expected(q, pool, metadata, make_spec(HEADS3))


@every_implementation
def test_c03_rows_and_requests(implementation):
    """Row j of a request is a decode of its first ``length - 2 + j`` keys; not causal, of all of them."""
    lens = (LENS3[:, None] - 2 + np.arange(3)).ravel()
    got, want = decode_nine(implementation, lens)
    assert_close(got, want, "bfloat16")
    assert_close(verify_three(implementation), (*got, want[2]), "bfloat16")
    got, want = decode_nine(implementation, np.repeat(LENS3, 3))
    assert_close(verify_three(implementation, causal=False), (*got, want[2]), "bfloat16")


@every_implementation
def test_c03_permuting_the_batch(implementation):
    """Permutes the output, to the bit where that is promised; and there decode and verify rows are equal bits."""
    pool, _ = three_rows()
    metadata = build.for_target_verify(ints(TABLE3), ints(LENS3 - 3), num_tokens=3, page_size=64)
    options = {"batch_invariant": True, "optimized": True}
    if reason(implementation, pool, metadata, make_spec(HEADS3), **options):
        options = {}
    straight = verify_three(implementation, **options)
    order = [2, 0, 1]
    rows = np.arange(9).reshape(3, 3)[order].ravel()
    turned = verify_three(implementation, order, **options)
    lens = (LENS3[:, None] - 2 + np.arange(3)).ravel()
    decoded, (_, _, v_max) = decode_nine(implementation, lens, **options)
    if options:
        assert_same_bits(turned, [x[rows] for x in straight])
        assert_same_bits(decoded, straight)
    else:
        assert_close(turned, [x[rows] for x in (*straight, v_max)], "bfloat16")


LENS11, FLAT_PAGES = [5, 17, 32], {16: [6, 2, 9, 4, 0]}


def flat_table(page_size):
    """A table from a flat list of shuffled ids, cut at the running sum of the requests' page counts."""
    counts = [-(-n // page_size) for n in LENS11]
    flat = FLAT_PAGES.get(page_size, np.random.default_rng(page_size).permutation(sum(counts)).tolist())
    offsets = np.cumsum([0, *counts])
    table = np.full((3, max(counts)), -1)
    for b, count in enumerate(counts):
        table[b, :count] = flat[offsets[b] : offsets[b + 1]]
    return offsets, table


def write_and_attend(implementation, table, requests, page_size):
    """Prompts packed into one call: their rows are written through its slots, and read back by their last tokens."""
    rows = [np.asarray(random_rows(2, sum(LENS11)))[sum(LENS11[:b]) : sum(LENS11[: b + 1])] for b in requests]
    lens = ints([LENS11[b] for b in requests])
    metadata = build.for_extend(
        ints(table[requests]), lens, lens, max_q_len=max(LENS11), num_rows=sum(LENS11), page_size=page_size
    )
    packed = np.full((sum(LENS11), WIDTH), np.nan, np.float32)
    packed[: sum(map(len, rows))] = np.concatenate(rows)
    num_pages = max(10, table.max() + 1)
    pool = LatentPool(jnp.full((num_pages, page_size, WIDTH), jnp.nan), 1, num_pages, RANK, 1, num_pages)
    pool = jax.jit(write_latent)(pool, jnp.asarray(packed[:, :RANK]), jnp.asarray(packed[:, RANK:]), metadata.slots)
    q = random_rows(3, 3, 2)[ints(requests)]
    decode = build.for_decode(ints(table[requests]), lens, page_size=page_size)
    got = attend(implementation, q, pool, decode, make_spec(2))
    assert_expected(got, q, make_pool(rows, table[requests], page_size=page_size, num_pages=num_pages, dtype="float32"),
                    decode, make_spec(2))  # fmt: skip
    return got, metadata, jax.tree.map(np.asarray, expected(q, pool, decode, make_spec(2)))


@every_implementation
def test_c11_page_offsets(implementation):
    """Requests of 5, 17 and 32 tokens hold 1, 2 and 2 pages of 16."""
    offsets, table = flat_table(16)
    assert offsets[:3].tolist() == [0, 1, 3] and offsets[3] == 5
    got, metadata, want = write_and_attend(implementation, table, [0, 1, 2], 16)
    slots = []
    for pages, n in zip(table, LENS11, strict=True):
        slots += [pages[t // 16] * 16 + t % 16 for t in range(n)]
    assert metadata.slots.tolist() == slots
    for b in range(3):
        alone, _, _ = write_and_attend(implementation, table, [b], 16)
        assert_close(alone, [x[b : b + 1] for x in (*got, want[2])], "float32")


@every_implementation
@pytest.mark.parametrize("page_size", [1, 32, 64])
def test_c11_page_sizes(implementation, page_size):
    """Results do not depend on the page size."""
    _, table = flat_table(page_size)
    got, _, want = write_and_attend(implementation, table, [0, 1, 2], page_size)
    other, _, _ = write_and_attend(implementation, flat_table(16)[1], [0, 1, 2], 16)
    assert_close(got, (*other, want[2]), "float32")


def test_c11_tables_of_the_allocator_and_of_token_maps():
    """Both make a table of each request's own pages."""
    pages = PageAllocator(10, 16, table_width=2)
    for request, length in enumerate(LENS11):
        pages.create(request, length)
    assert pages.table(range(3)).tolist() == [[0, -1], [1, 2], [3, 4]]
    _, table = flat_table(16)
    tokens = np.maximum(table, 0)[:, :, None] * 16 + np.arange(16)
    got = build.page_table_from_tokens(ints(tokens.reshape(3, 32)), ints([2, 0, 1]), page_size=16)
    assert got.tolist() == np.maximum(table, 0)[[2, 0, 1]].tolist()
