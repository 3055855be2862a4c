"""The contract of ragged paged attention, against float64."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from integrations import ragged
from mla_attn.dispatch import Device, compiling_for
from mla_attn.integrations.ragged_layout import gqa_supports, mla_supports
from mla_attn.integrations.ragged_paged import ragged_paged_gqa, ragged_paged_mla

FUNCTIONS = {"mla": ragged_paged_mla, "gqa": ragged_paged_gqa}
ARRAYS = {"kv_lens", "pages", "cu_q_lens", "distribution", "cu_kv_lens", "sinks", "tree_mask"}
CALLS = {
    kind: jax.jit(
        fn,
        donate_argnames="cache",
        static_argnames=[
            p.name
            for p in inspect.signature(fn).parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.name not in ARRAYS
        ],
    )
    for kind, fn in FUNCTIONS.items()
}
SIZES = {  # page size and pack; pages of one token may have several rows in MLA's caches
    "1": (1, 1, jnp.float32),
    "2": (2, 2, jnp.bfloat16),
    "16": (16, 1, jnp.float32),
    "64": (64, 2, jnp.bfloat16),
}


def decode(page):
    """One row each, padding in the middle and at the end, which counts in ``cu_q_lens``."""
    return [(1, 1), (page + 1, 1), (0, 1), (3 * page, 1), (page, 1), (0, 1), (0, 1)]


def mixed(page):
    """Prompts with and without a prefix beside decoding requests; requests without rows."""
    return [(page, page), (2 * page + 1, 1), (7, 0), (page + 3, 3), (0, 0), (70, 69), (2 * page, page)]


def call(batch, kind, **options):
    arrays = {**batch.arrays}
    out, cache = CALLS[kind](*batch.queries, *batch.new, jnp.asarray(batch.cache), **arrays, **options)
    return np.asarray(out), np.asarray(cache)


@pytest.mark.parametrize(("requests", "form"), [(decode, "packed"), (mixed, "flat")], ids=["decode", "mixed"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_against_float64(kind, size, requests, form):
    page_size, pack, dtype = SIZES[size]
    batch = ragged.make(
        kind, requests(page_size), page_size=page_size, pack=pack, dtype=dtype, packed=form == "packed",
        unused=2 * (form == "flat"),
    )  # fmt: skip
    out, cache = call(batch, kind, scale=0.3)
    ragged.check(out, *batch.expected(scale=0.3), dtype)
    ragged.check_cache(cache, batch)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_options(kind):
    """Windows, caps and scales; rows of DeepSeek's width; sinks."""
    options = {"kind": kind, "requests": mixed(4), "page_size": 4, "pack": 2, "dtype": jnp.bfloat16}
    batch = ragged.make(**options, widths=(512, 64))
    sinks = {"sinks": np.linspace(-1, 2, ragged.HEADS, dtype=np.float32)} if kind == "gqa" else {}
    out, _ = call(
        batch, kind, scale=0.1, window=9, soft_cap=2.0, q_scale=0.5, k_scale=2.5, v_scale=3.0, table_width=20, **sinks
    )
    expected, v_max = batch.expected(scale=0.125, window=9, soft_cap=2.0, **sinks)
    ragged.check(out, 3 * expected, 3 * v_max, jnp.bfloat16)


def test_pages_of_one_token_in_packs():
    """A cache of pages of 1 in bfloat16 has 2 rows a page, of which the first is used."""
    sizes = {"page_size": 1, "page_rows": 2, "pack": 2, "dtype": jnp.bfloat16}
    batch = ragged.make("mla", mixed(3), **sizes, packed=True)
    out, cache = call(batch, "mla", scale=0.3, page_size=1)
    ragged.check(out, *batch.expected(scale=0.3), jnp.bfloat16)
    ragged.check_cache(cache, batch)


