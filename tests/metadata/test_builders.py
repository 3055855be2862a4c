"""The metadata builders against a construction in plain Python, table by table of what systems call ``seq_lens``."""

import dataclasses
import functools
import inspect
import types

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import oracle
from mla_attn import metadata as md

INT32 = np.iinfo(np.int32)
BATCH, WIDTH, PAGES = 4, 5, 30


def i32(*values):
    return jnp.asarray(values, jnp.int32)


def compiled(builder):
    """One program instead of one for each operation."""
    static = ("page_size", "num_tokens", "max_q_len", "num_rows", "max_len")
    return jax.jit(builder, static_argnames=[name for name in inspect.signature(builder).parameters if name in static])


jitted = types.SimpleNamespace(
    **{name: compiled(builder) for name, builder in vars(md).items() if name.startswith("for_")}
)


def rows_of(q_lens, num_tokens, *, packed):
    """First row of each request."""
    return [sum(max(n, 0) for n in q_lens[:b]) if packed else b * num_tokens for b in range(len(q_lens))]


def by_hand(table, prefix_lens, q_lens, *, num_tokens, page_size, num_rows, packed, max_len=None, page_map=None):
    """What a builder should return, request by request: a dictionary of lists."""
    max_len = len(table[0]) * page_size if max_len is None else max_len
    if page_map is not None:
        table = [[page_map[page] if 0 <= page < len(page_map) else -1 for page in row] for row in table]
    starts = rows_of(q_lens, num_tokens, packed=packed)
    made = {"q_starts": starts, "q_lens": [], "kv_lens": [], "page_table": table}
    made |= {"slots": [-1] * num_rows, "positions": [0] * num_rows}
    for b, start in enumerate(starts):
        rows = 0
        for j in range(min(q_lens[b], num_tokens)):
            position = prefix_lens[b] + j
            if 0 <= position < max_len and prefix_lens[b] >= 0:
                page = table[b][position // page_size]
                if start + j < num_rows:
                    made["positions"][start + j] = position
                    made["slots"][start + j] = page * page_size + position % page_size if page >= 0 else -1
                rows += 1
        made["q_lens"].append(rows)
        made["kv_lens"].append(prefix_lens[b] + rows if rows else 0)
    return made


def assert_equal(metadata, made):
    """Pages are of 4 tokens."""
    for name, want in made.items():
        got = np.asarray(getattr(metadata, name))
        assert got.dtype == np.int32
        if name == "q_starts":  # what begins past the end of the call begins anywhere there
            got, want = (np.minimum(x, len(made["slots"])) for x in (got, want))
        if name == "slots":  # a page outside the pool may give any slot outside it
            got, want = (np.where((np.asarray(x) < 0) | (np.asarray(x) >= PAGES * 4), -1, x) for x in (got, want))
        np.testing.assert_array_equal(got, want, err_msg=name)
    assert metadata.kv_offsets.tolist() == [0] * len(made["q_lens"])
    assert metadata.kv_stride == 1 and metadata.work.shape == (0,)


# Each mode: the builder called with what its callers hold, from prefix lengths and rows per request.
MODES = {
    "decode": lambda table, prefix, q_lens, **options: md.for_decode(table, prefix + q_lens, **options),
    "verify": lambda table, prefix, q_lens, *, S, **options: md.for_target_verify(
        table, prefix, num_tokens=S, q_lens=q_lens, **options
    ),
    "draft_extend": lambda table, prefix, q_lens, *, S, **options: md.for_draft_extend(
        table, prefix + q_lens, q_lens, max_q_len=S, **options
    ),
    "draft_decode": lambda table, prefix, q_lens, **options: md.for_draft_decode(
        table, prefix - 2, 2, q_lens=q_lens, **options
    ),
    "extend": lambda table, prefix, q_lens, *, S, **options: md.for_extend(
        table, prefix + q_lens, q_lens, max_q_len=S, **options
    ),
    "mixed": lambda table, prefix, q_lens, *, S, **options: md.for_mixed(
        table, prefix + q_lens, q_lens, max_q_len=S, **options
    ),
}


@functools.partial(jax.jit, static_argnames=("mode", "options"))
def build(table, prefix_lens, q_lens, page_map, *, mode, options):
    return MODES[mode](table, prefix_lens, q_lens, page_map=page_map, **dict(options))


page_ids = st.one_of(
    st.integers(0, PAGES - 1),
    st.sampled_from([-1, -PAGES, PAGES, 2**30, 2**30 + 5, INT32.max, INT32.max // 4, INT32.min]),
)


@pytest.mark.parametrize("virtual", [False, True], ids=["", "virtual"])
@pytest.mark.parametrize(
    "mode, tokens, num_rows, max_len",
    [
        ("decode", 1, None, None),
        ("decode", 1, None, 13),
        ("verify", 3, None, 13),
        ("verify", 3, 14, None),
        ("draft_extend", 3, None, None),
        ("draft_extend", 3, 12, 13),
        ("draft_decode", 1, None, None),
        ("extend", 7, 30, None),
        ("mixed", 7, 28, 13),
    ],
)
def test_builders_equal_a_plain_construction(mode, tokens, num_rows, max_len, virtual):
    """Any prefixes, past the limit too, any rows, any page ids where a length does not reach and where it does."""
    options = {"page_size": 4, "max_len": max_len}
    if tokens > 1:
        options |= {"S": tokens, "num_rows": num_rows}
    requests = st.lists(st.tuples(st.integers(2, 24), st.integers(0, tokens)), min_size=BATCH, max_size=BATCH)
    rows = BATCH * tokens if num_rows is None else num_rows

    @hypothesis.settings(deadline=None, max_examples=30)
    @hypothesis.given(
        requests=requests,
        table=st.lists(st.lists(page_ids, min_size=WIDTH, max_size=WIDTH), min_size=BATCH, max_size=BATCH),
        page_map=st.lists(page_ids, min_size=20, max_size=20),
    )
    def run(requests, table, page_map):
        prefix_lens, q_lens = (list(x) for x in zip(*requests, strict=True))
        if mode == "decode":  # a length of 0 is what marks padding
            prefix_lens = [p if q else 0 for p, q in requests]
        page_map = page_map if virtual else None
        metadata = build(
            i32(*table),
            i32(*prefix_lens),
            i32(*q_lens),
            None if page_map is None else i32(*page_map),
            mode=mode,
            options=tuple(options.items()),
        )
        made = by_hand(
            table,
            prefix_lens,
            q_lens,
            num_tokens=tokens,
            page_size=4,
            num_rows=rows,
            packed=num_rows is not None,
            max_len=max_len,
            page_map=page_map,
        )
        assert_equal(metadata, made)
        assert metadata.max_q_len == tokens

    run()


@pytest.mark.parametrize(
    "mode, tokens, num_rows",
    [
        ("decode", 1, None),
        ("verify", 3, 14),
        ("draft_extend", 3, None),
        ("draft_extend", 3, 12),
        ("draft_decode", 1, None),
        ("extend", 7, 30),
        ("mixed", 7, 28),
    ],
)
def test_wrong_lengths_harm_their_own_request_alone(mode, tokens, num_rows):
    """Negative ones count as 0 and have no rows; too many rows are cut, but begin and end where the caller put them."""
    options = {"page_size": 4}
    options |= {"S": tokens, "num_rows": num_rows} if tokens > 1 else {}
    wrong = st.sampled_from([-1, -3, INT32.min, INT32.min + 1, 9, 21, 2**30, 2**31 - 3, INT32.max])

    @hypothesis.settings(deadline=None, max_examples=60)
    @hypothesis.given(
        lens=st.lists(st.one_of(st.integers(0, 20), wrong), min_size=BATCH, max_size=BATCH),
        q_lens=st.lists(st.one_of(st.integers(0, tokens), wrong), min_size=BATCH, max_size=BATCH),
    )
    def run(lens, q_lens):
        table = np.random.default_rng(0).permutation(PAGES)[: BATCH * WIDTH].reshape(BATCH, WIDTH)
        metadata = build_raw(i32(*table), i32(*lens), i32(*q_lens), mode=mode, options=tuple(options.items()))
        prefix_lens = list(lens)
        if mode == "decode":
            q_lens = [int(n > 0) for n in lens]
        if mode == "draft_decode":
            prefix_lens = [n + 2 if n >= 0 else -1 for n in lens]
        elif mode != "verify":
            prefix_lens = [n - max(q, 0) if n >= 0 else -1 for n, q in zip(lens, q_lens, strict=True)]
        rows = BATCH * tokens if num_rows is None else num_rows
        layout = {"num_tokens": tokens, "num_rows": rows, "packed": num_rows is not None, "page_size": 4}
        assert_equal(metadata, by_hand(table.tolist(), prefix_lens, q_lens, **layout))

    run()


# Each builder with its arguments as they are; ``draft_decode`` at step 2.
RAW_MODES = {
    "decode": lambda table, lens, q_lens, **options: md.for_decode(table, lens, **options),
    "verify": lambda table, lens, q_lens, *, S, **options: md.for_target_verify(
        table, lens, num_tokens=S, q_lens=q_lens, **options
    ),
    "draft_extend": lambda table, lens, q_lens, *, S, **options: md.for_draft_extend(
        table, lens, q_lens, max_q_len=S, **options
    ),
    "draft_decode": lambda table, lens, q_lens, **options: md.for_draft_decode(
        table, lens, 2, q_lens=q_lens, **options
    ),
    "extend": lambda table, lens, q_lens, *, S, **options: md.for_extend(table, lens, q_lens, max_q_len=S, **options),
    "mixed": lambda table, lens, q_lens, *, S, **options: md.for_mixed(table, lens, q_lens, max_q_len=S, **options),
}


@functools.partial(jax.jit, static_argnames=("mode", "options"))
def build_raw(table, lens, q_lens, *, mode, options):
    return RAW_MODES[mode](table, lens, q_lens, **dict(options))


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint32])
def test_rows_that_are_not_active_are_padding(unchecked, dtype):
    """Systems that fill padding with a length of 1 say which rows are requests."""
    table = i32([3, 1], [2, 0], [5, 4])
    active = np.array([1, 0, 1], dtype)
    got = host(lambda: md.for_decode(table, i32(6, 1, 1), page_size=4, active=active))
    want = host(lambda: md.for_decode(table, i32(6, 0, 1), page_size=4))
    assert got.q_lens.tolist() == [1, 0, 1] and got.slots.tolist() == [5, -1, 20]
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for wrong in (active[:2], active.astype(np.float32), [True, False, True]):
        with pytest.raises(ValueError, match=r"active (has (shape|dtype)|is a list)"):
            md.for_decode(table, i32(6, 1, 1), page_size=4, active=wrong)


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_page_sizes(page_size):
    table = np.random.default_rng(0).permutation(12).reshape(3, 4)
    prefix_lens, q_lens = [0, page_size, 4 * page_size - 2], [5 if page_size > 2 else 2, 2, 3]
    metadata = jitted.for_extend(
        i32(*table), i32(*prefix_lens) + i32(*q_lens), i32(*q_lens), max_q_len=5, page_size=page_size
    )
    made = by_hand(table.tolist(), prefix_lens, q_lens, num_tokens=5, page_size=page_size, num_rows=15, packed=False)
    assert metadata.slots.tolist() == made["slots"]
    assert metadata.kv_lens.tolist() == made["kv_lens"]
    md.check_metadata(metadata, num_pages=12, page_size=page_size)


def test_negative_and_huge_lengths_are_no_requests():
    table = i32(*np.arange(20).reshape(5, 4))
    lengths = i32(-1, -7, INT32.min, INT32.max, 10**6)
    for make in (
        lambda: jitted.for_decode(table, lengths, page_size=4),
        lambda: jitted.for_target_verify(table, lengths, num_tokens=1, page_size=4),
        lambda: jitted.for_extend(table, lengths, jnp.ones_like(lengths), max_q_len=1, page_size=4),
        lambda: jitted.for_draft_decode(table, lengths, 0, page_size=4),
    ):
        metadata = host(make)
        assert metadata.q_lens.tolist() == metadata.kv_lens.tolist() == metadata.positions.tolist() == [0] * 5
        assert metadata.slots.tolist() == [-1] * 5
    # More rows than the call holds, or fewer than none.
    metadata = jitted.for_extend(table, i32(8, 8, 8, 8, 8), i32(3, -1, INT32.max, 2, 0), max_q_len=2, page_size=4)
    assert metadata.q_lens.tolist() == [2, 0, 0, 2, 0]  # a prefix of 8 - INT32.max is negative


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(
    q_lens=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    gaps=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    idle_starts=st.lists(st.integers(-20, 30), min_size=4, max_size=4),
)
def test_row_owners(q_lens, gaps, idle_starts):
    """Ranges with gaps between them; requests without rows start anywhere."""
    starts, owners, end = [], [-1] * 24, 0
    for b, (length, gap) in enumerate(zip(q_lens, gaps, strict=True)):
        starts.append(end + gap if length else idle_starts[b])
        end += gap + length if length else 0
        for row in range(starts[-1], starts[-1] + length):
            owners[row] = b
    owner, owned = _owners(i32(*starts), i32(*q_lens))
    assert np.where(owned, owner, -1).tolist() == owners
    assert ((owner >= 0) & (owner < 4)).all()


_owners = jax.jit(functools.partial(md.row_owners, num_rows=24))


def test_who_owns_rows_that_no_request_can():
    """A request that starts before row 0 owns none, be it the first or a later one; nor do no requests."""
    for q_starts in ((-1, 4, 6, 8), (0, -1, 6, 8), (0, 4, 6, -24)):
        _, owned = _owners(i32(*q_starts), i32(2, 2, 2, 2))
        want = {row for start in q_starts if start >= 0 for row in (start, start + 1)}
        assert np.flatnonzero(owned).tolist() == sorted(want)
    owner, owned = md.row_owners(i32(), i32(), 3)
    assert (owner.tolist(), owned.tolist()) == ([0, 0, 0], [False] * 3)


def test_near_the_limit_only_what_fits_is_written():
    """max_len 64, 62 tokens committed, 4 more: positions 62 and 63 exist, and a neighbour's pages are not touched."""
    table = i32([8, 9, 10, 11], [0, 1, 2, 3])
    metadata = jitted.for_target_verify(table, i32(62, 5), num_tokens=4, page_size=16, max_len=64)
    assert metadata.slots.tolist() == [11 * 16 + 14, 11 * 16 + 15, -1, -1, 5, 6, 7, 8]
    assert metadata.q_lens.tolist() == [2, 4] and metadata.kv_lens.tolist() == [64, 9]
    assert metadata.positions.tolist() == [62, 63, 0, 0, 5, 6, 7, 8]
    # The request is full: no row is left.
    metadata = jitted.for_target_verify(table, i32(64, 70), num_tokens=4, page_size=16)
    assert metadata.slots.tolist() == [-1] * 8 and metadata.kv_lens.tolist() == [0, 0]


def test_rows_of_a_tree_have_positions_by_depth_and_are_cached_by_row():
    """Anchor, two drafts side by side, one below the first: rows at prefix + row, positions at prefix + depth."""
    table, prefix = i32([3, 1, 2], [0, 4, 5]), i32(6, 3)
    metadata = jitted.for_target_verify(
        table, prefix, num_tokens=4, page_size=4, depths=i32(0, 1, 1, 2), q_lens=i32(4, 3)
    )
    assert metadata.positions.tolist() == [6, 7, 7, 8, 3, 4, 4, 0]
    assert metadata.slots.tolist() == [6, 7, 8, 9, 3, 16, 17, -1]
    assert metadata.kv_lens.tolist() == [10, 6]
    each = jitted.for_target_verify(table, prefix, num_tokens=2, page_size=4, depths=i32([0, 1], [0, 0]))
    assert each.positions.tolist() == [6, 7, 3, 3]
    packed = jitted.for_target_verify(
        table, prefix, num_tokens=4, page_size=4, depths=i32(0, 1, 1, 2), q_lens=i32(1, 4), num_rows=6
    )
    assert packed.positions.tolist() == [6, 3, 4, 4, 5, 0]
    # Levels of 2 and 4 nodes: the second level is one further and is cached behind the first.
    first = jitted.for_draft_decode(table, prefix, 0, page_size=4, num_tokens=2)
    assert (first.positions.tolist(), first.kv_lens.tolist()) == ([6, 6, 3, 3], [8, 5])
    second = jitted.for_draft_decode(table, prefix, 1, page_size=4, num_tokens=4, num_drafted=2)
    assert second.positions.tolist() == [7] * 4 + [4] * 4
    assert second.slots.tolist() == [8, 9, 10, 11, 17, 18, 19, 20]
    assert second.kv_lens.tolist() == [12, 9]


def test_steps_of_drafting_are_traced():
    """One program serves all steps."""
    table = i32([3, 1, 2], [0, 4, 5])
    step = jax.jit(lambda step: md.for_draft_decode(table, i32(6, 3), step, q_lens=i32(1, 0), page_size=4))
    for s in range(3):
        metadata = step(s)
        assert metadata.positions.tolist() == [6 + s, 0]
        assert metadata.kv_lens.tolist() == [6 + s + 1, 0]
        assert metadata.slots.tolist() == [[6, 7, 8][s], -1]


def test_empty_batches():
    table, none = jnp.zeros((0, 4), jnp.int32), jnp.zeros(0, jnp.int32)
    for metadata in (
        jitted.for_decode(table, none, page_size=4),
        jitted.for_target_verify(table, none, num_tokens=3, page_size=4),
        jitted.for_draft_extend(table, none, none, max_q_len=3, num_rows=5, page_size=4),
        jitted.for_draft_decode(table, none, 1, page_size=4),
        jitted.for_extend(table, none, none, max_q_len=3, num_rows=0, page_size=4),
        jitted.for_mixed(table, none, none, max_q_len=3, num_rows=2, page_size=4, page_map=i32(1, 2)),
    ):
        assert metadata.q_lens.shape == (0,) and set(metadata.slots.tolist()) <= {-1}
        md.check_metadata(metadata, num_pages=3, page_size=4)
    no_rows = jitted.for_extend(i32([1, 2]), i32(5), i32(0), max_q_len=3, num_rows=0, page_size=4)
    assert no_rows.slots.shape == (0,) and no_rows.kv_lens.tolist() == [0]
    idle = jitted.for_target_verify(i32([-1, -1], [7, 9]), i32(0, 0), num_tokens=4, q_lens=i32(0, 0), page_size=4)
    assert idle.slots.tolist() == [-1] * 8 and idle.kv_lens.tolist() == [0, 0]


# What systems mean by `seq_lens`, one row of the table each. A system hands its kernel `rows` query rows and a length
# `kv_len` per request, and row j sees key k iff k <= kv_len - rows + j.

COMMITTED = [5, 64, 17]  # tokens before the call
ACCEPTED = [2, 4, 1]
DRAFTS = 4
PAGE_TABLE = np.random.default_rng(1).permutation(18).reshape(3, 6)
TABLE = i32(*PAGE_TABLE)


def host(make):
    """What a builder makes, as NumPy arrays."""
    return jax.tree.map(np.asarray, make())


def keys_seen(metadata, tree_mask=None):
    """Positions every row of every request sees."""
    return [
        [
            oracle.visible_slots(metadata, b, j, num_slots=6 * 16, tree_mask=tree_mask)
            for j in range(int(metadata.q_lens[b]))
        ]
        for b in range(metadata.q_lens.shape[0])
    ]


def kernel_sees(kv_lens, rows, real_rows):
    """What the kernel of a system shows to the rows that are no padding."""
    return [
        [list(range(kv_len - n + j + 1)) for j in range(real)]
        for kv_len, n, real in zip(kv_lens, rows, real_rows, strict=True)
    ]


def plus(lengths, more):
    more = [more] * len(lengths) if isinstance(more, int) else more
    return [a + b for a, b in zip(lengths, more, strict=True)]


N, ONE = [DRAFTS] * 3, [1] * 3
LONGEST = [max(ACCEPTED)] * 3
TABLE_ROWS = {
    "decode: seq_lens counts the token": (
        lambda: jitted.for_decode(TABLE, i32(*plus(COMMITTED, 1)), page_size=16),
        kernel_sees(plus(COMMITTED, 1), ONE, ONE),
    ),
    "target verify, uniform: seq_lens without, kernel + N": (
        lambda: jitted.for_target_verify(TABLE, i32(*COMMITTED), num_tokens=DRAFTS, page_size=16),
        kernel_sees(plus(COMMITTED, DRAFTS), N, N),
    ),
    "target verify, uniform: seq_lens without, kernel + draft_token_num": (
        lambda: jitted.for_target_verify(TABLE, i32(*COMMITTED), num_tokens=DRAFTS, num_rows=12, page_size=16),
        kernel_sees(plus(COMMITTED, DRAFTS), N, N),
    ),
    "target verify, prefix and new keys apart, mask of width seq_len + N": (
        lambda: jitted.for_target_verify(TABLE, i32(*COMMITTED), num_tokens=DRAFTS, page_size=16),
        [[[*range(p), *(p + i for i in range(j + 1))] for j in range(DRAFTS)] for p in COMMITTED],
    ),
    "target verify, ragged, front-aligned: kernel seq_lens + N for all": (
        lambda: jitted.for_target_verify(
            TABLE, i32(*COMMITTED), num_tokens=DRAFTS, q_lens=i32(*ACCEPTED), page_size=16
        ),
        kernel_sees(plus(COMMITTED, DRAFTS), N, ACCEPTED),
    ),
    "target verify, ragged, packed: kernel seq_lens + v": (
        lambda: jitted.for_target_verify(
            TABLE, i32(*COMMITTED), num_tokens=DRAFTS, q_lens=i32(*ACCEPTED), num_rows=9, page_size=16
        ),
        kernel_sees(plus(COMMITTED, ACCEPTED), ACCEPTED, ACCEPTED),
    ),
    "draft extend, padded to the longest: kernel seq_lens - e + m": (
        lambda: jitted.for_draft_extend(
            TABLE, i32(*plus(COMMITTED, ACCEPTED)), i32(*ACCEPTED), max_q_len=max(ACCEPTED), page_size=16
        ),
        kernel_sees(plus(COMMITTED, max(ACCEPTED)), LONGEST, ACCEPTED),
    ),
    "draft extend, all N accepted: kernel seq_lens": (
        lambda: jitted.for_draft_extend(TABLE, i32(*plus(COMMITTED, DRAFTS)), i32(*N), max_q_len=DRAFTS, page_size=16),
        kernel_sees(plus(COMMITTED, DRAFTS), N, N),
    ),
    "draft extend, packed: kernel seq_lens": (
        lambda: jitted.for_draft_extend(
            TABLE, i32(*plus(COMMITTED, ACCEPTED)), i32(*ACCEPTED), max_q_len=DRAFTS, num_rows=7, page_size=16
        ),
        kernel_sees(plus(COMMITTED, ACCEPTED), ACCEPTED, ACCEPTED),
    ),
    "draft extend, N fixed: kernel seq_lens": (
        lambda: jitted.for_draft_extend(
            TABLE, i32(*plus(COMMITTED, DRAFTS)), i32(*N), max_q_len=DRAFTS, num_rows=12, page_size=16
        ),
        kernel_sees(plus(COMMITTED, DRAFTS), N, N),
    ),
    "draft extend, seq_lens without: add the rows": (
        lambda: jitted.for_draft_extend(TABLE, i32(*COMMITTED) + DRAFTS, i32(*N), max_q_len=DRAFTS, page_size=16),
        kernel_sees(plus(COMMITTED, DRAFTS), N, N),
    ),
    "draft decode, step 2: kernel seq_lens + s + 1": (
        lambda: jitted.for_draft_decode(TABLE, i32(*COMMITTED), 2, page_size=16),
        kernel_sees(plus(COMMITTED, 3), ONE, ONE),
    ),
    "draft decode, step 0: kernel seq_lens + 1": (
        lambda: jitted.for_draft_decode(TABLE, i32(*COMMITTED), 0, page_size=16),
        kernel_sees(plus(COMMITTED, 1), ONE, ONE),
    ),
    "draft decode, seq_lens advanced by the caller": (
        lambda: jitted.for_decode(TABLE, i32(*plus(COMMITTED, 3)), page_size=16),
        kernel_sees(plus(COMMITTED, 3), ONE, ONE),
    ),
    "prefill without prefix: kernel e": (
        lambda: jitted.for_extend(TABLE, i32(*COMMITTED), i32(*COMMITTED), max_q_len=64, num_rows=90, page_size=16),
        kernel_sees(COMMITTED, COMMITTED, COMMITTED),
    ),
    "prefill over a prefix: kernel seq_lens": (
        lambda: jitted.for_extend(
            TABLE, i32(*plus(COMMITTED, [9, 3, 20])), i32(9, 3, 20), max_q_len=20, num_rows=32, page_size=16
        ),
        kernel_sees(plus(COMMITTED, [9, 3, 20]), [9, 3, 20], [9, 3, 20]),
    ),
    "prefill by prefix chunks of 16, not causal, then itself": (
        lambda: jitted.for_extend(TABLE, i32(*plus(COMMITTED, ACCEPTED)), i32(*ACCEPTED), max_q_len=4, page_size=16),
        [
            [
                [*(16 * c + i for c in range(4) for i in range(min(max(p - 16 * c, 0), 16))), *range(p, p + j + 1)]
                for j in range(e)
            ]
            for p, e in zip(COMMITTED, ACCEPTED, strict=True)
        ],
    ),
    "absorbed prefill: kernel seq_lens": (
        lambda: jitted.for_mixed(
            TABLE, i32(*plus(COMMITTED, [1, 5, 1])), i32(1, 5, 1), max_q_len=5, num_rows=7, page_size=16
        ),
        kernel_sees(plus(COMMITTED, [1, 5, 1]), [1, 5, 1], [1, 5, 1]),
    ),
}


@pytest.mark.parametrize("row", TABLE_ROWS)
def test_each_meaning_of_seq_lens(row):
    make, seen = TABLE_ROWS[row]
    metadata = host(make)
    assert keys_seen(metadata) == seen
    md.check_metadata(metadata, num_pages=18, page_size=16)
    # Rows are written where their own key is seen: the last position of each row.
    for b, rows in enumerate(seen):
        for j, keys in enumerate(rows):
            t = int(metadata.q_starts[b]) + j
            page, offset = divmod(int(metadata.slots[t]), 16)
            assert (page, offset) == (PAGE_TABLE[b, keys[-1] // 16], keys[-1] % 16)
            assert int(metadata.positions[t]) == keys[-1]


def test_draft_decode_with_branches():
    """Two branches at step 2: each row sees the prefix, its own ancestors and itself, ``seq_len + s + 1`` keys."""
    metadata = host(
        lambda: jitted.for_draft_decode(TABLE, i32(*COMMITTED), 2, page_size=16, num_tokens=2, num_drafted=4)
    )
    branches = np.zeros((3, 2, 6), bool)
    branches[:, 0, [0, 2, 4]] = branches[:, 1, [1, 3, 5]] = True
    seen = keys_seen(metadata, branches)
    assert [[len(keys) for keys in rows] for rows in seen] == [[p + 3] * 2 for p in COMMITTED]
    assert seen[0][1] == [0, 1, 2, 3, 4, 6, 8, 10]


def test_padded_requests_hold_any_fill_value():
    """Systems fill padded rows' lengths with 1 or N; here their rows are 0, and the length does not matter."""
    for fill in (0, 1, DRAFTS, 10**6):
        metadata = jitted.for_target_verify(TABLE, i32(5, 64, fill), num_tokens=4, q_lens=i32(4, 4, 0), page_size=16)
        assert metadata.kv_lens.tolist() == [9, 68, 0]
        assert metadata.slots[8:].tolist() == [-1] * 4


# Tables from a map of tokens.


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 18), min_size=6, max_size=6),
    ids=st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
def test_page_table_from_tokens(seed, lengths, ids):
    """A map of 18 tokens a request, 4 a page: the last page of a full request is half used."""
    rng = np.random.default_rng(seed)
    pages = rng.permutation(PAGES).reshape(6, 5)
    tokens = rng.choice([-1, INT32.min, INT32.max, 3], (6, 18))
    for b, length in enumerate(lengths):
        for p in range(length):
            tokens[b, p] = pages[b, p // 4] * 4 + p % 4
    table = np.asarray(_from_tokens(i32(*tokens), i32(*ids)))
    assert table.shape == (4, 5) and table.dtype == np.int32
    for row, b in zip(table, ids, strict=True):
        held = -(-lengths[b] // 4)
        assert row[:held].tolist() == pages[b, :held].tolist()
    # A decode step over it writes where the map says.
    prefix = [max(lengths[b] - 1, 0) for b in ids]
    metadata = _decode(jnp.asarray(table), i32(*(lengths[b] for b in ids)))
    want = [tokens[b, p] if lengths[b] else -1 for b, p in zip(ids, prefix, strict=True)]
    assert metadata.slots.tolist() == want


_from_tokens = jax.jit(functools.partial(md.page_table_from_tokens, page_size=4))
_decode = jax.jit(functools.partial(md.for_decode, page_size=4))


def test_page_table_from_tokens_of_any_width():
    tokens = i32(*(np.random.default_rng(2).permutation(12)[:, None] * 4 + np.arange(4)).reshape(2, 24))
    whole = md.page_table_from_tokens(tokens, i32(1, 0, 1), page_size=4)
    assert whole.shape == (3, 6) and whole[0].tolist() == whole[2].tolist() == (tokens[1, ::4] // 4).tolist()
    for width in (1, 5, 6):
        part = md.page_table_from_tokens(tokens, i32(1, 0, 1), page_size=4, table_width=width)
        assert part.tolist() == whole[:, :width].tolist()
    assert md.page_table_from_tokens(tokens, i32(0), page_size=1).tolist() == [tokens[0].tolist()]
    for width in (0, 7):
        with pytest.raises(ValueError, match=f"table_width={width} must be an integer from 1 to 6"):
            md.page_table_from_tokens(tokens, i32(0), page_size=4, table_width=width)
    with pytest.raises(ValueError, match="page_size=0 must be an integer of at least 1"):
        md.page_table_from_tokens(tokens, i32(0), page_size=0)


def test_virtual_pages():
    """Ids are looked up, never multiplied; those outside the map, or mapped to nothing, are no pages."""
    table = i32([2, 0, 1, -1], [3, 4, INT32.max, INT32.min])
    metadata = jitted.for_target_verify(table, i32(3, 2), num_tokens=6, page_size=4, page_map=i32(7, 9, 5, -1))
    assert metadata.page_table.tolist() == [[5, 7, 9, -1], [-1, -1, -1, -1]]
    assert metadata.slots.tolist() == [23, 28, 29, 30, 31, 36] + [-1] * 6


# Errors and checks.


@pytest.mark.parametrize(
    "change, message",
    [
        ({"page_size": 0}, "page_size=0 must be an integer from 1 to"),
        ({"max_q_len": 0}, "max_q_len=0 must be an integer from 1 to"),
        ({"num_rows": -1}, "num_rows=-1 must be an integer from 0 to"),
        ({"max_len": 0}, "max_len=0 must be an integer from 1 to 20"),
        ({"max_len": 21}, "max_len=21 must be an integer from 1 to 20"),
        ({"max_len": 8.0}, "max_len=8.0 must be an integer from 1 to 20"),
        ({"max_q_len": 2**31 - 1}, r"max_q_len=2147483647: B \* S = 4294967294 rows must be at most"),
        ({"q_lens": i32(1)}, r"q_lens has shape \(1,\), must be \(2,\)"),
        ({"seq_lens": i32(4, 5, 6), "q_lens": i32(1, 1, 1)}, r"seq_lens has shape \(3,\), must be \(2,\)"),
        ({"page_table": i32(0, 1)}, r"page_table has shape \(2,\), must be \[B, W\]"),
        ({"page_table": jnp.zeros((2, 5))}, "page_table has dtype float32, must be an integer dtype"),
        ({"seq_lens": jnp.ones(2)}, "seq_lens has dtype float32, must be an integer dtype"),
        ({"q_lens": jnp.ones(2)}, "q_lens has dtype float32, must be an integer dtype"),
        ({"page_map": i32()}, r"page_map has shape \(0,\), must be \[V\]"),
        ({"page_map": jnp.ones(2)}, "page_map has dtype float32, must be an integer dtype"),
        ({"page_table": [[0], [1]]}, "page_table is a list, must be an array"),
        ({"page_table": i32([], [])}, r"page_table has shape \(2, 0\), must be \[B, W\] with W at least 1"),
        ({"page_size": 4.0}, "page_size=4.0 must be an integer from 1 to"),
        ({"max_q_len": 1.0}, "max_q_len=1.0 must be an integer from 1 to"),
    ],
)
def test_errors(unchecked, change, message):
    call = {"page_table": i32(*np.arange(10).reshape(2, 5)), "seq_lens": i32(4, 5), "q_lens": i32(1, 1)}
    call |= {"max_q_len": 1, "page_size": 4, **change}
    with pytest.raises(ValueError, match=message):
        md.for_extend(**call)


def test_errors_of_depths(unchecked):
    for depths in (i32(0, 1, 2), i32([0, 1]), jnp.zeros(2), [0, 1]):
        with pytest.raises(ValueError, match=r"depths (has (shape|dtype)|is a list)"):
            md.for_target_verify(TABLE, i32(*COMMITTED), num_tokens=2, page_size=16, depths=depths)


@pytest.mark.parametrize("name", ["step", "num_drafted"])
@pytest.mark.parametrize("value", [-1, 1.5, jnp.ones(()), i32(1)])
def test_errors_of_draft_steps(unchecked, name, value):
    """Before the committed rows there is nothing to draft."""
    with pytest.raises(ValueError, match=rf"{name}(=| is )"):
        md.for_draft_decode(TABLE, i32(*COMMITTED), **{"step": 0, name: value}, page_size=16)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"req_to_token": jnp.zeros((3, 32))}, "req_to_token has dtype float32"),
        ({"req_to_token": i32(0, 1)}, r"req_to_token has shape \(2,\), must be \[requests, tokens\]"),
        ({"request_ids": i32([0])}, r"request_ids has shape \(1, 1\), must be \[B\]"),
    ],
)
def test_errors_of_token_maps(unchecked, change, message):
    call = {"req_to_token": jnp.zeros((3, 32), jnp.int32), "request_ids": i32(0), "page_size": 16, **change}
    with pytest.raises(ValueError, match=message):
        md.page_table_from_tokens(**call)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "int64"])
