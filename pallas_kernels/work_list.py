"""Work lists of split-KV kernels: which rows and which keys each thread block takes, so that all finish together.

The rows of a request (query tokens times heads, packed) are cut into *row tiles* of at most ``tile_rows`` rows, its
keys into *key tiles* of ``TILE`` keys. A row tile with too many keys for one thread block is divided into *KV splits*,
whose partial results are combined afterwards. Rows that no request owns form row tiles without keys: they become zeros.

Everything is computed in JAX, with static shapes, once per step; all layers share the list.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

TILE = 64  # keys
TILE_ROWS = 64  # of a thread block, at most
# What a thread block takes at a time: request, first packed row, first row within the request, rows, first key tile,
# key tiles, where its partial result goes (-1: it writes the result), keys in the table, and the position of row 0,
# counted from the table's first key.
ITEM = ("request", "row", "first", "rows", "tile", "tiles", "partial", "keys", "position")
# A row tile to combine: first packed row, first partial result, KV splits, rows.
COMBINED = ("row", "partial", "splits", "rows")

HEADER = 2  # the list begins with the numbers of items and of row tiles to combine that there are

INVARIANT_TILES = 32  # key tiles of a KV split that never changes with the batch: 2048 keys
_OVERHEAD = 3  # of an item, in key tiles: reading its queries, filling the pipeline, writing its result


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes of a work list.

    Attributes:
        num_requests: requests B.
        num_rows: packed rows, T * H.
        heads: query heads H.
        tile_rows: most rows of a row tile.
        blocks: thread blocks, all of which the device runs at a time.
        max_tiles: key tiles of the page table.
        combine_all: every row tile goes through the combine, also one that is not split.
        invariant: KV splits are cut at multiples of ``INVARIANT_TILES`` and nothing else.
    """

    num_requests: int
    num_rows: int
    heads: int
    tile_rows: int
    blocks: int
    max_tiles: int
    combine_all: bool = False
    invariant: bool = False

    @property
    def row_tiles(self) -> int:
        segments = min(2 * self.num_requests + 1, self.num_rows // self.heads)  # requests, and gaps between them
        return self.num_rows // self.tile_rows + (segments if self.heads % self.tile_rows else 0)

    @property
    def _most_splits(self) -> int:
        return -(-self.max_tiles // INVARIANT_TILES)

    @property
    def num_items(self) -> int:
        return self.row_tiles * self._most_splits if self.invariant else self.row_tiles + 2 * self.blocks

    @property
    def num_combined(self) -> int:
        if self.combine_all or self.invariant:
            return self.row_tiles
        return min(self.row_tiles, 2 * self.blocks)

    @property
    def num_partials(self) -> int:
        if self.invariant:
            return self.num_items
        return 4 * self.blocks + (self.row_tiles if self.combine_all else 0)

    @property
    def combined_at(self) -> int:
        """Where the records of ``COMBINED`` begin in the list."""
        return HEADER + self.num_items * len(ITEM)

    @property
    def size(self) -> int:
        """int32 numbers of the list."""
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
    """The list, flat: the numbers of items and of row tiles to combine that there are, then ``num_items`` records of
    ``ITEM``, then ``num_combined`` of ``COMBINED``.

    Thread block i takes the items i, 2 * blocks - 1 - i, 2 * blocks + i, ...: longest first, to and fro.

    Whatever one request's numbers are, rows of the others are taken once: a request whose rows are out of range, or
    overlap those of one before it, owns none.

    Sorts and prefix sums are sums over pairs of requests: one small kernel each, where XLA's own take ten.
    """
    segments = _segments(q_starts, q_lens, kv_lens, kv_offsets, plan, max_q_len, kv_stride)
    cuts = _cuts(segments, plan)
    # Or XLA computes all of it again for every number of the list.
    segments, cuts, starts = jax.lax.optimization_barrier((segments, cuts, _starts(cuts)))
    header = jnp.stack([(cuts.row_tiles * cuts.splits).sum(), cuts.combined.sum()])
    items, combined = _items(segments, cuts, starts, plan, causal, kv_stride), _combined(segments, cuts, starts, plan)
    return jnp.concatenate([header, items, combined]).astype(jnp.int32)


def sound_requests(
    q_starts: Int[Array, "B"], q_lens: Int[Array, "B"], *, num_tokens: int, max_q_len: int
) -> Bool[Array, "B"]:
    """Whether a request has rows, all of them within ``[0, num_tokens)`` and after those of the requests before it."""
    sound = (q_lens > 0) & (q_lens <= max_q_len) & (q_starts >= 0) & (q_starts <= num_tokens - q_lens)
    return sound & (q_starts >= _latest_before(jnp.where(sound, q_starts + q_lens, 0)))


def _latest_before(ends):
    """Of each request the largest of the numbers before its own, at least 0."""
    return jnp.where(_earlier(ends.shape[0]), ends[None], 0).max(axis=1, initial=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """What lies before request 0's rows, those, what lies between them and request 1's, and so on to the last row.

    Attributes:
        request: whose rows they are; 0 for gaps.
        token: first query token.
        tokens: query tokens.
        keys: keys in the table; 0 for gaps.
        position: of the first row, counted from the table's first key.
    """

    request: Int[Array, "segments"]
    token: Int[Array, "segments"]
    tokens: Int[Array, "segments"]
    keys: Int[Array, "segments"]
    position: Int[Array, "segments"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cuts:
    """How each segment is divided.

    Attributes:
        tiles: key tiles.
        row_tiles: row tiles.
        splits: KV splits of each row tile.
        split_tiles: key tiles of a KV split.
        combined: row tiles that are combined.
    """

    tiles: Int[Array, "segments"]
    row_tiles: Int[Array, "segments"]
    splits: Int[Array, "segments"]
    split_tiles: Int[Array, "segments"]
    combined: Int[Array, "segments"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Starts:
    """Where each segment's items begin, longest first, its row tiles to combine, and their partial results."""

    item: Int[Array, "segments"]
    combined: Int[Array, "segments"]
    partial: Int[Array, "segments"]


def _segments(q_starts, q_lens, kv_lens, kv_offsets, plan, max_q_len, kv_stride) -> Segments:
    tokens = plan.num_rows // plan.heads
    sound = sound_requests(q_starts, q_lens, num_tokens=tokens, max_q_len=max_q_len)
    ends = jnp.where(sound, q_starts + q_lens, 0)
    before = _latest_before(ends)
    kv_lens = jnp.where(sound & (kv_lens > 0), kv_lens, 0)
    keys = jnp.where(kv_lens > 0, _keys_before(kv_lens - kv_offsets, plan, kv_stride), 0)

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
    tiles, row_tiles = -(-s.keys // TILE), -(-s.tokens * plan.heads // plan.tile_rows)
    cap = jnp.int32(INVARIANT_TILES) if plan.invariant else _most_split_tiles(tiles, row_tiles, plan.blocks)
    splits = jnp.maximum(-(-tiles // cap), 1)
    size = jnp.broadcast_to(cap, tiles.shape) if plan.invariant else jnp.maximum(-(-tiles // splits), 1)
    splits = jnp.maximum(-(-tiles // size), 1)
    combined = jnp.where((splits > 1) | plan.combine_all, row_tiles, 0)
    return Cuts(tiles=tiles, row_tiles=row_tiles, splits=splits, split_tiles=size, combined=combined)


def _most_split_tiles(tiles, row_tiles, blocks):
    """Most key tiles of a KV split: of a few candidates around a thread block's mean load, the one that ends first.

    The estimate is that of list scheduling, longest first: the mean load, and (k + 1) KV splits of the size of the
    (k * blocks + 1)-th, which share a thread block.
    """
    mean = jnp.maximum(-(-(tiles * row_tiles).sum() // blocks), 4)
    cap = jnp.maximum(mean * (4 + jnp.arange(13, dtype=jnp.int32)) // 8, mean // 2 + 1)  # half of it to twice as much
    splits = jnp.maximum(-(-tiles[None] // cap[:, None]), 1)
    size = -(-tiles[None] // splits) + _OVERHEAD
    splits = splits * row_tiles[None]
    # Partial results are written and read once more: about as long as a key tile for each.
    load = (splits * size + jnp.where(size < tiles[None], splits, 0)).sum(axis=1)
    ends = load.astype(jnp.float32) / blocks
    as_large = jnp.where(size[:, None] >= size[:, :, None], splits[:, None], 0).sum(axis=2)
    for k in range(6):
        nth = jnp.where(as_large > k * blocks, size, 0).max(axis=1)
        ends = jnp.maximum(ends, ((k + 1) * nth).astype(jnp.float32))
    return cap[jnp.argmin(ends)]


def _starts(cuts: Cuts) -> Starts:
    work, ordinal = jnp.minimum(cuts.split_tiles, cuts.tiles), _earlier(cuts.tiles.shape[0])
    longer = (work[None] > work[:, None]) | ((work[None] == work[:, None]) & ordinal)

    def sums(before, counts):
        return jnp.where(before, counts[None], 0).sum(axis=1)

    return Starts(
        item=sums(longer, cuts.row_tiles * cuts.splits),
        combined=sums(ordinal, cuts.combined),
        partial=sums(ordinal, cuts.combined * cuts.splits),
    )


def _items(s: Segments, cuts: Cuts, starts: Starts, plan: Plan, causal: bool, kv_stride: int):
    """Of one segment, the row tiles of a KV split are side by side, for they read the same pages."""
    of, nth, live = _owner(starts.item, cuts.row_tiles * cuts.splits, plan.num_items)
    row_tiles = jnp.maximum(cuts.row_tiles[of], 1)
    split, row_tile = nth // row_tiles, nth % row_tiles
    first = row_tile * plan.tile_rows
    rows = jnp.where(live, jnp.clip(s.tokens[of] * plan.heads - first, 0, plan.tile_rows), 0)
    tiles = cuts.tiles[of]
    if causal:  # up to what the row tile's last row sees
        last = s.position[of] + (first + rows - 1) // plan.heads
        tiles = jnp.minimum(tiles, -(-_keys_before(last + 1, plan, kv_stride) // TILE))
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
    of, row_tile, live = _owner(starts.combined, cuts.combined, plan.num_combined)
    first = row_tile * plan.tile_rows
    fields = {
        "row": s.token[of] * plan.heads + first,
        "partial": starts.partial[of] + row_tile * cuts.splits[of],
        "splits": cuts.splits[of],
        "rows": jnp.where(live, jnp.clip(s.tokens[of] * plan.heads - first, 0, plan.tile_rows), 0),
    }
    return jnp.stack([fields[name] for name in COMBINED], axis=1).ravel()


def _keys_before(end, plan, kv_stride):
    """Keys of the table at positions before ``end``, counted from its first key."""
    return jnp.clip(-(-end // kv_stride), 0, plan.max_tiles * TILE)


def _earlier(n):
    """Bool [n, n]: whether the column comes before the row."""
    return jnp.tri(n, k=-1, dtype=bool)


def _owner(start, count, total):
    """Of each of ``total`` numbers: the segment whose range it is in, its number there, whether there is one."""
    number = jnp.arange(total, dtype=jnp.int32)
    inside = (number[:, None] >= start[None]) & (number[:, None] < (start + count)[None])
    of = jnp.where(inside, jnp.arange(start.shape[0], dtype=jnp.int32)[None], 0).max(axis=1, initial=0)
    return of, number - start[of], inside.any(axis=1)
