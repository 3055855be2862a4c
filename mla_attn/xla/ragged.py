"""Attention over packed, unpaged keys and values in plain JAX: bounded memory, runs anywhere."""

import jax.numpy as jnp
from jax import lax

from mla_attn.xla.blockwise import Batch, Rules, blockwise_attention, make_plan

_BLOCK_KEYS = 512


def ragged_attention(
    q, k, v, *, q_starts, q_lens, kv_starts, kv_lens, max_q_len, max_kv_len, scale, causal, window, soft_cap
):
    """``(out float32 [T, H, V], lse float32 [T, H])``; products in the keys' dtype, sums in float32."""
    batch = Batch(q_starts, q_lens, kv_lens, jnp.zeros_like(kv_lens), 1)
    rules = Rules(scale, causal, window, soft_cap)
    block = max(1, min(_BLOCK_KEYS, max_kv_len))

    def fetch(requests, first_slots):
        first = (kv_starts[requests] + first_slots)[:, None]
        index = jnp.clip(first + jnp.arange(block, dtype=jnp.int32)[None], 0, k.shape[0] - 1)
        return k[index], v[index]

    def run(q, *, parallel):
        plan = make_plan(q_lens.shape[0], max_q_len, q.shape[1], max_kv_len, block, parallel=parallel)
        return blockwise_attention(q, fetch, batch, plan, rules)

    if k.shape[0] == 0:
        rows, heads, _ = q.shape
        return jnp.zeros((rows, heads, v.shape[-1])), jnp.full((rows, heads), -jnp.inf)
    return lax.platform_dependent(q, cpu=lambda q: run(q, parallel=False), default=lambda q: run(q, parallel=True))
