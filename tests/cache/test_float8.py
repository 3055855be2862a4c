"""Float8 rows, latent and of keys and values: what is stored, against NumPy's casts, bit by bit, and what is read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from layouts import LAYOUTS, rows_of
from mla_attn.cache import KVPool, LatentPool, move_rows, read_kv, read_latent, write_kv, write_latent
from mla_attn.specs import GQASpec, MLASpec

LAYERS, PAGES, PAGE, RANK, ROPE, HEADS = 2, 4, 4, 256, 6, 2
SLOTS = PAGES * PAGE
SPEC = MLASpec(num_heads=2, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, scale=1.0)
KV_SPEC = GQASpec(num_heads=4, num_kv_heads=HEADS, head_dim=5, v_head_dim=3, scale=1.0)
SIZES = {"num_layers": LAYERS, "num_pages": PAGES, "page_size": PAGE}
# What every layout can have: 16 bytes are of 16 tokens or channels of the shuffled one.
KV_SIZES = {**SIZES, "page_size": 16, "spec": dataclasses.replace(KV_SPEC, head_dim=16)}
SCALES = np.asarray([0.02, 3.1], np.float32)  # by layer
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
FLOAT8 = tuple(LARGEST)
every_float8 = pytest.mark.parametrize("dtype", FLOAT8)
TABLE, ZERO = jnp.arange(PAGES, dtype=jnp.int32)[None], jnp.zeros(1, jnp.int32)

write = jax.jit(lambda pool, latent, rope, slots, layer: write_latent(pool, latent, rope, slots, layer=layer))
write_heads = jax.jit(lambda pool, k, v, slots, layer: write_kv(pool, k, v, slots, layer=layer))


def stored(x, scale, dtype):
    """Bytes of numbers: NumPy's."""
    x = np.asarray(x, np.float32) / np.asarray(scale, np.float32)
    return np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(getattr(ml_dtypes, dtype)).view(np.uint8)


def numbers(bytes_, dtype):
    return np.asarray(bytes_).view(getattr(ml_dtypes, dtype)).astype(np.float32)


def random(seed, *shape):
    """Of all sizes, some too large for any scale and some of 0."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape, np.float32) * np.exp(rng.uniform(-9, 9, shape)).astype(np.float32)
    return np.where(rng.random(shape) < 0.05, 0, x)


def filled(pool, seed=0):
    """Random bytes in all pages, NaN codes among them."""
    rng = np.random.default_rng(seed)
    arrays = {name: jnp.asarray(rng.integers(0, 256, getattr(pool, name).shape, np.uint8)) for name in pool.PAGED
              if getattr(pool, name) is not None}  # fmt: skip
    return dataclasses.replace(pool, **arrays)


def of_one_number(x, scale=1.0, dtype="float8_e4m3fn"):
    """A pool of one latent a row, with ``x`` written to its first rows."""
    spec = MLASpec(num_heads=1, kv_lora_rank=1, qk_rope_head_dim=0, scale=1.0)
    pool = LatentPool.create(num_layers=1, num_pages=1, page_size=8, spec=spec, dtype=dtype, scale=scale)
    x = jnp.asarray(x, jnp.float32)[:, None]
    return write_latent(pool, x, jnp.zeros((len(x), 0)), jnp.arange(len(x), dtype=jnp.int32))


def test_c06_what_is_too_large_is_clipped():
    """JAX's cast makes NaN of it, or infinity; NaN stays NaN."""
    pool = of_one_number([448, 464, 466, 1000, -1000, np.inf, np.nan])
    want = [448, 448, 448, 448, -448, 448]
    assert numbers(pool.data, "float8_e4m3fn").ravel().tolist()[:6] == want
    values = read_latent(pool, TABLE[:, :1], ZERO, 7)[0].ravel()
    assert values[:6].tolist() == want and np.isnan(values[6])
    pool = of_one_number([1e5, -np.inf, np.nan], dtype="float8_e5m2")
    assert numbers(pool.data, "float8_e5m2").ravel().tolist()[:2] == [57344, -57344]
    assert np.isnan(numbers(pool.data, "float8_e5m2").ravel()[2])


