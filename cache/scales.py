"""Scales: what FP8 rows are divided by when they are written, and multiplied by when they are read."""

import numbers
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mla_attn.checks import check_array, check_number, check_shape_in, check_type


def make_scale(name: str, value: Any, shapes: dict[str, tuple[int, ...]]) -> Float[Array, "..."]:
    """A pool's scale in float32; 1 if ``value`` is None.

    It is a copy, because a pool is donated together with its scale.

    Args:
        name: the argument's name.
        value: a number, or a floating array.
        shapes: allowed shapes, by the names of their axes.

    Raises:
        ValueError: another shape or type, or a number that is known not to be positive and finite.
    """
    if value is None:
        value = 1.0
    if isinstance(value, numbers.Real):
        return jnp.asarray(check_number(name, value, above=0), jnp.float32)
    check_array(name, value)
    check_shape_in(name, value, shapes)
    check_type(name, value, jnp.floating)
    if not isinstance(value, jax.core.Tracer):
        for number in np.asarray(value, np.float32).ravel().tolist():
            check_number(name, number, above=0)
    return jnp.array(value, jnp.float32)


def check_scale(name: str, scale: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises ValueError unless a pool's scale is float32 of one of these shapes; its values are not checked."""
    check_array(name, scale)
    check_shape_in(name, scale, shapes)
    if scale.dtype != jnp.float32:
        raise ValueError(f"{name} has dtype {scale.dtype}, must be float32")


def scale_of_layer(scale: Float[Array, "..."], layer: int | Int[Array, ""]) -> Float[Array, "..."]:
    """The scale of one layer: itself if it has no axis of layers. A layer that does not exist has that of another."""
    return scale if scale.ndim == 0 else jnp.take(scale, jnp.asarray(layer, jnp.int32), axis=0, mode="clip")
