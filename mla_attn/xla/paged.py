"""Blockwise attention over paged rows of any kind."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from mla_attn.xla.blockwise import Batch, Config, Rules, blockwise_attention, by_platform, make_plan

# read(physical pages [lanes, n]) -> keys [lanes, n * P, K, D], values [lanes, n * P, K, V]; values may be None if
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
    factors=None,
):
    """Attention of queries [T, H, D] over pages from ``read``: ``(out, lse)``, both float32; ``values`` is (K, V).

    ``factors`` are those of ``blockwise_attention``.

    With ``batch_invariant`` a tile is always one query token, and blocks begin at multiples of a size that depends only
    on the page size, counted from position 0: the products of a row, and their order, are then the same in every batch.
    ``config`` has the target sizes; None for those of the platform.
    """
    m = metadata
    batch = Batch(m.q_starts, m.q_lens, m.kv_lens, m.kv_offsets, m.kv_stride, m.positions)
    table_keys = m.page_table.shape[1] * pool.page_size

    def run(config: Config):
        # A block is a number of whole pages, each of them contiguous in memory.
        block = pool.page_size * max(1, config.block_keys // pool.page_size)
        cut, keys = batch, table_keys
        if batch_invariant:  # blocks begin at the same positions in a table with kv_offsets
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
        return blockwise_attention(q, fetch, values, cut, plan, rules, factors)

    return by_platform(config, run)


def take_pages(array, physical, token_axis: int = 1):
    """Gathers pages [lanes, n] of an array and joins each lane's along the axis of tokens: [lanes, ..., n * P, ...]."""
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
