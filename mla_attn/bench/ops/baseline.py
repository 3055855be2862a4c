"""The baseline, a direct JAX implementation: gather all keys of the padded page tables, then one softmax.

Its results are correct, even with NaN in unused rows; it computes in the pool's dtype with float32 sums. But its time
and memory grow with the width of the page table, not with the tokens: it materializes ``[B, W * P, C]`` rows and
``[B, S, H, W * P]`` scores.
"""

import jax.numpy as jnp
from jax import lax

from mla_attn.names import DENSE_GATHER

NAME = DENSE_GATHER


def dense_gather(q_latent, q_rope, pool, metadata, spec, *, layer):
    """Attention of a dense block of S causal rows per request: ``(out [T, H, R], lse float32 [T, H])``."""
    m = metadata
    batch, width = m.page_table.shape
    pages = pool.placement.physical_pages(jnp.clip(m.page_table, 0, pool.num_pages - 1), layer)
    slots = jnp.arange(width * pool.page_size, dtype=jnp.int32)
    held = (slots[None] < m.kv_lens[:, None])[..., None]
    rows = jnp.where(held, pool.data[pages].reshape(batch, slots.shape[0], -1), 0)
    q = jnp.concatenate([q_latent, q_rope], axis=-1).reshape(batch, m.max_q_len, spec.num_heads, -1)
    at = (m.kv_lens - m.q_lens)[:, None] + jnp.arange(m.max_q_len, dtype=jnp.int32)[None]
    visible = (slots[None, None] <= at[..., None])[:, :, None]

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