def test_tree_mask():
    """Drafts of a tree see their ancestors alone."""
    parents = [None, 0, 0, 1, 2]
    batch = ragged.make("gqa", [(9, 5), (0, 5), (14, 5)], page_size=4, pack=1, dtype=jnp.float32, extra_rows=0)
    ancestors = np.eye(5, dtype=bool)
    for node, parent in enumerate(parents):
        if parent is not None:
            ancestors[node] |= ancestors[parent]
    lens = batch.arrays["kv_lens"] - 5

    def mask(b, at, p):
        return p < lens[b] or ancestors[at - lens[b], p - lens[b]]

    out, _ = call(batch, "gqa", scale=0.3, max_q_len=5, tree_mask=np.stack([ancestors] * 3))
    ragged.check(out, *batch.expected(scale=0.3, mask=mask), jnp.float32)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_float8(kind):
    """Rows are cast as they are given; the scales are applied to scores and results."""
    batch = ragged.make(kind, mixed(4), page_size=4, pack=4, dtype=jnp.float8_e4m3fn)
    batch.queries = tuple(q.astype(jnp.bfloat16) for q in batch.queries)
    batch.new = tuple(x.astype(jnp.bfloat16) for x in batch.new)
    out, cache = call(batch, kind, scale=0.3, k_scale=0.5, v_scale=2.0)
    expected, v_max = batch.expected(scale=0.15)
    ragged.check(out, 2 * expected, 2 * v_max, jnp.bfloat16)
    ragged.check_cache(cache, batch)


def test_ranks_of_a_mesh():
    """Each rank of a data axis has its own requests, pages and padding at its end."""
    ranks = [
        ragged.make("mla", requests, page_size=4, pack=2, dtype=jnp.float32, packed=True, extra_rows=extra, seed=seed)
        for seed, (requests, extra) in enumerate([([(9, 1), (3, 3), (0, 0)], 2), ([(8, 2), (0, 1), (6, 3)], 0)])
    ]
    pages = max(len(rank.cache) for rank in ranks)
    entries = max(len(rank.arrays["pages"]) for rank in ranks)
    for rank in ranks:
        for name in ("cache", "stored"):
            array = getattr(rank, name)
            padding = np.full((pages - len(array), *array.shape[1:]), np.nan, array.dtype)
            setattr(rank, name, np.concatenate([array, padding]))
        rank.arrays["pages"] = np.resize(rank.arrays["pages"], entries)
    names = list(ranks[0].arrays)

    def local(cache, *args):
        rows, arrays = args[:4], dict(zip(names, args[4:], strict=True))
        return ragged_paged_mla(*rows, cache, **arrays, scale=0.3)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    args = [(r.cache, *r.queries, *r.new, *(r.arrays[n] for n in names)) for r in ranks]
    spec = jax.P("data")
    sharded = [jax.device_put(np.concatenate(x), jax.NamedSharding(mesh, spec)) for x in zip(*args, strict=True)]
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    with jax.set_mesh(mesh):
        out, cache = program(*sharded)
    for rank, one, stored in zip(ranks, np.split(np.asarray(out), 2), np.split(np.asarray(cache), 2), strict=True):
        ragged.check(one, *rank.expected(scale=0.3), jnp.float32)
        ragged.check_cache(stored, rank)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the CPU's XLA of before copies what it scatters into")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_the_cache_is_not_copied(kind, dtype):
    """Nor do few long requests take memory for as many rows of every other."""
    pages, rows, requests, pack = 4096, 512, 16, 4 // jnp.dtype(dtype).itemsize
    shape = (pages, 16 // pack, pack, 640) if kind == "mla" else (pages, 16, 4 // pack, pack, 128)
    cache = jax.ShapeDtypeStruct(shape, dtype)
    widths = [(4, 512), (4, 64), (512,), (64,)] if kind == "mla" else [(4, 64), (2, 64), (2, 64)]
    arrays = [jax.ShapeDtypeStruct((rows, *w), jnp.bfloat16) for w in widths]
    ints = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (requests, requests * 256, requests + 1, 3)]
    compiled = CALLS[kind].lower(*arrays, cache, *ints, scale=0.1).compile()
    memory, size = compiled.memory_analysis(), cache.size * cache.dtype.itemsize
    assert memory.alias_size_in_bytes == size
    state = 2 * 2 * rows * 4 * (512 if kind == "mla" else 64) * 4  # parts of requests, twice
    assert memory.temp_size_in_bytes < state + 16 * 2**20 < size


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="kernels refuse an older jax")
@pytest.mark.parametrize(("kind", "shape", "page_size"), [
    ("mla", (512, 32, 2, 640), 64),
    ("mla", (4096, 1, 2, 640), 1),
    ("gqa", (512, 16, 4, 2, 128), None),
])  # fmt: skip
def test_kernels_take_the_call(kind, shape, page_size):
    """Lowered for a Hopper GPU."""
    widths = [(16, 512), (16, 64), (512,), (64,)] if kind == "mla" else [(16, 64), (4, 64), (4, 64)]
    arrays = [jax.ShapeDtypeStruct((64, *width), jnp.bfloat16) for width in widths]
    ints = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (4, 4 * 64, 5, 3)]
    options = {"scale": 0.1, "implementation": "mosaic_gpu"} | ({} if page_size is None else {"page_size": page_size})
    with compiling_for(Device("gpu", "9.0", 132)):
        traced = CALLS[kind].trace(*arrays, jax.ShapeDtypeStruct(shape, jnp.bfloat16), *ints, **options)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_supports():
    def refused(supports, shape, dtype=jnp.bfloat16, **dims):
        return supports(jax.ShapeDtypeStruct(shape, dtype), **dims)

    mla = functools.partial(refused, mla_supports, kv_lora_rank=512, rope_dim=64)
    assert mla((9, 8, 2, 640)) is None and mla((9, 1, 2, 640), page_size=1) is None
    assert "transposed" in mla((9, 640, 16))
    assert "must be [pages, P / pack, pack, 640]" in mla((9, 8, 2, 576))
    assert mla((9, 2, 2, 640), page_size=3) == "page_size=3 in pages of 4 rows: must be 4, or 1"
    assert mla((9, 4, 4, 640), jnp.int8).startswith("a cache in int8: must be one of bfloat16")
    gqa = functools.partial(refused, gqa_supports, num_kv_heads=2, head_dim=64)
    assert gqa((9, 8, 2, 2, 128)) is None and gqa((9, 8, 1, 4, 64), jnp.float8_e5m2) is None
    assert "without padding" in gqa((9, 8, 1, 2, 128))
    assert gqa((9, 8, 2, 2, 32)) == "rows of 32 for heads of 64: must be as wide at least"
    assert "[pages, P, 2 K / pack, pack, width]" in gqa((9, 8, 4, 128))
    assert gqa((9, 8, 2, 2, 128), jnp.int8).startswith("a cache in int8")


