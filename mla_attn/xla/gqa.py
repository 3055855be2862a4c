"""Grouped-query attention over a paged cache in plain JAX, with bounded memory, on any device."""

import jax.numpy as jnp

from mla_attn.xla.blockwise import Config, Rules, score_factors
from mla_attn.xla.paged import paged_attention, take_pages


def gqa_attention(
    q, pool, metadata, layer, tree_mask, sinks, q_scale, *, spec, causal, batch_invariant, out_dtype,
    skip_threshold: float | None = None, config: Config | None = None,
):  # fmt: skip
    """``(out [T, H, V], lse float32 [T, H])``; products in the format's ``operand_dtype``, sums in float32."""
    dtype = pool.format.operand_dtype(q.dtype)
    rules = Rules(spec.scale, causal, spec.window, spec.soft_cap, tree_mask, sinks, skip_threshold)

    def read(physical):
        arrays = zip(pool.arrays, pool.axes, strict=False)
        pages = (axes.tokens_first(take_pages(x, physical, axes.of_tokens)) for x, axes in arrays)
        return pool.operands(*pages, dtype=dtype)

    scales = pool.scales_of(layer)
    k_scale, v_scale = (None, None) if scales is None else (_of_query_heads(x, spec) for x in scales)
    values, options = (spec.num_kv_heads, spec.v_head_dim), {"batch_invariant": batch_invariant, "config": config}
    options["factors"] = score_factors(q.shape, q_scale, k_scale)
    out, lse = paged_attention(q, read, values, pool, metadata, layer, rules, **options)
    if v_scale is not None:
        out *= v_scale if v_scale.ndim == 0 else v_scale[None, :, None]
    return out.astype(out_dtype), lse


def _of_query_heads(scale, spec):
    """Repeats the scales [K] of KV heads for the query heads that read them, [H]; a scale [] is for all heads."""
    return scale if scale.ndim == 0 else jnp.repeat(scale, spec.num_heads // spec.num_kv_heads)
