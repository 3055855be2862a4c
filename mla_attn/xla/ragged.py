"""Attention over packed, unpaged keys and values in plain JAX: bounded memory, runs anywhere."""

import jax.numpy as jnp
from jax import lax

from mla_attn.xla.blockwise import Batch, Rules, block_keys, blockwise_attention, make_plan


def ragged_attention(
    q, k, v, *, q_starts, q_lens, kv_starts, kv_lens, max_q_len, max_kv_len, scale, causal, window, soft_cap
):
    """``(out float32 [T, H, V], lse float32 [T, H])``; products in the keys' dtype, sums in float32."""
    batch = Batch(q_starts, q_lens, kv_lens, jnp.zeros_like(kv_lens), 1)
    rules = Rules(scale, causal, window, soft_cap)
    heads, shape = q.shape[1], (k.shape[1], v.shape[2])
    if k.shape[0] == 0:
        return jnp.zeros((q.shape[0], heads, shape[1])), jnp.full((q.shape[0], heads), -jnp.inf)

    def run(q, *, parallel):
        block = min(block_keys(parallel=parallel), max_kv_len)
        plan = make_plan(q_lens.shape[0], max_q_len, heads, max_kv_len, block, parallel=parallel)
        return blockwise_attention(q, _fetch(k, v, kv_starts, block), shape, batch, plan, rules)

    return lax.platform_dependent(q, cpu=lambda q: run(q, parallel=False), default=lambda q: run(q, parallel=True))


def _fetch(k, v, kv_starts, block: int):
    def fetch(requests, first_slots, seen):
        first = (kv_starts[requests] + first_slots)[:, None]
        index = jnp.clip(first + jnp.arange(block, dtype=jnp.int32)[None], 0, k.shape[0] - 1)
        seen = seen[:, :, None, None]
        return jnp.where(seen, k[index], jnp.zeros((), k.dtype)), jnp.where(seen, v[index], jnp.zeros((), v.dtype))

    return fetch