def test_integers_of_any_width(unchecked, dtype):
    """Slots are counted in int32 whatever ids and lengths come in, NumPy's own integers too; -1 is what it is."""
    table, lens = np.array([[100, 7], [3, 101]]), np.array([65, 3])
    want = md.for_extend(i32(*table), i32(*lens), i32(2, 5), max_q_len=5, page_size=64)
    got = md.for_extend(table.astype(dtype), lens.astype(dtype), i32(2, 5), max_q_len=5, page_size=64)
    assert want.q_lens.tolist() == [2, 0]  # more rows than tokens is no request
    assert want.slots.tolist()[:2] == [100 * 64 + 63, 7 * 64]
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all() and a.dtype == b.dtype, got, want))


def test_ids_past_int32_are_no_pages(unchecked):
    table = np.array([[2**32 + 5, -(2**33)]])
    metadata = md.for_extend(table, np.array([8]), i32(8), max_q_len=8, page_size=4)
    assert metadata.page_table.tolist() == [[INT32.max, INT32.min]]
    assert metadata.slots.tolist() == [-1] * 8


VALID = md.AttentionMetadata(
    q_starts=i32(0, 2, 9, 2),
    q_lens=i32(2, 0, 0, 3),
    kv_lens=i32(9, 0, 4, 5),
    page_table=i32([3, 4, 5], [-1, 99, 7], [6, INT32.max, 0], [1, 2, -1]),
    kv_offsets=i32(0, 0, 0, 0),
    slots=i32(19, 20, 6, 7, 8, -1, -1),
    positions=i32(7, 8, 2, 3, 4, 0, 0),
    work=i32(),
    max_q_len=3,
)
VIOLATIONS = {
    "q_lens: too many": ({"q_lens": i32(2, 0, 0, 4)}, "q_lens", 3, 4, "must be 0 to max_q_len=3"),
    "q_lens: negative": ({"q_lens": i32(2, -1, 0, 3)}, "q_lens", 1, -1, "must be 0 to max_q_len=3"),
    "q_starts: negative": ({"q_starts": i32(-1, 2, 9, 2)}, "q_starts", 0, -1, "rows must lie in 0 to T=7"),
    "q_starts: past the end": ({"q_starts": i32(0, 2, 9, 5)}, "q_starts", 3, 5, "rows must lie in 0 to T=7"),
    "q_starts: overflow": ({"q_starts": i32(0, 2, 9, INT32.max)}, "q_starts", 3, INT32.max, "rows must lie"),
    "q_starts: overlap": ({"q_starts": i32(0, 2, 9, 1)}, "q_starts", 3, 1, "disjoint and ascending"),
    "q_starts: descending": ({"q_starts": i32(3, 2, 9, 0)}, "q_starts", 3, 0, "disjoint and ascending"),
    "kv_lens: shorter than rows": ({"kv_lens": i32(1, 0, 4, 5)}, "kv_lens", 0, 1, "must be at least q_lens"),
    "kv_lens: negative": ({"kv_lens": i32(9, -1, 4, 5)}, "kv_lens", 1, -1, "must be at least q_lens"),
    "kv_lens: past the table": ({"kv_lens": i32(9, 0, 13, 5)}, "kv_lens", 2, 13, "more keys than W * P = 12"),
    "kv_lens: overflow": ({"kv_lens": i32(9, 0, INT32.max, 5)}, "kv_lens", 2, INT32.max, "more keys"),
    "kv_offsets: negative": ({"kv_offsets": i32(0, 0, 0, -1)}, "kv_offsets", 3, -1, "must be at least 0"),
    "kv_offsets: overflow": ({"kv_offsets": i32(INT32.min, 0, 0, 0)}, "kv_offsets", 0, INT32.min, "at least 0"),
    "page_table: negative": (
        {"page_table": VALID.page_table.at[0, 2].set(-1)}, "page_table", (0, 2), -1, "must be 0 to N - 1 = 7",
    ),
    "page_table: past the pool": (
        {"page_table": VALID.page_table.at[3, 1].set(8)}, "page_table", (3, 1), 8, "must be 0 to N - 1 = 7",
    ),
    "slots: past the pool": ({"slots": VALID.slots.at[5].set(32)}, "slots", 5, 32, "must be below N * P = 32"),
    "slots: twice": ({"slots": VALID.slots.at[6].set(19)}, "slots", 6, 19, "written twice"),
}  # fmt: skip

