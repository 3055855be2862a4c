"""``grouped_matmul`` by XLA's ``ragged_dot``."""

import jax
import jax.numpy as jnp


def grouped_matmul(rows, weights, sizes):
    """Multiplies the rows of each group by the group's own matrix: float32 [M, N]."""
    # By default GPUs multiply float32 in TF32.
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.ragged_dot(rows, weights, sizes, precision=precision, preferred_element_type=jnp.float32)
