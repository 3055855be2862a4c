"""A benchmarked call: its buffers, with NaN where nothing may be read, and the check of its result."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_attn.bench.ops.shapes import Shape, widths
from mla_attn.cache import KVPool, LatentPool
from mla_attn.cache.formats import FORMATS, RowFormat
from mla_attn.metadata import AttentionMetadata, for_decode, for_target_verify
from mla_attn.ops import gqa_attention, mla_attention
from mla_attn.specs import GQASpec, MLASpec

Spec = MLASpec | GQASpec

_SCALE = 0.02  # of plain float8: normal data is then far from its largest number, and is not clipped
_NAN_CODE = 0x7F  # NaN in either float8 dtype

# Bytes of all layers together, large enough that no layer is still in a cache when it is read again.
ROTATED_BYTES = {"gpu": 2**30, "cpu": 2**29}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A pool of several layers, and the metadata and queries of a call over any of them, on the device."""

    shape: Shape
    spec: Spec
    pool: Any
    metadata: AttentionMetadata
    queries: tuple[jax.Array, ...]  # MLA's are the latent and the rope part

    @property
    def arguments(self):
        """All arguments of the call except the layer."""
        return *self.queries, self.pool, self.metadata


def make_problem(shape: Shape, spec: Spec, *, page_size: int, dtype: jnp.dtype, kv_dtype: str, seed: int) -> Problem:
    """Draws normal data in shuffled pages, with NaN in free pages and past lengths, and invalid ids in unused table
    entries.

    Args:
        shape, spec: of the calls.
        page_size: tokens per page.
        dtype: of the queries, and of what is drawn.
        kv_dtype: name of the pool's format; plain float8 has a scale of 0.02.
        seed: of all data.
    """
    rng, kv_lens = np.random.default_rng(seed), np.array(shape.kv_lens)
    held, width = -(-kv_lens // page_size), shape.table_width(page_size)
    num_pages = int(held.sum()) + 3
    order = rng.permutation(num_pages).astype(np.int32)
    used = np.arange(width) < held[:, None]
    hostile = np.array([-1, num_pages, np.iinfo(np.int32).max, *order[-3:]], np.int32)
    table = rng.choice(hostile, used.shape)
    table[used] = order[:-3]
    seen = np.zeros((num_pages, page_size), bool)
    left = (kv_lens[:, None] - np.arange(width) * page_size)[used]
    seen[order[:-3]] = np.arange(page_size) < left[:, None]

    row_format, parts = FORMATS[kv_dtype], _parts(spec)
    layers = _layers(num_pages * page_size * _row_bytes(spec, row_format))
    keys = jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), 4)
    rows = (len(kv_lens) * shape.q_len, shape.heads)
    scale = jnp.float32(_SCALE) if row_format.scaled else None
    first, second = _fill((keys[0], keys[3]), jnp.asarray(seen), scale, layers, parts, dtype, row_format)
    if isinstance(spec, MLASpec):
        (rank,), (rope,) = parts
        data, stored = jnp.concatenate([first, second], axis=-1), {"format": row_format, "scale": scale}
        pool = LatentPool(data, layers, num_pages, rank, 1, num_pages, rope_dim=rope, **stored)
    else:
        stored = {"format": row_format, "k_scale": scale, "v_scale": scale}
        pool = KVPool(first, second, layers, num_pages, **stored)
    parts = (spec.kv_lora_rank, spec.qk_rope_head_dim) if isinstance(spec, MLASpec) else (spec.head_dim,)
    queries = tuple(jax.random.normal(key, (*rows, part), dtype) for key, part in zip(keys[1:], parts, strict=False))
    return Problem(shape, spec, pool, _metadata(shape, table, kv_lens, page_size), queries)


