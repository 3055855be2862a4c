"""Writing, reading and moving rows, against a pool kept in NumPy. Everything is compared bit by bit."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import made, zeros
from mla_attn.cache import LatentPool, move_rows, read_latent, write_latent

LAYERS, PAGES, PAGE, RANK, ROPE = 3, 4, 4, 5, 2
SLOTS = PAGES * PAGE
INT32 = np.iinfo(np.int32)

inside = st.integers(0, SLOTS - 1)
outside = st.sampled_from([-1, -2, -SLOTS, -SLOTS - 1, SLOTS, SLOTS + 1, 3 * SLOTS, 10**6, INT32.max, INT32.min])


def make_pool(seed, dtype=jnp.float32, page_stride=1, layer_stride=PAGES):
    """Random rows, some of them NaN, in every place, those between strided pages included."""
    rng = np.random.default_rng(seed)
    size = (PAGES - 1) * page_stride + (LAYERS - 1) * layer_stride + 1
    data = rng.standard_normal((size, PAGE, RANK + ROPE), np.float32)
    data[rng.random(data.shape[:2]) < 0.2] = np.nan
    return LatentPool(jnp.asarray(data, dtype), LAYERS, PAGES, RANK, page_stride, layer_stride)


def new_rows(seed, count, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    latent, rope = (rng.standard_normal((count, width), np.float32) for width in (RANK, ROPE))
    return jnp.asarray(latent, dtype), jnp.asarray(rope, dtype)


def place(pool, slot, layer):
    """Where a row lies, by the rule; None for a slot that does not exist."""
    if not 0 <= slot < SLOTS:
        return None
    return slot // PAGE * pool.page_stride + layer * pool.layer_stride, slot % PAGE


def written(pool, latent, rope, slots, layer):
    data = np.asarray(pool.data).copy()
    rows = np.concatenate([np.asarray(latent.astype(pool.dtype)), np.asarray(rope.astype(pool.dtype))], axis=-1)
    for row, slot in zip(rows, slots, strict=True):
        at = place(pool, slot, layer)
        if at is not None:
            data[at] = row
    return data


def same_bits(pool, data):
    assert np.asarray(pool.data).tobytes() == np.asarray(data).tobytes()


write = jax.jit(lambda pool, latent, rope, slots, layer: write_latent(pool, latent, rope, slots, layer=layer))
move = jax.jit(move_rows)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("strides", [(1, PAGES), (5, 2), (2, 11)])
def test_rows_go_to_their_slots_and_nowhere_else(dtype, strides):
    """Some slots exist, all different; others are negative, past the layer, or huge."""

    @hypothesis.settings(deadline=None, max_examples=25)
    @hypothesis.given(
        good=st.lists(inside, unique=True, max_size=6), bad=st.lists(outside, min_size=6, max_size=6),
        order=st.permutations(range(6)), layer=st.integers(0, LAYERS - 1),
    )  # fmt: skip
    def run(good, bad, order, layer):
        slots = [(good + bad)[i] for i in order]
        pool = make_pool(1, dtype, *strides)
        latent, rope = new_rows(2, 6)
        got = write(pool, latent, rope, jnp.asarray(slots, jnp.int32), layer)
        same_bits(got, written(pool, latent, rope, slots, layer))

    run()


def test_negative_slots_do_not_wrap():
    """Slots 0 and 17 of 64 change; -1 writes nothing, the last row included."""
    pool = LatentPool(jnp.zeros((4, 16, RANK + ROPE)), 1, 4, RANK, 1, 4)
    rows = jnp.full((4, RANK), 7.0), jnp.full((4, ROPE), 7.0)
    got = write(pool, *rows, jnp.asarray([0, 17, -1, -1]), 0)
    changed = np.flatnonzero((np.asarray(got.data).reshape(64, -1) != 0).any(axis=-1))
    assert changed.tolist() == [0, 17]


def test_no_rows():
    pool = make_pool(3)
    same_bits(write(pool, *new_rows(0, 0), jnp.zeros(0, jnp.int32), 1), pool.data)


def test_layers_scanned_over():
    """The pool is carried, the layer traced: every layer gets its own rows."""
    pool = make_pool(4)
    slots = [3, -1, 12, SLOTS]
    latent, rope = (x.reshape(LAYERS, 4, -1) for x in new_rows(5, 4 * LAYERS))

    def step(pool, inputs):
        layer, latent, rope = inputs
        return write_latent(pool, latent, rope, jnp.asarray(slots), layer=layer), None

    got, _ = jax.jit(functools.partial(jax.lax.scan, step))(pool, (jnp.arange(LAYERS), latent, rope))
    want = pool
    for layer in range(LAYERS):
        data = written(want, latent[layer], rope[layer], slots, layer)
        want = dataclasses.replace(want, data=jnp.asarray(data))
    same_bits(got, want.data)


@pytest.mark.parametrize("layer", [-1, LAYERS, INT32.max, INT32.min])
def test_layers_that_do_not_exist(layer):
    """An error where the number is known, nothing written where it is traced."""
    pool, rows, slots = make_pool(6), new_rows(6, 2), jnp.asarray([3, 12])
    for call in (
        lambda: write_latent(pool, *rows, slots, layer=layer),
        lambda: read_latent(pool, jnp.zeros((1, 1), int), jnp.zeros(1, int), 3, layer=layer),
    ):
        with pytest.raises(ValueError, match=f"layer={layer} must be an integer from 0 to {LAYERS - 1}"):
            call()
    same_bits(write(pool, *rows, slots, layer), pool.data)


@pytest.mark.parametrize("kind", [np.int64, np.array, jnp.int32, jnp.uint8])
def test_layers_are_checked_where_their_values_are_known(unchecked, kind):
    layer = kind(LAYERS)
    pool, rows, slots = make_pool(6), new_rows(6, 2), jnp.asarray([3, 12])
    with pytest.raises(ValueError, match=f"layer={LAYERS} must be an integer from 0 to {LAYERS - 1}"):
        write_latent(pool, *rows, slots, layer=layer)
    same_bits(write_latent(pool, *rows, slots, layer=layer - 1), written(pool, *rows, [3, 12], LAYERS - 1))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "int64"])
def test_integers_of_any_width(unchecked, dtype):
    """2,000 pages of 64 tokens: many pages and most slots are too large for a narrow integer, and none wraps."""
    pages, page, held = 2000, 64, np.iinfo(dtype)
    data = jnp.arange(pages * page, dtype=jnp.float32).reshape(pages, page, 1).repeat(3, axis=2)
    pool = LatentPool(data, 1, pages, 2)
    last_page, last = min(held.max, pages - 1), min(held.max, pages * page - 1)
    with jax.enable_x64(True):
        outside = [held.min] * (held.min < 0) + [held.max] * (held.max > last)
        table, starts, slots = ([[3, last_page]], [63], [5, last, *outside])
        for array in (np.array, jnp.array):
            latent, rope = read_latent(pool, array(table, dtype), array(starts, dtype), 66)
            want = [3 * page + 63, *range(last_page * page, last_page * page + page), last_page * page]
            assert latent[0, :, 0].tolist() == rope[0, :, 0].tolist() == want
            rows = jnp.full((len(slots), 2), -1.0), jnp.full((len(slots), 1), -1.0)
            got = np.asarray(write_latent(pool, *rows, array(slots, dtype)).data)
            assert np.flatnonzero((got == -1).all(axis=-1)).tolist() == [5, last]
            moved = move_rows(pool, array([5, *outside], dtype), array([last, *outside], dtype)).data
            assert np.flatnonzero((moved != data).any(axis=-1)).tolist() == [last]
            assert moved.reshape(-1, 3)[last].tolist() == [5] * 3


def test_starts_past_any_table_repeat_its_last_entry():
    pool = make_pool(21)
    got = read_latent(pool, jnp.asarray([[0, 3]]), jnp.asarray([INT32.max]), 2 * PAGE)
    last = np.asarray(pool.data)[3]
    rows = np.concatenate(got, axis=-1)[0]
    assert all(row.tobytes() in {r.tobytes() for r in last} for row in rows)


def test_rows_are_rounded_to_the_pool():
    pool = LatentPool(jnp.zeros((4, 4, 3), jnp.bfloat16), 1, 4, 2, 1, 4)
    got = write_latent(pool, jnp.asarray([[1.00390625, 3e38]]), jnp.asarray([[-0.0]]), jnp.asarray([5]))
    assert got.data.dtype == jnp.bfloat16
    assert np.asarray(got.data[1, 1]).tobytes() == np.asarray([1.0, 3e38, -0.0], jnp.bfloat16).tobytes()


def test_a_donated_pool_is_written_in_place():
    data = jnp.zeros((LAYERS * PAGES, PAGE, RANK + ROPE))  # memory of JAX alone: what NumPy sees too cannot be donated
    address = data.unsafe_buffer_pointer()
    pool = LatentPool(data, LAYERS, PAGES, RANK, 1, PAGES)
    got = jax.jit(write_latent, donate_argnums=0)(pool, *new_rows(8, 2), jnp.asarray([1, 2]), layer=1)
    assert data.is_deleted() and got.data.unsafe_buffer_pointer() == address
    assert got.data[PAGES, 1:3].all() and np.count_nonzero(got.data) == 2 * (RANK + ROPE)


@pytest.mark.parametrize("strides", [(1, PAGES), (5, 2)])
def test_reading_back(strides):
    """Slots past the table repeat its last entry; ids outside the pool stay inside the layer."""
    pool = make_pool(9, jnp.bfloat16, *strides)
    read = jax.jit(lambda table, starts, layer: read_latent(pool, table, starts, 7, layer=layer))

    @hypothesis.settings(deadline=None, max_examples=25)
    @hypothesis.given(
        table=st.lists(st.lists(st.integers(0, PAGES - 1), min_size=3, max_size=3), min_size=2, max_size=2),
        starts=st.lists(st.integers(0, 14), min_size=2, max_size=2),
        layer=st.integers(0, LAYERS - 1),
        foreign=st.sampled_from([None, -1, PAGES, 99, INT32.max, INT32.min]),
    )
    def run(table, starts, layer, foreign):
        ids = np.asarray(table, np.int32)
        if foreign is not None:
            ids[1, 1] = foreign
            table[1][1] = 0 if foreign < 0 else PAGES - 1
        latent, rope = read(jnp.asarray(ids), jnp.asarray(starts, jnp.int32), layer)
        assert latent.shape == (2, 7, RANK) and rope.shape == (2, 7, ROPE) and latent.dtype == pool.dtype
        got = np.concatenate([latent, rope], axis=-1)
        for b in range(2):
            for i in range(7):
                slot = starts[b] + i
                page = table[b][min(slot // PAGE, 2)]
                want = np.asarray(pool.data)[page * strides[0] + layer * strides[1], slot % PAGE]
                assert got[b, i].tobytes() == want.tobytes()

    run()


def test_what_is_written_is_read():
    pool = make_pool(10)
    table = jnp.asarray([[3, 0], [1, 2]])
    latent, rope = new_rows(11, 6)
    slots = jnp.asarray([14, 15, 0, 7, 8, 9])  # tokens 2 to 4 of request 0, 3 to 5 of request 1
    pool = write_latent(pool, latent, rope, slots, layer=2)
    got = read_latent(pool, table, jnp.asarray([2, 3]), 3, layer=2)
    for a, b in zip(got, (latent, rope), strict=True):
        assert (a.reshape(6, -1) == b).all()


@pytest.mark.parametrize("strides", [(1, PAGES), (5, 2)])
def test_moving_rows(strides):
    """In all layers, reads before writes; pairs with a slot that does not exist move nothing."""

    @hypothesis.settings(deadline=None, max_examples=40)
    @hypothesis.given(
        src=st.lists(st.one_of(inside, inside, outside), min_size=6, max_size=6),
        dst=st.lists(inside, min_size=6, max_size=6, unique=True),
        lost=st.lists(st.one_of(st.none(), st.none(), outside), min_size=6, max_size=6),
    )
    def run(src, dst, lost):
        dst = [a if b is None else b for a, b in zip(dst, lost, strict=True)]
        pool = make_pool(12, jnp.bfloat16, *strides)
        before = np.asarray(pool.data)
        want = before.copy()
        for a, b in zip(src, dst, strict=True):
            for layer in range(LAYERS):
                source, target = place(pool, a, layer), place(pool, b, layer)
                if source is not None and target is not None:
                    want[target] = before[source]
        same_bits(move(pool, jnp.asarray(src, jnp.int32), jnp.asarray(dst, jnp.int32)), want)

    run()


def test_moving_along_a_chain_and_in_a_circle():
    pool = make_pool(13)
    rows = np.asarray(pool.data).reshape(LAYERS, SLOTS, -1)
    for src, dst in (([4, 5, 6, 7], [5, 6, 7, 8]), ([4, 5, 6, 7], [3, 4, 5, 6]), ([0, 15, 7], [15, 7, 0]), ([], [])):
        want = rows.copy()
        want[:, dst] = rows[:, src]
        same_bits(move_rows(pool, jnp.asarray(src, jnp.int32), jnp.asarray(dst, jnp.int32)), want.reshape(-1, PAGE, 7))


# Rows of other systems: wider than R + E, the rope part anywhere after the latent part.

WIDE = [(RANK + ROPE, RANK), (12, RANK), (12, 8), (12, 10)]


def wide_pool(width, rope_offset, dtype=jnp.float32):
    """All NaN, so that what is not written is seen to have no influence."""
    array = jnp.full((PAGES, PAGE, width), jnp.nan, dtype)
    pool = LatentPool.of(array, kv_lora_rank=RANK, rope_dim=ROPE, rope_offset=rope_offset)
    assert pool.data is array
    return pool


@pytest.mark.parametrize("width, rope_offset", WIDE)
def test_rows_of_other_systems(width, rope_offset):
    """What is written is read; elements beside the two parts keep their bits, and rows move whole."""
    pool = wide_pool(width, rope_offset)
    assert (pool.latent_dim, pool.row_width, pool.rope_offset, pool.num_layers) == (7, width, rope_offset, 1)
    assert pool.row_bytes == 4 * 7
    latent, rope = new_rows(20, 4)
    slots = [14, 0, -1, 7]
    got = write(pool, latent, rope, jnp.asarray(slots), 0)
    want = np.asarray(pool.data).copy().reshape(SLOTS, width)
    for i, slot in enumerate(slots):
        if slot >= 0:
            want[slot, :RANK], want[slot, rope_offset : rope_offset + ROPE] = latent[i], rope[i]
    same_bits(got, want)
    read = read_latent(got, jnp.asarray([[3, 0]]), jnp.asarray([2]), 3)
    for part, rows in zip(read, (latent, rope), strict=True):
        assert (part[0, ::2] == rows[:2]).all() and np.isnan(part[0, 1]).all()
    want[1] = want[14]
    same_bits(move(got, jnp.asarray([14]), jnp.asarray([1])), want)


@pytest.mark.parametrize("width, rope_offset", WIDE)
def test_wide_rows_are_written_in_place(width, rope_offset):
    pool = jax.eval_shape(lambda: dataclasses.replace(wide_pool(width, rope_offset), num_pages=2**16))
    pool = dataclasses.replace(pool, data=jax.ShapeDtypeStruct((2**16, PAGE, width), jnp.float32))
    rows, slots = jax.eval_shape(lambda: new_rows(0, 4)), jax.ShapeDtypeStruct((4,), jnp.int32)
    memory = jax.jit(write_latent, donate_argnums=0).lower(pool, *rows, slots).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 4 * pool.data.size and memory.temp_size_in_bytes < 2**12


@pytest.mark.parametrize(
    "change, message",
    [
        ({"array": zeros(PAGES, 12)}, r"array has shape \(4, 12\), must be \[N, P, row_width\]"),
        (
            {"array": zeros(PAGES, PAGE, 12, dtype=jnp.float8_e4m3fn)},
            "data.dtype=float8_e4m3fn must be one of",
        ),
        ({"array": [[[1.0]]]}, "array is a list, must be an array"),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0 must be an integer of at least 1"),
        ({"rope_dim": 2.0}, "rope_dim=2.0 must be an integer of at least 0"),
        ({"rope_offset": RANK - 1}, "rope_offset=4 must be an integer of at least 5"),
        ({"rope_offset": 11}, r"pool.data has shape \(4, 4, 12\), must have rows of 13 elements for rope_dim=2 at"),
        ({"kv_lora_rank": 11}, "must have rows of 13 elements"),
        ({"kv_lora_rank": 13, "rope_dim": None}, "rope_dim=-1 must be an integer of at least 0"),
    ],
)
def test_errors_of_arrays_of_others(unchecked, change, message):
    call = made({"array": zeros(PAGES, PAGE, 12), "kv_lora_rank": RANK, "rope_dim": ROPE, **change})
    with pytest.raises(ValueError, match=message):
        LatentPool.of(call.pop("array"), **call)


def test_all_that_follows_the_latent_part_is_rope_unless_said():
    assert LatentPool.of(jnp.zeros((1, 4, 12)), kv_lora_rank=RANK).rope_dim == 7
    assert LatentPool.of(jnp.zeros((1, 4, 12)), kv_lora_rank=RANK, rope_offset=8).rope_dim == 4


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int32", "uint8"])
def test_pools_of_other_dtypes_are_refused(unchecked, dtype):
    """Made by hand: they would be read, written or multiplied as they are."""
    pool = LatentPool(jnp.zeros((PAGES, PAGE, RANK + ROPE), dtype), 1, PAGES, RANK)
    slots = jnp.asarray([1, 2])
    for call in (
        lambda: write_latent(pool, *new_rows(0, 2), slots),
        lambda: read_latent(pool, slots[None], slots[:1], 2),
        lambda: move_rows(pool, slots, slots),
    ):
        with pytest.raises(ValueError, match=f"pool.data.dtype={dtype} must be one of bfloat16, float16, float32"):
            call()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"latent": zeros(2, 6)}, r"latent has shape \(2, 6\), must be \(2, 5\)"),
        ({"latent": zeros(3, 5)}, r"latent has shape \(3, 5\), must be \(2, 5\)"),
        ({"rope": zeros(2, 3)}, r"rope has shape \(2, 3\), must be \(2, 2\)"),
        ({"slots": zeros(3, dtype=int)}, r"latent has shape \(2, 5\), must be \(3, 5\)"),
        ({"slots": zeros(2, 1, dtype=int)}, r"slots has shape \(2, 1\), must be \[T\]"),
        ({"slots": zeros(2)}, "slots has dtype float32, must be an integer dtype"),
        ({"latent": zeros(2, 5, dtype=int)}, "latent has dtype int32, must be a floating dtype"),
        (
            {"latent": zeros(2, 5, dtype=jnp.float8_e5m2)},
            "latent has dtype float8_e5m2, must be a floating",
        ),
        ({"latent": [[0.0] * 5] * 2}, "latent is a list, must be an array"),
        ({"layer": 0.5}, "layer=0.5 must be an integer"),
        ({"layer": True}, "layer=True must be an integer"),
        ({"layer": zeros(1, dtype=int)}, r"layer is int32\[1\], must be one integer"),
    ],
)
def test_errors(unchecked, change, message):
    latent, rope = new_rows(14, 2)
    call = {"latent": latent, "rope": rope, "slots": jnp.asarray([1, 2]), **made(change)}
    with pytest.raises(ValueError, match=message):
        write_latent(make_pool(14), **call)


def test_errors_of_reads_and_moves(unchecked):
    pool = make_pool(15)
    for shapes in ((2, 3), ((2, 1), (2, 1)), ((), ())):
        with pytest.raises(ValueError, match=r"src has shape .* and dst .*: they must be equal, \[n\]"):
            move_rows(pool, *(jnp.zeros(shape, int) for shape in shapes))
    with pytest.raises(ValueError, match="dst has dtype float32, must be an integer dtype"):
        move_rows(pool, jnp.zeros(2, int), jnp.zeros(2))
    with pytest.raises(ValueError, match="num_tokens=-1 must be an integer from 0"):
        read_latent(pool, jnp.zeros((1, 1), int), jnp.zeros(1, int), -1)
    with pytest.raises(ValueError, match=r"starts has shape \(2,\), must be \(1,\)"):
        read_latent(pool, jnp.zeros((1, 1), int), jnp.zeros(2, int), 3)
    for shape in (4, (1, 0)):
        with pytest.raises(ValueError, match=r"page_table has shape .*, must be \[B, W\] with W at least 1"):
            read_latent(pool, jnp.zeros(shape, int), jnp.zeros(1, int), 3)
    with pytest.raises(ValueError, match="page_table has dtype float32, must be an integer dtype"):
        read_latent(pool, jnp.zeros((1, 1)), jnp.zeros(1, int), 3)
