"""The baseline, a direct JAX implementation: gather all keys of the padded page tables, then one softmax.

Its results are correct, even with NaN in unused rows; it computes in the pool's dtype with float32 sums. But its time
and memory grow with the width of the page table, not with the tokens: it materializes ``[B, W * P, C]`` rows and
``[B, S, H, W * P]`` scores.
"""

import jax.numpy as jnp
from jax import lax

from mla_attn.names import DENSE_GATHER

NAME = DENSE_GATHER


def _check(pool) -> None:
    if pool.format.storage_dtype != pool.format.dtype:
        raise NotImplementedError(f"a {pool.format.name} pool")


def _visible(m, slots):
    """Which slots of its table each row sees: [B, S, 1, slots]."""
    at = (m.kv_lens - m.q_lens)[:, None] + jnp.arange(m.max_q_len, dtype=jnp.int32)[None]
    return (slots[None, None] <= at[..., None])[:, :, None]


def dense_gather_gqa(q, pool, metadata, spec, *, layer):
    """Grouped-query attention, as ``dense_gather``: ``(out [T, H, V], lse float32 [T, H])``."""
    _check(pool)
    m, (keys, values) = metadata, pool.arrays
    batch, width = m.page_table.shape
    pages = pool.placement.physical_pages(jnp.clip(m.page_table, 0, pool.num_pages - 1), layer)
    slots = jnp.arange(width * pool.page_size, dtype=jnp.int32)
    held = (slots[None] < m.kv_lens[:, None])[..., None, None]
    shape = (batch, slots.shape[0], spec.num_kv_heads, -1)
    k, v = (jnp.where(held, array[pages].reshape(shape), 0) for array in (keys, values))
    grouped = q.reshape(batch, m.max_q_len, spec.num_kv_heads, -1, spec.head_dim)

    options = {
        "precision": lax.Precision.HIGHEST if k.dtype == jnp.float32 else None,
        "preferred_element_type": jnp.float32,
    }
    scores = spec.scale * jnp.einsum("bskgd,bmkd->bskgm", grouped, k, **options)
    scores = jnp.where(_visible(m, slots)[:, :, :, None], scores, -jnp.inf)
    largest = scores.max(axis=-1, keepdims=True)
    p = jnp.exp(scores - largest)
    l = p.sum(axis=-1, keepdims=True)
    out = jnp.einsum("bskgm,bmkv->bskgv", p.astype(k.dtype), v, **options) / l
    lse = (largest + jnp.log(l))[..., 0]
    return out.reshape(*q.shape[:2], spec.v_head_dim).astype(q.dtype), lse.reshape(q.shape[:2])


def dense_gather(q_latent, q_rope, pool, metadata, spec, *, layer):
    """Attention of a dense block of S causal rows per request: ``(out [T, H, R], lse float32 [T, H])``."""
    _check(pool)
    m = metadata
    batch, width = m.page_table.shape
    pages = pool.placement.physical_pages(jnp.clip(m.page_table, 0, pool.num_pages - 1), layer)
    slots = jnp.arange(width * pool.page_size, dtype=jnp.int32)
    held = (slots[None] < m.kv_lens[:, None])[..., None]
    rows = jnp.where(held, pool.data[pages].reshape(batch, slots.shape[0], -1), 0)
    q = jnp.concatenate([q_latent, q_rope], axis=-1).reshape(batch, m.max_q_len, spec.num_heads, -1)
    visible = _visible(m, slots)

    options = {
        "precision": lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None,
        "preferred_element_type": jnp.float32,
    }
    scores = jnp.where(visible, spec.scale * jnp.einsum("bshc,bmc->bshm", q, rows, **options), -jnp.inf)
    m = scores.max(axis=-1, keepdims=True)
    p = jnp.exp(scores - m)
    l = p.sum(axis=-1, keepdims=True)
    values = rows[..., : spec.kv_lora_rank]
    out = jnp.einsum("bshm,bmr->bshr", p.astype(rows.dtype), values, **options) / l
    lse = (m + jnp.log(l))[..., 0]
    return out.reshape(q_latent.shape).astype(q_latent.dtype), lse.reshape(q_latent.shape[:2])
