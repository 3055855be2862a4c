"""The grouped matrix product in Triton without a GPU: interpreted, and compiled for every architecture."""

import jax
import jax.numpy as jnp
import pytest

import triton_host
from mla_attn.dispatch import Device, compiling_for
from mla_attn.ops.grouped_matmul import grouped_matmul
from mla_attn.pallas_kernels.triton.grouped_configs import GroupedConfig, grouped_config, tile_rows
from mla_attn.pallas_kernels.triton.limits import LIMITS
from mla_attn.support import A100, H200
from mla_attn.triton import gpus
from ops.grouped_base import GroupedTests


@triton_host.needs_triton
class TestInterpreted(GroupedTests):
    """Few rows a group, and many."""

    implementation = "triton"
    shapes = ((1, 4, 16, 7), (13, 5, 40, 33), (90, 3, 64, 70), (70, 40, 32, 64))

    @pytest.fixture(autouse=True)
    def interpreter(self, monkeypatch):
        with triton_host.interpreting(monkeypatch, Device("gpu", "9.0", 1)):
            yield


# Rows of a tile, depth, width; of float32 the last tile has at most 64 rows.
VARIANTS = [(16, 2048, 1408), (16, 40, 33), (32, 2048, 1408), (64, 7168, 2048), (128, 2048, 1408), (128, 2048, 7)]


@triton_host.needs_triton
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("target", LIMITS)
def test_machine_code(target, dtype):
    """Within the limits, nothing spilled; no float32 product is made of TF32 numbers."""
    from mla_attn.pallas_kernels.triton.grouped_matmul import constants_of, grouped_matmul_kernel
    from triton_code import compiled

    limits, itemsize = LIMITS[target], jnp.dtype(dtype).itemsize
    for rows, depth, width in VARIANTS:
        rows = min(rows, 64) if itemsize == 4 else rows
        config = grouped_config(target, rows=rows, tiles=64, width=width, itemsize=itemsize, cores=132)
        constants = constants_of(config, (64, depth, width))
        sizes = {"constants": constants, "warps": config.warps, "stages": config.stages}
        taken = compiled(grouped_matmul_kernel, target, (dtype, dtype, "int32", "float32"), **sizes)
        assert taken.shared <= config.shared <= limits.shared
        assert taken.registers <= limits.registers and taken.spills == 0, (config, depth, width)
        assert "tf32" not in taken.assembly and "xf32" not in taken.assembly


@pytest.mark.parametrize("device", [A100, H200], ids=lambda device: device.compute_capability)
@pytest.mark.parametrize("dtype, shape", [("bfloat16", (384, 64, 2048, 1408)), ("float32", (40, 8, 40, 33))])
def test_lowered(device, dtype, shape):
    """Through jax-triton, one kernel: where a GPU plugin is installed, which needs no GPU for it."""
    if (reason := gpus.missing()) is not None:
        pytest.skip(reason)
    (num_rows, groups, depth, width), struct = shape, jax.ShapeDtypeStruct
    arrays = struct((num_rows, depth), dtype), struct((groups, depth, width), dtype), struct((groups,), "int32")
    with compiling_for(device):
        traced = jax.jit(lambda *a: grouped_matmul(*a, implementation="triton")).trace(*arrays)
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@triton_kernel_call") == 1


@pytest.mark.parametrize(
    "num_rows, groups, want", [(1, 256, 16), (12 * 64, 64, 16), (64 * 13, 64, 32), (64 * 97, 64, 128)]
)
def test_rows_of_a_tile(num_rows, groups, want):
    assert tile_rows(num_rows, groups, itemsize=2) == want
    assert tile_rows(num_rows, groups, itemsize=4) == min(want, 64)


@pytest.mark.parametrize("target", LIMITS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_call_has_a_config(target, itemsize):
    """Few output tiles are narrower, so that there are enough for the multiprocessors."""
    for rows in (16, 32, 64, 128)[: 3 if itemsize == 4 else 4]:
        for width in (1, 7, 64, 1408, 8192):
            sizes = {"rows": rows, "width": width, "itemsize": itemsize, "cores": 132}
            few, many = (grouped_config(target, tiles=n, **sizes) for n in (1, 10**4))
            assert few.block_n <= many.block_n < max(2 * width, 32)
            assert many.shared <= LIMITS[target].shared


@pytest.mark.parametrize(
    "change, message",
    [
        ({"target": "sm_70"}, "target='sm_70' must be one of sm_80"),
        ({"itemsize": 1}, "itemsize=1 must be one of 2, 4"),
        ({"tile_rows": 8}, "tile_rows=8 must be one of 16, 32, 64, 128"),
        ({"block_n": 192}, "block_n=192 must be one of"),
        ({"stages": 0}, "stages=0 must be one of 1"),
        (
            {"block_n": 256, "tile_rows": 128, "stages": 5},
            "stages=5 take 245760 bytes of shared memory, must be at most",
        ),
    ],
)
def test_configs_that_there_are_not(change, message):
    sizes = {"target": "sm_90", "itemsize": 2, "tile_rows": 64, "block_n": 64, "block_k": 64, "warps": 4, "stages": 3}
    with pytest.raises(ValueError, match=message):
        GroupedConfig(**sizes | change)
