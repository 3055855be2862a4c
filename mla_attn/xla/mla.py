"""``mla_attention`` in plain JAX: absorbed MLA over a paged cache, blockwise."""

import jax.numpy as jnp
from jax import lax

from mla_attn.xla.blockwise import Batch, Config, Rules, blockwise_attention, by_platform, make_plan


def mla_attention(
    q_latent, q_rope, pool, metadata, layer, tree_mask, *, spec, causal, batch_invariant, out_dtype,
    config: Config | None = None,
):  # fmt: skip
    """Attends: ``(out [T, H, R], lse float32 [T, H])``; products in the pool's dtype, sums in float32.

    With ``batch_invariant`` a tile is one query token whatever the call's shape, and keys are cut at multiples of a
    block that depends on the page size alone: every row then goes through the same products in the same order.
    ``config`` says how work is cut; by platform if None.
    """
    m = metadata
    batch = Batch(m.q_starts, m.q_lens, m.kv_lens, m.kv_offsets, m.kv_stride)
    rules = Rules(spec.scale, causal, spec.window, spec.soft_cap, tree_mask)
    keys = m.page_table.shape[1] * pool.page_size
    q = jnp.concatenate([q_latent, q_rope], axis=-1)

    def run(config: Config):
        # Whole pages, so that a block is a few contiguous ranges of memory.
        block = pool.page_size * max(1, config.block_keys // pool.page_size)
        if not batch_invariant:
            block = min(block, keys)
        plan = make_plan(
            config,
            batch=m.q_lens.shape[0],
            max_q_len=m.max_q_len,
            heads=spec.num_heads,
            keys=keys,
            block=block,
            tile=1 if batch_invariant else None,
        )
        fetch = _fetch(pool, m.page_table, layer, block)
        return blockwise_attention(q, fetch, (1, pool.kv_lora_rank), batch, plan, rules)

    out, lse = by_platform(config, run)
    return out.astype(out_dtype), lse


def _fetch(pool, page_table, layer, block: int):
    pages = block // pool.page_size

    def fetch(requests, first_keys, seen):
        columns = first_keys[:, None] + jnp.arange(0, block, pool.page_size, dtype=jnp.int32)[None]
        physical, _ = pool.placement.locate_table_slots(page_table[requests], columns, layer)
        if requests.shape[0] == 1 and pages <= 16:
            rows = jnp.concatenate([lax.dynamic_index_in_dim(pool.data, p) for p in physical[0]], axis=1)
        else:
            rows = pool.data[physical].reshape(requests.shape[0], block, -1)
        keys = pool.decode(rows)
        keys = jnp.where(seen[:, :, None], keys, jnp.zeros((), keys.dtype))[:, :, None]
        return keys, keys[..., : pool.kv_lora_rank]

    return fetch
