"""The contract of ``grouped_matmul``, which every implementation subclasses."""

import jax.numpy as jnp
import numpy as np
import pytest

from groups import KINDS, product, random_sizes
from mla_attn.ops.grouped_matmul import grouped_matmul

TOLERANCE = {"bfloat16": 1e-2, "float16": 1e-2, "float32": 1e-4}  # float32 in TF32 is off by some thousandths


class GroupedTests:
    """One implementation. Subclass as ``Test...`` and set what follows.

    Attributes:
        implementation: its name.
        poison: whether matrices of groups without rows, and rows of no group, may hold NaN: XLA multiplies them by 0.
        shapes: rows M, groups E, depth K and width N of calls that it supports.
    """

    implementation: str
    poison = True
    shapes: tuple[tuple[int, int, int, int], ...] = ((1, 4, 16, 7), (13, 5, 40, 33), (90, 3, 96, 130), (70, 40, 32, 64))

    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("sizes", [(3, 0, 9), (0, 0, 0), (0, 12, 0), (2, 3, 4)])
    def test_runs_of_rows(self, sizes, dtype):
        self.check(12, np.asarray(sizes, np.int32), 8, 5, dtype)

    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("kind", KINDS)
    def test_shapes(self, kind, dtype):
        """Of any size, with groups that begin anywhere and rows after the last one."""
        for seed, (num_rows, num_groups, depth, width) in enumerate(self.shapes):
            sizes = random_sizes(np.random.default_rng(seed), num_rows, num_groups, kind)
            self.check(num_rows, sizes, depth, width, dtype)

    def check(self, num_rows, sizes, depth, width, dtype):
        rng = np.random.default_rng(0)
        rows = rng.standard_normal((num_rows, depth), np.float32)
        weights = rng.standard_normal((len(sizes), depth, width), np.float32)
        if self.poison:
            rows[sizes.sum() :], weights[sizes == 0] = np.nan, np.nan
        rows, weights = jnp.asarray(rows, dtype), jnp.asarray(weights, dtype)
        got = grouped_matmul(rows, weights, jnp.asarray(sizes), implementation=self.implementation)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, product(rows, weights, sizes), atol=TOLERANCE[dtype])
