"""What XLA says of the memory that the library's programs take, on any backend; nothing is allocated for it.

The arguments of each program are a pure function of sizes, so that ``jax.eval_shape`` describes a pool of any size.
"""

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from mla_attn import metadata as md
from mla_attn import steps
from mla_attn.cache import KVPool, LatentPool, move_rows, write_kv, write_latent
from mla_attn.cache.formats import format_of
from mla_attn.ops import mla_attention, plan_mla
from mla_attn.passes import DraftPasses, Passes, Shapes
from mla_attn.specs import GQASpec, MLASpec
from mla_attn.speculative import DraftTree

LAYERS, BATCH, ROWS = 3, 4, 4  # ROWS: query tokens of each request in verify, draft-extend, extend and prefill
NOPE, V_DIM = 128, 128
SPEC = MLASpec(num_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, scale=192**-0.5)
# Keys and values take as many bytes as a latent row.
GQA = GQASpec(num_heads=12, num_kv_heads=3, head_dim=96, scale=96**-0.5, window=200)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What scratch memory must not depend on, and what it may."""

    num_pages: int
    table_width: int
    page_size: int = 64
    dtype: str = "bfloat16"
    row_format: str | None = None  # of a cache in float8_e4m3fn

    def with_page_size(self, page_size: int) -> "Sizes":
        """The same tokens in smaller or larger pages."""
        ratio = self.page_size / page_size
        pages, width = int(self.num_pages * ratio), int(self.table_width * ratio)
        return dataclasses.replace(self, num_pages=pages, table_width=width, page_size=page_size)

    @property
    def layer_bytes(self) -> int:
        row_format = format_of(jnp.dtype(self.pool_dtype), self.row_format or "plain")
        return self.num_pages * self.page_size * row_format.row_bytes(SPEC.kv_lora_rank, SPEC.qk_rope_head_dim)

    @property
    def pool_dtype(self) -> str:
        return self.dtype if self.row_format is None else "float8_e4m3fn"


# A GPU works on many keys at once, up to a limit that shorter tables do not reach: both hold 128 Ki tokens or more. The
# large pool is what a server might have, 14.5 GB in bfloat16: some of its elements lie past 2**31.
SMALL = Sizes(num_pages=64, table_width=2048)
LARGE = Sizes(num_pages=65536, table_width=8192)


_BOTH = ("decode", "extend", "scan_layers")  # what others are made of


def sizes_of(name: str, dtype: str) -> list[Sizes]:
    """The sizes to compile a program for, the large one last."""
    return [dataclasses.replace(s, dtype=dtype) for s in ((SMALL, LARGE) if name in _BOTH else (LARGE,))]


# Arguments: the pool, a layer, and what the program takes besides.


def _metadata(mode: str, sizes: Sizes) -> md.AttentionMetadata:
    pages = jnp.arange(BATCH * sizes.table_width, dtype=jnp.int32) % sizes.num_pages
    table, page_size = pages.reshape(sizes.table_width, BATCH).T, sizes.page_size
    new = jnp.full(BATCH, ROWS, jnp.int32)
    prefix = jnp.arange(1, BATCH + 1, dtype=jnp.int32) * 5
    if mode == "decode":
        return md.for_decode(table, prefix, page_size=page_size)
    if mode == "draft_decode":
        return md.for_draft_decode(table, prefix, 1, page_size=page_size)
    if mode == "target_verify":
        return md.for_target_verify(table, prefix, num_tokens=ROWS, page_size=page_size)
    build = md.for_draft_extend if mode == "draft_extend" else md.for_extend
    return build(table, new if mode == "prefill" else prefix + new, new, max_q_len=ROWS, page_size=page_size)


def _absorbed(mode: str, sizes: Sizes) -> tuple:
    """Metadata, queries and new rows of a step over the paged cache."""
    m = _metadata(mode, sizes)
    rows, heads, latent, rope = m.slots.shape[0], SPEC.num_heads, SPEC.kv_lora_rank, SPEC.qk_rope_head_dim
    shapes = (rows, heads, latent), (rows, heads, rope), (rows, latent), (rows, rope)
    return m, *(jnp.ones(shape, sizes.dtype) for shape in shapes)


def _expanded(mode: str, sizes: Sizes) -> tuple:
    """The same of a step over fresh keys and values; for ``extend`` with both halves of ``kv_b_proj``."""
    m, _, _, latent, rope = _absorbed(mode, sizes)
    dims = NOPE + SPEC.qk_rope_head_dim, NOPE + SPEC.qk_rope_head_dim, V_DIM
    fresh = (jnp.ones((m.slots.shape[0], SPEC.num_heads, dim), sizes.dtype) for dim in dims)
    shapes = [(SPEC.num_heads, dim, SPEC.kv_lora_rank) for dim in (NOPE, V_DIM) if mode == "extend"]
    return m, *fresh, latent, rope, *(jnp.ones(shape, sizes.dtype) for shape in shapes)


def _grouped(mode: str, sizes: Sizes) -> tuple:
    """Metadata, queries, keys and values of a step of grouped-query attention."""
    m = _metadata(mode, sizes)
    heads = GQA.num_heads, GQA.num_kv_heads, GQA.num_kv_heads
    return m, *(jnp.ones((m.slots.shape[0], n, GQA.head_dim), sizes.dtype) for n in heads)


def _tree(sizes: Sizes) -> tuple:
    """A step's arguments with the mask of a draft tree, here a chain."""
    return *_absorbed("target_verify", sizes), jnp.tri(ROWS, dtype=bool)[None].repeat(BATCH, axis=0)


