"""Absorbed multi-head latent attention over a paged cache in plain JAX, with bounded memory, on any device."""

import jax.numpy as jnp

from mla_attn.xla.blockwise import Config, Rules, score_factors
from mla_attn.xla.paged import paged_attention, take_pages


def mla_attention(
    q_latent, q_rope, pool, metadata, layer, tree_mask, sinks, q_scale, *, spec, causal, batch_invariant, out_dtype,
    skip_threshold: float | None = None, config: Config | None = None,
):  # fmt: skip
    """``(out [T, H, R], lse float32 [T, H])``; products in the format's ``operand_dtype``, sums in float32."""
    dtype = pool.format.operand_dtype(q_latent.dtype)
    rules = Rules(spec.scale, causal, spec.window, spec.soft_cap, tree_mask, sinks, skip_threshold)
    q = jnp.concatenate([q_latent, q_rope], axis=-1)

    def read(physical):
        return pool.operands(take_pages(pool.data, physical), dtype)[:, :, None], None

    scale = pool.scale_of(layer)
    values, options = (1, pool.kv_lora_rank), {"batch_invariant": batch_invariant, "config": config}
    options["factors"] = score_factors(q.shape, q_scale, scale)
    out, lse = paged_attention(q, read, values, pool, metadata, layer, rules, **options)
    out = out if scale is None else out * scale
    return out.astype(out_dtype), lse
