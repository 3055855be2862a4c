"""Attention over packed, unpaged keys and values, the specification."""

import jax.numpy as jnp

from mla_attn.reference.dense import attend, to_blocks, to_rows, visible_keys


def ragged_attention(
    q, k, v, *, q_starts, q_lens, kv_starts, kv_lens, max_q_len, max_kv_len, scale, causal, window, soft_cap
):
    """``(out float32 [T, H, V], lse float32 [T, H])``."""
    positions = jnp.broadcast_to(jnp.arange(max_kv_len), (kv_lens.shape[0], max_kv_len))
    out, lse = attend(
        to_blocks(q, q_starts, q_lens, max_q_len),
        to_blocks(k, kv_starts, kv_lens, max_kv_len),
        to_blocks(v, kv_starts, kv_lens, max_kv_len),
        visible_keys(positions, q_lens, kv_lens, max_q_len, causal=causal, window=window),
        scale=scale,
        soft_cap=soft_cap,
    )
    return to_rows(out, q_starts, q_lens, q.shape[0], 0.0), to_rows(lse, q_starts, q_lens, q.shape[0], -jnp.inf)
