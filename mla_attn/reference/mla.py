"""The specification of ``mla_attention``: absorbed MLA over a paged cache (DeepSeek-V2, arXiv:2405.04434)."""

import jax.numpy as jnp

from mla_attn.cache import read_latent
from mla_attn.reference.dense import attend, to_blocks, to_rows, visible_keys


def mla_attention(q_latent, q_rope, pool, metadata, layer, tree_mask, *, spec, causal, batch_invariant, out_dtype):
    """Gathers every key that a page table has room for, and attends: ``(out [T, H, R], lse float32 [T, H])``."""
    del batch_invariant  # the dispatcher refuses True
    m = metadata
    slots = m.page_table.shape[1] * pool.page_size
    latent, rope = read_latent(pool, m.page_table, jnp.zeros_like(m.kv_lens), slots, layer=layer)
    positions = m.kv_offsets[:, None] + jnp.arange(slots, dtype=jnp.int32)[None] * m.kv_stride
    q = to_blocks(jnp.concatenate([q_latent, q_rope], axis=-1), m.q_starts, m.q_lens, m.max_q_len)
    out, lse = attend(
        q,
        jnp.concatenate([latent, rope], axis=-1)[:, :, None],
        latent[:, :, None],
        visible_keys(
            positions, m.q_lens, m.kv_lens, m.max_q_len, causal=causal, window=spec.window, tree_mask=tree_mask
        ),
        scale=spec.scale,
        soft_cap=spec.soft_cap,
    )
    rows = q_latent.shape[0]
    out = to_rows(out, m.q_starts, m.q_lens, rows, 0.0).astype(out_dtype)
    return out, to_rows(lse, m.q_starts, m.q_lens, rows, -jnp.inf)
