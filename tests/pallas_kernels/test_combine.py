"""The combine against a plain sum, in the interpreter of Mosaic GPU kernels: it needs no GPU, and looks for races.

Run as a program of its own, for the interpreter wants a thread for each thread block, and the number of threads is
settled when JAX starts.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

HEADS, RANK = 8, 256
# KV splits of a row tile: full batches of loads, the last of them short or not, and nothing but a short one.
SPLITS = (4, 33, 2, 17, 8, 5, 16)
ROWS = (8, 8, 5, 8, 1, 8, 8)


def work(invariant: bool, untouched: int, blocks: int):
    """A plan of a row tile for each of ``SPLITS`` and some rows that are not split, and its list."""
    from mla_attn.pallas_kernels.work_list import COMBINED, Plan

    batch = len(SPLITS) + untouched
    plan = Plan(batch, batch * HEADS, HEADS, HEADS, blocks, 1024, combine_all=True, invariant=invariant)
    numbers, first = np.zeros(plan.size, np.int32), 0
    numbers[:2] = 0, len(SPLITS)
    for n, (splits, rows) in enumerate(zip(SPLITS, ROWS, strict=True)):
        at = plan.combined_at + n * len(COMBINED)
        numbers[at : at + len(COMBINED)] = (n + untouched) * HEADS, first, splits, rows
        first += splits
    return plan, numbers


def expected(plan, numbers, partial, partial_lse, out, lse):
    """By hand: every row of every row tile, from its own KV splits."""
    out, lse = out.astype(np.float64), lse.astype(np.float64)
    tiles = numbers[plan.combined_at :].reshape(-1, 4)[: numbers[1]]
    for row, first, splits, rows in tiles:
        for n in range(rows):
            terms = [(partial_lse[first + i, n] * np.log(2), partial[first + i, n]) for i in range(splits)]
            total = np.logaddexp.reduce([x for x, _ in terms])
            lse[row + n] = total
            out[row + n] = sum(np.exp(x - total) * v for x, v in terms) if not np.isneginf(total) else 0
    return out, lse, tiles


def check(invariant: bool, untouched: int, blocks: int) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from mla_attn.pallas_kernels.mosaic_gpu.combine import combine

    plan, numbers = work(invariant, untouched, blocks)
    rng = np.random.default_rng(0)
    partial = rng.standard_normal((sum(SPLITS), HEADS, RANK), np.float32)
    partial_lse = 20 * rng.standard_normal((sum(SPLITS), HEADS)).astype(np.float32)
    partial_lse[rng.random(partial_lse.shape) < 0.2] = -np.inf  # rows that see no key of a piece
    partial_lse[:, 3] = -np.inf  # nor of any
    partial[2, 5], partial_lse[2, 5] = np.nan, np.nan  # a row with scores that are NaN: it must not look empty
    before = rng.standard_normal((plan.num_rows, RANK), np.float32), rng.standard_normal(plan.num_rows, np.float32)
    want, want_lse, tiles = expected(plan, numbers, partial, partial_lse, *before)
    arrays = map(jnp.asarray, (numbers, partial, partial_lse, *before))
    got, got_lse = combine(*arrays, plan=plan, interpret=plgpu.InterpretGPUParams(detect_races=True))
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(got_lse, want_lse, rtol=1e-5, atol=1e-5)
    touched = np.concatenate([np.arange(row, row + rows) for row, _, _, rows in tiles])
    others = np.setdiff1d(np.arange(plan.num_rows), touched)
    np.testing.assert_array_equal(np.asarray(got)[others], before[0][others])  # what is not split stays, bit for bit


@pytest.mark.parametrize(
    ("invariant", "untouched", "blocks"),
    [
        (True, 2, 3),  # few thread blocks: each joins several rows, one after the other
        (False, 0, 24),  # many: two share a row
        pytest.param(False, 2, 3, marks=pytest.mark.slow),
        pytest.param(True, 0, 24, marks=pytest.mark.slow),
    ],
)
def test_splits_are_joined_and_nothing_else_is_touched(invariant, untouched, blocks):
    arguments = [sys.executable, __file__, *(str(int(a)) for a in (invariant, untouched, blocks))]
    environment = os.environ | {"NPROC": "16", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "RACE DETECTED" not in ran.stdout


if __name__ == "__main__":
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "lib"))
    import source_tree

    sys.meta_path.insert(0, source_tree.PathFinder)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    check(bool(int(sys.argv[1])), *(int(a) for a in sys.argv[2:]))
