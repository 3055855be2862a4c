"""Tables that begin later, cross attention, and the forms of other systems."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn import metadata as build
from mla_attn.cache import KVPool, write_kv
from mla_attn.ops import gqa_attention
from mla_attn.specs import GQASpec


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def test_slots_follow_the_offset():
    """Positions below the offset, or past the table, write nothing; lengths stay those of the whole request."""
    table, offsets = ints([7, 3], [5, 1]), ints(8, 0)
    m = build.for_extend(table, ints(18, 6), ints(12, 6), max_q_len=12, page_size=4, max_len=100, kv_offsets=offsets)
    slots = np.asarray(m.slots).reshape(2, 12)
    assert slots[0].tolist() == [-1, -1, 28, 29, 30, 31, 12, 13, 14, 15, -1, -1]  # positions 6 to 17
    assert slots[1, :6].tolist() == [20, 21, 22, 23, 4, 5]
    assert m.kv_lens.tolist() == [18, 6] and m.kv_offsets.tolist() == [8, 0]
    assert np.asarray(m.positions).reshape(2, 12)[0].tolist() == list(range(6, 18))
    build.check_metadata(dataclasses.replace(m, kv_lens=ints(16, 6), q_lens=ints(10, 6)), num_pages=8, page_size=4)
    with pytest.raises(ValueError, match=r"kv_lens\[0\]=18: needs more .* than W \* P = 8"):
        build.check_metadata(m, num_pages=8, page_size=4)


def test_every_builder_takes_offsets():
    table, offsets, sizes = ints([7, 3]), ints(8), {"page_size": 4, "kv_offsets": ints(8)}
    for m, want in (
        (build.for_decode(table, ints(11), **sizes), [30]),
        (build.for_target_verify(table, ints(11), num_tokens=2, **sizes), [31, 12]),
        (build.for_draft_extend(table, ints(13), ints(2), max_q_len=2, **sizes), [31, 12]),
        (build.for_draft_decode(table, ints(11), 1, **sizes), [12]),
        (build.for_extend(table, ints(9), ints(2), max_q_len=2, **sizes), [-1, 28]),
        (build.for_mixed(table, ints(9), ints(2), max_q_len=2, num_rows=3, **sizes), [-1, 28, -1]),
    ):
        assert m.slots.tolist() == want and m.kv_offsets.tolist() == offsets.tolist()


def test_limits_of_tables_that_begin_later(unchecked):
    """Rows past what the table reaches to are none, unless ``max_len`` allows them; no sum wraps."""
    table, big = ints([7, 3]), 2**31 - 8
    assert build.for_decode(table, ints(17), page_size=4, kv_offsets=ints(8)).q_lens.tolist() == [0]
    assert build.for_decode(table, ints(17), page_size=4, kv_offsets=ints(8), max_len=17).q_lens.tolist() == [1]
    assert build.for_decode(table, ints(17), page_size=4, kv_offsets=ints(8), max_len=16).q_lens.tolist() == [0]
    m = build.for_decode(table, ints(big + 2), page_size=4, kv_offsets=ints(big))
    assert (m.q_lens.tolist(), m.slots.tolist()) == ([1], [29])
    for hostile in (-(2**31), 2**31 - 1, -4):
        slots = build.for_decode(table, ints(3), page_size=4, kv_offsets=ints(hostile), max_len=9).slots
        assert slots.tolist()[0] in (-1, 14)
    with pytest.raises(ValueError, match=r"kv_offsets has shape \(2,\), must be \(1,\)"):
        build.for_decode(table, ints(3), page_size=4, kv_offsets=ints(0, 0))


def test_cross_attention():
    """Encoders of 3, 0 and 6 rows, decoder rows of which one request has more than keys."""
    table = ints([4, -1], [-1, -1], [2, 0])
    lens, q_lens = ints(3, 0, 6), ints(5, 1, 2)
    slots = build.for_encoder(table, lens, num_rows=11, page_size=4)
    assert slots.tolist() == [16, 17, 18, 8, 9, 10, 11, 0, 1, -1, -1]
    spec = GQASpec(num_heads=2, num_kv_heads=1, head_dim=4, scale=1.0)
    pool = KVPool.create(num_layers=1, num_pages=5, page_size=4, spec=spec, dtype="float32")
    pool = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool)
    v = jnp.broadcast_to(jnp.arange(11.0)[:, None, None], (11, 1, 4))
    pool = write_kv(pool, jnp.zeros_like(v), v, slots)
    m = build.for_cross_attention(table, lens, q_lens, max_q_len=5, page_size=4, num_rows=9)
    assert m.kv_lens.tolist() == [3, 0, 6] and (m.slots == -1).all()
    build.check_metadata(m, num_pages=5, page_size=4, causal=False)
    for implementation in ("xla", "reference"):
        options = {"causal": False, "return_lse": True, "implementation": implementation}
        out, lse = gqa_attention(jnp.zeros((9, 2, 4)), pool, m, spec, **options)
        assert out[:, 0, 0].tolist() == pytest.approx([1, 1, 1, 1, 1, 0, 5.5, 5.5, 0])
        assert np.isneginf(lse[:, 0]).tolist() == [False] * 5 + [True, False, False, True]


def test_page_maps_of_token_maps():
    mapping = jnp.asarray([8, 9, 10, 11, -1, -1, -1, -1, 0, 1, 2, 3], jnp.int32)
    assert build.page_map_from_tokens(mapping, 4).tolist() == [2, -1, 0]
    assert build.page_map_from_tokens(mapping, 1).tolist() == mapping.tolist()
    with pytest.raises(ValueError, match=r"mapping has shape \(0,\), must be \[slots\]"):
        build.page_map_from_tokens(mapping[:0], 4)


def test_tables_of_packed_lists(unchecked):
    indptr, indices = ints(0, 5, 5, 9), ints(8, 9, 10, 11, 0, 4, 5, 6, 7, 99, 99)
    table, lens = build.page_table_from_indices(indptr, indices, page_size=4, table_width=2)
    assert table.tolist() == [[2, 0], [-1, -1], [1, -1]] and lens.tolist() == [5, 0, 4]
    table, lens = build.page_table_from_indices(indptr, indices, page_size=4, table_width=1)
    assert table.tolist() == [[2], [-1], [1]] and lens.tolist() == [5, 0, 4]
    with pytest.raises(ValueError, match=r"needs more .* than W \* P = 4"):
        build.check_metadata(
            dataclasses.replace(build.for_decode(table, ints(1, 0, 1), page_size=4), kv_lens=lens),
            num_pages=9,
            page_size=4,
        )
    pages, lens = ints(5, 2, 0, 7, 1, 9), ints(0, 8, 8, 20)
    table = build.page_table_from_packed(pages, lens, page_size=4, table_width=4)
    assert table.tolist() == [[5, 2, -1, -1], [-1] * 4, [0, 7, 1, -1]]
    with pytest.raises(ValueError, match=r"cu_kv_lens has shape \(0,\)"):
        build.page_table_from_packed(pages, lens[:0], page_size=4, table_width=4)


@pytest.mark.parametrize("dtype", ["bool", "uint8"])
def test_flat_tree_masks(unchecked, dtype):
    """Masks of prefixes of 3 and 0, and a padding request between them."""
    rng = np.random.default_rng(0)
    own = rng.random((2, 4, 4)) < 0.5
    flat = [np.ones(0)]
    for prefix, mask in zip((3, 0), own, strict=True):
        flat.append(np.concatenate([np.ones((4, prefix)), mask], axis=1).ravel())
    flat = jnp.asarray(np.concatenate([*flat, np.ones(5)]).astype(dtype))
    got = build.tree_mask_from_flat(flat, ints(3, -1, 0), num_tokens=4)
    assert got.dtype == jnp.bool_ and (got[::2] == own).all() and not got[1].any()
    with pytest.raises(ValueError, match="mask is float32"):
        build.tree_mask_from_flat(jnp.zeros(4), ints(3), num_tokens=4)
