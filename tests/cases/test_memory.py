"""C07, page ids whose elements pass 2 ** 31 and 2 ** 32, and C22, calls that must not grow memory."""

import dataclasses
import functools
import mmap
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.paged import (
    RANK,
    ROPE,
    WIDTH,
    assert_same_bits,
    attend,
    every_implementation,
    ints,
    make_pool,
    make_spec,
    random_rows,
)  # fmt: skip
from mla_attn import metadata as build
from mla_attn.cache import LatentPool, move_rows, write_latent
from mla_attn.ops import merge_states, mla_attention
from mla_attn.specs import MLASpec

PAGES, PAGE = 116_600, 64
PLACES = ((0, 1), (58_254, 58_255), (116_508, 116_599))
LENGTH = 128
INT32_MAX = np.iinfo(np.int32).max


def abstract_pool(**strides):
    """The pool of the case, of which only the shape exists."""
    data = jax.ShapeDtypeStruct((PAGES, PAGE, WIDTH), jnp.bfloat16)
    return dataclasses.replace(LatentPool(data, 1, PAGES, RANK, 1, PAGES), **strides)


def test_c07_addresses():
    """Ids are exact as far as they are computed here; elements are addressed by XLA, from ids and offsets."""
    pool = abstract_pool()
    for page, limit in ((PLACES[1][0], 2**31), (PLACES[2][0], 2**32)):  # the page that crosses it
        assert page * PAGE * WIDTH < limit < (page + 1) * PAGE * WIDTH
    slots = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    for place in PLACES:
        pages, offsets = pool.placement.locate_table_slots(ints([place]), slots, 0)
        assert pages[0].tolist() == np.repeat(place, PAGE).tolist()
        assert offsets[0].tolist() == [*range(PAGE)] * 2
        metadata = build.for_decode(ints([place]), ints([LENGTH]), page_size=PAGE)
        assert metadata.slots.tolist() == [place[1] * PAGE + PAGE - 1]
        # Layers: the same page of the last of four layers that share the array.
        shared = dataclasses.replace(pool, num_layers=4, num_pages=PAGES // 4, layer_stride=PAGES // 4)
        assert (
            shared.placement.physical_pages(ints(place[0] % (PAGES // 4)), 3).tolist()
            == place[0] % (PAGES // 4) + 87_450
        )


def programs():
    """Everything that reads or writes a pool, compiled for the case's, without allocating it."""
    metadata = build.for_target_verify(ints([PLACES[2]]), ints([LENGTH - 2]), num_tokens=2, page_size=PAGE)
    spec, q = make_spec(2), jax.ShapeDtypeStruct((2, 2, WIDTH), jnp.bfloat16)

    def read(pool, q, implementation=None):
        return mla_attention(q[..., :RANK], q[..., RANK:], pool, metadata, spec, implementation=implementation)

    def write(pool, q):
        return write_latent(pool, q[:, 0, :RANK], q[:, 0, RANK:], metadata.slots)

    def move(pool, q):
        return move_rows(pool, metadata.slots, metadata.slots - 1)

    return {
        "xla": (read, ()), "reference": (functools.partial(read, implementation="reference"), ()),
        "write": (write, (0,)), "move": (move, (0,)),
    }, q  # fmt: skip


@pytest.mark.parametrize("name", ["xla", "reference", "write", "move"])
def test_c07_no_index_of_elements(name):
    """The compiled program never views the pool as something whose indices would need more than 32 bits."""
    calls, q = programs()
    call, donated = calls[name]
    compiled = jax.jit(call, donate_argnums=donated).lower(abstract_pool(), q).compile()
    sizes = [[int(n) for n in shape.split(",")] for shape in set(re.findall(r"\w+\[([\d,]+)\]", compiled.as_text()))]
    whole = [shape for shape in sizes if np.prod(shape) >= PAGES * PAGE * WIDTH]
    assert whole and all(max(shape) <= INT32_MAX for shape in sizes)
    assert compiled.memory_analysis().temp_size_in_bytes < 2**22


def sparse_pool():
    """The case's pool in memory that takes up room only where it is touched; XLA on a CPU reads it in place."""
    shape = (PAGES, PAGE, WIDTH)
    no_reserve = 0x4000  # MAP_NORESERVE, which Python does not name: the kernel need not have 8 GiB to spare
    memory = mmap.mmap(-1, 2 * int(np.prod(shape)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    data = np.frombuffer(memory, jnp.bfloat16).reshape(shape)
    for place in PLACES:
        data[list(place)] = np.asarray(random_rows(0, 2, PAGE, dtype="bfloat16"))
    array = jax.device_put(data)
    if array.unsafe_buffer_pointer() != data.ctypes.data:
        pytest.skip("this JAX copies NumPy arrays, 8 GiB of them")
    return LatentPool(array, 1, PAGES, RANK, 1, PAGES)


@every_implementation
def test_c07_reading(implementation):
    """A request of 128 keys at page ids around 0, 2 ** 31 and 2 ** 32 elements: equal bits."""
    if jax.default_backend() != "cpu":
        pytest.skip("sparse memory is the host's; test_c07_on_a_gpu has the whole pool")
    check_reading(implementation, sparse_pool())


def check_reading(implementation, pool):
    q, spec = random_rows(1, 1, 16, dtype="bfloat16"), make_spec(16)
    rows = np.asarray(random_rows(0, 2, PAGE)).reshape(LENGTH, WIDTH)
    small = make_pool([rows], [[0, 1]], page_size=PAGE, num_pages=2)
    want = None
    for place in PLACES:
        metadata = build.for_decode(ints([place]), ints([LENGTH]), page_size=PAGE)
        got = attend(implementation, q, pool, metadata, spec)
        want = got if want is None else want
        assert_same_bits(got, want)
    metadata = build.for_decode(ints([PLACES[0]]), ints([LENGTH]), page_size=PAGE)
    out, _ = attend(implementation, q, small, metadata, spec)
    np.testing.assert_allclose(want[0].astype(float), out.astype(float), rtol=0, atol=2**-6)
    assert want[0].any()


@pytest.mark.gpu
@every_implementation
def test_c07_on_a_gpu(implementation):
    """The whole case in 8 GiB: rows written at each place land there and nowhere else, and are read from there."""
    rows = random_rows(0, LENGTH, dtype="bfloat16")
    pool = LatentPool(jnp.zeros((PAGES, PAGE, WIDTH), jnp.bfloat16), 1, PAGES, RANK, 1, PAGES)
    write = jax.jit(write_latent, donate_argnums=0)
    for place in PLACES:
        slots = ints([page * PAGE + i for page in place for i in range(PAGE)])
        pool = write(pool, rows[:, :RANK], rows[:, RANK:], slots)
    touched = np.flatnonzero(np.asarray(jax.jit(lambda data: (data != 0).any(axis=(1, 2)))(pool.data)))
    assert touched.tolist() == sorted(page for place in PLACES for page in place)
    for place in PLACES:
        assert_same_bits([pool.data[jnp.asarray(place)].reshape(LENGTH, WIDTH)], [rows])
    check_reading(implementation, pool)
    # Rows moved from the last page to the first one, as of a draft tree.
    pool = jax.jit(move_rows, donate_argnums=0)(pool, ints([PLACES[2][1] * PAGE + 63]), ints([2 * PAGE]))
    assert_same_bits([pool.data[2, 0]], [rows[-1]])


GIB = 2**30


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_c22_write(dtype):
    """Four tokens into 1 GiB, donated: the result is the argument, and next to nothing is used besides."""
    row_bytes = PAGE * WIDTH * jnp.dtype(dtype).itemsize
    pages = -(-GIB // row_bytes)
    spec = MLASpec(num_heads=1, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, scale=1.0)
    create = functools.partial(
        LatentPool.create, num_layers=1, num_pages=pages, page_size=PAGE, spec=spec, dtype=jnp.dtype(dtype)
    )
    rows = [jax.ShapeDtypeStruct((4, n), jnp.bfloat16) for n in (RANK, ROPE)]
    slots = jax.ShapeDtypeStruct((4,), jnp.int32)
    compiled = jax.jit(write_latent, donate_argnums=0).lower(jax.eval_shape(create), *rows, slots).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pages * row_bytes >= GIB
    assert memory.temp_size_in_bytes < GIB // 1000

    pool = dataclasses.replace(create(num_pages=2), data=jnp.zeros((2, PAGE, WIDTH), dtype))
    data = pool.data
    rows = random_rows(2, 4)
    pool = jax.jit(write_latent, donate_argnums=0)(pool, rows[:, :RANK], rows[:, RANK:], ints([3, 4, 5, 64]))
    assert data.is_deleted() and not pool.data.is_deleted()


def test_c22_merge():
    """Two shards of 16384 x 96 x 512 float32: no third copy of 3 GiB besides the result; in place when donated."""
    out, lse = (jax.ShapeDtypeStruct((16384, 96, *tail), jnp.float32) for tail in ((512,), ()))
    bytes_of_one = 4 * 16384 * 96 * 512
    assert bytes_of_one == 3 * GIB
    for donated in ((), (0,)):
        merge = jax.jit(lambda a, b, x, y: merge_states([a, b], [x, y])[0], donate_argnums=donated)
        memory = merge.lower(out, out, lse, lse).compile().memory_analysis()
        assert memory.temp_size_in_bytes < bytes_of_one // 50
        assert memory.alias_size_in_bytes == bytes_of_one * len(donated)
