"""``mla-attn bench ops --check``: whether results are right on this machine, for its owner and for a bug report."""

import functools
import importlib.metadata
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mla_attn.bench.machine import machine
from mla_attn.bench.ops.problem import Problem, error_shares, expected, make_problem
from mla_attn.bench.ops.run import spec_of
from mla_attn.bench.ops.shapes import Shape
from mla_attn.ops import gqa_attention, mla_attention

_PACKAGES = ("triton", "jax-triton")


def check(
    shapes: Sequence[Shape], implementations: Sequence[str], *, latent: tuple[int, int], head_dim: int, **sizes
) -> bool:
    """Prints versions, and for each shape and implementation "pass", a refusal, or the first wrong row; whether none
    is wrong or fails.

    Args:
        shapes: calls to check.
        implementations: names from ``dispatch.NAMES``.
        latent, head_dim: channels of MLA, and of a head of GQA.
        sizes: the other arguments of ``make_problem``.
    """
    versions = {**machine(), **{name: _version(name) for name in _PACKAGES}}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    right = True
    for shape in shapes:
        problem = make_problem(shape, spec_of(shape, latent, head_dim), **sizes)
        layer = problem.pool.num_layers - 1
        want = expected(problem, layer)
        for name in implementations:
            try:
                answer = _answer(_attend(problem, layer, name), want, sizes["dtype"])
            except NotImplementedError as error:
                answer = f"refused: {error}"
            except Exception as error:  # what a compiler or a driver raises is what a report is for
                answer = f"failed: {type(error).__name__}: {error}"
            right &= answer == "pass" or answer.startswith("refused")
            print(f"{shape.name} {name}: {answer}", flush=True)
    return right


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _attend(problem: Problem, layer: int, implementation: str) -> tuple[jax.Array, jax.Array]:
    op = mla_attention if problem.shape.kv_heads is None else gqa_attention
    call = functools.partial(op, spec=problem.spec, layer=layer, return_lse=True, implementation=implementation)
    return jax.block_until_ready(jax.jit(call)(*problem.arguments))


def _answer(outputs, want, dtype) -> str:
    shares = error_shares(outputs, want, jnp.dtype(dtype))
    for row, head in np.ndindex(len(want.rows), want.lse.shape[1]):
        for name, share in shares.items():
            if not share[row, head] <= 1:  # NaN is wrong
                return f"wrong: row {want.rows[row]}, head {head}: {name} error is {share[row, head]:.3g} tolerances"
    return "pass"
