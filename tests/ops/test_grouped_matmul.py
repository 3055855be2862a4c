"""Which implementation computes a grouped matrix product, and what the portable ones give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernel_calls import needs_kernels
from mla_attn.dispatch import ENVIRONMENT_VARIABLE, Device, compiling_for, current_device
from mla_attn.mosaic_gpu.grouped_matmul import output_tile
from mla_attn.ops.grouped_matmul import grouped_matmul
from mla_attn.support import H200
from mla_attn.triton import gpus
from ops.grouped_base import GroupedTests

KERNEL = "custom_call @mosaic_gpu"


class TestXLA(GroupedTests):
    implementation = "xla"
    poison = False


class TestReference(GroupedTests):
    implementation = "reference"


@pytest.mark.gpu
class TestTriton(GroupedTests):
    """Of every width, and of many rows a group and few; on a GPU."""

    implementation = "triton"
    shapes = (*GroupedTests.shapes, (700, 256, 128, 256), (1000, 4, 200, 700), (3000, 2, 192, 1408))

    @pytest.fixture(autouse=True)
    def launches(self):
        if (reason := gpus.refuses(current_device())) is not None:
            pytest.skip(reason)


def test_the_reference_holds_one_product_at_a_time():
    """Those of all experts of a model would not fit a device; derivatives too."""
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((16, 8), "float32"), ((32, 8, 24), "float32"), ((32,), "int32"))]

    def loss(rows, weights, sizes):
        return grouped_matmul(rows, weights, sizes, implementation="reference").sum()

    for function in (loss, jax.grad(loss, argnums=(0, 1))):
        assert "f32[32,16,24]" not in str(jax.make_jaxpr(function)(*shapes))


def test_no_rows():
    got = grouped_matmul(jnp.zeros((0, 64)), jnp.zeros((3, 64, 64)), jnp.zeros(3, jnp.int32))
    assert got.shape == (0, 64)


def lowered(device=H200, *, num_rows=40, groups=8, depth=128, width=192, dtype="bfloat16") -> str:
    X = jax.ShapeDtypeStruct
    arguments = X((num_rows, depth), dtype), X((groups, depth, width), dtype), X((groups,), jnp.int32)
    with compiling_for(device):
        traced = jax.jit(lambda *a: grouped_matmul(*a)).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_kernels
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
def test_the_kernel_is_taken(sizes):
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


@needs_kernels
@pytest.mark.parametrize("name, count", [("", 1), ("mosaic_gpu", 1), ("xla", 0), ("reference", 0)])
def test_the_environment_variable(name, count, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, name)
    assert lowered().count(KERNEL) == count


@needs_kernels
def test_a_named_kernel_never_falls_back(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "mosaic_gpu")
    with pytest.raises(NotImplementedError, match="mosaic_gpu: float32 rows and weights: must be bfloat16"):
        lowered(dtype="float32")


@pytest.mark.parametrize(
    "rows, weights, sizes, message",
    [
        ((4, 8), (2, 9, 5), (2,), r"rows has shape \(4, 8\), must be \(4, 9\)"),
        ((4,), (2, 8, 5), (2,), r"rows has shape \(4,\), must be \[M, K\]"),
        ((4, 8), (8, 5), (2,), r"weights has shape \(8, 5\), must be \[E, K, N\]"),
        ((4, 8), (2, 8, 5), (1,), r"sizes has shape \(1,\), must be \[G\] with G at least the 2 of weights"),
    ],
)
def test_shapes_that_do_not_fit(unchecked, rows, weights, sizes, message):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(jnp.zeros(rows), jnp.zeros(weights), jnp.zeros(sizes, jnp.int32))


def test_types_that_do_not_fit(unchecked):
    rows, weights, sizes = jnp.zeros((4, 8)), jnp.zeros((2, 8, 5)), jnp.zeros(2, jnp.int32)
    eight = jnp.float8_e4m3fn
    for arguments, message in (
        ((rows.astype(eight), weights.astype(eight), sizes), "rows has dtype float8_e4m3fn, must be a floating dtype"),
        ((rows, weights.astype(jnp.bfloat16), sizes), "weights has dtype bfloat16, must be that of rows, float32"),
        ((rows, weights, sizes.astype(jnp.int8)), "sizes has dtype int8, must be int32"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_matmul(*arguments)


@pytest.mark.parametrize(
    "num_rows, groups, width, want",
    [
        (6, 64, 1408, (64, 64)),  # 132 tiles, a wave of half the width
        (6, 64, 2048, (64, 128)),  # 96 tiles instead of two waves of 192
        (384, 64, 1408, (64, 128)),
        (3072, 64, 1408, (64, 256)),
        (16384, 64, 1408, (128, 256)),
        (16384, 64, 64, (128, 64)),
        (512, 256, 2048, (64, 128)),
    ],
)
def test_output_tiles(num_rows, groups, width, want):
    assert output_tile(num_rows, groups, width, H200.cores) == want


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_some_of_the_groups(first, implementation):
    """A device's two experts of five: the rows of the others, NaN among them, give zeros."""
    rng = np.random.default_rng(0)
    sizes = np.asarray([2, 0, 3, 4, 1])
    rows, weights = rng.standard_normal((12, 8)).astype(np.float32), rng.standard_normal((2, 8, 5)).astype(np.float32)
    ends = np.cumsum(sizes)
    own = (np.arange(12) >= ends[first] - sizes[first]) & (np.arange(12) < ends[first + 1])
    wanted = np.zeros((12, 5))
    for i in range(2):
        run = slice(ends[first + i] - sizes[first + i], ends[first + i])
        wanted[run] = np.float64(rows[run]) @ weights[i]
    rows[~own] = np.nan

    @jax.jit
    def run(first):
        options = {"first_group": first, "implementation": implementation}
        return grouped_matmul(jnp.asarray(rows), jnp.asarray(weights), jnp.asarray(sizes, jnp.int32), **options)

    np.testing.assert_allclose(run(first), wanted, atol=1e-5)


def test_groups_that_do_not_exist(unchecked):
    rows, weights = jnp.zeros((4, 8)), jnp.zeros((3, 8, 5))
    with pytest.raises(ValueError, match=r"sizes has shape \(2,\), must be \[G\] with G at least the 3 of weights"):
        grouped_matmul(rows, weights, jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="first_group=3 must be an integer from 0 to 2"):
        grouped_matmul(rows, weights, jnp.zeros(5, jnp.int32), first_group=3)
