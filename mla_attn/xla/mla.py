"""Absorbed multi-head latent attention over a paged cache in plain JAX: bounded memory, runs anywhere."""

import jax.numpy as jnp
from jax import lax

from mla_attn.xla.blockwise import Batch, Rules, block_keys, blockwise_attention, make_plan


def mla_attention(q_latent, q_rope, pool, metadata, spec, *, layer, causal, tree_mask, batch_invariant, out_dtype):
    """``(out float32 [T, H, R], lse float32 [T, H])``; products in the pool's dtype, sums in float32.

    With ``batch_invariant`` a tile is one query token whatever the call's shape, and keys are cut at multiples of a
    block that depends on the page size alone: every row then goes through the same products in the same order.
    """
    del out_dtype  # the result is float32
    m = metadata
    batch = Batch(m.q_starts, m.q_lens, m.kv_lens, m.kv_offsets, m.kv_stride)
    rules = Rules(spec.scale, causal, spec.window, spec.soft_cap, tree_mask)
    slots = m.page_table.shape[1] * pool.page_size
    q = jnp.concatenate([q_latent, q_rope], axis=-1)

    def run(q, *, parallel):
        # Whole pages: a block is then a few contiguous pieces of memory.
        block = pool.page_size * max(1, block_keys(parallel=parallel) // pool.page_size)
        if not batch_invariant:
            block = min(block, slots)
        tile = 1 if batch_invariant else None
        plan = make_plan(m.q_lens.shape[0], m.max_q_len, spec.num_heads, slots, block, parallel=parallel, tile=tile)
        return blockwise_attention(
            q, _fetch(pool, m.page_table, layer, block), (1, pool.kv_lora_rank), batch, plan, rules
        )

    return lax.platform_dependent(q, cpu=lambda q: run(q, parallel=False), default=lambda q: run(q, parallel=True))


def _fetch(pool, page_table, layer, block: int):
    pages = block // pool.page_size

    def fetch(requests, first_slots, seen):
        columns = first_slots[:, None] + jnp.arange(0, block, pool.page_size, dtype=jnp.int32)[None]
        physical, _ = pool.placement.locate_table_slots(page_table[requests], columns, layer)
        if requests.shape[0] == 1 and pages <= 16:
            rows = jnp.concatenate([lax.dynamic_index_in_dim(pool.data, p) for p in physical[0]], axis=1)
        else:
            rows = pool.data[physical].reshape(requests.shape[0], block, -1)
        keys = pool.decode(rows)
        keys = jnp.where(seen[:, :, None], keys, jnp.zeros((), keys.dtype))[:, :, None]
        return keys, keys[..., : pool.kv_lora_rank]

    return fetch
