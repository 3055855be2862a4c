"""Which implementation serves a grouped matrix product, and what the portable one gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.dispatch import ENVIRONMENT_VARIABLE, H200, Device, compiling_for
from mla_attn.ops.grouped_matmul import _shape_of_units, grouped_matmul

KERNEL = "custom_call @mosaic_gpu"
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [(3, 0, 9), (0, 0, 0), (0, 12, 0), (2, 3, 4)])
def test_runs_of_rows(sizes, dtype):
    rng = np.random.default_rng(0)
    rows, kernels = jnp.asarray(rng.standard_normal((12, 8)), dtype), jnp.asarray(rng.standard_normal((3, 8, 5)), dtype)
    got, start = grouped_matmul(rows, kernels, jnp.asarray(sizes, jnp.int32)), 0
    assert got.dtype == jnp.float32
    for kernel, size in zip(kernels, sizes, strict=True):
        run = slice(start, start + size)
        np.testing.assert_allclose(got[run], np.float64(rows[run]) @ np.float64(kernel), atol=TOLERANCE[dtype])
        start += size
    assert (got[start:] == 0).all()


def test_no_rows():
    got = grouped_matmul(jnp.zeros((0, 64)), jnp.zeros((3, 64, 64)), jnp.zeros(3, jnp.int32))
    assert got.shape == (0, 64)


def lowered(device=H200, *, num_rows=40, groups=8, depth=128, width=192, dtype="bfloat16") -> str:
    X = jax.ShapeDtypeStruct
    arguments = X((num_rows, depth), dtype), X((groups, depth, width), dtype), X((groups,), jnp.int32)
    with compiling_for(device):
        traced = jax.jit(lambda *a: grouped_matmul(*a)).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_rows": 1},
        {"num_rows": 2000, "groups": 1},
        {"groups": 256, "width": 64},
        {"num_rows": 3001, "groups": 7},
    ],
    ids=str,
)
def test_the_kernel_serves(sizes):
    assert lowered(**sizes).count(KERNEL) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        {"depth": 96},
        {"width": 96},
        {"dtype": "float32"},
        {"num_rows": 0},
        {"device": Device("cpu")},
        {"device": Device("gpu", "10.0", 148)},
    ],
    ids=str,
)
def test_all_else_is_left_to_xla(sizes):
    assert KERNEL not in lowered(**sizes)


def test_a_misspelt_name(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "mosiac_gpu")
    with pytest.raises(ValueError, match=r"mosiac_gpu.* must be one of"):
        lowered()


@pytest.mark.parametrize("name, count", [("", 1), ("mosaic_gpu", 1), ("xla", 0), ("reference", 0)])
def test_the_environment_variable(name, count, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, name)
    assert lowered().count(KERNEL) == count


@pytest.mark.parametrize(
    "num_rows, groups, width, want",
    [
        (6, 64, 1408, (64, 64)),  # 132 units, a round of half the width
        (6, 64, 2048, (64, 128)),  # 96 units instead of two rounds of 192
        (384, 64, 1408, (64, 128)),
        (3072, 64, 1408, (64, 256)),
        (16384, 64, 1408, (128, 256)),
        (16384, 64, 64, (128, 64)),
        (512, 256, 2048, (64, 128)),
    ],
)
def test_the_shape_of_units(num_rows, groups, width, want):
    assert _shape_of_units(num_rows, groups, width, H200.cores) == want