def test_errors(unchecked):
    batch = ragged.make("mla", [(5, 1), (3, 2)], page_size=4, pack=1, dtype=jnp.float32)
    rows, cache, arrays = (*batch.queries, *batch.new), jnp.asarray(batch.cache), batch.arrays

    def error(kind=ValueError, cache=cache, **changed):
        options = {"scale": 1.0, **arrays, **changed}
        with pytest.raises(kind) as caught:
            ragged_paged_mla(*map(jnp.asarray, rows), cache, **options)
        return str(caught.value)

    assert "transposed" in error(NotImplementedError, cache=jnp.zeros((3, 256, 4)))
    assert "scale=None" in error(scale=None)
    assert "cu_q_lens has shape (4,), must be (3,)" in error(cu_q_lens=np.zeros(4, np.int32))
    assert "pages has shape (3,), must be [B * W] with B = 2" in error(pages=np.zeros(3, np.int32))
    assert "cu_kv_lens has shape (2,), must be (3,)" in error(cu_kv_lens=np.zeros(2, np.int32))
    assert "distribution has shape (2,), must be (3,)" in error(distribution=np.zeros(2, np.int32))
    assert "kv_lens has shape (0,)" in error(kv_lens=np.zeros(0, np.int32))
    assert "max_q_len=0" in error(max_q_len=0)