def _moves(sizes: Sizes) -> tuple:
    src = jnp.arange(BATCH * ROWS, dtype=jnp.int32)
    return src, src + BATCH * ROWS


# Programs: what is jitted, and the arguments as it takes them.


def _step(mode: str, **options):
    """A step as it is, so that it is the one to donate."""
    return lambda pool, layer, m, *arrays: (
        getattr(steps, mode),
        (*arrays, pool, m),
        {"spec": SPEC, "layer": layer, **options},
    )


def _gqa_step(mode: str):
    return lambda pool, layer, m, *arrays: (
        getattr(steps, f"gqa_{mode}"),
        (*arrays, pool, m),
        {"spec": GQA, "layer": layer, "sinks": jnp.zeros(GQA.num_heads)},
    )


def _tree_step(pool, layer, m, *arrays):
    *arrays, tree_mask = arrays
    return steps.target_verify, (*arrays, pool, m), {"spec": SPEC, "layer": layer, "tree_mask": tree_mask}


def _jitted(function: Callable):
    jitted = jax.jit(function, donate_argnums=0)
    return lambda *arguments: (jitted, arguments, {})


def _write(pool, layer, m, q_latent, q_rope, latent, rope):
    return write_latent(pool, latent, rope, m.slots, layer=layer)


def _write_kv(pool, layer, m, q, k, v):
    return write_kv(pool, k, v, m.slots, layer=layer)


def _move(pool, layer, src, dst):
    return move_rows(pool, src, dst)


def _scan_layers(pool, _, m, q_latent, q_rope, latent, rope, *, implementation=None):
    """Layers as a model would scan them: each takes what the one before gave."""
    options = {"implementation": implementation}
    m = plan_mla(m, pool, SPEC, out_dtype=q_latent.dtype, **options)

    def body(carry, layer):
        q_latent, pool = carry
        return steps.decode(q_latent, q_rope, latent, rope, pool, m, SPEC, layer=layer, **options), None

    return lax.scan(body, (q_latent, pool), jnp.arange(LAYERS, dtype=jnp.int32))[0]


def _loop_layers(pool, _, m, q_latent, q_rope, latent, rope):
    def body(layer, carry):
        q_latent, pool = carry
        pool = write_latent(pool, latent, rope, m.slots, layer=layer)
        return mla_attention(q_latent, q_rope, pool, m, SPEC, layer=layer), pool

    return lax.fori_loop(0, LAYERS, body, (q_latent, pool))