def _parts(spec: Spec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Channels of both parts of a cached token: latent and rope, or keys and values of each head."""
    if isinstance(spec, MLASpec):
        return (spec.kv_lora_rank,), (spec.qk_rope_head_dim,)
    return (spec.num_kv_heads, spec.head_dim), (spec.num_kv_heads, spec.v_head_dim)


def _row_bytes(spec: Spec, row_format: RowFormat) -> int:
    """Bytes of a cached token."""
    first, second = (math.prod(part) for part in _parts(spec))
    return row_format.row_bytes(first, second)


def problem_bytes(shape: Shape, spec: Spec, *, page_size: int, dtype: jnp.dtype, kv_dtype: str) -> int:
    """Bytes of a problem: pool, page table and its temporaries, queries and outputs."""
    num_pages = sum(-(-length // page_size) for length in shape.kv_lens) + 3
    layer_bytes = num_pages * page_size * _row_bytes(spec, FORMATS[kv_dtype])
    table = len(shape.kv_lens) * shape.table_width(page_size)
    rows = len(shape.kv_lens) * shape.q_len * shape.heads * sum(widths(spec))
    return _layers(layer_bytes) * layer_bytes + 16 * table + rows * dtype.itemsize


def _layers(layer_bytes: int) -> int:
    rotated = ROTATED_BYTES["cpu" if jax.default_backend() == "cpu" else "gpu"]
    return max(2, -(-rotated // layer_bytes))


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _fill(keys, seen, scale, layers, parts, dtype, row_format):
    """Both parts of the pool's data, [layers * N, P, *channels]. One layer is drawn; each further layer has the same
    rows, shifted by a page."""
    drawn = (jax.random.normal(key, (*seen.shape, *part), dtype) for key, part in zip(keys, parts, strict=True))
    stored = row_format.encode(*drawn, None if scale is None else (scale, scale))
    poison = _NAN_CODE if row_format.storage_dtype == jnp.uint8 else jnp.nan

    def layer(i):
        return [jnp.where(_like(seen, x), jnp.roll(x, i, axis=0), jnp.asarray(poison, x.dtype)) for x in stored]

    filled = jax.lax.map(layer, jnp.arange(layers, dtype=jnp.int32))
    return [x.reshape(-1, *x.shape[2:]) for x in filled]


def _like(seen, x):
    return seen.reshape(*seen.shape, *(1 for _ in x.shape[2:]))


def _metadata(shape: Shape, table, kv_lens, page_size: int) -> AttentionMetadata:
    table, kv_lens = jnp.asarray(table, jnp.int32), jnp.asarray(kv_lens, jnp.int32)
    if shape.q_len == 1:
        return for_decode(table, kv_lens, page_size=page_size)
    return for_target_verify(table, kv_lens - shape.q_len, num_tokens=shape.q_len, page_size=page_size)


@dataclasses.dataclass(frozen=True)
class Expected:
    """The expected results of some rows of a call."""

    rows: np.ndarray  # [rows], indices of the rows
    out: np.ndarray  # [rows, H, R]
    lse: np.ndarray  # [rows, H]
    v_max: np.ndarray  # [rows], largest |v| of the keys that are visible to all rows of the request


def expected(problem: Problem, layer: int) -> Expected:
    """The expected results of the longest, the shortest, the first and the last request of ``problem`` in ``layer``.

    The reference implementation computes them head by head over the same gathered rows, so that it needs memory only
    for a few requests' rows in float32.
    """
    shape, pool = problem.shape, problem.pool
    kv_lens, q_len = np.array(shape.kv_lens), shape.q_len
    chosen = np.unique(np.array([kv_lens.argmax(), kv_lens.argmin(), 0, len(kv_lens) - 1]))
    kv_lens = kv_lens[chosen]
    table = np.asarray(problem.metadata.page_table)[chosen, : -(-kv_lens.max() // pool.page_size)]
    metadata = _metadata(shape, table, kv_lens, pool.page_size)
    rows = (chosen[:, None] * q_len + np.arange(q_len)).ravel()
    out, lse = _by_head(problem, [query[rows] for query in problem.queries], metadata, layer)
    pages = pool.placement.physical_pages(jnp.clip(metadata.page_table, 0, pool.num_pages - 1), layer)
    if isinstance(pool, KVPool):
        _, values = pool.decode(*(array[pages] for array in pool.arrays), layer=layer)
    else:
        values, _ = pool.decode(pool.data[pages], layer=layer)
    v_max = np.abs(np.asarray(values).astype(np.float32)).reshape(*pages.shape, pool.page_size, -1).max(axis=-1)
    v_max = v_max.reshape(len(chosen), -1)
    common = np.arange(v_max.shape[1]) < kv_lens[:, None] - q_len + 1
    v_max = np.where(common, v_max, 0).max(axis=1).repeat(q_len)
    return Expected(rows, out, lse, v_max)


def _by_head(problem: Problem, queries, metadata, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Float64 ``(out [rows, H, R], lse [rows, H])`` of the reference, for the heads of one KV head after the other."""
    pool, kv_heads = problem.pool, problem.shape.kv_heads or 1
    one = {} if isinstance(problem.spec, MLASpec) else {"num_kv_heads": 1}
    op: Any = gqa_attention if one else mla_attention
    spec = dataclasses.replace(problem.spec, num_heads=1, **one)
    options = {"layer": layer, "return_lse": True, "out_dtype": jnp.float32, "implementation": "reference"}

    def attend(pool, *queries):
        return op(*(query[:, None] for query in queries), pool, metadata, spec, **options)

    @jax.jit
    def per_head(pool, kv_head, *queries):
        if one:
            k, v = (jax.lax.dynamic_slice_in_dim(array, kv_head, 1, axis=2) for array in pool.arrays)
            pool = dataclasses.replace(pool, k=k, v=v)
        return jax.vmap(attend, in_axes=(None, *(1 for _ in queries)), out_axes=1)(pool, *queries)

    parts = zip(*(np.split(np.asarray(query), kv_heads, axis=1) for query in queries), strict=True)
    results = [per_head(pool, kv_head, *part) for kv_head, part in enumerate(parts)]
    out, lse = (np.concatenate([np.asarray(x)[:, :, 0] for x in xs], axis=1) for xs in zip(*results, strict=True))
    return out.astype(np.float64), lse.astype(np.float64)


def errors(outputs: tuple[jax.Array, jax.Array], expected: Expected, dtype: jnp.dtype) -> dict[str, float]:
    """The largest of ``error_shares`` over rows and heads."""
    return {name: float(share.max()) for name, share in error_shares(outputs, expected, dtype).items()}


def error_shares(outputs: tuple[jax.Array, jax.Array], expected: Expected, dtype: jnp.dtype) -> dict[str, np.ndarray]:
    """The errors of ``(out, lse)``, divided by their tolerances, [rows, H] each: above 1 is wrong.

    The tolerances, for bfloat16 (float16, float32): largest error of a row ``2**-8 (2**-11, 1e-5) * (|v| max + |out|
    max)``, relative L2 error ``4e-3``, one minus the cosine ``5e-6`` (both scaled alike), error of the lse ``1e-5 +
    1e-5 * |lse|``.
    """
    out, lse = (np.asarray(x[expected.rows]).astype(np.float64) for x in outputs)
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 1e-5}[jnp.dtype(dtype).name]
    ratio = unit / 2.0**-8
    size, error = np.linalg.norm(expected.out, axis=-1), np.abs(out - expected.out)
    cosine = (out * expected.out).sum(axis=-1) / np.maximum(np.linalg.norm(out, axis=-1) * size, 1e-300)
    return {
        "maximum": error.max(axis=-1) / (unit * (expected.v_max[:, None] + np.abs(expected.out).max(axis=-1))),
        "L2": np.linalg.norm(error, axis=-1) / (4e-3 * ratio * size),
        "cosine": (1 - cosine) / (5e-6 * ratio**2),
        "lse": np.abs(lse - expected.lse) / (1e-5 + 1e-5 * np.abs(expected.lse)),
    }
