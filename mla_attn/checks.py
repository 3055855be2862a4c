"""Argument checks of the whole package: static integers, numbers and flags, and the shapes and dtypes of arrays.

Each raises ``ValueError`` with the argument's name, its value and what is allowed. Those that convert return a Python
number or an int32 array.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from mla_attn.text import shown

INT32_MAX = 2**31 - 1
_FLOAT32 = jnp.finfo(jnp.float32)
# With a larger cap, ``score / cap`` of an ordinary score is not a normal float32 and would be flushed to zero.
_MOST_SOFT_CAP = 1e30


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Returns a static integer from ``least`` to ``most`` as a Python integer, because NumPy's products would wrap.

    ``most=None`` means the largest int32, because such integers are combined with int32 arrays. Booleans, integral
    floats, strings and JAX arrays are refused: they are not static integers.
    """
    if type(value) is not int:
        value = int(value) if _is_integer(value) else value
    right_type = isinstance(value, int) and not isinstance(value, bool)
    if not right_type or not least <= value <= (INT32_MAX if most is None else most):
        too_large = most is None and right_type and value > INT32_MAX
        allowed = (
            f"of at least {least}"
            if most is None and not too_large
            else f"from {least} to {INT32_MAX if most is None else most}"
        )
        raise ValueError(f"{name}={shown(value)} must be an integer {allowed}")
    return value


def check_integers(name: str, values: Any) -> list[int]:
    """Returns a sequence of static integers, or an array of one axis, as a list."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, Sequence):
        raise ValueError(f"{name}={shown(values)} must be a sequence of integers")
    if set(map(type, listed)) <= {int}:  # fast path for long prompts
        return list(listed)
    wrong = [value for value in listed if not _is_integer(value)]
    if wrong:
        raise ValueError(f"{name} holds {shown(wrong[0])}, must be a sequence of integers")
    return [int(value) for value in listed]


def check_index(name: str, value: int | Int[Array, ""], least: int, most: int = INT32_MAX) -> int | Int[Array, ""]:
    """Returns one integer, static or an array [], as a Python integer or an int32 array.

    The range of a traced value cannot be checked, so callers must not rely on it.
    """
    if not isinstance(value, jax.Array | np.ndarray):
        return check_integer(name, value, least, most)
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"{name} is {value.dtype}{list(value.shape)}, must be one integer, []")
    if not isinstance(value, jax.core.Tracer):
        check_integer(name, int(value), least, most)
    return as_int32(name, value)


def check_flag(name: str, value: Any) -> bool:
    """Returns a Python or NumPy flag as a Python bool. Other values are refused, because the string "False" is true."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={value!r} must be True or False")
    return bool(value)


def check_number(
    name: str,
    value: Any,
    *,
    above: int | float | None = None,
    least: int | float | None = None,
    most: int | float | None = None,
) -> float:
    """Returns a static real number of Python or NumPy as a Python number.

    It must be finite in float32, and 0 or at least the smallest normal number, because devices flush smaller ones to 0.

    Args:
        name: the argument's name.
        value: the argument's value; booleans, strings and JAX arrays are refused.
        above: exclusive lower bound, if any.
        least: inclusive lower bound, if any.
        most: inclusive upper bound, if any.
    """
    number = _as_float(value)
    held = number == 0 or float(_FLOAT32.tiny) <= abs(number) <= float(_FLOAT32.max)  # false for NaN
    bounds = [
        # A value that rounds to the bound in float32 is not above it.
        (above is None or (held and np.float32(number) > above), f"above {above}"),
        (least is None or number >= least, f"of at least {least}"),
        (most is None or number <= most, f"of at most {most}"),
    ]
    if not (held and all(inside for inside, _ in bounds)):
        given = [text for (_, text), bound in zip(bounds, (above, least, most), strict=True) if bound is not None]
        allowed = " ".join(["a finite number", " and ".join(given)]).strip()
        raise ValueError(f"{name}={shown(value)} must be {allowed}, as float32")
    return number