PROGRAMS: dict[str, tuple[Callable, Callable[[Sizes], tuple]]] = {
    **{
        mode: (_step(mode), functools.partial(_absorbed, mode))
        for mode in ("decode", "target_verify", "draft_extend", "draft_decode")
    },
    "tree_verify": (_tree_step, _tree),
    "prefill": (_step("prefill"), functools.partial(_expanded, "prefill")),
    "extend": (_step("extend", chunk_size=256), functools.partial(_expanded, "extend")),
    **{
        f"gqa_{mode}": (_gqa_step(mode), functools.partial(_grouped, mode))
        for mode in ("decode", "target_verify", "prefill")
    },
    "shuffled_decode": (_gqa_step("decode"), functools.partial(_grouped, "decode")),
    "shuffled_moves": (_jitted(_move), _moves),
    "write_kv": (_jitted(_write_kv), functools.partial(_grouped, "target_verify")),
    "write_latent": (_jitted(_write), functools.partial(_absorbed, "target_verify")),
    "move_rows": (_jitted(_move), _moves),
    "scan_layers": (_jitted(_scan_layers), functools.partial(_absorbed, "decode")),
    "loop_layers": (_jitted(_loop_layers), functools.partial(_absorbed, "target_verify")),
}

SHUFFLED_PROGRAMS = ("shuffled_decode", "shuffled_moves")
GQA_PROGRAMS = ("gqa_decode", "gqa_target_verify", "gqa_prefill", "write_kv", *SHUFFLED_PROGRAMS)

# Programs of the CPU alone: batch invariance in plain JAX is not promised elsewhere.
CPU_PROGRAMS = PROGRAMS | {
    "invariant_verify": (
        _step("target_verify", batch_invariant=True),
        functools.partial(_absorbed, "target_verify"),
    )
}

# Programs for compute capability 9.0 alone.
HOPPER_PROGRAMS = {
    "mosaic_gpu_layers": (
        _jitted(functools.partial(_scan_layers, implementation="mosaic_gpu")),
        functools.partial(_absorbed, "decode"),
    )
}


# What tests of the above must notice.


def _copied_layer(pool, layer, m, *arrays):
    """Takes a layer out of the pool and puts it back."""
    start = layer * pool.layer_stride
    data = lax.dynamic_slice_in_dim(pool.data, start, pool.num_pages)
    out, one = steps.decode(*arrays, LatentPool(data, 1, pool.num_pages, pool.kv_lora_rank), m, SPEC)
    return out, dataclasses.replace(pool, data=lax.dynamic_update_slice_in_dim(pool.data, one.data, start, 0))


def _stacked_layers(pool, _, m, q_latent, q_rope, latent, rope):
    """Scans over the layers of the pool, rather than over their indices."""

    def body(q_latent, data):
        one = LatentPool(data, 1, pool.num_pages, pool.kv_lora_rank)
        out, one = steps.decode(q_latent, q_rope, latent, rope, one, m, SPEC)
        return out, one.data

    out, data = lax.scan(body, q_latent, pool.data.reshape(LAYERS, pool.num_pages, *pool.data.shape[1:]))
    return out, dataclasses.replace(pool, data=data.reshape(pool.data.shape))


def _undonated(pool, layer, m, *arrays):
    return jax.jit(lambda pool, m, *arrays: steps.decode(*arrays, pool, m, SPEC)), (pool, m, *arrays), {}


MISTAKES: dict[str, tuple[Callable, Callable[[Sizes], tuple]]] = {
    "undonated": (_undonated, functools.partial(_absorbed, "decode")),
    "copied_layer": (_jitted(_copied_layer), functools.partial(_absorbed, "decode")),
    "stacked_layers": (_jitted(_stacked_layers), functools.partial(_absorbed, "decode")),
    "whole_table": (_step("decode", implementation="reference"), functools.partial(_absorbed, "decode")),
}


_ALL = CPU_PROGRAMS | HOPPER_PROGRAMS | MISTAKES


def _arguments(name: str, sizes: Sizes) -> tuple:
    facts = {"num_layers": LAYERS, "num_pages": sizes.num_pages, "page_size": sizes.page_size}
    facts["dtype"] = sizes.pool_dtype
    if name in GQA_PROGRAMS:
        pool = KVPool.create(**facts, spec=GQA, layout="shuffled" if name in SHUFFLED_PROGRAMS else "nhd")
    else:
        pool = LatentPool.create(**facts, spec=SPEC, row_format=sizes.row_format or "plain")
    return pool, jnp.int32(1), *_ALL[name][1](sizes)


