"""Work lists of split-KV kernels: which rows and which keys each thread block takes, so that all finish together.

The rows of a request (query tokens times heads, packed) are cut into *groups* of at most ``group_rows``; a group's keys
lie in *tiles* of ``TILE`` table slots. A group whose tiles are too many for one thread block is split into pieces, whose
partial results are combined afterwards. Rows that no request owns form groups without tiles: they become zeros.

Everything is computed in JAX, with static shapes, once per step; all layers share the list.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

TILE = 64  # keys
# A thread block's item: request, first packed row, first row within the request, rows, first tile, tiles, where its
# partial result goes (-1: it writes the result), table slots that hold keys, and where row 0 stands, from slot 0's key.
ITEM = ("request", "row", "first", "rows", "tile", "tiles", "partial", "keys", "stands")
# A group to combine: first packed row, first partial result, pieces (0: nothing to do), rows.
SPLIT = ("row", "partial", "pieces", "rows")

INVARIANT_TILES = 32  # keys of a piece never change with the batch: 2048 of them
_OVERHEAD = 3  # of an item, in tiles: reading its queries, filling the pipeline, writing its result


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes of a work list.

    Attributes:
        num_requests: requests B.
        num_rows: packed rows, T * H.
        heads: query heads H.
        group_rows: most rows of a group.
        lanes: groups that the device runs at a time.
        max_tiles: tiles of the page table.
        combine_all: every group goes through the combine, also one that is not split.
        invariant: pieces are cut at multiples of ``INVARIANT_TILES`` and nothing else.
    """

    num_requests: int
    num_rows: int
    heads: int
    group_rows: int
    lanes: int
    max_tiles: int
    combine_all: bool = False
    invariant: bool = False

    @property
    def groups(self) -> int:
        segments = min(2 * self.num_requests + 1, self.num_rows // self.heads)  # requests, and gaps between them
        return self.num_rows // self.group_rows + (segments if self.heads % self.group_rows else 0)

    @property
    def _most_pieces(self) -> int:
        return -(-self.max_tiles // INVARIANT_TILES)

    @property
    def num_items(self) -> int:
        return self.groups * self._most_pieces if self.invariant else self.groups + 2 * self.lanes

    @property
    def num_splits(self) -> int:
        if self.combine_all or self.invariant:
            return self.groups
        return min(self.groups, 2 * self.lanes)

    @property
    def num_partials(self) -> int:
        if self.invariant:
            return self.num_items
        return 4 * self.lanes + (self.groups if self.combine_all else 0)

    @property
    def splits_at(self) -> int:
        """Where the splits begin in the list."""
        return self.num_items * len(ITEM)

    @property
    def size(self) -> int:
        """int32 numbers of the list."""
        return self.splits_at + self.num_splits * len(SPLIT)


@functools.partial(jax.jit, static_argnames=("plan", "max_q_len", "causal", "kv_stride"), inline=True)
def work_list(
    q_starts: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    kv_lens: Int[Array, "B"],
    kv_offsets: Int[Array, "B"],
    *,
    plan: Plan,
    max_q_len: int,
    causal: bool = True,
    kv_stride: int = 1,
) -> Int[Array, "size"]:
    """The list, flat: ``num_items`` records of ``ITEM``, then ``num_splits`` of ``SPLIT``.

    Whatever one request's numbers are, rows of the others are taken once: a request whose rows are out of range, or
    overlap those of one before it, owns none.
    """
    starts, lens = _segments(q_starts, q_lens, plan.num_rows // plan.heads, max_q_len)
    group, request_tiles, tiles = _groups(
        starts, lens, kv_lens, kv_offsets, plan=plan, causal=causal, kv_stride=kv_stride
    )
    cap = jnp.int32(INVARIANT_TILES) if plan.invariant else _piece_tiles(request_tiles, plan.lanes)
    return _list(group, request_tiles, tiles, cap, plan)


def _segments(q_starts, q_lens, tokens, max_q_len):
    """First token and tokens of: what lies before request 0, request 0, what lies between it and request 1, ..."""
    sound = (q_lens > 0) & (q_lens <= max_q_len) & (q_starts >= 0) & (q_starts <= tokens - q_lens)
    ends = jax.lax.cummax(jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.where(sound, q_starts + q_lens, 0)]))
    sound &= q_starts >= ends[:-1]
    ends = jax.lax.cummax(jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.where(sound, q_starts + q_lens, 0)]))
    before = ends[:-1]
    gaps = jnp.where(sound, q_starts - before, 0)
    starts = jnp.stack([before, jnp.where(sound, q_starts, before)], axis=1).ravel()
    lens = jnp.stack([gaps, jnp.where(sound, q_lens, 0)], axis=1).ravel()
    return jnp.append(starts, ends[-1]), jnp.append(lens, tokens - ends[-1])


