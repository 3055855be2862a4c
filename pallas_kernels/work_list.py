"""Work lists of the MLA kernels: which rows and which keys each thread block takes, so that all finish together.

The rows of a request (query tokens times heads, packed) are cut into *row tiles* of at most ``tile_rows`` rows, its
keys into *key tiles* of ``TILE`` keys. A row tile with too many keys for one thread block is divided into *KV splits*,
whose partial results are combined afterwards. Rows that no request owns form row tiles without keys: they become zeros.

Everything is computed in JAX, with static shapes, once per step; all layers share the list.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

TILE = 64  # keys of a key tile
TILE_ROWS = 64  # most rows of a row tile
# An item, what a thread block takes at a time: request, first packed row, first row within the request, rows, first key
# tile, key tiles, index of its partial result (-1: it writes the result itself), keys of the request, and the position
# of the request's row 0, counted from the table's first key.
ITEM = ("request", "row", "first", "rows", "tile", "tiles", "partial", "keys", "position")
# A row tile to combine: first packed row, index of its first partial result, KV splits, rows.
COMBINED = ("row", "partial", "splits", "rows")

HEADER = 2  # the list begins with the numbers of items and of row tiles to combine

INVARIANT_TILES = 32  # key tiles of a KV split when the batch must have no influence: 2048 keys


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes of a work list.

    Attributes:
        num_requests: requests B.
        num_rows: packed rows, T * H.
        heads: query heads H.
        tile_rows: most rows of a row tile.
        blocks: thread blocks of a launch, all of which the device runs at once.
        max_tiles: key tiles of a request's page table.
        combine_all: whether row tiles that are not split go through the combine too.
        invariant: whether KV splits are cut at multiples of ``INVARIANT_TILES`` and nowhere else.
        overhead: cost of an item besides its keys, in key tiles: queries, filling the pipeline, writing the result.
    """

    num_requests: int
    num_rows: int
    heads: int
    tile_rows: int
    blocks: int
    max_tiles: int
    combine_all: bool = False
    invariant: bool = False
    overhead: int = 3

    kv_heads: ClassVar[int] = 1  # MLA is multi-query attention
    set_heads: ClassVar[int] = 1

    @property
    def row_tiles(self) -> int:
        """The most row tiles that any batch of these sizes has."""
        segments = min(2 * self.num_requests + 1, self.num_rows // self.heads)  # requests, and gaps between them
        return self.num_rows // self.tile_rows + (segments if self.heads % self.tile_rows else 0)

    @property
    def _most_splits(self) -> int:
        return -(-self.max_tiles // INVARIANT_TILES)

    @property
    def num_items(self) -> int:
        """Records of ``ITEM`` in the list."""
        return self.row_tiles * self._most_splits if self.invariant else self.row_tiles + 2 * self.blocks

    @property
    def num_combined(self) -> int:
        """Records of ``COMBINED`` in the list."""
        if self.combine_all or self.invariant:
            return self.row_tiles
        return min(self.row_tiles, 2 * self.blocks)

    @property
    def num_partials(self) -> int:
        """Partial results that there is room for."""
        if self.invariant:
            return self.num_items
        return 4 * self.blocks + (self.row_tiles if self.combine_all else 0)

    @property
    def combined_at(self) -> int:
        """Index in the list of the first record of ``COMBINED``."""
        return HEADER + self.num_items * len(ITEM)

    @property
    def size(self) -> int:
        """Length of the list."""
        return self.combined_at + self.num_combined * len(COMBINED)


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
    """Makes the list, int32 [plan.size].

    It holds the numbers of items and of row tiles to combine, then ``plan.num_items`` records of ``ITEM``, then
    ``plan.num_combined`` of ``COMBINED``.

    Items are ordered longest first. Thread block i takes items i, 2 * blocks - 1 - i, 2 * blocks + i, ...

    Whatever one request's numbers are, each row of the others is in one item: a request whose rows are out of range, or
    overlap those of one before it, owns none.

    Sorts and prefix sums are sums over pairs of requests: one small kernel each, where XLA's own take ten.

    Args:
        q_starts, q_lens, kv_lens, kv_offsets: fields of ``AttentionMetadata``.
        plan: static sizes.
        max_q_len: most query tokens of a request.
        causal: whether rows see keys up to their own position only.
        kv_stride: positions from one key index to the next.
    """
    segments = segments_of(q_starts, q_lens, kv_lens, kv_offsets, plan, max_q_len, kv_stride)
    cuts = _cuts(segments, plan)
    # Without a barrier XLA computes all of this again for every number of the list.
    segments, cuts, starts = jax.lax.optimization_barrier((segments, cuts, _starts(cuts)))
    header = jnp.stack([(cuts.row_tiles * cuts.splits).sum(), cuts.combined.sum()])
    items, combined = _items(segments, cuts, starts, plan, causal, kv_stride), _combined(segments, cuts, starts, plan)
    return jnp.concatenate([header, items, combined]).astype(jnp.int32)


def sound_requests(
    q_starts: Int[Array, "B"], q_lens: Int[Array, "B"], *, num_tokens: int, max_q_len: int
) -> Bool[Array, "B"]:
    """Whether each request has rows, all within ``[0, num_tokens)`` and after those of the requests before it."""
    sound = (q_lens > 0) & (q_lens <= max_q_len) & (q_starts >= 0) & (q_starts <= num_tokens - q_lens)
    return sound & (q_starts >= _latest_before(jnp.where(sound, q_starts + q_lens, 0)))


def _latest_before(ends):
    """For each request the largest of the numbers before its own, at least 0."""
    return jnp.where(earlier(ends.shape[0]), ends[None], 0).max(axis=1, initial=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """All rows of a call in segments: the gap before request 0's rows, those rows, the gap before request 1's, and on.

    Attributes:
        request: request of the rows; 0 for gaps.
        token: first query token.
        tokens: query tokens.
        keys: keys of the request; 0 for gaps.
        position: position of the first row, counted from the table's first key.
    """

    request: Int[Array, "segments"]
    token: Int[Array, "segments"]
    tokens: Int[Array, "segments"]
    keys: Int[Array, "segments"]
    position: Int[Array, "segments"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cuts:
    """How the rows and keys of each segment are divided.

    Attributes:
        tiles: number of key tiles.
        row_tiles: number of row tiles.
        splits: KV splits of each row tile.
        split_tiles: key tiles of a KV split.
        combined: number of row tiles that are combined.
    """

    tiles: Int[Array, "segments"]
    row_tiles: Int[Array, "segments"]
    splits: Int[Array, "segments"]
    split_tiles: Int[Array, "segments"]
    combined: Int[Array, "segments"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Starts:
    """Indices of each segment's first item (longest first), first row tile to combine, and first partial result."""

    item: Int[Array, "segments"]
    combined: Int[Array, "segments"]
    partial: Int[Array, "segments"]


def segments_of(q_starts, q_lens, kv_lens, kv_offsets, plan, max_q_len, kv_stride) -> Segments:
    tokens = plan.num_rows // plan.heads
    sound = sound_requests(q_starts, q_lens, num_tokens=tokens, max_q_len=max_q_len)
    ends = jnp.where(sound, q_starts + q_lens, 0)
    before = _latest_before(ends)
    kv_lens = jnp.where(sound & (kv_lens > 0), kv_lens, 0)
    keys = jnp.where(kv_lens > 0, keys_before(kv_lens - kv_offsets, plan, kv_stride), 0)

    def interleave(gaps, requests, last):
        return jnp.append(jnp.stack([gaps, requests], axis=1).ravel(), last)

    none, request = jnp.zeros_like(q_lens), jnp.arange(q_lens.shape[0], dtype=jnp.int32)
    return Segments(
        request=interleave(none, request, 0),
        token=interleave(before, jnp.where(sound, q_starts, before), ends.max(initial=0)),
        tokens=interleave(
            jnp.where(sound, q_starts - before, 0), jnp.where(sound, q_lens, 0), tokens - ends.max(initial=0)
        ),
        keys=interleave(none, keys, 0),
        position=interleave(none, kv_lens - q_lens - kv_offsets, 0),
    )


def _cuts(s: Segments, plan: Plan) -> Cuts:
    """Divides each segment: KV splits of equal size, no larger than ``_most_split_tiles`` allows."""
    tiles, row_tiles = -(-s.keys // TILE), -(-s.tokens * plan.heads // plan.tile_rows)
    cap = jnp.int32(INVARIANT_TILES) if plan.invariant else _most_split_tiles(tiles, row_tiles, plan)
    splits = jnp.maximum(-(-tiles // cap), 1)
    size = jnp.broadcast_to(cap, tiles.shape) if plan.invariant else jnp.maximum(-(-tiles // splits), 1)
    splits = jnp.maximum(-(-tiles // size), 1)
    combined = jnp.where((splits > 1) | plan.combine_all, row_tiles, 0)
    return Cuts(tiles=tiles, row_tiles=row_tiles, splits=splits, split_tiles=size, combined=combined)


def _most_split_tiles(tiles, row_tiles, plan):
    """The most key tiles of a KV split: of 13 candidates around a thread block's mean load, the one that ends first.

    The estimate is that of list scheduling, longest first: the mean load, and (k + 1) KV splits of the size of the
    (k * blocks + 1)-th, which share a thread block.
    """
    blocks = plan.blocks
    mean = jnp.maximum(-(-(tiles * row_tiles).sum() // blocks), 4)
    # From half the mean to twice the mean.
    cap = jnp.maximum(mean * (4 + jnp.arange(13, dtype=jnp.int32)) // 8, mean // 2 + 1)
    splits = jnp.maximum(-(-tiles[None] // cap[:, None]), 1)
    size = -(-tiles[None] // splits) + plan.overhead
    splits = splits * row_tiles[None]
    # A partial result is written and read once more, which takes about as long as a key tile.
    load = (splits * size + jnp.where(size < tiles[None], splits, 0)).sum(axis=1)
    ends = load.astype(jnp.float32) / blocks
    as_large = jnp.where(size[:, None] >= size[:, :, None], splits[:, None], 0).sum(axis=2)
    for k in range(6):
        nth = jnp.where(as_large > k * blocks, size, 0).max(axis=1)
        ends = jnp.maximum(ends, ((k + 1) * nth).astype(jnp.float32))
    return cap[jnp.argmin(ends)]


def _starts(cuts: Cuts) -> Starts:
    """Indices as sums over pairs of segments; items of longer splits come first, of equals the earlier segment's."""
    work, ordinal = jnp.minimum(cuts.split_tiles, cuts.tiles), earlier(cuts.tiles.shape[0])
    longer = (work[None] > work[:, None]) | ((work[None] == work[:, None]) & ordinal)

    def sums(before, counts):
        return jnp.where(before, counts[None], 0).sum(axis=1)

    return Starts(
        item=sums(longer, cuts.row_tiles * cuts.splits),
        combined=sums(ordinal, cuts.combined),
        partial=sums(ordinal, cuts.combined * cuts.splits),
    )


def _items(s: Segments, cuts: Cuts, starts: Starts, plan: Plan, causal: bool, kv_stride: int):
    """The records of ``ITEM``. Row tiles of one KV split of a segment are neighbours, for they read the same pages."""
    of, nth, live = owner(starts.item, cuts.row_tiles * cuts.splits, jnp.arange(plan.num_items, dtype=jnp.int32))
    row_tiles = jnp.maximum(cuts.row_tiles[of], 1)
    split, row_tile = nth // row_tiles, nth % row_tiles
    first = row_tile * plan.tile_rows
    rows = jnp.where(live, jnp.clip(s.tokens[of] * plan.heads - first, 0, plan.tile_rows), 0)
    tiles = cuts.tiles[of]
    if causal:  # keys after those of the row tile's last row are not visible
        last = s.position[of] + (first + rows - 1) // plan.heads
        tiles = jnp.minimum(tiles, -(-keys_before(last + 1, plan, kv_stride) // TILE))
    size = cuts.split_tiles[of]
    fields = {
        "request": s.request[of],
        "row": s.token[of] * plan.heads + first,
        "first": first,
        "rows": rows,
        "tile": split * size,
        "tiles": jnp.where(live, jnp.clip(tiles - split * size, 0, size), 0),
        "partial": jnp.where(
            live & (cuts.combined[of] > 0), starts.partial[of] + row_tile * cuts.splits[of] + split, -1
        ),
        "keys": s.keys[of],
        "position": s.position[of],
    }
    return jnp.stack([fields[name] for name in ITEM], axis=1).ravel()


def _combined(s: Segments, cuts: Cuts, starts: Starts, plan: Plan):
    """The records of ``COMBINED``."""
    of, row_tile, live = owner(starts.combined, cuts.combined, jnp.arange(plan.num_combined, dtype=jnp.int32))
    first = row_tile * plan.tile_rows
    fields = {
        "row": s.token[of] * plan.heads + first,
        "partial": starts.partial[of] + row_tile * cuts.splits[of],
        "splits": cuts.splits[of],
        "rows": jnp.where(live, jnp.clip(s.tokens[of] * plan.heads - first, 0, plan.tile_rows), 0),
    }
    return jnp.stack([fields[name] for name in COMBINED], axis=1).ravel()


def keys_before(end, plan, kv_stride):
    """Number of keys at positions before ``end``, which counts from the table's first key."""
    return jnp.clip(-(-end // kv_stride), 0, plan.max_tiles * TILE)


def earlier(n):
    """Bool [n, n]: whether the column's index is below the row's."""
    return jnp.tri(n, k=-1, dtype=bool)


def owner(start, count, number):
    """For each number: the segment whose range holds it, its number there, and whether one does."""
    inside = (number[:, None] >= start[None]) & (number[:, None] < (start + count)[None])
    of = jnp.where(inside, jnp.arange(start.shape[0], dtype=jnp.int32)[None], 0).max(axis=1, initial=0)
    return of, number - start[of], inside.any(axis=1)