def test_scales_divide():
    """Also where 25 is no number of the dtype."""
    assert numbers(of_one_number([1.0], 0.25).data, "float8_e4m3fn")[0, 0, 0] == 4.0
    spec = GQASpec(num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0)
    for layout in ("nhd", "hnd", "interleaved"):
        pool = KVPool.create(
            num_layers=1, num_pages=1, page_size=1, spec=spec, dtype="float8_e4m3fn", layout=layout, k_scale=0.02,
            v_scale=0.05,
        )  # fmt: skip
        pool = write_kv(pool, jnp.full((1, 1, 1), 0.5), jnp.full((1, 1, 1), 1.25), jnp.asarray([0]))
        got = [numbers(x, "float8_e4m3fn").ravel().tolist() for x in pool.arrays]
        assert got == ([[24.0, 24.0]] if layout == "interleaved" else [[24.0], [24.0]])


def test_blocks():
    """The largest number of a block is stored as 448; a block of zeros has scale 1; NaN stays alone."""
    latent = np.zeros((4, RANK), np.float32)
    latent[0, :3] = 3.5, -1.75, 0.0078125
    latent[1, 130], latent[1, 131] = np.nan, 448.0
    latent[2, 0], latent[2, 1] = np.inf, 1.0
    latent[3, 0] = 1e-38  # over 448 no normal number
    rope = random(1, 4, ROPE)
    pool = LatentPool.create(**SIZES, spec=SPEC, dtype="float8_e4m3fn", row_format="blocks")
    assert pool.row_bytes == RANK + RANK // 32 + 2 * ROPE == pool.row_width
    pool = write(pool, jnp.asarray(latent), jnp.asarray(rope), jnp.arange(4), 1)
    rows = np.asarray(pool.data)[PAGES, :4]
    codes, scales, tail = rows[:, :RANK], rows[:, RANK : RANK + 8].copy().view(np.float32), rows[:, RANK + 8 :]
    assert scales[0].tolist() == [0.0078125, 1.0] and scales[1].tolist() == [1.0, 1.0]
    assert numbers(codes[0, :3], "float8_e4m3fn").tolist() == [448.0, -224.0, 1.0]
    assert np.isnan(numbers(codes[1, 130:131], "float8_e4m3fn")) and numbers(codes[1, 131], "float8_e4m3fn") == 448
    assert tail.tobytes() == rope.astype(ml_dtypes.bfloat16).tobytes()
    got, got_rope = (np.asarray(x)[0] for x in read_latent(pool, TABLE, ZERO, 4, layer=1, dtype=jnp.float32))
    assert got[0, :3].tolist() == [3.5, -1.75, 0.0078125] and np.isnan(got[1, 130])
    assert np.isfinite(got[1, :130]).all() and np.isfinite(got[2:]).all() and got[2, 0] > 3e38
    assert got[3, 0] == pytest.approx(1e-38, rel=0.1)
    assert (got_rope == rope.astype(ml_dtypes.bfloat16)).all()


def block_rows(latent, rope, scale):
    """Rows of bytes in blocks: NumPy's, but for the last bit of their scales."""
    blocks = latent.reshape(len(latent), -1, 128)
    np.testing.assert_allclose(scale, np.abs(blocks).max(axis=-1) / 448, rtol=1.2e-7)
    codes = stored(blocks, scale[..., None], "float8_e4m3fn").reshape(latent.shape)
    rope = np.ascontiguousarray(rope.astype(ml_dtypes.bfloat16)).view(np.uint8)
    return np.concatenate([codes, np.ascontiguousarray(scale).view(np.uint8), rope], axis=1)


