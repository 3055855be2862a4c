"""Work lists of split-KV kernels: which rows and which keys each thread block takes, so that all finish together.

The rows of a request (query tokens times heads, packed) are cut into *groups* of at most ``group_rows``; a group's keys
lie in *tiles* of ``TILE`` table slots. A group whose tiles are too many for one lane is split into *pieces*, whose
partial results are combined afterwards. Rows that no request owns form groups without tiles: they become zeros.

Everything is computed in JAX, with static shapes, once per step; all layers share the list.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

TILE = 64  # keys
GROUP_ROWS = 64  # of a thread block, at most
# A thread block's item: request, first packed row, first row within the request, rows, first tile, tiles, where its
# partial result goes (-1: it writes the result), table slots that hold keys, and where row 0 stands, from slot 0's key.
ITEM = ("request", "row", "first", "rows", "tile", "tiles", "partial", "keys", "stands")
# A group to combine: first packed row, first partial result, pieces, rows.
SPLIT = ("row", "partial", "pieces", "rows")

HEADER = 2  # the list begins with the numbers of items and of splits that there are

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
        return HEADER + self.num_items * len(ITEM)

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
    """The list, flat: how many items and splits there are, then ``num_items`` records of ``ITEM``, then those of
    ``SPLIT``.

    Lane i takes the items i, 2 * lanes - 1 - i, 2 * lanes + i, ...: longest first, to and fro.

    Whatever one request's numbers are, rows of the others are taken once: a request whose rows are out of range, or
    overlap those of one before it, owns none.

    Sorts and prefix sums are sums over pairs of requests: one small kernel each, where XLA's own take ten.
    """
    s = _segments(q_starts, q_lens, kv_lens, kv_offsets, plan, max_q_len, kv_stride)
    s |= _pieces(s, plan)
    s = jax.lax.optimization_barrier(s | _starts(s))  # or XLA computes all of it again for every number of the list
    header = jnp.stack([(s["groups"] * s["pieces"]).sum(), s["combined"].sum()])
    return jnp.concatenate([header, _items(s, plan, causal, kv_stride), _splits(s, plan)]).astype(jnp.int32)


def sound_requests(
    q_starts: Int[Array, "B"], q_lens: Int[Array, "B"], *, num_tokens: int, max_q_len: int
) -> Bool[Array, "B"]:
    """Whether a request has rows, all of them within ``[0, num_tokens)`` and after those of the requests before it."""
    sound = (q_lens > 0) & (q_lens <= max_q_len) & (q_starts >= 0) & (q_starts <= num_tokens - q_lens)
    return sound & (q_starts >= _latest_before(jnp.where(sound, q_starts + q_lens, 0)))


def _latest_before(ends):
    """Of each request the largest of the numbers before its own, at least 0."""
    return jnp.where(_earlier(ends.shape[0]), ends[None], 0).max(axis=1, initial=0)


def _segments(q_starts, q_lens, kv_lens, kv_offsets, plan, max_q_len, kv_stride):
    """Arrays over segments: what lies before request 0's rows, those, what lies between them and request 1's, ..."""
    tokens = plan.num_rows // plan.heads
    sound = sound_requests(q_starts, q_lens, num_tokens=tokens, max_q_len=max_q_len)
    ends = jnp.where(sound, q_starts + q_lens, 0)
    before = _latest_before(ends)

    # Table slots that hold keys, and where the first row stands, both counted from slot 0's key.
    kv_lens = jnp.where(sound & (kv_lens > 0), kv_lens, 0)
    keys = jnp.where(kv_lens > 0, _slots(kv_lens - kv_offsets, plan, kv_stride), 0)

    def interleave(gaps, requests, last):
        return jnp.append(jnp.stack([gaps, requests], axis=1).ravel(), last)

    none, request = jnp.zeros_like(q_lens), jnp.arange(q_lens.shape[0], dtype=jnp.int32)
    return {
        "request": interleave(none, request, 0),
        "token": interleave(before, jnp.where(sound, q_starts, before), ends.max(initial=0)),
        "tokens": interleave(
            jnp.where(sound, q_starts - before, 0), jnp.where(sound, q_lens, 0), tokens - ends.max(initial=0)
        ),
        "keys": interleave(none, keys, 0),
        "stands": interleave(none, kv_lens - q_lens - kv_offsets, 0),
    }


def _pieces(s, plan):
    """How each segment is cut: its groups, the pieces of each, the tiles of a piece."""
    tiles, groups = -(-s["keys"] // TILE), -(-s["tokens"] * plan.heads // plan.group_rows)
    cap = jnp.int32(INVARIANT_TILES) if plan.invariant else _piece_tiles(tiles, groups, plan.lanes)
    pieces = jnp.maximum(-(-tiles // cap), 1)
    size = jnp.broadcast_to(cap, tiles.shape) if plan.invariant else jnp.maximum(-(-tiles // pieces), 1)
    pieces = jnp.maximum(-(-tiles // size), 1)
    combined = jnp.where((pieces > 1) | plan.combine_all, groups, 0)
    return {"tiles": tiles, "groups": groups, "size": size, "pieces": pieces, "combined": combined}


def _piece_tiles(tiles, groups, lanes):
    """Most tiles of a piece: of a few candidates around the mean load of a lane, the one whose pieces end first.

    The estimate is that of list scheduling, longest first: the mean load, and (k + 1) pieces of the size of the
    (k * lanes + 1)-th, which share a lane.
    """
    mean = jnp.maximum(-(-(tiles * groups).sum() // lanes), 4)
    cap = jnp.maximum(mean * (4 + jnp.arange(13, dtype=jnp.int32)) // 8, mean // 2 + 1)  # half of it to twice as much
    pieces = jnp.maximum(-(-tiles[None] // cap[:, None]), 1)
    size = -(-tiles[None] // pieces) + _OVERHEAD
    pieces = pieces * groups[None]
    # A split's partial results are written and read once more: about as long as a tile of its own.
    load = (pieces * size + jnp.where(size < tiles[None], pieces, 0)).sum(axis=1)
    ends = load.astype(jnp.float32) / lanes
    as_large = jnp.where(size[:, None] >= size[:, :, None], pieces[:, None], 0).sum(axis=2)
    for k in range(6):
        nth = jnp.where(as_large > k * lanes, size, 0).max(axis=1)
        ends = jnp.maximum(ends, ((k + 1) * nth).astype(jnp.float32))
    return cap[jnp.argmin(ends)]


def _starts(s):
    """Where each segment's items begin, longest first, and its splits and their partial results."""
    work, ordinal = jnp.minimum(s["size"], s["tiles"]), _earlier(s["size"].shape[0])
    longer = (work[None] > work[:, None]) | ((work[None] == work[:, None]) & ordinal)

    def sums(before, counts):
        return jnp.where(before, counts[None], 0).sum(axis=1)

    return {
        "item": sums(longer, s["groups"] * s["pieces"]),
        "split": sums(ordinal, s["combined"]),
        "partial": sums(ordinal, s["combined"] * s["pieces"]),
    }


