"""Grouped-query attention over a paged cache in plain JAX, with bounded memory, on any device."""

from mla_attn.xla.blockwise import Config, Rules
from mla_attn.xla.paged import paged_attention, take_pages


def gqa_attention(
    q, pool, metadata, layer, tree_mask, sinks, *, spec, causal, batch_invariant, out_dtype,
    config: Config | None = None,
):  # fmt: skip
    """``(out [T, H, V], lse float32 [T, H])``; products in the pool's dtype, sums in float32."""
    rules = Rules(spec.scale, causal, spec.window, spec.soft_cap, tree_mask, sinks)

    def read(physical):
        if pool.layout == "hnd":
            return pool.decode(*(take_pages(x, physical, 2).swapaxes(1, 2) for x in pool.arrays))
        return pool.decode(*(take_pages(x, physical) for x in pool.arrays))

    values, options = (spec.num_kv_heads, spec.v_head_dim), {"batch_invariant": batch_invariant, "config": config}
    out, lse = paged_attention(q, read, values, pool, metadata, layer, rules, **options)
    return out.astype(out_dtype), lse