@pytest.mark.parametrize("row_format", [*FLOAT8, "blocks"])
def test_latent_rows(row_format):
    """Written, with the scale of their layer, to their slots and nowhere else; read, and moved with every byte."""
    blocks = row_format == "blocks"
    dtype = "float8_e4m3fn" if blocks else row_format
    options = {"row_format": "blocks"} if blocks else {"scale": jnp.asarray(SCALES)}
    pool = filled(LatentPool.create(**SIZES, spec=SPEC, dtype=dtype, **options))
    latent, rope, slots = random(2, 6, RANK), random(3, 6, ROPE), [14, -1, 0, SLOTS, 7, -SLOTS]
    want = np.array(pool.data).reshape(LAYERS, SLOTS, -1)
    for layer, scale in enumerate(SCALES):
        pool = write(pool, jnp.asarray(latent), jnp.asarray(rope), jnp.asarray(slots), np.int32(layer))
        good, slots_of_good = [0, 2, 4], [14, 0, 7]
        if blocks:
            scale = np.array(pool.data).reshape(want.shape)[layer, slots_of_good, RANK : RANK + 8].view(np.float32)
            rows = block_rows(latent[good], rope[good], scale)
        else:
            rows = stored(np.concatenate([latent, rope], axis=1)[good], scale, dtype)
        want[layer, slots_of_good] = rows
        assert np.asarray(pool.data).tobytes() == want.tobytes()

    for layer, scale in enumerate(SCALES):
        got = read_latent(pool, TABLE, ZERO, SLOTS, layer=layer, dtype=jnp.float32)
        read = [14, 0, 7] if blocks else np.arange(SLOTS)  # random bytes are no scales
        rows = want[layer, read]
        if blocks:
            scale = rows[:, RANK : RANK + 8].copy().view(np.float32).repeat(128, axis=1)
        else:
            np.testing.assert_array_equal(got[1][0], numbers(rows[:, RANK:].copy(), dtype) * scale)
        np.testing.assert_array_equal(got[0][0, read], numbers(rows[:, :RANK].copy(), dtype) * scale)
        rounded = read_latent(pool, TABLE, ZERO, SLOTS, layer=layer)
        for exact, x in zip(got, rounded, strict=True):
            assert x.dtype == jnp.bfloat16
            np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (x, exact.astype(jnp.bfloat16))))

    want[:, [3, 4]] = want[:, [14, 0]]
    moved = jax.jit(move_rows)(pool, jnp.asarray([14, 0, 5, SLOTS]), jnp.asarray([3, 4, -1, 6]))
    assert np.asarray(moved.data).tobytes() == want.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@every_float8
def test_keys_and_values(dtype, layout):
    """With scales of their own, of each layer and head; what lies beside short values keeps its bytes."""
    k_scale, v_scale = np.asarray([[0.02, 3.1], [0.5, 1.7]], np.float32), np.asarray([0.3, 0.05], np.float32)
    scales = {"k_scale": jnp.asarray(k_scale), "v_scale": jnp.asarray(v_scale)}
    pool = filled(KVPool.create(**KV_SIZES, dtype=dtype, layout=layout, **scales))
    k, v, count = random(4, 4, HEADS, 16), random(5, 4, HEADS, 3), PAGES * 16
    for layer in range(LAYERS):
        want = rows_of(layout, pool.arrays)
        want_k, want_v = want[0], want[1][..., :3]
        pool = write_heads(pool, jnp.asarray(k), jnp.asarray(v), jnp.asarray([62, -1, 0, count]), np.int32(layer))
        for t, slot in ((0, 62), (2, 0)):
            at = layer * PAGES + slot // 16, slot % 16
            want_k[at] = stored(k[t], k_scale[layer][:, None], dtype)
            want_v[at] = stored(v[t], v_scale[layer], dtype)
        assert [x.tobytes() for x in rows_of(layout, pool.arrays)] == [x.tobytes() for x in want]
        got_k, got_v = read_kv(pool, TABLE, ZERO, count, layer=layer, dtype=jnp.float32)
        pages = slice(layer * PAGES, (layer + 1) * PAGES)
        codes_k, codes_v = (x[pages].reshape(count, HEADS, -1) for x in (want_k, want_v))
        np.testing.assert_array_equal(got_k[0], numbers(np.ascontiguousarray(codes_k), dtype) * k_scale[layer][:, None])
        np.testing.assert_array_equal(got_v[0], numbers(np.ascontiguousarray(codes_v), dtype) * v_scale[layer])
        assert [x.dtype for x in read_kv(pool, TABLE, ZERO, 1, layer=layer)] == [jnp.bfloat16] * 2


