"""``ragged_attention`` in plain JAX: blockwise attention over packed, unpaged keys and values."""

import jax.numpy as jnp

from mla_attn.xla.blockwise import Batch, Config, Rules, blockwise_attention, by_platform, make_plan


def ragged_attention(
    q, k, v, metadata, sinks, *, scale, causal, window, soft_cap, out_dtype, config: Config | None = None,
):  # fmt: skip
    """``(out [T, H, V], lse float32 [T, H])``; products in the keys' dtype, sums in float32.

    ``config`` has the target sizes; None for those of the platform.
    """
    m, heads, shape = metadata, q.shape[1], (k.shape[1], v.shape[2])
    if k.shape[0] == 0:
        return jnp.zeros((q.shape[0], heads, shape[1]), out_dtype), jnp.full((q.shape[0], heads), -jnp.inf, jnp.float32)
    batch = Batch(m.q_starts, m.q_lens, m.kv_lens, jnp.zeros_like(m.kv_lens), 1)
    rules = Rules(scale, causal, window, soft_cap, sinks=sinks)

    def run(config: Config):
        block = min(config.block_keys, m.max_kv_len)
        plan = make_plan(
            config,
            batch=m.q_lens.shape[0],
            max_q_len=m.max_q_len,
            heads=heads,
            keys=m.max_kv_len,
            block=block,
        )
        return blockwise_attention(q, _fetch(k, v, m.kv_starts, block), shape, batch, plan, rules)

    out, lse = by_platform(config, run)
    return out.astype(out_dtype), lse


def _fetch(k, v, kv_starts, block: int):
    def fetch(requests, first_keys, seen):
        first = (kv_starts[requests] + first_keys)[:, None]
        index = jnp.clip(first + jnp.arange(block, dtype=jnp.int32)[None], 0, k.shape[0] - 1)
        seen = seen[:, :, None, None]
        return jnp.where(seen, k[index], jnp.zeros((), k.dtype)), jnp.where(seen, v[index], jnp.zeros((), v.dtype))

    return fetch