_check = functools.partial(md.check_metadata, num_pages=8)
_checked = jax.jit(checkify.checkify(functools.partial(_check, page_size=4)))


def test_valid_metadata_passes():
    md.check_metadata(VALID, num_pages=8, page_size=4)
    md.check_metadata(jax.tree.map(np.asarray, VALID), num_pages=8, page_size=4)
    for checked in (_checked, jax.jit(checkify.checkify(functools.partial(_check, window=2, page_size=4)))):
        error, _ = checked(VALID)
        assert error.get() is None
    # A window's pool has let go of the first page, and a stride of 3 makes few slots hold many positions.
    windowed = dataclasses.replace(VALID, kv_offsets=i32(4, 0, 0, 0), kv_lens=i32(16, 0, 4, 5))
    md.check_metadata(windowed, num_pages=8, page_size=4)
    strided = dataclasses.replace(VALID, kv_stride=3, kv_lens=i32(36, 0, 4, 5))
    md.check_metadata(strided, num_pages=8, page_size=4)
    with pytest.raises(ValueError, match=r"kv_lens\[0\]=37"):
        md.check_metadata(dataclasses.replace(strided, kv_lens=i32(37, 0, 4, 5)), num_pages=8, page_size=4)


def test_pages_are_those_of_the_builder():
    metadata = md.for_decode(TABLE, i32(*COMMITTED), page_size=16)
    assert metadata.page_size == 16
    with pytest.raises(ValueError, match="metadata was built with page_size=16, but the pool has page_size=8"):
        md.check_metadata(metadata, num_pages=100, page_size=8)