@pytest.mark.parametrize("row_format", [*FLOAT8, "blocks"])
def test_every_code_is_read(row_format):
    """Subnormal numbers, negative zero and NaN among them."""
    dtype, blocks = ("float8_e4m3fn", True) if row_format == "blocks" else (row_format, False)
    codes = np.arange(256, dtype=np.uint8)
    row = np.concatenate([codes, np.asarray([0.02, 3.1], np.float32).view(np.uint8)]) if blocks else codes
    array = jnp.asarray(row[None, None])
    options = {"row_format": "blocks"} if blocks else {"scale": 0.02}
    pool = LatentPool.of(array, kv_lora_rank=256, rope_dim=0, dtype=dtype, **options)
    scale = np.asarray([0.02, 3.1 if blocks else 0.02], np.float32).repeat(128)
    want = numbers(codes, dtype) * scale
    assert np.isnan(want).sum() == (2 if dtype == "float8_e4m3fn" else 6)
    for out in ("float32", "bfloat16"):
        read = jax.jit(functools.partial(read_latent, num_tokens=1, dtype=out))
        got, _ = read(pool, jnp.zeros((1, 1), jnp.int32), ZERO)
        assert got.dtype == out
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (got[0, 0], want.astype(got.dtype))))


def test_layers_scanned_over():
    """A traced layer takes its own scale: the bytes are those of a pool with that scale alone."""
    latent, rope = jnp.asarray(random(6, 4, RANK)), jnp.asarray(random(7, 4, ROPE))
    pool = LatentPool.create(**SIZES, spec=SPEC, dtype="float8_e4m3fn", scale=jnp.asarray(SCALES))
    slots = jnp.arange(4)

    def step(pool, layer):
        return write_latent(pool, latent, rope, slots, layer=layer), None

    pool, _ = jax.jit(functools.partial(jax.lax.scan, step))(pool, jnp.arange(LAYERS))
    for layer, scale in enumerate(SCALES):
        alone = LatentPool.create(**SIZES, spec=SPEC, dtype="float8_e4m3fn", scale=float(scale))
        alone = write(alone, latent, rope, slots, layer)
        pages = slice(layer * PAGES, (layer + 1) * PAGES)
        assert np.asarray(pool.data[pages]).tobytes() == np.asarray(alone.data[pages]).tobytes()


def test_scales_are_leaves():
    """A number is an array: one structure, so that one program serves all; a format without scales has none."""
    number, array, none = (
        LatentPool.create(**SIZES, spec=SPEC, dtype="float8_e4m3fn", scale=s) for s in (0.02, jnp.asarray(0.02), None)
    )
    assert jax.tree.structure(number) == jax.tree.structure(array) == jax.tree.structure(none)
    assert [x.scale.dtype for x in (number, array, none)] == [jnp.float32] * 3 and none.scale == 1
    assert number.scale == array.scale == np.float32(0.02)
    plain = LatentPool.create(**SIZES, spec=SPEC)
    for pool in (
        LatentPool.create(**SIZES, spec=SPEC, scale=jnp.asarray([7.0])),
        LatentPool.create(**SIZES, spec=SPEC, scale=-1.0),
    ):
        assert jax.tree.structure(pool) == jax.tree.structure(plain) and len(jax.tree.leaves(pool)) == 1
    kv = KVPool.create(**SIZES, spec=KV_SPEC, k_scale=0.5, v_scale=0.0)
    assert jax.tree.structure(kv) == jax.tree.structure(KVPool.create(**SIZES, spec=KV_SPEC))


