"""Argument checks: what is refused, by name, and what Python's and NumPy's values become."""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn import checks

INT32 = np.iinfo(np.int32)
NO_NUMBERS = ["3", None, True, np.bool_(True), 1j, np.array(3), [3], b"3"]


@pytest.mark.parametrize("value", [*NO_NUMBERS, 3.0, np.float32(3), math.nan, 0, 6, -(2**70)])
def test_what_is_no_integer(value, unchecked):
    with pytest.raises(ValueError, match=r"(?s)size=.* must be an integer from 1 to 5"):
        checks.check_integer("size", value, 1, 5)


@pytest.mark.parametrize("value", ["False", None, 0, 1, 1.0, [True], np.array(True)], ids=repr)
def test_what_is_no_flag(value, unchecked):
    with pytest.raises(ValueError, match=r"(?s)causal=.* must be True or False"):
        checks.check_flag("causal", value)


def test_arrays_of_jax_are_no_static_values(unchecked):
    with pytest.raises(ValueError, match=r"causal=Array\(False.*\) must be True or False"):
        checks.check_flag("causal", jnp.bool_(False))
    for value in (jnp.int32(3), jnp.float32(3)):
        with pytest.raises(ValueError, match=r"size=Array\(3.*\) must be an integer from 1 to 5"):
            checks.check_integer("size", value, 1, 5)
        with pytest.raises(ValueError, match=r"share=Array\(3.*\) must be a finite number"):
            checks.check_number("share", value)


def test_flags_become_pythons():
    assert checks.check_flag("causal", True) is True and checks.check_flag("causal", np.bool_(False)) is False


def test_integers_become_pythons():
    """A product of NumPy's int8 would wrap."""
    got = checks.check_integer("size", np.int8(100), 1)
    assert type(got) is int and got * 100 == 10_000
    assert [type(n) for n in checks.check_integers("sizes", np.array([1, 2]))] == [int, int]


@pytest.mark.parametrize("value", [*NO_NUMBERS, math.nan, math.inf, -math.inf, 1e39, -1e39, 10**400, 1e-39, 1e-50, -1])
def test_what_is_no_number(value, unchecked):
    """1e39 would be infinite in float32, 1e-39 is flushed to zero by devices."""
    with pytest.raises(ValueError, match=r"(?s)share=.* must be a finite number of at least 0 and of at most 4e\+38"):
        checks.check_number("share", value, least=0, most=4e38)


@pytest.mark.parametrize("value", [0, 1, 0.1, 3e38, 1.2e-38, np.float32(0.1), np.int8(3), fractions.Fraction(1, 3)])
def test_numbers_become_pythons(value):
    """NumPy's float64 would promote what it is multiplied with."""
    got = checks.check_number("share", value, least=0)
    assert type(got) is float and got == float(value)


def test_bounds_of_numbers():
    assert checks.check_number("p", 1, above=0, most=1) == 1
    for value, bounds in ((0, {"above": 0}), (1.5, {"most": 1}), (2, {"above": 2}), (1 + 1e-12, {"above": 1})):
        with pytest.raises(ValueError, match=f"p={value} must be a finite number"):
            checks.check_number("p", value, **bounds)


def test_soft_caps_and_windows():
    """An infinite cap is none; one so large that scores over it are flushed to zero is refused."""
    for none in (None, math.inf, np.float32("inf")):
        assert checks.check_soft_cap(none) is None
    assert checks.check_soft_cap(1e30) == 1e30 and checks.check_window(None) is None
    assert checks.check_window(2**31 - 1) == 2**31 - 1
    for cap in (1e38, 0, -math.inf, "1", jnp.float32(math.inf)):
        with pytest.raises(ValueError, match=r"(?s)soft_cap=.* must be a finite number above 0"):
            checks.check_soft_cap(cap)
    for window in (2**31, 0, 1.5, True):
        with pytest.raises(ValueError, match=f"window={window} must be an integer from 1 to 2147483647"):
            checks.check_window(window)


@pytest.mark.parametrize("kind", [int, np.int16, np.array, jnp.int32, jnp.uint8])
def test_an_index_is_checked_where_it_is_known(kind, unchecked):
    value = kind(2)
    assert checks.check_index("step", value, 0, 2) == 2
    with pytest.raises(ValueError, match="step=2 must be an integer from 0 to 1"):
        checks.check_index("step", value, 0, 1)
    traced = jax.jit(lambda step: checks.check_index("step", step, 0, 1))(value)
    assert (traced, traced.dtype) == (2, jnp.int32)


def test_integers_of_any_width_become_int32():
    """Those that do not fit become the nearest limit: they never wrap into a range."""
    with jax.enable_x64(True):
        for dtype in ("int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64"):
            held = np.iinfo(dtype)
            values = np.array([held.min, held.max, 5], dtype)
            for given in (values, jnp.asarray(values)):
                got = checks.as_int32("slots", given)
                assert got.dtype == jnp.int32
                assert got.tolist() == [max(held.min, INT32.min), min(held.max, INT32.max), 5]
    for wrong in (jnp.zeros(2), jnp.zeros(2, bool), [1, 2], 3):
        with pytest.raises(ValueError, match=r"slots (has dtype|is a)"):
            checks.as_int32("slots", wrong)


def test_float8_needs_a_scale(unchecked):
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8):
        with pytest.raises(
            ValueError, match=f"q has dtype {jnp.dtype(dtype).name}, must be a floating dtype of at least 16"
        ):
            checks.check_type("q", np.zeros(2, dtype), jnp.floating)
        with pytest.raises(ValueError, match=f"out_dtype={jnp.dtype(dtype).name} must be a floating dtype"):
            checks.check_out_dtype(dtype)
    for wrong in ("int9", 3, "float8"):
        with pytest.raises(ValueError, match=f"out_dtype={wrong!r} must be a dtype"):
            checks.check_out_dtype(wrong)
    for dtype in (jnp.bfloat16, "float16", np.float32):
        checks.check_out_dtype(dtype)