def prepare(name: str, sizes: Sizes):
    """The pool, and a function that runs the program on it."""
    pool, *rest = _arguments(name, sizes)
    jitted, arguments, options = _ALL[name][0](pool, *rest)
    return pool, lambda: jitted(*arguments, **options)


def lower(name: str, sizes: Sizes, sharding: jax.sharding.Sharding | None = None) -> jax.stages.Lowered:
    """The program for arguments of these sizes, placed by ``sharding``."""
    shapes = place(jax.eval_shape(lambda: _arguments(name, sizes)), sharding)
    jitted, arguments, options = _ALL[name][0](*shapes)
    return jitted.lower(*arguments, **options)


PASSES = ("prefill", "extend", "decode", "draft_prefill", "draft_decode", "target_verify", "draft_extend")
CUDA_PASSES = ("extend", "decode", "target_verify")  # of each form and number of rows, one; each takes ten seconds


def lower_pass(name: str, model, sharding: jax.sharding.Sharding | None = None) -> tuple[jax.stages.Lowered, int]:
    """A pass of a whole model over a large pool, and the bytes of a layer of that pool."""
    passes = Passes(model, Shapes((2,), (16,), LARGE.table_width, LARGE.page_size, max_len=1024))
    owner = passes if name in ("prefill", "extend", "decode") else DraftPasses(passes, model, DraftTree((2, 2)))
    buckets = getattr(owner, name)
    buckets = buckets[0] if isinstance(buckets, tuple) else buckets
    pools = jax.eval_shape(lambda: model.create_pools(num_pages=LARGE.num_pages, page_size=LARGE.page_size))
    arguments = place((passes.state, pools, buckets._rungs[0]), sharding)
    (pool,) = pools.values()
    return buckets._step.jitted.lower(*arguments), pool.data.size * pool.dtype.itemsize // pool.num_layers


def place(tree, sharding: jax.sharding.Sharding | None):
    """The shapes of arrays, on the devices of ``sharding``."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


# Results.


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes a compiled program takes.

    Attributes:
        layer: of a layer of the pool.
        unaliased: of the pool it returns that do not lie in the pool it takes.
        temp: of scratch.
        copies: instructions that copy at least as much as a layer.
    """

    layer: int
    unaliased: int
    temp: int
    copies: list[str]


def footprint(lowered: jax.stages.Lowered, layer_bytes: int, layers: int = LAYERS, **options) -> Footprint:
    """What a program takes once compiled with ``options``. Steps that differ in name alone are compiled once."""
    text = re.sub(r"^module @\S+", "module", lowered.as_text())
    if text not in _found:
        compiled = lowered.compile(options)
        memory, copies = compiled.memory_analysis(), large_copies(compiled.as_text(), layer_bytes)
        unaliased = layers * layer_bytes - memory.alias_size_in_bytes
        _found[text] = Footprint(layer_bytes, unaliased, memory.temp_size_in_bytes, copies)
    return _found[text]


_found: dict[str, Footprint] = {}
_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "pred": 1, "s8": 1, "u8": 1, "s32": 4, "u32": 4, "s64": 8, "u64": 8}
_COPY = re.compile(
    r" = \(*(\w+)\[([\d,]*)\][^=]*? (copy|copy-start|transpose|convert|concatenate|slice|dynamic-slice|gather)\("
)


def large_copies(hlo: str, least: int) -> list[str]:
    """Instructions of optimised HLO that copy at least that many bytes, in whatever type or order."""
    found = []
    for line in hlo.splitlines():
        match = _COPY.search(line)
        if match:
            shape = [int(size) for size in match[2].split(",") if size]
            if functools.reduce(int.__mul__, shape, _BYTES.get(match[1], 1)) >= least:
                found.append(line.strip()[:160])
    return found


def assert_in_place(*found: Footprint):
    """The pool is written where it lies, and neither its size nor the table's width costs scratch memory. ``found``
    ends with the large one; of most programs there is no other, for compiling both takes twice as long."""
    large = found[-1]
    assert [each.unaliased for each in found] == [0] * len(found)
    assert {each.temp for each in found} == {large.temp}
    assert large.temp < large.layer / 8  # a quarter of what the table's rows take
    assert not large.copies
