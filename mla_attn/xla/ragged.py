"""``ragged_attention`` in plain JAX: blockwise attention over packed, unpaged keys and values."""

import jax.numpy as jnp

from mla_attn.cache.formats import operand_dtype
from mla_attn.xla.blockwise import Batch, Config, Rules, blockwise_attention, by_platform, make_plan, score_factors


def ragged_attention(
    q, k, v, metadata, sinks, q_scale, k_scale, v_scale, *, scale, causal, window, soft_cap, out_dtype,
    skip_threshold: float | None = None, config: Config | None = None,
):  # fmt: skip
    """``(out [T, H, V], lse float32 [T, H])``; products in the keys' dtype, sums in float32.

    Products of float8 keys run in the queries' dtype, or in bfloat16 if that is float8 too.

    ``config`` has the target sizes; None for those of the platform.
    """
    m, heads, shape = metadata, q.shape[1], (k.shape[1], v.shape[2])
    if k.shape[0] == 0:
        return jnp.zeros((q.shape[0], heads, shape[1]), out_dtype), jnp.full((q.shape[0], heads), -jnp.inf, jnp.float32)
    batch = Batch(m.q_starts, m.q_lens, m.kv_lens, jnp.zeros_like(m.kv_lens), 1)
    rules = Rules(scale, causal, window, soft_cap, sinks=sinks, skip_threshold=skip_threshold)
    dtype = operand_dtype(q.dtype) if k.dtype == jnp.float8_e4m3fn else k.dtype
    factors = score_factors(q.shape, q_scale, k_scale)

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
        return blockwise_attention(q, _fetch(k, v, m.kv_starts, block, dtype), shape, batch, plan, rules, factors)

    out, lse = by_platform(config, run)
    out = out if v_scale is None else out * v_scale
    return out.astype(out_dtype), lse


def _fetch(k, v, kv_starts, block: int, dtype):
    def fetch(requests, first_keys, seen):
        first = (kv_starts[requests] + first_keys)[:, None]
        index = jnp.clip(first + jnp.arange(block, dtype=jnp.int32)[None], 0, k.shape[0] - 1)
        seen = seen[:, :, None, None]
        keys, values = (x[index].astype(dtype) for x in (k, v))
        return jnp.where(seen, keys, jnp.zeros((), dtype)), jnp.where(seen, values, jnp.zeros((), dtype))

    return fetch
