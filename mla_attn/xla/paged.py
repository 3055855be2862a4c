"""Blockwise attention over paged rows, whatever they are."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from mla_attn.xla.blockwise import Batch, Config, Rules, blockwise_attention, by_platform, make_plan

# read(physical pages [lanes, n]) -> keys [lanes, n * P, K, D], values [lanes, n * P, K, V]; values may be None where
# they are the first channels of the keys.
Read = Callable[[Array], tuple[Array, Array | None]]


def paged_attention(
    q,
    read: Read,
    values: tuple[int, int],
    pool,
    metadata,
    layer,
    rules: Rules,
    *,
    batch_invariant,
    config: Config | None,
):
    """``(out, lse)``, both float32, of queries [T, H, D] over pages that ``read`` takes; ``values`` is (K, V).

    With ``batch_invariant`` a tile is one query token whatever the call's shape, and keys are cut at multiples of a
    block that depends on the page size alone, from position 0 on: every row then goes through the same products in the
    same order. ``config`` says how work is cut; by platform if None.
    """
    m = metadata
    batch = Batch(m.q_starts, m.q_lens, m.kv_lens, m.kv_offsets, m.kv_stride, m.positions)
    table_keys = m.page_table.shape[1] * pool.page_size

    def run(config: Config):
        # Whole pages: a block is then a few contiguous pieces of memory.
        block = pool.page_size * max(1, config.block_keys // pool.page_size)
        cut, keys = batch, table_keys
        if batch_invariant:  # a table that begins later is cut where a whole one is
            pages = m.kv_offsets // (m.kv_stride * pool.page_size)
            cut = dataclasses.replace(batch, phases=pages % (block // pool.page_size) * pool.page_size)
            keys += block
        else:
            block = min(block, keys)
        plan = make_plan(
            config,
            batch=m.q_lens.shape[0],
            max_q_len=m.max_q_len,
            heads=q.shape[1],
            keys=keys,
            block=block,
            tile=1 if batch_invariant else None,
        )
        fetch = _fetch(read, values[1], pool, m.page_table, layer, block)
        return blockwise_attention(q, fetch, values, cut, plan, rules)

    return by_platform(config, run)


def take_pages(array, physical, token_axis: int = 1):
    """Pages [lanes, n] of an array, each lane's one after the other: [lanes, n * P, ...], or with tokens on axis 2
    [lanes, K, n * P, ...]."""
    lanes, pages = physical.shape
    if lanes == 1 and pages <= 16:
        return jnp.concatenate([lax.dynamic_index_in_dim(array, p) for p in physical[0]], axis=token_axis)
    rows = array[physical]
    shape = list(array.shape)
    shape[0], shape[token_axis] = lanes, pages * shape[token_axis]
    return jnp.moveaxis(rows, 1, token_axis).reshape(shape)


def _fetch(read: Read, v_dim: int, pool, page_table, layer, block: int):
    def fetch(requests, first_keys, seen):
        columns = first_keys[:, None] + jnp.arange(0, block, pool.page_size, dtype=jnp.int32)[None]
        physical, _ = pool.placement.locate_table_slots(page_table[requests], columns, layer)
        keys, values = read(physical)
        seen = seen[:, :, None, None]
        keys = jnp.where(seen, keys, jnp.zeros((), keys.dtype))
        if values is None:
            return keys, keys[..., :v_dim]
        return keys, jnp.where(seen, values, jnp.zeros((), values.dtype))

    return fetch
