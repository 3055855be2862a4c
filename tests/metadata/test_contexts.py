"""The builders where tokens of a request are on several ranks in turn, beside those of one device with larger pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn import metadata as md

PAGE, WIDTH = 2, 4


def i32(*values):
    return jnp.asarray(values, jnp.int32)


TABLE = jnp.asarray([[5, 2, 7, 0], [1, 9, -1, 3], [4, 6, 8, 2**31 - 1]], jnp.int32)
CASES = {
    "for_decode": (i32(7, 0, 24), {}),
    "for_decode, few": (i32(7, 0, 24), {"max_len": 8, "active": i32(1, 0, 1)}),
    "for_target_verify": (i32(7, 0, 23), {"num_tokens": 3}),
    "for_target_verify, tree": (i32(7, -1, 3), {"num_tokens": 3, "depths": i32(0, 1, 1), "q_lens": i32(3, 3, 2)}),
    "for_draft_extend": (i32(7, 1, 24), {"q_lens": i32(2, 1, 3), "max_q_len": 3, "num_rows": 8}),
    "for_draft_decode": (i32(7, 0, 20), {"step": 1, "num_tokens": 2, "num_drafted": 2}),
    "for_extend": (i32(11, 3, 0), {"q_lens": i32(9, 3, 0), "max_q_len": 9}),
    "for_mixed": (i32(11, 3, 1), {"q_lens": i32(9, 1, 1), "max_q_len": 9, "num_rows": 12}),
    "for_cross_attention": (i32(11, 3, 0), {"q_lens": i32(1, 2, 1), "max_q_len": 2}),
    "for_mixed, mapped": (
        i32(11, 3, 1),
        {"q_lens": i32(9, 1, 1), "max_q_len": 9, "num_rows": 12, "page_map": i32(3, 1, 4, 1, 5, 9, 2, 6)},
    ),
    "for_decode, windowed": (i32(19, 0, 30), {"kv_offsets": i32(12, 0, 24)}),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_builders(case, ranks):
    """Position p is on rank ``p % ranks``, at offset ``p // ranks % P`` of a page that all ranks have."""
    lens, options = CASES[case]
    build = functools.partial(getattr(md, case.split(",")[0]), TABLE, lens, **options)
    whole = build(page_size=PAGE * ranks)
    offset = np.asarray(whole.slots) % (PAGE * ranks)
    for rank in range(ranks):
        got = jax.jit(lambda rank: build(page_size=PAGE, context=(rank, ranks)))(rank)
        assert (got.kv_stride, got.max_q_len, got.page_size) == (ranks, whole.max_q_len, PAGE)
        for name in ("q_starts", "q_lens", "kv_lens", "positions", "page_table"):
            np.testing.assert_array_equal(getattr(got, name), getattr(whole, name), err_msg=name)
        np.testing.assert_array_equal(got.kv_offsets, np.asarray(whole.kv_offsets) + rank)
        pages = np.asarray(whole.slots) // (PAGE * ranks)
        held = (np.asarray(whole.slots) >= 0) & (offset % ranks == rank)
        np.testing.assert_array_equal(got.slots, np.where(held, pages * PAGE + offset // ranks, -1))


def test_encoders():
    lens = i32(11, 3, 0)
    whole = np.asarray(md.for_encoder(TABLE, lens, num_rows=15, page_size=6))
    for rank in range(3):
        got = md.for_encoder(TABLE, lens, num_rows=15, page_size=2, context=(rank, 3))
        held = (whole >= 0) & (whole % 3 == rank)
        np.testing.assert_array_equal(got, np.where(held, whole // 6 * 2 + whole % 6 // 3, -1))


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (2, "context=2 must be None or"),
        ((2, 2), "rank of context=2 must be an integer from 0 to 1"),
        ((0, 0), "size of context=0 must be an integer from 1"),
        ((0, 2, 1), r"context=\(0, 2, 1\) must be None or \(rank, size\)"),
    ],
)
def test_contexts_that_are_wrong(context, message, unchecked):
    with pytest.raises(ValueError, match=message):
        md.for_decode(TABLE, i32(1, 2, 3), page_size=PAGE, context=context)


def test_checks_know_the_ranks():
    """A rank's table has the pages of its own keys alone; a length that needs more is found."""
    metadata = md.for_decode(TABLE[:1], i32(15), page_size=PAGE, context=(1, 2), kv_offsets=i32(0))
    md.check_metadata(metadata, num_pages=8, page_size=PAGE)
    with pytest.raises(ValueError, match=r"page_table\[\(0, 2\)\]=7"):
        md.check_metadata(metadata, num_pages=7, page_size=PAGE)
