"""Queries and other operands of attention in float8."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from mla_attn.cache.formats import row_scale, saturated
from mla_attn.checks import check_array, check_type


def quantize_queries(*parts: Float[Array, "T H _"]) -> tuple[Float[Array, "T H ..."], ...]:
    """The parts of queries in float8_e4m3fn, and the scale that all parts of a row and head share.

    The scale is the largest number of the row and head divided by 448, 1 where all are 0. Position-dependent scaling
    of queries (``QueryScaling``) comes before. NaN stays NaN; infinity is clipped to the largest number.

    Args:
        parts: ``q_latent, q_rope`` of ``mla_attention``, or ``q`` of ``gqa_attention``; [T, H, ...], floating.

    Returns:
        ``(*quantized, q_scale)``: each part in float8_e4m3fn with its shape, and ``q_scale`` float32 [T, H].

    Raises:
        ValueError: no part, or parts of other types or with rows and heads that differ.
    """
    if not parts:
        raise ValueError("quantize_queries() needs the parts of queries, [T, H, ...] each")
    for i, part in enumerate(parts):
        name = f"parts[{i}]"
        check_array(name, part)
        check_type(name, part, jnp.floating)
        if part.ndim != 3 or part.shape[:2] != parts[0].shape[:2]:
            raise ValueError(f"{name} has shape {tuple(part.shape)}, must be [T, H, ...] with T and H of all parts")
    rows = jnp.concatenate(parts, axis=-1).astype(jnp.float32)
    largest = jnp.where(jnp.isnan(rows), 0.0, jnp.abs(rows)).max(axis=-1, initial=0.0)
    scale = row_scale(largest, jnp.float8_e4m3fn)
    quantized = (quantize(part, scale[:, :, None]) for part in parts)
    return *quantized, scale


def quantize(x: Float[Array, "..."], scale: Float[Array, "..."] | float) -> Float[Array, "..."]:
    """``x / scale`` in float8_e4m3fn, computed in float32: rounded to nearest, clipped to 448; NaN stays NaN."""
    return saturated(x.astype(jnp.float32) / scale, jnp.float8_e4m3fn)
