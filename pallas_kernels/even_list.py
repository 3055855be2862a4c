"""Work lists of kernels bound by memory: equal shares of one long row of key tiles, cut where a share ends.

As in ``work_list.py`` the rows of a request are cut into row tiles and its keys into key tiles. A *unit* is a row tile
of one set of KV heads, with all key tiles that its rows see. All units stand in one line, and each team of thread
blocks takes an equal length of it: so all teams end together, whatever the numbers of requests, heads and keys are. A
unit in which one share ends and the next begins is divided into KV splits there, whose partial results are combined
afterwards.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from mla_attn.pallas_kernels.work_list import (
    COMBINED,
    INVARIANT_TILES,
    TILE,
    Segments,
    earlier,
    keys_before,
    owner,
    segments_of,
)

# An item: request, first query token, its number in the request, rows, first key tile, key tiles, index of its partial
# result (-1: it writes the result itself), keys of the request, position of the request's row 0 (counted from the
# table's first key), set of KV heads, and whether it begins its unit.
ITEM = ("request", "token", "nth", "rows", "tile", "tiles", "partial", "keys", "position", "set", "begins")

HEADER = 2  # the list begins with the numbers of items and of units to combine

_OVERHEAD = 1  # cost of a unit besides its keys, in key tiles
_LEAST_SPLIT = 2  # key tiles of a KV split, unless all of its request's are fewer
_LEAST_SHARE = 4  # key tiles of a team, unless there are fewer


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvenPlan:
    """Static sizes of an even list.

    Attributes:
        num_requests: requests B.
        num_tokens: query tokens T.
        kv_heads: KV heads K.
        heads: query heads of a KV head; rows of a query token.
        tile_tokens: most query tokens of a row tile.
        block_heads: KV heads that a thread block takes at a time.
        lanes: thread blocks of a team, which take neighbouring KV heads of the same keys.
        teams: teams of a launch, all of which the device runs at once.
        max_tiles: key tiles of a request's page table.
        window: keys that a row may see, itself included; None for all.
        tree: whether the windows of a request's rows end at positions of their own, as those of trees do.
        invariant: whether KV splits are cut at multiples of ``INVARIANT_TILES`` and nowhere else.
    """

    num_requests: int
    num_tokens: int
    kv_heads: int
    heads: int
    tile_tokens: int
    block_heads: int
    lanes: int
    teams: int
    max_tiles: int
    window: int | None = None
    tree: bool = False
    invariant: bool = False

    @property
    def set_heads(self) -> int:
        """KV heads of a set: those that a team takes at a time."""
        return self.block_heads * self.lanes

    @property
    def sets(self) -> int:
        """Sets of KV heads."""
        return self.kv_heads // self.set_heads

    @property
    def tile_rows(self) -> int:
        """Most rows of a row tile, of one KV head."""
        return self.tile_tokens * self.heads

    @property
    def num_rows(self) -> int:
        """Rows of a KV head."""
        return self.num_tokens * self.heads

    @property
    def blocks(self) -> int:
        """Thread blocks of a launch."""
        return self.teams * self.lanes

    @property
    def _units(self) -> int:
        segments = min(2 * self.num_requests + 1, self.num_tokens)  # requests, and gaps between them
        row_tiles = self.num_tokens // self.tile_tokens + (segments if self.tile_tokens > 1 else 0)
        return row_tiles * self.sets

    @property
    def _most_splits(self) -> int:
        return -(-self.max_tiles // INVARIANT_TILES)

    @property
    def num_items(self) -> int:
        """Records of ``ITEM`` in the list."""
        return self._units * self._most_splits if self.invariant else self._units + self.teams

    @property
    def most_tiles(self) -> int:
        """Most key tiles of a unit."""
        if self.window is None or self.tree:
            return self.max_tiles
        return min(self.max_tiles, most_window_tiles(self.window, self.tile_tokens))

    @property
    def num_combined(self) -> int:
        """Records of ``COMBINED`` in the list; 0 where no unit can be divided."""
        if self.invariant:
            return self._units if self._most_splits > 1 else 0
        return min(self._units, self.teams) if self.most_tiles >= 2 * _LEAST_SPLIT else 0

    @property
    def num_partials(self) -> int:
        """Partial results, of a set of KV heads each, that there is room for."""
        return self.num_items if self.invariant else 2 * self.teams

    @property
    def items_at(self) -> int:
        """Index in the list of the first record of ``ITEM``; before it stand the teams' first items."""
        return HEADER + self.teams + 1

    @property
    def combined_at(self) -> int:
        """Index in the list of the first record of ``COMBINED``."""
        return self.items_at + self.num_items * len(ITEM)

    @property
    def size(self) -> int:
        """Length of the list."""
        return self.combined_at + self.num_combined * len(COMBINED)


