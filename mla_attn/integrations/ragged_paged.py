"""Ragged paged attention as sglang-jax, ejkernel, tokamax and tpu-inference call it: one function for MLA, one for GQA.

A call has T query rows of up to B requests, and the pages of one layer, to which it writes this call's rows before it
attends. Both functions return ``(out, cache)``; the write is in place if the outermost ``jit`` donates the cache (but
XLA on CPUs copies a float8 cache). They run inside ``jax.shard_map`` too, where T, B, pages and heads are the shard's.

================  ==================================================================================================
argument          what
================  ==================================================================================================
``cache``         MLA: ``[pages, P / pack, pack, row]``, where a row has the latent part at 0, the rope part at the next
                  multiple of 128, and ends at a multiple of 128 (512 + 64: rows of 640, the rope part at 512). GQA:
                  ``[pages, P, 2 K / pack, pack, width]``, each head's key, then its value. Elements beside the channels
                  are neither written nor read
``kv_lens``       int32 [B], tokens of each request including this call's; 0 marks padding
``pages``         int32, page ids: W for each request, [B * W]; or, with ``cu_kv_lens``, packed. Or, instead of all
                  lists, the metadata of ``ragged_metadata``, made once for all layers
``cu_q_lens``     int32 [B + 1], first row of each request, and the end of the last. A padding request may have rows
                  too; they are not written, and give zeros
``distribution``  int32 [3]; the last number says how many requests there are, entries of others may hold anything.
                  None for B
``cu_kv_lens``    int32 [B + 1], the sum of the lengths before each request, each rounded up to whole pages: a request
                  has the entries of ``pages`` from ``cu_kv_lens[b] / P`` on
================  ==================================================================================================

New rows are cast to the dtype of the cache, and ``q_scale``, ``k_scale`` and ``v_scale``, static numbers, multiply
scores and results: callers of float8 caches divide before.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from mla_attn.cache import write_kv, write_latent
from mla_attn.cache.formats import FLOAT8
from mla_attn.checks import check_array
from mla_attn.dispatch import Order
from mla_attn.integrations.ragged_layout import kv_pool, latent_pool, stored
from mla_attn.integrations.ragged_metadata import ragged_metadata
from mla_attn.metadata import AttentionMetadata
from mla_attn.ops import gqa_attention, mla_attention
from mla_attn.specs import GQASpec, MLASpec


def ragged_paged_mla(
    q_nope: Float[Array, "T H R"],
    q_pe: Float[Array, "T H E"],
    new_c: Float[Array, "T R"],
    new_pe: Float[Array, "T E"],
    cache: Shaped[Array, "pages rows pack width"],
    kv_lens: Int[Array, "B"],
    pages: Int[Array, "n"] | AttentionMetadata,
    cu_q_lens: Int[Array, "ends"],
    distribution: Int[Array, "3"] | None = None,
    *,
    scale: float,
    cu_kv_lens: Int[Array, "ends"] | None = None,
    page_size: int | None = None,
    table_width: int | None = None,
    max_q_len: int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    implementation: Order = None,
) -> tuple[Float[Array, "T H R"], Shaped[Array, "pages rows pack width"]]:
    """Writes this call's latent rows, then attends to those of each request; the result is in latent space.

    Args:
        q_nope, q_pe: absorbed queries, and their rotary part.
        new_c, new_pe: this call's latent rows after their norm, and rope keys after rotation.
        cache, kv_lens, pages, cu_q_lens, distribution, cu_kv_lens, q_scale, k_scale, v_scale: see the module.
        scale: softmax scale: of DeepSeek ``(nope + rope) ** -0.5 * mscale ** 2``, not ``(R + E) ** -0.5``.
        page_size: tokens P of a page; None for all rows of a page of ``cache``. If it is 1, the first of them is used.
        table_width: most pages of a request in a packed list; None for the whole list, which takes memory for each.
        max_q_len: static bound of the rows of a request; None if unknown.
        window, soft_cap: as in ``MLASpec``.
        implementation: as in ``mla_attention``.

    Raises:
        ValueError: a wrong shape, dtype or static value, at trace time.
        NotImplementedError: ``mla_supports`` refuses the cache.
    """
    _check_ranks(q_nope=(q_nope, 3), q_pe=(q_pe, 3), cache=(cache, None))
    dims = {"kv_lora_rank": q_nope.shape[2], "rope_dim": q_pe.shape[2]}
    page_size = pages.page_size if isinstance(pages, AttentionMetadata) else page_size
    pool = latent_pool(cache, **dims, page_size=page_size)
    spec = MLASpec(
        num_heads=q_nope.shape[1],
        kv_lora_rank=pool.kv_lora_rank,
        qk_rope_head_dim=pool.rope_dim,
        scale=_product(scale, q_scale, k_scale),
        window=window,
        soft_cap=soft_cap,
    )
    metadata = ragged_metadata(
        kv_lens,
        pages,
        cu_q_lens,
        distribution,
        num_rows=q_nope.shape[0],
        page_size=pool.page_size,
        cu_kv_lens=cu_kv_lens,
        table_width=table_width,
        max_q_len=max_q_len,
    )
    pool = write_latent(pool, new_c, new_pe, metadata.slots)
    options = {"out_dtype": _out_dtype(q_nope, v_scale), "implementation": implementation}
    out: Any = mla_attention(q_nope, q_pe, pool, metadata, spec, **options)
    return _scaled(out, v_scale, q_nope), stored(pool.data, cache)


def ragged_paged_gqa(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K V"],
    cache: Shaped[Array, "pages P rows pack width"],
    kv_lens: Int[Array, "B"],
    pages: Int[Array, "n"] | AttentionMetadata,
    cu_q_lens: Int[Array, "ends"],
    distribution: Int[Array, "3"] | None = None,
    *,
    scale: float,
    sinks: Float[Array, "H"] | None = None,
    cu_kv_lens: Int[Array, "ends"] | None = None,
    table_width: int | None = None,
    max_q_len: int | None = None,
    causal: bool = True,
    tree_mask: Bool[Array, "B S M"] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    implementation: Order = None,
) -> tuple[Float[Array, "T H V"], Shaped[Array, "pages P rows pack width"]]:
    """Writes this call's keys and values, then attends to those of each request.

    Args:
        q, k, v: queries, and this call's keys and values; queries and keys after rotation.
        cache, kv_lens, pages, cu_q_lens, distribution, cu_kv_lens, q_scale, k_scale, v_scale: see the module.
        scale: softmax scale.
        sinks: as in ``gqa_attention``.
        table_width: as in ``ragged_paged_mla``.
        max_q_len: static bound of the rows of a request; None if unknown, which ``tree_mask`` does not allow.
        causal, tree_mask: as in ``gqa_attention``.
        window, soft_cap: as in ``GQASpec``.
        implementation: as in ``gqa_attention``.

    Raises:
        ValueError: a wrong shape, dtype or static value, at trace time.
        NotImplementedError: ``gqa_supports`` refuses the cache.
    """
    _check_ranks(q=(q, 3), k=(k, 3), v=(v, 3), cache=(cache, None))
    dims = {"num_kv_heads": k.shape[1], "head_dim": q.shape[2], "v_head_dim": v.shape[2]}
    pool = kv_pool(cache, **dims)
    scale = _product(scale, q_scale, k_scale)
    spec = GQASpec(num_heads=q.shape[1], **dims, scale=scale, window=window, soft_cap=soft_cap)
    metadata = ragged_metadata(
        kv_lens,
        pages,
        cu_q_lens,
        distribution,
        num_rows=q.shape[0],
        page_size=pool.page_size,
        cu_kv_lens=cu_kv_lens,
        table_width=table_width,
        max_q_len=q.shape[0] if max_q_len is None and not causal else max_q_len,
    )
    if tree_mask is not None and max_q_len is None:
        raise ValueError("max_q_len=None with a tree_mask: must be the mask's S")
    pool = write_kv(pool, k, v, metadata.slots)
    masks = {"causal": causal, "tree_mask": tree_mask, "sinks": sinks}
    options = {"out_dtype": _out_dtype(q, v_scale), "implementation": implementation}
    out: Any = gqa_attention(q, pool, metadata, spec, **masks, **options)
    return _scaled(out, v_scale, q), stored(pool.k, cache)


def _check_ranks(**arrays) -> None:
    for name, (array, rank) in arrays.items():
        check_array(name, array)
        if rank is not None and array.ndim != rank:
            raise ValueError(f"{name} has shape {array.shape}, must have {rank} axes")


def _product(scale: float, *factors: float | None) -> float:
    for factor in factors:
        scale = scale if factor is None else scale * factor
    return scale


def _out_dtype(q, v_scale):
    return None if v_scale is None else jnp.float32


def _scaled(out, v_scale: float | None, q):
    if v_scale is None:
        return out
    return (out * v_scale).astype(q.dtype if q.dtype not in FLOAT8 else jnp.bfloat16)