def test_a_pool_has_scales_of_its_own():
    """Donated pools do not take each other's scales, or the caller's, with them."""
    scale = jnp.asarray(SCALES)
    donated = jax.jit(write_kv, donate_argnums=0)
    for _ in range(2):
        pool = KVPool.create(**SIZES, spec=KV_SPEC, dtype="float8_e5m2", k_scale=scale, v_scale=scale)
        donated(pool, jnp.zeros((1, HEADS, 5)), jnp.zeros((1, HEADS, 3)), ZERO)
    assert scale.tolist() == SCALES.tolist()


LARGE = 2**16


def large_pools():
    yield LatentPool.create(num_layers=1, num_pages=LARGE, page_size=PAGE, spec=SPEC, dtype=FLOAT8[0], scale=0.02)
    yield LatentPool.create(
        num_layers=1, num_pages=LARGE, page_size=PAGE, spec=SPEC, dtype=FLOAT8[0], row_format="blocks"
    )
    for layout in LAYOUTS:
        yield KVPool.create(**{**KV_SIZES, "num_layers": 1, "num_pages": LARGE // 4}, dtype=FLOAT8[1], layout=layout)


@pytest.mark.parametrize("number", range(2 + len(LAYOUTS)))
def test_c22_written_in_place(number):
    """Of a large pool; scattering into an array of float8 would take twice its bytes of scratch."""
    pool = jax.eval_shape(lambda: list(large_pools())[number])
    of_heads = isinstance(pool, KVPool)
    shapes = [(4, HEADS, 16), (4, HEADS, 3)] if of_heads else [(4, RANK), (4, ROPE)]
    rows = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    slots = jax.ShapeDtypeStruct((4,), jnp.int32)
    call = write_kv if of_heads else write_latent
    for program, arguments in ((call, (*rows, slots)), (move_rows, (slots, slots))):
        compiled = jax.jit(program, donate_argnums=0, keep_unused=True).lower(pool, *arguments).compile()
        memory = compiled.memory_analysis()
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))
        assert memory.alias_size_in_bytes == held and memory.temp_size_in_bytes < 2**14