def _items(s, plan, causal, kv_stride):
    """Of one segment, the groups of a piece are side by side, for they read the same pages."""
    of, nth, live = _owner(s["item"], s["groups"] * s["pieces"], plan.num_items)
    piece, group = nth // jnp.maximum(s["groups"][of], 1), nth % jnp.maximum(s["groups"][of], 1)
    first = group * plan.group_rows
    rows = jnp.where(live, jnp.clip(s["tokens"][of] * plan.heads - first, 0, plan.group_rows), 0)
    tiles = s["tiles"][of]
    if causal:  # up to what the group's last row sees
        last = s["stands"][of] + (first + rows - 1) // plan.heads
        tiles = jnp.minimum(tiles, -(-_slots(last + 1, plan, kv_stride) // TILE))
    size = s["size"][of]
    fields = {
        "request": s["request"][of],
        "row": s["token"][of] * plan.heads + first,
        "first": first,
        "rows": rows,
        "tile": piece * size,
        "tiles": jnp.where(live, jnp.clip(tiles - piece * size, 0, size), 0),
        "partial": jnp.where(live & (s["combined"][of] > 0), s["partial"][of] + group * s["pieces"][of] + piece, -1),
        "keys": s["keys"][of],
        "stands": s["stands"][of],
    }
    return jnp.stack([fields[name] for name in ITEM], axis=1).ravel()


def _splits(s, plan):
    of, group, live = _owner(s["split"], s["combined"], plan.num_splits)
    first = group * plan.group_rows
    fields = {
        "row": s["token"][of] * plan.heads + first,
        "partial": s["partial"][of] + group * s["pieces"][of],
        "pieces": s["pieces"][of],
        "rows": jnp.where(live, jnp.clip(s["tokens"][of] * plan.heads - first, 0, plan.group_rows), 0),
    }
    return jnp.stack([fields[name] for name in SPLIT], axis=1).ravel()


def _slots(end, plan, kv_stride):
    """Table slots whose keys stand before ``end``, counted from slot 0's key."""
    return jnp.clip(-(-end // kv_stride), 0, plan.max_tiles * TILE)


def _earlier(n):
    """Bool [n, n]: whether the column comes before the row."""
    return jnp.tri(n, k=-1, dtype=bool)


def _owner(start, count, total):
    """Of each of ``total`` places: the segment whose range it is in, its number there, whether there is one."""
    place = jnp.arange(total, dtype=jnp.int32)
    inside = (place[:, None] >= start[None]) & (place[:, None] < (start + count)[None])
    of = jnp.where(inside, jnp.arange(start.shape[0], dtype=jnp.int32)[None], 0).max(axis=1, initial=0)
    return of, place - start[of], inside.any(axis=1)