def _groups(starts, lens, kv_lens, kv_offsets, *, plan, causal, kv_stride):
    """Of each group the fields of ``ITEM`` that its pieces share, the tiles of its request and its own."""
    count = -(-lens * plan.heads // plan.group_rows)
    stop = jnp.cumsum(count)
    g = jnp.arange(plan.groups, dtype=jnp.int32)
    segment = jnp.minimum(jnp.searchsorted(stop, g, side="right").astype(jnp.int32), lens.shape[0] - 1)
    first = (g - (stop - count)[segment]) * plan.group_rows
    rows = jnp.where(g < stop[-1], jnp.clip(lens[segment] * plan.heads - first, 0, plan.group_rows), 0)
    owned = (segment % 2 == 1) & (rows > 0)
    request = jnp.where(owned, segment // 2, 0)
    kv_len, offset = jnp.where(owned, kv_lens[request], 0), kv_offsets[request]
    stands = kv_len - lens[segment] - offset  # of the request's first row
    last_row = stands + (first + rows - 1) // plan.heads

    def held(end):  # table slots below a position counted from slot 0's key
        return jnp.clip(-(-end // kv_stride), 0, plan.max_tiles * TILE)

    keys = jnp.where(owned & (kv_len > 0), held(kv_len - offset), 0)
    seen = jnp.minimum(keys, held(last_row + 1)) if causal else keys
    shared = {"request": request, "row": starts[segment] * plan.heads + first, "first": first, "rows": rows}
    return shared | {"keys": keys, "stands": stands}, -(-keys // TILE), -(-seen // TILE)


def _piece_tiles(tiles, lanes):
    """Most tiles of a piece: of a few candidates around the mean load of a lane, the one whose pieces end first.

    The estimate is that of list scheduling, longest first: the mean load, and (k + 1) pieces of the size of the
    (k * lanes + 1)-th, which share a lane.
    """
    mean = jnp.maximum(-(-tiles.sum() // lanes), 4)
    cap = mean * (4 + jnp.arange(13, dtype=jnp.int32)) // 8 + 1  # half of it to twice as much
    pieces = -(-tiles[None] // cap[:, None])
    size = jnp.where(pieces > 0, -(-tiles[None] // jnp.maximum(pieces, 1)), 0) + _OVERHEAD
    # A split's partial results are written and read once more: about as long as one tile of its own.
    load = (pieces * size + jnp.where(pieces > 1, pieces, 0)).sum(axis=1)
    order = jnp.argsort(-size, axis=1)
    size, upto = (jnp.take_along_axis(x, order, axis=1) for x in (size, pieces))
    upto = jnp.cumsum(upto, axis=1)
    ends = load.astype(jnp.float32) / lanes
    for k in range(6):
        there = upto[:, -1] > k * lanes
        nth = jnp.take_along_axis(size, (upto > k * lanes).argmax(axis=1)[:, None], axis=1)[:, 0]
        ends = jnp.maximum(ends, jnp.where(there, (k + 1) * nth, 0))
    return cap[jnp.argmin(ends)]


def _list(group, request_tiles, tiles, cap, plan):
    pieces = jnp.maximum(-(-request_tiles // cap), 1)
    # Groups of one request are cut alike, whatever their own last tile: they read the same pages at the same time.
    size = cap if plan.invariant else jnp.maximum(-(-request_tiles // pieces), 1)
    pieces = jnp.maximum(-(-tiles // size), 1)
    combined = (group["rows"] > 0) & ((pieces > 1) | plan.combine_all)
    slots = jnp.where(combined, pieces, 0)
    partial = (jnp.cumsum(slots) - slots).astype(jnp.int32)
    pieces = jnp.where(group["rows"] > 0, pieces, 0)

    # Longest first. The sort is stable: neighbours of one size, which may share pages, stay neighbours.
    order = jnp.argsort(-jnp.minimum(size, request_tiles), stable=True).astype(jnp.int32)
    ends = jnp.cumsum(pieces[order])
    item = jnp.arange(plan.num_items, dtype=jnp.int32)
    at = jnp.minimum(jnp.searchsorted(ends, item, side="right"), plan.groups - 1)
    of, live = order[at], item < ends[-1]
    piece = item - (ends - pieces[order])[at]
    size = jnp.broadcast_to(size, tiles.shape)[of]
    fields = {name: value[of] for name, value in group.items()} | {
        "rows": jnp.where(live, group["rows"][of], 0),
        "tile": piece * size,
        "tiles": jnp.where(live, jnp.clip(tiles[of] - piece * size, 0, size), 0),
        "partial": jnp.where(live & combined[of], partial[of] + piece, -1),
    }
    items = jnp.stack([fields[name] for name in ITEM], axis=1)

    nth = jnp.where(combined, jnp.cumsum(combined) - 1, plan.num_splits)
    records = {"row": group["row"], "partial": partial, "pieces": pieces, "rows": group["rows"]}
    splits = jnp.zeros((plan.num_splits, len(SPLIT)), jnp.int32)
    splits = splits.at[nth].set(jnp.stack([records[name] for name in SPLIT], axis=1), mode="drop")
    return jnp.concatenate([items.ravel(), splits.ravel()]).astype(jnp.int32)
