"""The work list of split-KV kernels against a plain statement of what it must hold."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.pallas_kernels.work_list import COMBINED, HEADER, INVARIANT_TILES, ITEM, TILE, Plan, work_list

INT32 = np.iinfo(np.int32)
FIELDS = ("q_starts", "q_lens", "kv_lens", "kv_offsets")


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a list is compiled for."""

    plan: Plan
    max_q_len: int
    causal: bool = True
    kv_stride: int = 1

    @property
    def tokens(self) -> int:
        return self.plan.num_rows // self.plan.heads

    def make(self, requests: np.ndarray) -> np.ndarray:
        arrays = (jnp.asarray(requests[name], jnp.int32) for name in FIELDS)
        options = {"max_q_len": self.max_q_len, "causal": self.causal, "kv_stride": self.kv_stride}
        return np.asarray(work_list(*arrays, plan=self.plan, **options))


def shape(requests, tokens, heads, tile_rows, blocks, max_tiles, *, max_q_len, causal=True, kv_stride=1, **options):
    return Shape(
        Plan(requests, tokens * heads, heads, tile_rows, blocks, max_tiles, **options), max_q_len, causal, kv_stride
    )


# Heads that divide a row tile, that a row tile divides, and that do neither; few thread blocks and many.
SHAPES = {
    "verify": shape(5, 23, 16, 64, 3, 9, max_q_len=4),
    "decode": shape(6, 8, 128, 128, 66, 40, max_q_len=1),
    "decode of 128 heads by 64 rows": shape(4, 6, 128, 64, 5, 20, max_q_len=1),
    "24 heads": shape(5, 30, 24, 64, 4, 12, max_q_len=6),
    "not causal, strided": shape(5, 30, 24, 128, 7, 12, max_q_len=6, causal=False, kv_stride=3),
    "causal, strided": shape(3, 14, 40, 64, 2, 12, max_q_len=5, kv_stride=3),
    "all combined": shape(4, 20, 64, 128, 6, 30, max_q_len=4, combine_all=True),
    "invariant": shape(4, 12, 16, 64, 6, 70, max_q_len=3, invariant=True),
    "invariant, all combined": shape(3, 12, 8, 128, 1, 70, max_q_len=4, invariant=True, combine_all=True),
    "one request": shape(1, 3, 128, 128, 66, 200, max_q_len=2),
}


def read(work: np.ndarray, plan: Plan):
    """The items and the row tiles to combine that there are, as records; those after them must be dead."""
    assert work.shape == (plan.size,) and work.dtype == np.int32
    found = []
    for kind, (begin, end), count in (
        (ITEM, (HEADER, plan.combined_at), work[0]),
        (COMBINED, (plan.combined_at, plan.size), work[1]),
    ):
        records = np.rec.fromarrays(work[begin:end].reshape(-1, len(kind)).T.astype(np.int64), names=kind)
        assert 0 <= count <= len(records)
        assert (records.rows[count:] == 0).all()
        assert (records.rows[:count] > 0).all()
        found.append(records[:count])
    return found


def owned(shape: Shape, requests: np.ndarray) -> np.ndarray:
    """Which requests have rows: in range, and after all that those before them claim."""
    found, end = [], 0
    for start, length in zip(requests.q_starts.tolist(), requests.q_lens.tolist(), strict=True):
        claims = 1 <= length <= shape.max_q_len and 0 <= start <= shape.tokens - length
        found.append(claims and start >= end)
        end = max(end, start + length) if claims else end
    return np.array(found)