def test_without_causality_a_request_may_have_fewer_keys_than_rows():
    fewer = dataclasses.replace(VALID, kv_lens=i32(1, 0, 4, 0))
    md.check_metadata(fewer, num_pages=8, page_size=4, causal=False)
    with pytest.raises(ValueError, match=r"kv_lens\[0\]=1: must be at least q_lens"):
        md.check_metadata(fewer, num_pages=8, page_size=4)
    with pytest.raises(ValueError, match=r"kv_lens\[3\]=-1: must be at least 0"):
        negative = dataclasses.replace(VALID, kv_lens=i32(1, 0, 4, -1))
        md.check_metadata(negative, num_pages=8, page_size=4, causal=False)


@pytest.mark.parametrize("stride, offset", [(1, 0), (1, 3), (3, 0), (3, 2)])
def test_pages_left_of_every_window_may_be_anything(stride, offset):
    """A page counts if some row sees a key of it: found by looking at every key of every row."""
    q_len, pages = 2, 4
    for kv_len in range(1, pages * 4 * stride + offset):
        for window in (1, 2, 5, 9, INT32.max):
            metadata = md.AttentionMetadata(
                q_starts=i32(0), q_lens=i32(min(q_len, kv_len)), kv_lens=i32(kv_len), kv_offsets=i32(offset),
                page_table=i32([0] * pages), slots=i32(-1, -1), positions=i32(0, 0), work=i32(), max_q_len=q_len,
                kv_stride=stride,
            )  # fmt: skip
            metadata = jax.tree.map(np.asarray, metadata)
            first = kv_len - min(q_len, kv_len)
            seen = {i // 4 for i in range(pages * 4) if first - window < offset + i * stride < kv_len}
            for page in range(pages):
                table = np.zeros((1, pages), np.int32)
                table[0, page] = 99
                broken = dataclasses.replace(metadata, page_table=table)
                check = functools.partial(md.check_metadata, num_pages=8, page_size=4, window=window)
                if page in seen:
                    with pytest.raises(ValueError, match=rf"page_table\[\(0, {page}\)\]=99"):
                        check(broken)
                else:
                    check(broken)


@pytest.mark.parametrize(
    "call, message",
    [
        ({"window": 0}, "window=0 must be an integer from 1 to"),
        ({"window": 2, "causal": False}, "window=2 with causal=False: a window needs causal=True"),
        ({"num_pages": 0}, "num_pages=0 must be an integer from 1 to"),
        ({"num_pages": 2**29}, "num_pages=536870912 must be an integer from 1 to 536870911"),
        ({"page_size": 4.0}, "page_size=4.0 must be an integer from 1 to"),
        ({"metadata": dataclasses.replace(VALID, slots=VALID.slots.astype(jnp.int16))}, "slots has dtype int16"),
        ({"metadata": dataclasses.replace(VALID, q_lens=[2, 0, 0, 3])}, "q_lens is a list, must be an array"),
        ({"metadata": dataclasses.replace(VALID, q_lens=jnp.int32(2))}, r"q_lens has shape \(\), must be \[B\]"),
        ({"metadata": dataclasses.replace(VALID, page_table=i32(1, 2, 3, 4))}, r"page_table has shape \(4,\), must be"),
        ({"metadata": dataclasses.replace(VALID, page_table=[[1]])}, "page_table is a list, must be an array"),
        ({"metadata": dataclasses.replace(VALID, kv_lens=i32(1, 2))}, r"kv_lens has shape \(2,\), must be \(4,\)"),
        ({"metadata": dataclasses.replace(VALID, kv_offsets=i32([0] * 4))}, r"kv_offsets has shape \(1, 4\), must be"),
        ({"metadata": dataclasses.replace(VALID, slots=jnp.int32(1))}, r"slots has shape \(\), must be \[T\]"),
        ({"metadata": dataclasses.replace(VALID, positions=i32(0))}, r"positions has shape \(1,\), must be"),
        ({"metadata": dataclasses.replace(VALID, kv_stride=0)}, "kv_stride=0 must be an integer of at least 1"),
    ],
)
def test_wrong_calls_of_the_check(unchecked, call, message):
    with pytest.raises(ValueError, match=message):
        md.check_metadata(**{"metadata": VALID, "num_pages": 8, "page_size": 4, **call})


@pytest.mark.parametrize("name", VIOLATIONS)
def test_each_violation_is_found(name):
    """On the host with the field, place and value in the message; under a trace by checkify."""
    change, field, index, value, allowed = VIOLATIONS[name]
    wrong = dataclasses.replace(VALID, **change)
    with pytest.raises(ValueError) as error:
        md.check_metadata(wrong, num_pages=8, page_size=4)
    assert str(error.value).startswith(f"{field}[{index}]={value}: ") and allowed in str(error.value)
    found, _ = _checked(wrong)
    with pytest.raises(checkify.JaxRuntimeError) as error:
        found.throw()
    assert f"{field}: {value} at flat index" in str(error.value) and allowed in str(error.value)
