"""C18 and C19: partial results of context-parallel ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from cases.paged import (
    RANK,
    WIDTH,
    assert_close,
    assert_expected,
    attend,
    by_hand,
    every_implementation,
    expected,
    make_pool,
    make_spec,
    random_rows,
)  # fmt: skip
from mla_attn.ops import merge_states

YARN = 192**-0.5 * 1.87385


def merge(states):
    """NumPy in, NumPy out."""
    outs, lses = zip(*states, strict=True)
    return tuple(
        np.asarray(x) for x in jax.jit(merge_states)(list(map(jnp.asarray, outs)), list(map(jnp.asarray, lses)))
    )


def test_c18_natural_log():
    """0 with weight 1, and 1 with weight e ** 2."""
    one = np.ones((1, 1, 4), np.float32)
    out, lse = merge([(0 * one, np.full((1, 1), 0.0, np.float32)), (one, np.full((1, 1), 2.0, np.float32))])
    np.testing.assert_allclose(out, 0.880797, rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, np.log(1 + np.exp(2)), rtol=1e-6)


@every_implementation
def test_c18_splits(implementation):
    """64 tokens cut in two at 20, and anywhere else, with YaRN's scale: merged, they are one pass.

    Requests of one call: number s holds the first s tokens, number 65 + s the others, at positions s on.
    """
    spec, tokens, heads = make_spec(16, scale=YARN), np.asarray(random_rows(0, 64)), 16
    parts = [tokens[:s] for s in range(65)] + [tokens[s:] for s in range(65)]
    pool = make_pool(parts, np.arange(130)[:, None], page_size=64, num_pages=130, dtype="float32")
    metadata = by_hand([*range(65), *[64] * 65], [1] * 130, np.arange(130)[:, None], kv_offsets=[*[0] * 65, *range(65)])
    one = np.asarray(2 * random_rows(1, 1, heads))
    q = jnp.asarray(np.broadcast_to(one, (130, heads, WIDTH)))
    out, lse = attend(implementation, q, pool, metadata, spec)
    assert np.isneginf(lse[0]).all() and np.isneginf(lse[129]).all()
    got = merge([(out[:65], lse[:65]), (out[65:], lse[65:])])
    want, want_lse = oracle.attend(
        one[0].astype(float), tokens.astype(float), tokens[:, :RANK].astype(float), scale=YARN
    )
    scores = YARN * (one[0].astype(float) @ tokens.T.astype(float))
    np.testing.assert_allclose(want_lse, np.log(np.exp(scores).sum(axis=-1)), rtol=1e-12)
    v_max = np.full((65, 1), np.abs(tokens[:, :RANK]).max())
    every = (np.broadcast_to(want, (65, *want.shape)), np.broadcast_to(want_lse, (65, heads)), v_max)
    assert_close(got, every, "float32")
    # Half of the sum of the parts would be within no tolerance: the parts differ.
    assert np.abs(out[20] - out[85]).max() > 0.1


@every_implementation
def test_c18_lse_axes(implementation):
    """16 tokens x 16 heads, all different: a transposed LSE keeps its shape, but not its values, nor the merge."""
    spec, rows = make_spec(16, scale=YARN), np.asarray(random_rows(2, 64))
    # Larger scores' own rounding, which grows with them, is over float32's bound on some CPUs.
    q = random_rows(3, 16, 16)
    pool = make_pool([rows[:20], rows[20:]], [[0], [1]], page_size=64, num_pages=2, dtype="float32")
    halves = []
    for metadata in (by_hand([20], [16], [[0]]), by_hand([64], [16], [[1]], kv_offsets=[20])):
        halves.append(attend(implementation, q, pool, metadata, spec, causal=False))
        assert len(np.unique(halves[-1][1])) == 256
        assert_expected(halves[-1], q, pool, metadata, spec, causal=False)
    whole = make_pool([rows], [[0]], page_size=64, num_pages=1, dtype="float32")
    want = expected(q, whole, by_hand([64], [16], [[0]]), spec, causal=False)
    assert np.abs(want[1] - want[1].T).max() > 0.1
    assert_close(merge(halves), want, "float32")


RANKS, LENS19 = 8, [3, 0, 9]


@every_implementation
@pytest.mark.parametrize("q_len", [1, 2])
def test_c19_ranks_without_keys(implementation, q_len):
    """Token p lies on rank p % 8: most ranks own nothing of a short request, and what they return is never used."""
    spec = make_spec(16)
    tokens = [np.asarray(random_rows(b, n)) for b, n in enumerate(LENS19)]
    q = random_rows(4, 3 * q_len, 16)
    states, table = [], [[2], [0], [1]]
    for rank in range(RANKS):
        pool = make_pool([x[rank::RANKS] for x in tokens], table, page_size=64, num_pages=4, dtype="float32")
        metadata = by_hand(LENS19, [q_len] * 3, table, kv_offsets=[rank] * 3, kv_stride=RANKS)
        states.append(attend(implementation, q, pool, metadata, spec))
    whole = make_pool(tokens, table, page_size=64, num_pages=4, dtype="float32")
    want = expected(q, whole, by_hand(LENS19, [q_len] * 3, table), spec)
    owns = np.array([[len(x[rank::RANKS]) > 0 for x in tokens] for rank in range(RANKS)])
    assert owns.sum(axis=0).tolist() == [3, 0, 8]
    last = np.arange(3) * q_len + q_len - 1
    for (out, lse), own in zip(states, owns, strict=True):
        assert (np.isneginf(lse[last]).all(axis=1) == ~own).all()
        assert (out[last][~own] == 0).all()

    for payload in (0.0, np.nan, np.inf, -np.inf):
        filled = [(np.where(np.isneginf(lse)[..., None], np.float32(payload), out), lse) for out, lse in states]
        out, lse = merge(filled)
        assert_close((out, lse), want, "float32")
        assert (out[q_len : 2 * q_len] == 0).all() and np.isneginf(lse[q_len : 2 * q_len]).all()
        assert np.isfinite(out).all()