def check(shape: Shape, requests: np.ndarray, *, bad: int | None = None):
    """Holds a list against what it must be. Of request ``bad`` it must only be safe to run."""
    plan = shape.plan
    items, combined = read(shape.make(requests), plan)

    # Safe: no row or tile outside, whatever the numbers are.
    assert (items.row >= 0).all() and (items.row + items.rows <= plan.num_rows).all()
    assert (items.rows <= plan.tile_rows).all() and (items["first"] % plan.tile_rows == 0).all()
    assert (items.tiles >= 0).all() and (items.tile >= 0).all()
    assert (items.tile + items.tiles)[items.tiles > 0].max(initial=0) <= plan.max_tiles
    assert ((items["keys"] >= 0) & (items["keys"] <= plan.max_tiles * TILE)).all()
    assert ((items.request >= 0) & (items.request < max(plan.num_requests, 1))).all()

    # Every row is written once: by an item, or by a combine whose KV splits are in order.
    written = np.zeros(plan.num_rows, int)
    for item in items[items.partial < 0]:
        written[item.row : item.row + item.rows] += 1
    for tile in combined:
        written[tile.row : tile.row + tile.rows] += 1
    assert (written == 1).all()
    partial = items[items.partial >= 0]
    assert len(set(partial.partial)) == len(partial) == combined.splits.sum()
    assert partial.partial.max(initial=-1) < plan.num_partials
    by_slot = {item.partial: item for item in partial}
    for tile in combined:
        splits = [by_slot[tile.partial + n] for n in range(tile.splits)]
        assert {(split.row, split.rows) for split in splits} == {(tile.row, tile.rows)}
        assert (np.diff([split.tile for split in splits]) > 0).all()
    assert not plan.combine_all or len(partial) == len(items)

    # Every (row, tile it sees) is taken once; of the other tiles, none that no row of the row tile sees.
    taken = np.zeros((plan.num_rows, plan.max_tiles), int)
    owner = np.full(plan.num_rows, -1)
    for item in items:
        taken[item.row : item.row + item.rows, item.tile : item.tile + item.tiles] += 1
    assert taken.max(initial=0) <= 1
    for b in np.flatnonzero(owned(shape, requests)):
        request = requests[b]
        rows = slice(request.q_starts * plan.heads, (request.q_starts + request.q_lens) * plan.heads)
        owner[rows] = b
        if b == bad:
            continue
        keys = 0
        if request.kv_lens > 0:
            keys = np.clip(-(-(request.kv_lens - request.kv_offsets) // shape.kv_stride), 0, plan.max_tiles * TILE)
        position = request.kv_lens - request.q_lens - request.kv_offsets
        token = np.arange(rows.stop - rows.start) // plan.heads
        slots = np.arange(plan.max_tiles * TILE)
        seen = np.broadcast_to(slots < keys, (len(token), len(slots)))
        if shape.causal:
            seen = seen & (slots * shape.kv_stride <= (position + token)[:, None])
        tiles = seen.reshape(len(token), plan.max_tiles, TILE).any(axis=2)
        for first in range(0, len(token), plan.tile_rows):
            rows_of_tile = slice(first, first + plan.tile_rows)
            assert (taken[rows][rows_of_tile] == tiles[rows_of_tile].any(axis=0)).all()
        for item in items[(items.row >= rows.start) & (items.row < rows.stop)]:
            assert (item.request, item["first"], item["keys"], item.position) == (
                b,
                item.row - rows.start,
                keys,
                position,
            )
    for item in items:  # no row tile holds rows of two requests, or of one and of nobody
        assert len(set(owner[item.row : item.row + item.rows])) == 1
    assert (taken[owner < 0] == 0).all()
    if plan.invariant:
        assert (items.tile % INVARIANT_TILES == 0).all() and (items.tiles <= INVARIANT_TILES).all()
    return items, combined


def batch(**columns) -> np.ndarray:
    return np.rec.fromarrays([np.asarray(columns[name], np.int64) for name in FIELDS], names=FIELDS)


def batches(shape: Shape) -> st.SearchStrategy:
    """Requests one after the other, with gaps; the last may not fit, and be no request."""
    most = shape.plan.max_tiles * TILE * shape.kv_stride
    lengths = st.one_of(st.integers(0, 3), st.sampled_from([63, 64, 65, most - 1, most]), st.integers(0, most))
    request = st.tuples(st.sampled_from([0, 0, 1, 3]), st.integers(0, shape.max_q_len), lengths, st.integers(0, 200))

    def place(drawn):
        gaps, q_lens, kv_lens, offsets = np.array(drawn, np.int64).T
        starts = np.cumsum(gaps) + np.cumsum(q_lens) - q_lens
        return batch(q_starts=starts, q_lens=q_lens, kv_lens=kv_lens, kv_offsets=offsets * (offsets % 2))

    count = shape.plan.num_requests
    return st.lists(request, min_size=count, max_size=count).map(place)


@pytest.mark.parametrize("name", SHAPES)
def test_any_batch(name):
    @hypothesis.settings(deadline=None, max_examples=30)
    @hypothesis.given(batches(SHAPES[name]))
    def run(requests):
        check(SHAPES[name], requests)

    run()


@pytest.mark.parametrize("name", ["verify", "24 heads", "all combined", "invariant"])
def test_one_request_that_makes_no_sense(name):
    """Whatever it is, the rows of the others are taken as they should, its own are written, nothing is out of range."""
    used = SHAPES[name]
    values = [INT32.min, INT32.min + 1, -used.tokens, -5, -1, 0, 2, 7, used.tokens - 1, used.tokens, 10**6, INT32.max]

    @hypothesis.settings(deadline=None, max_examples=30)
    @hypothesis.given(
        batches(used), st.integers(0, used.plan.num_requests - 1), st.sets(st.sampled_from(FIELDS)), st.data()
    )
    def run(requests, bad, fields, data):
        for field in sorted(fields):
            requests[field][bad] = data.draw(st.sampled_from(values), field)
        check(used, requests, bad=bad)

    run()


def test_rows_claimed_twice_are_the_first_claimers():
    used = SHAPES["verify"]
    requests = batch(q_starts=[0, 2, 6, 6, 10], q_lens=[4, 3, 2, 4, 4], kv_lens=[99] * 5, kv_offsets=[0] * 5)
    items, _ = check(used, requests)
    assert owned(used, requests).tolist() == [True, False, True, False, True]
    assert set(items.request[items.tiles > 0]) == {0, 2, 4}


@pytest.mark.parametrize("tokens, requests", [(0, 0), (0, 2), (3, 0), (1, 3)])
def test_hardly_anything(tokens, requests):
    used = shape(requests, tokens, 16, 64, 3, 2, max_q_len=1)
    rows = np.minimum(np.arange(requests), tokens)
    check(used, batch(q_starts=rows, q_lens=[1] * requests, kv_lens=[70] * requests, kv_offsets=[0] * requests))


# Balance

BLOCKS = 66


def decode(kv_lens, heads=128, q_len=1, **options):
    """The list of a decode batch on an H200, two thread blocks a multiprocessor."""
    count = len(kv_lens)
    used = shape(count, count * q_len, heads, 128, BLOCKS, -(-max(kv_lens) // TILE), max_q_len=q_len, **options)
    starts = np.arange(count) * q_len
    return check(used, batch(q_starts=starts, q_lens=[q_len] * count, kv_lens=kv_lens, kv_offsets=[0] * count))


def test_one_long_request_among_short_ones_is_split():
    items, combined = decode([32768] + [16] * 63)
    assert items.tiles.max() <= 1.5 * items.tiles.sum() / BLOCKS
    assert combined.row.tolist() == [0]


def test_even_batches_are_not_split():
    """128 requests on 66 thread blocks: two each. A cut would add a combine and shorten nothing."""
    items, combined = decode([4096] * 128)
    assert (len(items), len(combined)) == (128, 0)


def test_a_lone_request_fills_the_device():
    items, combined = decode([65536])
    assert len(combined) == 1
    assert BLOCKS * 0.75 <= len(items) <= BLOCKS


@pytest.mark.parametrize("q_len", [1, 2])
def test_thread_blocks_end_together(q_len):
    """Longest first, to and fro over the thread blocks: none ends later than a quarter after the mean."""
    items, _ = decode(np.random.default_rng(0).integers(q_len, 8193, 128).tolist(), q_len=q_len)
    longest = [items.tiles[items.request == item.request].max() for item in items]
    assert (np.diff(longest) <= 0).all()
    ends = np.zeros(BLOCKS)
    for begin in range(0, len(items), BLOCKS):
        tiles = items.tiles[begin : begin + BLOCKS]
        ends[: len(tiles)] += tiles
        ends = ends[::-1]
    assert ends.max() <= 1.25 * items.tiles.sum() / BLOCKS


def test_cuts_follow_nothing_but_a_requests_own_keys():
    """With ``invariant``, the KV splits of a request are the same alone and in a crowd."""
    alone, _ = decode([9000], invariant=True)
    crowd, _ = decode([9000] + [40000, 17] * 5, invariant=True)
    splits = [sorted(zip(i.tile.tolist(), i.tiles.tolist(), strict=True)) for i in (alone, crowd[crowd.request == 0])]
    assert splits[0] == splits[1] == [(tile, min(32, 141 - tile)) for tile in range(0, 141, 32)]