def check_scale(scale: Any) -> float:
    """Returns a softmax scale, which must be positive."""
    return check_number("scale", scale, above=0)


def check_window(window: Any) -> int | None:
    """Returns a sliding window, which counts the row's own key; None for none."""
    return None if window is None else check_integer("window", window, 1, INT32_MAX)


def check_soft_cap(soft_cap: Any) -> float | None:
    """Returns a cap of scores, ``cap * tanh(score / cap)``; None for no cap, also if it is infinite."""
    if soft_cap is None or _as_float(soft_cap) == math.inf:
        return None
    return check_number("soft_cap", soft_cap, above=0, most=_MOST_SOFT_CAP)


def check_skip_threshold(skip_threshold: Any) -> float | None:
    """Returns the threshold for leaving key tiles out; None to leave none out."""
    return None if skip_threshold is None else check_number("skip_threshold", skip_threshold, above=0)


def check_array(name: str, array: Any) -> None:
    """Checks that ``array`` is a NumPy or JAX array."""
    if not isinstance(array, jax.Array | np.ndarray):
        raise ValueError(f"{name} is a {type(array).__name__}, must be an array")


def check_shape(name: str, array: Any, shape: tuple[int, ...], meaning: str) -> None:
    """Checks that an array has exactly ``shape``; ``meaning`` describes its axes."""
    check_array(name, array)
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, must be {shape}: {meaning}")


def check_shape_in(name: str, array: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Checks that an array has one of ``shapes``, which are named by the axes that they have."""
    if tuple(array.shape) not in shapes.values():
        allowed = " or ".join(f"{axes} = {shape}" if shape else axes for axes, shape in shapes.items())
        raise ValueError(f"{name} has shape {tuple(array.shape)}, must be {allowed}")


def check_type(name: str, array: Any, kind: Any) -> None:
    """Checks that an array's dtype is of ``kind``. float8 does not count as ``jnp.floating``: it needs a scale."""
    if kind is jnp.floating and not _is_floating(array.dtype):
        raise ValueError(f"{name} has dtype {array.dtype}, must be a floating dtype of at least 16 bits")
    if not jnp.issubdtype(array.dtype, kind):
        raise ValueError(f"{name} has dtype {array.dtype}, must be {jnp.dtype(kind).name}")


def check_operand(name: str, array: Any) -> None:
    """Checks the dtype of queries, or of keys and values that are not paged: floating or float8_e4m3fn."""
    if array.dtype != jnp.float8_e4m3fn and not _is_floating(array.dtype):
        raise ValueError(
            f"{name} has dtype {array.dtype}, must be a floating dtype of at least 16 bits or float8_e4m3fn"
        )


def check_dtype(name: str, dtype: DTypeLike | None) -> np.dtype:
    """Returns a dtype, given by name or type."""
    try:
        if dtype is not None:  # NumPy would take its default dtype
            return jnp.dtype(dtype)
    except TypeError:
        pass
    raise ValueError(f"{name}={dtype!r} must be a dtype")


def check_out_dtype(out_dtype: DTypeLike | None, name: str = "out_dtype") -> None:
    """Checks the dtype of a result, which may be None."""
    if out_dtype is not None and not _is_floating(check_dtype(name, out_dtype)):
        raise ValueError(f"{name}={jnp.dtype(out_dtype).name} must be a floating dtype of at least 16 bits")


def as_int32(name: str, array: Any) -> Int[Array, "..."]:
    """Returns an array of any integer dtype as int32; values that do not fit become the nearest limit, out of range."""
    check_array(name, array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {array.dtype}, must be an integer dtype")
    held = jnp.iinfo(array.dtype)
    if held.max > INT32_MAX:
        array = array.clip(max(held.min, -INT32_MAX - 1), INT32_MAX)
    return jnp.asarray(array, jnp.int32)


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


def _as_float(value: Any) -> float:
    """``value`` as a float; NaN if it is not a real number or too large."""
    try:
        return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan
