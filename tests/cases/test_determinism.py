"""C20: what a row's result may depend on."""

import dataclasses
import functools
import re

import jax.numpy as jnp
import numpy as np

from cases.paged import (
    assert_same_bits,
    attend,
    by_hand,
    every_implementation,
    make_pool,
    make_spec,
    random_rows,
)  # fmt: skip
from mla_attn.ops import mla_attention

# One head: a decode row is then a product with a vector, which rounds otherwise than one with a matrix does.
PAGE, HEADS, LENGTH, LONGEST = 64, 1, 4096, 32768
WIDTH_OF_TABLE = LONGEST // PAGE + 1
# The specification gathers every slot of every table: it gets a batch of 8 alone, and shorter neighbours.
SMALL = {"reference": 4608}


@functools.cache
def cache():
    """The request's pages, shuffled among those that its neighbours read; all neighbours share them."""
    rng = np.random.default_rng(0)
    pages = LONGEST // PAGE + LENGTH // PAGE + 1
    own, shared = np.split(rng.permutation(pages), [LENGTH // PAGE + 1])
    pool = make_pool([], [], page_size=PAGE, num_pages=pages)
    data = jnp.asarray(rng.standard_normal(pool.data.shape, np.float32), jnp.bfloat16)
    q = random_rows(1, 64, HEADS, dtype="bfloat16")
    return dataclasses.replace(pool, data=data), own, shared, q


def run(implementation, batch, place, longest, *, width=WIDTH_OF_TABLE, q_len=1, **options):
    """The request at ``place`` of a batch of neighbours with lengths in 1 .. longest: its first row's (out, lse)."""
    pool, own, shared, q = cache()
    rng = np.random.default_rng(batch + place)
    lens = rng.integers(1, longest, batch, endpoint=True)
    lens[rng.integers(batch)] = longest
    lens[place] = LENGTH + q_len - 1
    table = np.stack([np.resize(rng.permutation(shared), width) for _ in range(batch)])
    table[place, : len(own)] = own
    rows = q[jnp.asarray(rng.integers(0, 64, batch * q_len))].at[place * q_len].set(q[0])
    metadata = by_hand(lens, [q_len] * batch, table, max_q_len=q_len)
    got = attend(implementation, rows, pool, metadata, make_spec(HEADS), optimized=True, **options)
    return [x[place * q_len] for x in got]


def calls(implementation):
    """Alone, in batches, elsewhere in them, in a wider table, and as the first row of four."""
    longest = SMALL.get(implementation, LONGEST)
    width = longest // PAGE + 1
    yield functools.partial(run, implementation, 1, 0, LENGTH, width=width)
    yield functools.partial(run, implementation, 8, 0, longest, width=width)
    yield functools.partial(run, implementation, 8, 5, longest, width=width)
    if implementation not in SMALL:
        yield functools.partial(run, implementation, 64, 41, longest, width=width)
    yield functools.partial(run, implementation, 1, 0, LENGTH, width=width + 5, q_len=4)


@every_implementation
def test_c20_batch_invariant(implementation):
    """Equal bits in every batch, place and table, and as a row of a verify call."""
    first, *others = (call(batch_invariant=True) for call in calls(implementation))
    for other in others:
        assert_same_bits(other, first)
    assert np.isfinite(first[0].astype(float)).all() and first[0].any()


@every_implementation
def test_c20_default(implementation):
    """Within 2 units in the last place of the row's largest output, as ``mla_attention`` says."""
    assert re.search(r"by at most 2 units in\s+the last place of its row's largest", mla_attention.__doc__)
    first, *others = (call() for call in calls(implementation))
    out, lse = (x.astype(np.float64) for x in first)
    unit = 2.0 ** (np.floor(np.log2(np.abs(out).max(axis=-1, keepdims=True))) - 7)
    for other in others:
        assert (np.abs(other[0].astype(np.float64) - out) <= 2 * unit).all()
        np.testing.assert_allclose(other[1], lse, rtol=1e-5, atol=1e-5)