@functools.partial(jax.jit, static_argnames=("plan", "max_q_len", "causal", "kv_stride"), inline=True)
def even_list(
    q_starts: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    kv_lens: Int[Array, "B"],
    kv_offsets: Int[Array, "B"],
    window_starts: Int[Array, "B"] | None = None,
    *,
    plan: EvenPlan,
    max_q_len: int,
    causal: bool = True,
    kv_stride: int = 1,
) -> Int[Array, "size"]:
    """Makes the list, int32 [plan.size]; arguments are those of ``work_list``, and with ``plan.tree`` the first
    position in the window of any row of each request, counted from the table's first key.

    It holds the numbers of items and of units to combine, for each team the number of its first item and then that of
    all items, ``plan.num_items`` records of ``ITEM``, and ``plan.num_combined`` of ``COMBINED``. The items of a team
    follow each other.

    Tiles left of every window of a row tile are in no item.
    """
    segments = segments_of(q_starts, q_lens, kv_lens, kv_offsets, plan, max_q_len, kv_stride)
    units = _units(segments, window_starts, plan, kv_stride)
    # Without barriers XLA computes all of this again for every number of the list.
    segments, units = jax.lax.optimization_barrier((segments, units))
    shares = jax.lax.optimization_barrier(_shares(units, plan))
    place = functools.partial(_Place.of, segments, units, plan)
    items = _items(shares, place, window_starts, plan, causal, kv_stride)
    count, combined = (_combined_splits if plan.invariant else _combined_cuts)(units, shares, place, plan)
    header = jnp.stack([shares.item[-1], count])
    return jnp.concatenate([header, shares.item, items, combined]).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Units:
    """The units of each segment.

    Attributes:
        first: number of the first unit.
        count: number of units; with ``plan.invariant`` each KV split is one.
        tiles: most key tiles of a unit.
        splits: KV splits at fixed places; 1 unless ``plan.invariant``.
        begin: place of the first unit in the line.
    """

    first: Int[Array, "segments"]
    count: Int[Array, "segments"]
    tiles: Int[Array, "segments"]
    splits: Int[Array, "segments"]
    begin: Int[Array, "segments"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shares:
    """Where the share of each team begins, and after the last one where the line ends.

    Attributes:
        unit: number of the unit.
        cut: key tile of the unit; 0 where it begins with the unit.
        item: number of the team's first item.
        left: index of the partial result that ends here, where there is a cut.
        first: whether this is the first cut of its unit.
        nth: number of the unit among those that are cut.
    """

    unit: Int[Array, "places"]
    cut: Int[Array, "places"]
    item: Int[Array, "places"]
    left: Int[Array, "places"]
    first: Int[Array, "places"]
    nth: Int[Array, "places"]


def _units(s: Segments, window_starts, plan: EvenPlan, kv_stride: int) -> Units:
    tiles = -(-s.keys // TILE)
    count = -(-s.tokens // plan.tile_tokens) * plan.sets
    splits = jnp.ones_like(tiles)
    if plan.invariant:
        splits = jnp.maximum(-(-tiles // INVARIANT_TILES), 1)
        tiles, count = jnp.minimum(tiles, INVARIANT_TILES), count * splits
    elif plan.tree:
        tiles = jnp.maximum(tiles - keys_before(window_starts[s.request], plan, kv_stride) // TILE, 0)
    elif plan.window is not None:  # most tiles that the keys of a row tile's windows lie in
        tiles = jnp.minimum(tiles, most_window_tiles(plan.window, plan.tile_tokens, kv_stride))
    before = earlier(tiles.shape[0])
    first, begin = (jnp.where(before, x[None], 0).sum(axis=1) for x in (count, count * (tiles + _OVERHEAD)))
    return Units(first=first, count=count, tiles=tiles, splits=splits, begin=begin)


def most_window_tiles(window: int, tile_tokens: int, kv_stride: int = 1) -> int:
    """Most key tiles that the keys of all windows of a row tile lie in."""
    keys = -(-(window + tile_tokens - 1) // kv_stride)
    return (keys + TILE - 2) // TILE + 1


def _shares(u: Units, plan: EvenPlan) -> Shares:
    cost = u.tiles + _OVERHEAD
    total, units = u.begin[-1] + u.count[-1] * cost[-1], u.first[-1] + u.count[-1]
    share = jnp.maximum(-(-total // plan.teams), _LEAST_SHARE + _OVERHEAD)
    number = jnp.arange(plan.teams + 1, dtype=jnp.int32)
    place = jnp.minimum(number, -(-total // share)) * share  # no product past the line's end
    inside = (place[:, None] >= u.begin[None]) & (place[:, None] < (u.begin + u.count * cost)[None])
    pick = functools.partial(_pick, inside)
    at, tiles = place - pick(u.begin), pick(u.tiles)
    unit, cut = pick(u.first) + at // pick(cost, 1), jnp.minimum(at % pick(cost, 1), tiles)
    if plan.invariant:
        after, cut = 2 * cut > tiles, jnp.zeros_like(cut)
    else:
        cut = jnp.where(cut < _LEAST_SPLIT, 0, cut)
        after = (cut > 0) & (cut > tiles - _LEAST_SPLIT)
    past = place >= total
    unit, cut = jnp.where(past, units, jnp.where(after, unit + 1, unit)), jnp.where(past | after, 0, cut)
    is_cut = cut > 0
    same = is_cut[1:] & is_cut[:-1] & (unit[1:] == unit[:-1])
    first = is_cut & ~jnp.concatenate([jnp.zeros(1, bool), same])
    upto = jnp.tri(plan.teams + 1, dtype=bool)
    cuts, nth = ((upto & x[None]).sum(axis=1, dtype=jnp.int32) for x in (is_cut, first))
    return Shares(unit=unit, cut=cut, item=unit + cuts, left=cuts + nth - 2, first=first, nth=nth - 1)


def _pick(inside, values, default=0):
    """For each row the value whose column is true, or ``default``."""
    return jnp.where(inside.any(axis=1), jnp.where(inside, values[None], 0).sum(axis=1), default)


@dataclasses.dataclass(frozen=True)
class _Place:
    """What there is to know of units by their numbers: the segment's fields, and which part of it a unit is."""

    segment: Segments
    tiles: Array
    splits: Array
    nth: Array  # number of the first query token in the segment
    tokens: Array
    set: Array
    split: Array

    @classmethod
    def of(cls, segments, units, plan, number):
        """The places of units ``number``; those that do not exist are of no tokens."""
        of, local, live = owner(units.first, units.count, number)
        s = jax.tree.map(lambda x: x[of], segments)
        splits = units.splits[of]
        row_tile, split = local // splits, local % splits
        row_tile, set_ = row_tile // plan.sets, row_tile % plan.sets
        nth = row_tile * plan.tile_tokens
        tokens = jnp.where(live, jnp.clip(s.tokens - nth, 0, plan.tile_tokens), 0)
        return cls(s, units.tiles[of], splits, nth, tokens, set_, split)


def _items(shares: Shares, place, window_starts, plan: EvenPlan, causal: bool, kv_stride: int):
    """The records of ``ITEM``."""
    number = jnp.arange(plan.num_items, dtype=jnp.int32)
    team = (shares.item[None, :-1] <= number[:, None]).sum(axis=1, dtype=jnp.int32) - 1
    unit = shares.unit[team] + number - shares.item[team]
    # The item continues a unit that the team before began, and breaks off where the next team continues.
    continues = (number == shares.item[team]) & (shares.cut[team] > 0)
    breaks = (unit == shares.unit[team + 1]) & (shares.cut[team + 1] > 0)
    at = place(jnp.where(number < shares.item[-1], unit, -1))
    s, live = at.segment, at.tokens > 0
    first, end = jnp.zeros_like(s.keys), -(-s.keys // TILE)  # tiles that the unit's rows see
    if causal:  # keys after those of the row tile's last row are not visible
        end = jnp.minimum(end, -(-keys_before(s.position + at.nth + at.tokens, plan, kv_stride) // TILE))
    if plan.tree:
        first = keys_before(window_starts[s.request], plan, kv_stride) // TILE
    elif plan.window is not None:  # nor those left of its first row's window
        first = keys_before(s.position + at.nth - plan.window + 1, plan, kv_stride) // TILE
    if plan.invariant:
        begin = at.split * INVARIANT_TILES
        first, end = jnp.maximum(first, begin), jnp.minimum(end, begin + INVARIANT_TILES)
        partial = jnp.where(at.splits > 1, number, -1)
    else:
        end = jnp.where(breaks, jnp.minimum(end, first + shares.cut[team + 1]), end)
        first = first + jnp.where(continues, shares.cut[team], 0)
        partial = jnp.where(breaks, shares.left[team + 1], jnp.where(continues, shares.left[team] + 1, -1))
    fields = {
        "request": s.request,
        "token": s.token + at.nth,
        "nth": at.nth,
        "rows": at.tokens * plan.heads,
        "tile": first,
        "tiles": jnp.where(live, jnp.maximum(end - first, 0), 0),
        "partial": jnp.where(live, partial, -1),
        "keys": s.keys,
        "position": s.position,
        "set": at.set,
        "begins": ((at.split == 0) & ~continues).astype(jnp.int32),
    }
    return jnp.stack([fields[name] for name in ITEM], axis=1).ravel()


def _combined_cuts(units: Units, shares: Shares, place, plan: EvenPlan):
    """The number of units that are cut, and the records of ``COMBINED``."""
    del units
    number = jnp.arange(plan.num_combined, dtype=jnp.int32)
    inside = shares.first[None] & (shares.nth[None] == number[:, None])
    unit = jnp.where(inside.any(axis=1), _pick(inside, shares.unit), -1)
    splits = ((shares.unit[None] == unit[:, None]) & (shares.cut > 0)[None]).sum(axis=1) + 1
    return shares.first.sum(), _records(place(unit), _pick(inside, shares.left), splits, plan)


def _combined_splits(units: Units, shares: Shares, place, plan: EvenPlan):
    """The same of units whose splits have fixed places: items are numbered as units are."""
    del shares
    count = jnp.where(units.splits > 1, units.count // units.splits, 0)
    before = earlier(count.shape[0])
    first = jnp.where(before, count[None], 0).sum(axis=1)
    of, local, live = owner(first, count, jnp.arange(plan.num_combined, dtype=jnp.int32))
    unit = jnp.where(live, units.first[of] + local * units.splits[of], -1)
    return count.sum(), _records(place(unit), unit, units.splits[of], plan)


def _records(at: _Place, partial, splits, plan: EvenPlan):
    row = (at.segment.token + at.nth) * plan.kv_heads + at.set * plan.set_heads
    fields = {"row": row * plan.heads, "partial": partial, "splits": splits, "rows": at.tokens * plan.heads}
    return jnp.stack([fields[name] for name in COMBINED], axis=1).ravel()
