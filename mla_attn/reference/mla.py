"""The specification of ``mla_attention``: absorbed MLA over a paged cache (DeepSeek-V2, arXiv:2405.04434)."""

import jax.numpy as jnp

from mla_attn.cache import read_latent
from mla_attn.reference.dense import attend_paged, scaled_queries


def mla_attention(
    q_latent, q_rope, pool, metadata, layer, tree_mask, sinks, q_scale, *, spec, causal, batch_invariant, out_dtype,
    skip_threshold=None,
):  # fmt: skip
    """``(out [T, H, R], lse float32 [T, H])``; it gathers all keys of the page tables."""
    del batch_invariant, skip_threshold  # ``supports`` refuses the one; the other allows what it need not do
    table = metadata.page_table
    starts, keys = jnp.zeros_like(metadata.kv_lens), table.shape[1] * pool.page_size
    latent, rope = (x[:, :, None] for x in read_latent(pool, table, starts, keys, layer=layer, dtype=jnp.float32))
    q, k = jnp.concatenate([q_latent, q_rope], axis=-1), jnp.concatenate([latent, rope], axis=-1)
    q = scaled_queries(q, q_scale)
    rules = {"spec": spec, "causal": causal, "tree_mask": tree_mask, "sinks": sinks}
    out, lse = attend_paged(q, k, latent, metadata, **rules)
    return out.astype(out_dtype), lse
