"""The list of tiles of a grouped matmul: the rows of one group that a thread block multiplies at a time.

Rows are sorted by group. TMA copies begin only at multiples of ``ALIGNED`` rows, so a tile has ``tile_rows`` rows from
such a multiple on (from anywhere if ``aligned`` is 1), and its group's rows are those from ``begin`` to ``end``. Rows
after the last group form one more group, whose result is zero.

The list is computed in JAX, on the device, with static shapes. Prefix sums are computed as sums over pairs of groups,
which is one small kernel each (XLA's own take ten), shared by all products of a program with the same sizes.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

ALIGNED = 8  # rows: copies begin at multiples of it
RECORD = ("group", "first", "begin", "end")  # a tile: its group, its first row, first and end of its group's rows
HEADER = 1  # the list begins with the number of its tiles


def most_tiles(num_rows: int, num_groups: int, tile_rows: int, aligned: int = ALIGNED) -> int:
    """The most tiles that any sizes of groups need."""
    groups = min(num_groups + 1, num_rows)  # with rows, the one after the last included
    return (num_rows + groups * (tile_rows + aligned - 2)) // tile_rows


@functools.partial(jax.jit, static_argnames=("num_rows", "tile_rows", "aligned"), inline=True)
def tile_list(
    sizes: Int32[Array, "E"], *, num_rows: int, tile_rows: int, aligned: int = ALIGNED
) -> Int32[Array, "numbers"]:
    """Makes the list: int32 [1 + 4 * most_tiles], the number of tiles, then a ``RECORD`` for each, by group and row.

    Args:
        sizes: rows of each group; negative ones count as 0, and rows beyond ``num_rows`` do not exist.
        num_rows: rows of all groups, at least 1.
        tile_rows: rows of a tile, a multiple of ``aligned``.
        aligned: tiles begin at multiples of it.
    """
    sizes, groups = jnp.clip(sizes, 0, num_rows), sizes.shape[0]  # so that sums cannot overflow
    before = jnp.tri(groups + 1, groups, k=-1, dtype=bool)
    starts = jnp.minimum(jnp.where(before, sizes[None], 0).sum(axis=1), num_rows)
    ends = jnp.append(starts[1:], num_rows).astype(jnp.int32)
    firsts = starts // aligned * aligned
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
