"""Tiles of a grouped matrix product: which rows, of which group, a thread block multiplies at a time.

The rows of a group lie one after the other, and the groups too. A tile is ``tile_rows`` rows from a multiple of
``ALIGNED`` on, for copies begin only there; those from ``begin`` to ``end`` are its group's. Rows after the last group
are one more group, whose result is zero.

Computed in JAX, with static shapes. Prefix sums are sums over pairs of groups: one small kernel each, and the same in
all products of a program that share their sizes.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

ALIGNED = 8  # rows
RECORD = ("group", "first", "begin", "end")  # of a tile: its group, its first row, the rows that are its group's
HEADER = 1  # the list begins with the number of tiles that there are


def most_tiles(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """Tiles that any sizes may need."""
    groups = min(num_groups + 1, num_rows)  # with rows, the one after the last included
    return (num_rows + groups * (tile_rows + ALIGNED - 2)) // tile_rows


@functools.partial(jax.jit, static_argnames=("num_rows", "tile_rows"), inline=True)
def tile_list(sizes: Int32[Array, "E"], *, num_rows: int, tile_rows: int) -> Int32[Array, "numbers"]:
    """The list, flat: how many tiles there are, then ``most_tiles`` records of ``RECORD``, by group and row.

    Args:
        sizes: rows of each group; negative ones count as 0, and rows beyond ``num_rows`` are nobody's.
        num_rows: rows of all groups, at least 1.
        tile_rows: of a tile; a multiple of ``ALIGNED``.
    """
    sizes, groups = jnp.clip(sizes, 0, num_rows), sizes.shape[0]  # or their sums overflow
    before = jnp.tri(groups + 1, groups, k=-1, dtype=bool)
    starts = jnp.minimum(jnp.where(before, sizes[None], 0).sum(axis=1), num_rows)
    ends = jnp.append(starts[1:], num_rows).astype(jnp.int32)
    firsts = starts // ALIGNED * ALIGNED
    tiles = jnp.where(ends > starts, -(-(ends - firsts) // tile_rows), 0)
    upto = jnp.where(jnp.tri(groups + 1, dtype=bool), tiles[None], 0).sum(axis=1)

    place = jnp.arange(most_tiles(num_rows, groups, tile_rows), dtype=jnp.int32)
    of = jnp.minimum((upto[None] <= place[:, None]).sum(axis=1, dtype=jnp.int32), groups)
    first = firsts[of] + (place - upto[of] + tiles[of]) * tile_rows
    fields = {
        "group": of,
        "first": first,
        "begin": jnp.maximum(starts[of], first),
        "end": jnp.minimum(ends[of], first + tile_rows),
    }
    records = jnp.stack([fields[name] for name in RECORD], axis=1)
    return jnp.concatenate([upto[-1:], records.ravel()]).astype(jnp.int32)
