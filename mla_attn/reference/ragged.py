"""The specification of ``ragged_attention``: attention over packed, unpaged keys and values."""

import jax.numpy as jnp

from mla_attn.reference.dense import attend, scaled_queries, to_blocks, to_rows, visible_keys


def ragged_attention(
    q, k, v, metadata, sinks, q_scale, k_scale, v_scale, *, scale, causal, window, soft_cap, out_dtype,
    skip_threshold=None,
):  # fmt: skip
    """``(out [T, H, V], lse float32 [T, H])``, from dense blocks."""
    del skip_threshold  # it allows what need not be done
    m = metadata
    q, k, v = (scaled_queries(x, x_scale) for x, x_scale in ((q, q_scale), (k, k_scale), (v, v_scale)))
    positions = jnp.arange(m.max_kv_len, dtype=jnp.int32)
    positions = jnp.broadcast_to(positions, (m.kv_lens.shape[0], m.max_kv_len))
    out, lse = attend(
        to_blocks(q, m.q_starts, m.q_lens, m.max_q_len),
        to_blocks(k, m.kv_starts, m.kv_lens, m.max_kv_len),
        to_blocks(v, m.kv_starts, m.kv_lens, m.max_kv_len),
        visible_keys(positions, m.q_lens, m.kv_lens, m.max_q_len, causal=causal, window=window),
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    out = to_rows(out, m.q_starts, m.q_lens, q.shape[0], 0.0).astype(out_dtype)
    return out, to_rows(lse, m.q_starts, m.q_lens, q.shape[0], -jnp.inf)