@pytest.mark.parametrize("row_format", ["plain", "blocks"])
def test_rows_of_other_systems(row_format):
    """Padded, the rope part further on: bytes beside the two parts stay."""
    first = RANK + (RANK // 32 if row_format == "blocks" else 0)
    width = first + 8 + 2 * ROPE + 4
    array = jnp.full((PAGES, PAGE, width), 0x7F, jnp.uint8)
    options = {"row_format": row_format, **({"scale": 0.25} if row_format == "plain" else {})}
    pool = LatentPool.of(array, kv_lora_rank=RANK, rope_dim=ROPE, rope_offset=first + 8, dtype=FLOAT8[0], **options)
    assert pool.data is array and pool.latent_dim == RANK + ROPE and pool.page_size == PAGE
    latent, rope = jnp.ones((1, RANK)), jnp.full((1, ROPE), 0.5)
    got = np.asarray(write(pool, latent, rope, jnp.asarray([6]), 0).data).reshape(SLOTS, width)
    rope_width = pool.format.widths(RANK, ROPE)[1]
    beside = np.r_[first : first + 8, first + 8 + rope_width : width]
    assert (got[6, beside] == 0x7F).all() and (np.delete(got, 6, axis=0) == 0x7F).all()
    assert (got[6, :RANK] != 0x7F).all() or row_format == "blocks"
    pool = dataclasses.replace(pool, data=jnp.asarray(got.reshape(array.shape)))
    read = read_latent(pool, jnp.asarray([[1]]), jnp.asarray([2]), 1)
    assert (read[0] == 1).all() and (read[1] == 0.5).all()
    assert LatentPool.of(array, kv_lora_rank=RANK, dtype=FLOAT8[0]).rope_dim == width - RANK
    if row_format == "blocks":
        narrow = LatentPool.of(array[..., : first + 2 * ROPE], kv_lora_rank=RANK, dtype=FLOAT8[0], row_format="blocks")
        assert (narrow.rope_dim, narrow.rope_offset) == (ROPE, first)


def create(**changes):
    return LatentPool.create(**{**SIZES, "spec": SPEC, "dtype": "float8_e4m3fn", **changes})


def create_kv(**changes):
    return KVPool.create(**{**SIZES, "spec": KV_SPEC, "dtype": "float8_e4m3fn", **changes})


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: create(scale=0.0), "scale=0.0 must be a finite number above 0"),
        (lambda: create(scale=jnp.asarray([1.0, np.nan])), "scale=nan must be a finite number above 0"),
        (lambda: create(scale=np.asarray([1.0, -2.0])), "scale=-2.0 must be a finite number above 0"),
        (lambda: create(scale=1e-40), "scale=1e-40 must be a finite number above 0"),
        (lambda: create(scale=True), "scale=True must be a finite"),
        (lambda: create(scale=jnp.ones(3)), r"scale has shape \(3,\), must be \[\] or \[L\] = \(2,\)"),
        (lambda: create(scale=jnp.ones((2, 1))), r"scale has shape \(2, 1\), must be \[\] or \[L\]"),
        (lambda: create(scale=jnp.ones(2, int)), "scale has dtype int32, must be a floating"),
        (lambda: create(scale=[1.0, 1.0]), "scale is a list, must be an array"),
        (lambda: create(row_format="block"), "row_format='block' must be plain or blocks"),
        (lambda: create(row_format="blocks", scale=1.0), "scale= with row_format='blocks': must be None"),
        (lambda: create(row_format="blocks", dtype="float8_e5m2"), "row_format='blocks' with dtype=float8_e5m2"),
        (lambda: create(row_format="blocks", dtype="bfloat16"), "'blocks' with dtype=bfloat16: must be float8_e4m3fn"),
        (
            lambda: create(row_format="blocks", spec=dataclasses.replace(SPEC, kv_lora_rank=192)),
            "row_format='blocks' with kv_lora_rank=192: must be a multiple of 128",
        ),
        (lambda: create(dtype="float8_e4m3"), "dtype=float8_e4m3 must be one of .* float8_e4m3fn, float8_e5m2"),
        (lambda: create_kv(k_scale=jnp.ones((2, 3))), r"k_scale has shape .*, must be .* or \[L, K\] = \(2, 2\)"),
        (lambda: create_kv(v_scale=np.inf), "v_scale=inf must be a finite number above 0"),
        (lambda: dataclasses.replace(create(), data=jnp.zeros((8, 4, 262))).check(), "float32 must be uint8: format"),
        (lambda: dataclasses.replace(create(), scale=None).check(), "pool.scale is a NoneType, must be an array"),
        (lambda: dataclasses.replace(create(), scale=jnp.ones(3)).check(), r"pool.scale has shape \(3,\), must be"),
        (lambda: dataclasses.replace(create(), scale=jnp.ones((), "bfloat16")).check(), "scale has dtype bfloat16"),
        (lambda: dataclasses.replace(create_kv(), v_scale=jnp.ones(3)).check(), r"pool.v_scale has shape \(3,\)"),
        (
            lambda: dataclasses.replace(create_kv(), format=create(row_format="blocks").format).check(),
            "pool.format=float8_e4m3fn:blocks is of latent rows",
        ),
        (lambda: LatentPool.of(jnp.zeros((1, 4, 8), jnp.uint8), kv_lora_rank=5), "uint8 must be one of .* a format"),
        (
            lambda: LatentPool.of(jnp.zeros((1, 4, 8), jnp.uint8), kv_lora_rank=5, row_format="blocks"),
            "row_format='blocks' with dtype=uint8|dtype=uint8 must be one of",
        ),
        (lambda: KVPool.of(jnp.zeros((1, 4, 2, 2, 8)), dtype="float8_e5m2"), "pool.k.dtype=float32 must be uint8"),
        (lambda: read_latent(create(), TABLE, ZERO, 1, dtype="float8_e5m2"), "dtype=float8_e5m2 must be a floating"),
        (lambda: read_kv(create_kv(), TABLE, ZERO, 1, dtype="int8"), "dtype=int8 must be a floating dtype"),
    ],
)  # fmt: skip
def test_errors(unchecked, call, message):
    with pytest.raises(ValueError, match=message):
        call()
