"""The specification of ``gqa_attention``: grouped-query attention over a paged cache (arXiv:2305.13245)."""

import jax.numpy as jnp

from mla_attn.cache import read_kv
from mla_attn.reference.dense import attend_paged, scaled_queries


def gqa_attention(
    q,
    pool,
    metadata,
    layer,
    tree_mask,
    sinks,
    q_scale,
    *,
    spec,
    causal,
    batch_invariant,
    out_dtype,
    skip_threshold=None,
):
    """``(out [T, H, V], lse float32 [T, H])``; it gathers all keys of the page tables."""
    del batch_invariant, skip_threshold  # ``supports`` refuses the one; the other allows what it need not do
    table = metadata.page_table
    starts, keys = jnp.zeros_like(metadata.kv_lens), table.shape[1] * pool.page_size
    k, v = read_kv(pool, table, starts, keys, layer=layer, dtype=jnp.float32)
    rules = {"spec": spec, "causal": causal, "tree_mask": tree_mask, "sinks": sinks}
    out, lse = attend_paged(scaled_queries(q, q_scale), k, v, metadata, **rules)
    return out.astype(out_dtype), lse
