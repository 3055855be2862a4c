"""The specification of ``grouped_matmul``: rows of each group times the group's own matrix."""

import jax
import jax.numpy as jnp
from jax.lax import Precision

from mla_attn.varying import vary_together


def grouped_matmul(rows, weights, sizes):
    """Multiplies all rows by one matrix after the other, and keeps the product of each row's group: float32 [M, N]."""
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)

    def add_group(total, group):
        matrix, end, size = group
        own = ((row >= end - size) & (row < end))[:, None]
        # Masked before the product too, because the derivative multiplies other groups' rows, which may be NaN, by 0.
        x = jnp.where(own, rows.astype(jnp.float32), 0.0)
        product = jnp.matmul(x, matrix.astype(jnp.float32), precision=Precision.HIGHEST)
        return total + jnp.where(own, product, 0.0), None

    # A loop over groups, because all products together, [E, M, N], would take gigabytes for a model's experts.
    total = vary_together(jnp.zeros((rows.shape[0], weights.shape[2]), jnp.float32), like=(rows, weights, sizes))
    return jax.lax.scan(add_group, total, (weights, ends, sizes))[0]
