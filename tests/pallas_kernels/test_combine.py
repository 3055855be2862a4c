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

HEADS, RANK, LANES = 8, 256, 24
KV_LENS = (16000, 1, 0, 90, 700)  # the first is split into more pieces than are loaded at a time


def work(invariant: bool, combine_all: bool):
    """A plan and its list for one row of each request."""
    from mla_attn.pallas_kernels.schedule import Plan, work_list

    batch = len(KV_LENS)
    plan = Plan(batch, batch * HEADS, HEADS, HEADS, LANES, 256, combine_all=combine_all, invariant=invariant)
    arrays = (np.arange(batch), np.array([n > 0 for n in KV_LENS]), KV_LENS, np.zeros(batch))
    return plan, work_list(*(jnp.asarray(x, jnp.int32) for x in arrays), plan=plan, max_q_len=1)


def expected(plan, numbers, partial, partial_lse, out, lse):
    """By hand: every row of every split, from its own pieces."""
    out, lse = out.astype(np.float64), lse.astype(np.float64)
    splits = numbers[plan.splits_at :].reshape(-1, 4)[: numbers[1]]
    assert splits[:, 2].max() > (4 if plan.invariant else 16)
    for row, first, pieces, rows in splits:
        for n in range(rows):
            terms = [(partial_lse[first + i, n] * np.log(2), partial[first + i, n]) for i in range(pieces)]
            total = np.logaddexp.reduce([x for x, _ in terms])
            lse[row + n] = total
            out[row + n] = sum(np.exp(x - total) * v for x, v in terms) if np.isfinite(total) else 0
    return out, lse, splits


def check(invariant: bool, combine_all: bool) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from mla_attn.pallas_kernels.mosaic_gpu.combine import combine

    plan, numbers = work(invariant, combine_all)
    rng = np.random.default_rng(0)
    partial = rng.standard_normal((plan.num_partials, HEADS, RANK), np.float32)
    partial_lse = 20 * rng.standard_normal((plan.num_partials, HEADS)).astype(np.float32)
    partial_lse[rng.random(partial_lse.shape) < 0.2] = -np.inf  # rows that see no key of a piece
    partial_lse[:, 3] = -np.inf  # nor of any
    before = rng.standard_normal((plan.num_rows, RANK), np.float32), rng.standard_normal(plan.num_rows, np.float32)
    want, want_lse, splits = expected(plan, np.asarray(numbers), partial, partial_lse, *before)
    got, got_lse = combine(
        numbers, *map(jnp.asarray, (partial, partial_lse, *before)), plan=plan, interpret=plgpu.InterpretGPUParams()
    )
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(got_lse, want_lse, rtol=1e-5, atol=1e-5)
    touched = np.concatenate([np.arange(row, row + rows) for row, _, _, rows in splits])
    others = np.setdiff1d(np.arange(plan.num_rows), touched)
    assert bool(len(others)) != combine_all
    np.testing.assert_array_equal(np.asarray(got)[others], before[0][others])  # what is not split stays, bit for bit


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("combine_all", [False, True])
def test_splits_are_joined_and_nothing_else_is_touched(invariant, combine_all):
    arguments = [sys.executable, __file__, str(int(invariant)), str(int(combine_all))]
    environment = os.environ | {"NPROC": "16", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


if __name__ == "__main__":
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
    import source_tree

    sys.meta_path.insert(0, source_tree.PathFinder)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    check(*(bool(int(a)) for a in sys.argv[1:]))
