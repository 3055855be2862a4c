"""The caches of ragged paged attention as pools of this library, without a copy; ``ragged_paged.py`` describes them."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from mla_attn.cache import KVPool, LatentPool
from mla_attn.cache.formats import FLOAT8
from mla_attn.checks import check_integer

ALIGNED = 128  # the parts of a row begin and end at multiples of it
_DTYPES = ("bfloat16", "float16", "float32", *(dtype.name for dtype in FLOAT8))


def mla_supports(cache: Any, *, kv_lora_rank: int, rope_dim: int, page_size: int | None = None) -> str | None:
    """Returns why ``ragged_paged_mla`` refuses a cache, which may be abstract; None if it does not."""
    rope_offset = _aligned(kv_lora_rank)
    width = rope_offset + _aligned(rope_dim)
    if cache.ndim == 3 and cache.shape[1] == width:
        return f"a cache of {tuple(cache.shape)}, transposed [pages, row, P]: must be [pages, P / pack, pack, row]"
    if cache.ndim != 4 or cache.shape[3] != width:
        return f"a cache of {tuple(cache.shape)}: must be [pages, P / pack, pack, {width}] for rows of " + (
            f"{kv_lora_rank} + {rope_dim}"
        )
    rows = cache.shape[1] * cache.shape[2]
    if page_size not in (None, 1, rows):
        return f"page_size={page_size} in pages of {rows} rows: must be {rows}, or 1"
    return _dtype_refusal(cache)


def gqa_supports(cache: Any, *, num_kv_heads: int, head_dim: int, v_head_dim: int | None = None) -> str | None:
    """Returns why ``ragged_paged_gqa`` refuses a cache, which may be abstract; None if it does not."""
    if cache.ndim != 5:
        return f"a cache of {tuple(cache.shape)}: must be [pages, P, 2 K / pack, pack, width]"
    _, _, rows, pack, width = cache.shape
    if rows * pack != 2 * num_kv_heads:
        return (
            f"{rows} x {pack} rows of a token for {num_kv_heads} KV heads: must be {2 * num_kv_heads}, without padding"
        )
    if width < max(head_dim, v_head_dim or head_dim):
        return f"rows of {width} for heads of {head_dim}: must be as wide at least"
    return _dtype_refusal(cache)


def _dtype_refusal(cache) -> str | None:
    name = jnp.dtype(cache.dtype).name
    return None if name in _DTYPES else f"a cache in {name}: must be one of {', '.join(_DTYPES)}"


def latent_pool(
    cache: Shaped[Array, "pages rows pack width"], *, kv_lora_rank: int, rope_dim: int, page_size: int | None = None
) -> LatentPool:
    """The cache as a pool of one layer; with one token in pages of several rows, pages that lie several rows apart.

    Raises:
        NotImplementedError: the reason of ``mla_supports``.
    """
    _refuse(mla_supports(cache, kv_lora_rank=kv_lora_rank, rope_dim=rope_dim, page_size=page_size))
    pages, rows = cache.shape[0], cache.shape[1] * cache.shape[2]
    page_size = rows if page_size is None else check_integer("page_size", page_size, 1, rows)
    array, dtype = _bytes(cache)
    array = array.reshape(pages * (rows // page_size), page_size, cache.shape[3])
    rope_offset = _aligned(kv_lora_rank)
    pool = LatentPool.of(array, kv_lora_rank=kv_lora_rank, rope_dim=rope_dim, rope_offset=rope_offset, dtype=dtype)
    stride = rows // page_size
    return LatentPool(
        pool.data, 1, pages, kv_lora_rank, page_stride=stride, rope_dim=rope_dim, rope_offset=rope_offset,
        format=pool.format, scale=pool.scale,
    )  # fmt: skip


def kv_pool(
    cache: Shaped[Array, "pages P rows pack width"], *, num_kv_heads: int, head_dim: int, v_head_dim: int
) -> KVPool:
    """The cache as a pool of one layer.

    Raises:
        NotImplementedError: the reason of ``gqa_supports``.
    """
    _refuse(gqa_supports(cache, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim))
    array, dtype = _bytes(cache)
    array = array.reshape(*cache.shape[:2], num_kv_heads, 2, cache.shape[4])
    return KVPool.of(array, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype)


def _bytes(cache):
    """The cache as pools store it, float8 numbers as bytes, and the dtype of its numbers."""
    dtype = jnp.dtype(cache.dtype)
    return (lax.bitcast_convert_type(cache, jnp.uint8) if dtype in FLOAT8 else cache), dtype


def stored(data: Shaped[Array, "..."], cache: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The array of a pool in the shape and dtype of the cache that it was made from."""
    # Without the barrier XLA for CPUs gives an axis of size 1 another place in memory, then copies the cache.
    data = lax.optimization_barrier(data.reshape(-1)).reshape(cache.shape)
    return data if data.dtype == cache.dtype else lax.bitcast_convert_type(data, cache.dtype)


def _aligned(channels: int) -> int:
    return -(-channels // ALIGNED) * ALIGNED


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise NotImplementedError(reason)
