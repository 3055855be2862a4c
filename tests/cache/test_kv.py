"""Keys and values: writing, reading and moving in every layout, against arrays kept in NumPy, bit by bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layouts import LAYOUTS, arrays_of, rows_of
from mla_attn.cache import KVPool, move_rows, read_kv, write_kv
from mla_attn.specs import GQASpec

LAYERS, PAGES, PAGE, HEADS = 3, 4, 8, 2
SLOTS = PAGES * PAGE
# Layout, channels of keys and values, width of their rows.
POOLS = {
    "nhd": ("nhd", 5, 3, 5, 3),
    "nhd, wide rows": ("nhd", 5, 3, 8, 3),
    "hnd": ("hnd", 5, 3, 5, 3),
    "hnd, wide rows": ("hnd", 5, 3, 5, 4),
    "interleaved": ("interleaved", 5, 5, 5, 5),
    "interleaved, wide rows": ("interleaved", 5, 3, 8, 8),
    "shuffled": ("shuffled", 16, 3, 16, 3),
    "shuffled, wide rows": ("shuffled", 8, 3, 16, 5),
}
every_pool = pytest.mark.parametrize("name", POOLS)
write = jax.jit(lambda pool, k, v, slots, layer: write_kv(pool, k, v, slots, layer=layer))
read = jax.jit(lambda pool, table, starts, layer: read_kv(pool, table, starts, 7, layer=layer))
move = jax.jit(move_rows)


def make_pool(name, dtype="float32", page_stride=1, layer_stride=PAGES):
    """Random numbers in every place."""
    layout, dim, v_dim, *widths = POOLS[name]
    size = (PAGES - 1) * page_stride + (LAYERS - 1) * layer_stride + 1
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((size, PAGE, HEADS, width), np.float32).astype(jnp.dtype(dtype)) for width in widths)
    k, v = (*map(jnp.asarray, arrays_of(layout, *rows)), None)[:2]
    return KVPool(k, v, LAYERS, PAGES, layout, dim, v_dim, page_stride, layer_stride)


def whole_rows(pool):
    """Rows of keys and of values, with what lies beside them: every element of the arrays, once."""
    return rows_of(pool.layout, pool.arrays)


def new_rows(pool, count):
    rng = np.random.default_rng(1)
    shapes = (count, HEADS, pool.head_dim), (count, HEADS, pool.v_head_dim)
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


def same_bits(pool, rows):
    assert [x.tobytes() for x in whole_rows(pool)] == [x.tobytes() for x in rows]


@pytest.mark.parametrize("strides", [(1, PAGES), (5, 2)])
@every_pool
def test_written_read_and_moved(name, strides):
    """Rows go to their slots and nowhere else, what lies beside them keeps its bits, and rows move in all layers."""
    pool = make_pool(name, "bfloat16", *strides)
    k, v = new_rows(pool, 6)
    slots = [14, -1, 0, SLOTS, 7, -SLOTS]
    for layer in (0, 2):
        want = whole_rows(pool)
        want_k, want_v = want[0][..., : pool.head_dim], want[1][..., : pool.v_head_dim]
        for t, slot in enumerate(slots):
            if 0 <= slot < SLOTS:
                at = slot // PAGE * strides[0] + layer * strides[1], slot % PAGE
                want_k[at], want_v[at] = (np.asarray(x[t].astype(pool.dtype)) for x in (k, v))
        pool = write(pool, k, v, jnp.asarray(slots), layer)
        same_bits(pool, want)

    table = jnp.asarray([[3, 0], [1, -9]])  # a foreign id stays inside the layer, and slots past the table repeat
    got_k, got_v = read(pool, table, jnp.asarray([2, 12]), 2)
    for b, pages in enumerate(([3, 0], [1, 0])):
        for i in range(7):
            slot = (2, 12)[b] + i
            at = pages[min(slot // PAGE, 1)] * strides[0] + 2 * strides[1], slot % PAGE
            assert (got_k[b, i] == want_k[at]).all() and (got_v[b, i] == want_v[at]).all()

    before, want = whole_rows(pool), whole_rows(pool)
    for src, dst in ((14, 3), (3, 14), (5, -1), (SLOTS, 5)):
        for x, old in zip(want, before, strict=True) if max(src, dst) < SLOTS and dst >= 0 else ():
            for layer in range(LAYERS):
                places = [s // PAGE * strides[0] + layer * strides[1] for s in (src, dst)]
                x[places[1], dst % PAGE] = old[places[0], src % PAGE]
    same_bits(move(pool, jnp.asarray([14, 3, 5, SLOTS]), jnp.asarray([3, 14, -1, 5])), want)


@every_pool
def test_written_in_place(name):
    """Of a large pool: scratch memory is that of the rows."""
    small = make_pool(name, "bfloat16")
    large = (jax.ShapeDtypeStruct((2**16, *x.shape[1:]), x.dtype) for x in small.arrays)
    k, v = (*large, None)[:2]
    pool = KVPool(k, v, 1, 2**16, small.layout, small.head_dim, small.v_head_dim)
    rows, slots = jax.eval_shape(lambda: new_rows(pool, 4)), jax.ShapeDtypeStruct((4,), jnp.int32)
    for call in (functools.partial(write_kv, layer=0), lambda pool, k, v, slots: move_rows(pool, slots, slots)):
        program = jax.jit(call, donate_argnums=0, keep_unused=True).lower(pool, *rows, slots).compile()
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes == sum(2 * x.size for x in jax.tree.leaves(pool))
        assert memory.temp_size_in_bytes < 2**13


def test_c05_slot_minus_one():
    """Of 64 slots two are written: -1 is not the last one."""
    spec = GQASpec(num_heads=2, num_kv_heads=2, head_dim=8, scale=1.0)
    for layout in LAYOUTS:
        pool = KVPool.create(num_layers=1, num_pages=4, page_size=16, spec=spec, dtype="float16", layout=layout)
        rows = jnp.full((4, 2, 8), 7.0)
        pool = write_kv(pool, rows.at[0, 0, 0].set(65536), rows, jnp.asarray([0, 17, -1, -1]))
        assert np.isposinf(whole_rows(pool)[0][0, 0, 0, 0])  # above 65504
        written = (whole_rows(pool)[0] != 0).any(axis=(2, 3)).ravel()
        assert np.flatnonzero(written).tolist() == [0, 17]


def test_sizes():
    spec = GQASpec(num_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=32, scale=1.0)
    sizes = {"num_layers": 3, "num_pages": 5, "page_size": 16, "spec": spec}
    for layout, shapes in (
        ("nhd", [(15, 16, 2, 64), (15, 16, 2, 32)]),
        ("hnd", [(15, 2, 16, 64), (15, 2, 16, 32)]),
        ("interleaved", [(15, 16, 2, 2, 64)]),
        ("shuffled", [(15, 2, 8, 16, 8), (15, 2, 2, 32, 8)]),
    ):
        pool = KVPool.create(**sizes, layout=layout)
        assert [x.shape for x in pool.arrays] == shapes and pool.dtype == jnp.bfloat16
        assert (pool.page_size, pool.num_kv_heads, pool.head_dim, pool.v_head_dim) == (16, 2, 64, 32)
        assert pool.row_bytes == 2 * 2 * 96
        pool.check_spec(spec)
        with pytest.raises(ValueError, match=r"pool has num_kv_heads=2, head_dim=64, .* but spec has .* head_dim=65"):
            pool.check_spec(dataclasses.replace(spec, head_dim=65))
    for dtype, shapes in (
        ("float8_e5m2", [(15, 2, 4, 16, 16), (15, 2, 1, 32, 16)]),
        ("float32", [(15, 2, 16, 16, 4), (15, 2, 4, 32, 4)]),
    ):
        assert [x.shape for x in KVPool.create(**sizes, layout="shuffled", dtype=dtype).arrays] == shapes
    array = jnp.zeros((5, 16, 2, 2, 128))
    assert KVPool.of(array).k is array and KVPool.of(array).v_head_dim == 128
    assert KVPool.of(array, head_dim=64).v_head_dim == 64
    assert KVPool.of(array[..., 0, :], array[..., 1, :64], layout="nhd").v_head_dim == 64


def test_where_a_shuffled_channel_lies():
    """Pages of 16 tokens and heads of 128 in bfloat16: groups of 8."""
    spec = GQASpec(num_heads=2, num_kv_heads=2, head_dim=128, scale=1.0)
    pool = KVPool.create(num_layers=1, num_pages=3, page_size=16, spec=spec, layout="shuffled")
    rows = jnp.zeros((1, 2, 128)).at[0, 1, 77].set(3.0)
    pool = write_kv(pool, rows, 2 * rows, jnp.asarray([2 * 16 + 5]))
    assert np.argwhere(np.asarray(pool.k)).tolist() == [[2, 1, 9, 5, 5]] and pool.k[2, 1, 9, 5, 5] == 3
    assert np.argwhere(np.asarray(pool.v)).tolist() == [[2, 1, 0, 77, 5]] and pool.v[2, 1, 0, 77, 5] == 6


def test_shuffled_arrays_of_other_systems():
    """Kept flat by some: as many numbers a page as of tokens in order."""
    flat = jnp.arange(2.0 * 3 * 2 * 16 * 64).astype(jnp.bfloat16).reshape(2, 3, 2 * 16 * 64)
    k, v = flat[0].reshape(3, 2, 8, 16, 8), flat[1].reshape(3, 2, 2, 64, 8)
    pool = KVPool.of(k, v, layout="shuffled")
    assert pool.k is k and pool.v is v
    assert (pool.num_pages, pool.page_size, pool.num_kv_heads, pool.head_dim, pool.v_head_dim) == (3, 16, 2, 64, 64)
    got_k, got_v = read_kv(pool, jnp.asarray([[2, 0]]), jnp.asarray([0]), 32)
    for t, d in ((0, 0), (5, 63), (21, 9)):
        page, offset = (2, 0)[t // 16], t % 16
        assert (got_k[0, t, :, d] == k[page, :, d // 8, offset, d % 8]).all()
        assert (got_v[0, t, :, d] == v[page, :, offset // 8, d, offset % 8]).all()
    pool = KVPool.of(
        k.view(jnp.uint8).reshape(3, 2, 8, 16, 16),
        v.view(jnp.uint8).reshape(3, 2, 1, 128, 16),
        layout="shuffled",
        dtype="float8_e4m3fn",
    )
    assert (pool.head_dim, pool.v_head_dim, pool.page_size) == (128, 128, 16)


K, V = jnp.zeros((2, HEADS, 5)), jnp.zeros((2, HEADS, 3))
JOINT = jnp.zeros((4, 4, 2, 2, 8))
KEYS, VALUES = jnp.zeros((3, 2, 4, 8, 4)), jnp.zeros((3, 2, 2, 9, 4))  # shuffled: D of 16, V of 9, pages of 8


def make_shuffled(page_size, dim, dtype):
    spec = GQASpec(num_heads=2, num_kv_heads=2, head_dim=dim, scale=1.0)
    sizes = {"num_layers": 1, "num_pages": 2, "page_size": page_size, "spec": spec}
    return KVPool.create(**sizes, dtype=dtype, layout="shuffled")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda p: write_kv(p, V, V, jnp.zeros(2, int)), r"k has shape \(2, 2, 3\), must be \(2, 2, 5\)"),
        (lambda p: write_kv(p, K, V[:1], jnp.zeros(2, int)), r"v has shape \(1, 2, 3\), must be \(2, 2, 3\)"),
        (lambda p: write_kv(p, K.astype("float8_e4m3fn"), V, jnp.zeros(2, int)), "k has dtype float8_e4m3fn, must be"),
        (lambda p: write_kv(p, K, V, jnp.zeros((2, 1), int)), r"slots has shape \(2, 1\), must be \[T\]"),
        (lambda p: write_kv(p, K, V, jnp.zeros(2, int), layer=3), "layer=3 must be an integer from 0 to 2"),
        (lambda p: read_kv(p, jnp.zeros((1, 0), int), jnp.zeros(1, int), 3), "page_table has shape"),
        (lambda p: move_rows(dataclasses.replace(p, layout="NHD"), *[jnp.zeros(1, int)] * 2), "layout='NHD' must be"),
        (lambda p: dataclasses.replace(p, v=None).check(), r"layout='nhd' with 1 array\(s\): only 'interleaved'"),
        (lambda p: dataclasses.replace(p, v=p.v[:2]).check(), r"pool.v is float32\[2, 8, 2, 3\], must be as pool.k"),
        (lambda p: dataclasses.replace(p, num_layers=4).check(), "pool.k has shape .*, must have 16 pages"),
        (lambda p: dataclasses.replace(p, v_head_dim=4).check(), "v_head_dim=4 must be at most 3, the pool's row"),
        (lambda p: KVPool.of(JOINT.astype("float8_e4m3fn")), "pool.k.dtype=float8_e4m3fn must be one of bfloat16, fl"),
        (lambda p: KVPool.of(JOINT, head_dim=9), "head_dim=9 must be at most 8"),
        (lambda p: KVPool.of(JOINT[:, :, :, 0]), r"pool.k has shape \(4, 4, 2, 8\), must be \[pages, P, K, 2, D\]"),
        (lambda p: KVPool.of(JOINT[:, :, :, :1]), r"pool.k has shape .*, must be \[pages, P, K, 2, D\]"),
        (lambda p: KVPool.of(JOINT, layout="nhd"), "layout='nhd' with 1"),
        (lambda p: KVPool.of(KEYS, VALUES[:, :, :1], layout="shuffled"), r"pool.v is .*\[3, 2, 1, 9, 4\], must be as"),
        (lambda p: KVPool.of(KEYS, KEYS, layout="shuffled"), r"pool.v is .*\[3, 2, 4, 8, 4\], must be as pool.k"),
        (lambda p: KVPool.of(KEYS, VALUES.swapaxes(3, 4), layout="shuffled"), r"must be .*P / X, V, X\] with X = 4"),
        (lambda p: KVPool.of(KEYS[0], VALUES[0], layout="shuffled"), r"must be \[pages, K, D / X, P, X\]"),
        (lambda p: KVPool.of(KEYS.astype("float16"), VALUES, layout="shuffled"), "pool.k is float16.* with X = 8"),
        (
            lambda p: KVPool.of(KEYS, VALUES, layout="shuffled", head_dim=15),
            "layout='shuffled' with page_size=8, head_dim=15: must be multiples of 4, the elements of 16 bytes",
        ),
        (lambda p: KVPool.of(KEYS, VALUES, layout="shuffled", head_dim="8"), "head_dim='8' must be an integer"),
        (lambda p: make_shuffled(6, 8, "float32"), "page_size=6, head_dim=8: must be multiples of 4"),
        (lambda p: make_shuffled(8, 12, "bfloat16"), "page_size=8, head_dim=12: must be multiples of 8"),
        (lambda p: make_shuffled(8, 16, "float8_e4m3fn"), "page_size=8, head_dim=16: must be multiples of 16"),
    ],
)
def test_errors(unchecked, call, message):
    with pytest.raises(ValueError, match=message):
        call(make_pool("nhd"))
