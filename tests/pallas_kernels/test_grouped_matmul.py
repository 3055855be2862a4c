"""The grouped matrix product: its tiles against NumPy; its kernel in the interpreter, on a GPU, and as machine code.

The interpreter runs in a program of its own, for it wants a thread for each warpgroup, and the number of threads is
settled when JAX starts.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aot
from groups import KINDS, product, random_sizes

TILE_ROWS = (64, 128)


# Tiles


# Rows of a tile, and of what its first one is a multiple.
TILES = ((64, 8), (128, 8), (16, 1), (128, 1))


def tiles_of(sizes, num_rows: int, tile_rows: int, aligned: int) -> np.ndarray:
    """Records of the tiles that there are."""
    from mla_attn.pallas_kernels.tile_list import HEADER, RECORD, tile_list

    list_ = tile_list(jnp.asarray(sizes, jnp.int32), num_rows=num_rows, tile_rows=tile_rows, aligned=aligned)
    numbers = np.asarray(list_)
    records = numbers[HEADER:].reshape(-1, len(RECORD))
    assert 0 <= numbers[0] <= len(records)
    return records[: numbers[0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile_rows, aligned", TILES)
@pytest.mark.parametrize("num_rows, num_groups", [(1, 4), (9, 1), (96, 64), (517, 256), (1024, 8)])
def test_tiles_cover_every_row_once(num_rows, num_groups, tile_rows, aligned, kind):
    for seed in range(4):
        sizes = random_sizes(np.random.default_rng(seed), num_rows, num_groups, kind)
        owners = np.full(num_rows, -1)
        tiles = tiles_of(sizes, num_rows, tile_rows, aligned)
        for group, first, begin, end in tiles:
            assert first % aligned == 0 and first <= begin < end <= first + tile_rows
            assert (owners[begin:end] == -1).all()
            owners[begin:end] = group
        want = np.repeat(np.arange(num_groups), sizes)
        assert (owners == np.append(want, np.full(num_rows - len(want), num_groups))).all()
        assert (np.diff(tiles[:, 2]) > 0).all()  # in order: neighbours share a kernel


@pytest.mark.parametrize("tile_rows, aligned", TILES)
@pytest.mark.parametrize("groups, left", [(140, 0), (140, 9), (0, 2)])
def test_the_list_holds_the_most_tiles_that_sizes_may_need(groups, left, tile_rows, aligned):
    """Groups that take two tiles, with one row more than fits one from where they begin; and rows of no group."""
    first = max(aligned - 1, 1)
    sizes = [first] + [tile_rows + (aligned == 1)] * groups
    tiles = tiles_of(sizes, sum(sizes) + left, tile_rows, aligned)
    assert len(tiles) == 1 + 2 * groups + (left > 0)
    assert sum(end - begin for _, _, begin, end in tiles) == sum(sizes) + left


@pytest.mark.parametrize("sizes", [(-3, 5, 2), (3, 90, 2), (2**30, 2**30, 2**29)])
def test_whatever_the_sizes_are_tiles_lie_within_the_rows(sizes):
    tiles = tiles_of(sizes, 20, 64, 8)
    assert (tiles[:, 2] >= 0).all() and (tiles[:, 3] <= 20).all()


# The kernel

# Rows, groups, depth, width, blocks, and what differs in Config.
INTERPRETED = {
    "few rows": (13, 5, 128, 64, 3, {"block_n": 64, "stages": 2}),
    "unaligned groups": (90, 3, 192, 128, 2, {"block_n": 64, "stages": 3}),
    "two warpgroups": (200, 3, 128, 128, 2, {"tile_rows": 128, "block_n": 128, "stages": 2}),
    "a part of the columns": (40, 2, 64, 192, 3, {"block_n": 128, "stages": 2}),
}


def check_interpreted(name: str) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from mla_attn.pallas_kernels.mosaic_gpu import grouped_matmul as module
    from mla_attn.pallas_kernels.tile_list import tile_list

    num_rows, num_groups, depth, width, blocks, options = INTERPRETED[name]
    module.store_rows = store_rows_one_by_one
    config, rng = module.Config(**options), np.random.default_rng(0)
    for kind in ("all", "rows of no group"):
        sizes = random_sizes(rng, num_rows, num_groups, kind)
        rows = jnp.asarray(rng.standard_normal((num_rows, depth)), jnp.bfloat16)
        kernels = jnp.asarray(rng.standard_normal((num_groups, depth, width)), jnp.bfloat16)
        tiles = tile_list(jnp.asarray(sizes), num_rows=num_rows, tile_rows=config.tile_rows)
        params = plgpu.InterpretGPUParams(detect_races=True)
        got = module.grouped_matmul(rows, kernels, tiles, config=config, blocks=blocks, interpret=params)
        np.testing.assert_allclose(got, product(rows, kernels, sizes), atol=1e-3)


def store_rows_one_by_one(ref, values, begin, end, width=None):
    """What the interpreter can do of ``store_rows``."""
    from jax.experimental import pallas as pl

    @pl.loop(jnp.maximum(begin, 0), jnp.minimum(end, values.shape[0]))
    def _(row):
        for column in range(0, values.shape[1], 64):

            @pl.when(True if width is None else column < width)
            def _(column=column):
                piece = jax.lax.dynamic_slice(values, (row, jnp.int32(column)), (1, 64))
                ref.at[row, pl.ds(column, 64)][...] = piece[0]


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name):
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1] / "lib"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"NPROC": "16", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    ran = subprocess.run([sys.executable, __file__, name], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "RACE DETECTED" not in ran.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("tile_rows", TILE_ROWS)
@pytest.mark.parametrize("block_n", [64, 128, 256])
@pytest.mark.parametrize(
    "num_rows, num_groups, depth, width",
    [(1, 4, 64, 256), (13, 5, 192, 320), (90, 16, 128, 448), (700, 256, 128, 256), (1000, 4, 192, 704)],
)
def test_on_a_gpu(num_rows, num_groups, depth, width, block_n, tile_rows):
    """Kernels of groups without rows are NaN: they are not looked at."""
    from mla_attn.pallas_kernels.mosaic_gpu.grouped_matmul import Config, grouped_matmul
    from mla_attn.pallas_kernels.tile_list import tile_list

    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs compute capability 9.0")
    config = Config(tile_rows=tile_rows, block_n=block_n)
    for seed, kind in enumerate(KINDS):
        rng = np.random.default_rng(seed)
        sizes = random_sizes(rng, num_rows, num_groups, kind)
        rows = jnp.asarray(rng.standard_normal((num_rows, depth)), jnp.bfloat16)
        kernels = jnp.asarray(rng.standard_normal((num_groups, depth, width)), jnp.bfloat16)
        poisoned = jnp.where((sizes == 0)[:, None, None], jnp.nan, kernels)
        tiles = tile_list(jnp.asarray(sizes), num_rows=num_rows, tile_rows=tile_rows)
        got = grouped_matmul(rows, poisoned, tiles, config=config, blocks=132)
        np.testing.assert_allclose(got, product(rows, kernels, sizes), atol=1e-3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tile_rows": 32}, "tile_rows=32 must be 64 or 128"),
        ({"block_n": 192}, "block_n=192 must be 64, 128 or 256"),
        ({"stages": 1}, "stages=1 must be 2 to"),
        ({"tile_rows": 128, "block_n": 256, "stages": 5}, "stages=5 must be 2 to 4"),
    ],
)
def test_configs_that_there_are_not(options, message):
    from mla_attn.pallas_kernels.mosaic_gpu.grouped_matmul import Config

    with pytest.raises(ValueError, match=message):
        Config(**options)


# Machine code

CALLS = {  # M, E, K, N
    "one token": (6, 64, 2048, 1408),
    "decode": (384, 64, 2048, 1408),
    "prompts": (3072, 64, 2048, 1408),
    "long prompts": (16384, 64, 2048, 1408),
}


@functools.cache
def compiled() -> dict:
    """What ``grouped_aot.py`` prints."""
    return aot.run("grouped_aot.py", json.dumps(CALLS), LD_PRELOAD=str(aot.standin_driver()))


@aot.needs_compiler
@aot.needs_c_compiler
class TestMachineCode:
    @pytest.mark.parametrize("name", CALLS)
    def test_nothing_is_spilled_and_no_product_waits_for_another(self, name):
        [kernel] = compiled()[name]["kernels"]
        assert "grouped_matmul" in kernel["name"]
        assert kernel["spill_stores"] == kernel["spill_loads"] == 0
        assert not kernel["serialised"]

    def test_products_of_the_same_rows_share_a_list(self):
        one, two = compiled()["decode"]["instructions"], compiled()["decode"]["instructions of two"]
        assert two.pop("mosaic_gpu_v2") == 1 + one.pop("mosaic_gpu_v2") == 2
        assert two["fusion"] == one["fusion"] <= 5


if __name__ == "__main__":
    import source_tree

    sys.meta_path.insert(0, source_tree.PathFinder)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    check_interpreted(*sys.argv[1:])
