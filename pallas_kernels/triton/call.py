"""One way to call a Triton kernel from JAX, whichever release of jax-triton is installed."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax


def triton_call(
    kernel: Any,
    arrays: Sequence[jax.Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    *,
    name: str,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    target: str,
    constants: Mapping[str, Any],
) -> list[jax.Array]:
    """Launches ``kernel(*arrays, *outs, **constants)`` and returns the outputs, which the kernel must fill.

    Args:
        kernel: a function under ``triton.jit`` whose parameters are pointers, then ``tl.constexpr``.
        arrays: inputs, each aligned to 16 bytes, as arrays of JAX are.
        outs: shapes and dtypes of the outputs.
        name: the kernel's name in profiles.
        grid: programs along each axis.
        warps, stages: warps of a program, and stages of its pipelined loops.
        target: architecture to compile for, such as sm_90; that of the machine's GPU for AMD.
        constants: values of the kernel's ``tl.constexpr`` parameters.
    """
    import jax_triton  # pyright: ignore[reportMissingImports]

    options = _options(name, grid, warps, stages, target) | {_shapes_argument(): tuple(outs)}
    return list(jax_triton.triton_call(*arrays, kernel=kernel, **options, **constants))


def triton_update(
    kernels: tuple[Any, Any],
    arrays: Sequence[jax.Array],
    updated: Sequence[jax.Array],
    *,
    name: str,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    target: str,
    constants: Mapping[str, Any],
) -> list[jax.Array]:
    """Launches a kernel that changes parts of ``updated``, in place, and returns them; the rest as in ``triton_call``.

    Args:
        kernels: ``kernel(*arrays, *updated, **constants)``, and the same with ``updated`` given twice, of which it
            writes to the second: jax-triton 0.3 passes aliased arrays as inputs and as outputs.
    """
    import jax_triton  # pyright: ignore[reportMissingImports]

    # Barriers, because where results are stacked XLA (jaxlib 0.11.2) would let a kernel write them straight into their
    # slice of the stack, and lose what was already there in place.
    options, (once, twice) = _options(name, grid, warps, stages, target), kernels
    if _shapes_argument() == "out_shape":
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in updated)
        aliases = {len(arrays) + i: i for i in range(len(updated))}
        options |= {"out_shape": shapes, "input_output_aliases": aliases}
        results = jax_triton.triton_call(*arrays, *updated, kernel=twice, **options, **constants)
        return list(jax.lax.optimization_barrier(tuple(results)))
    refs: list[Any] = [jax.new_ref(x) for x in updated]
    jax_triton.triton_call(*arrays, *refs, kernel=once, **options, out_type=(), **constants)
    return list(jax.lax.optimization_barrier(tuple(ref[...] for ref in refs)))


def _options(name, grid, warps, stages, target) -> dict[str, Any]:
    capability = {"compute_capability": int(target.removeprefix("sm_"))} if target.startswith("sm_") else {}
    return {"name": name, "grid": grid, "num_warps": warps, "num_stages": stages, **capability}


def _shapes_argument() -> str:
    """The name of the argument for shapes of outputs: jax-triton 0.4 renamed it."""
    import jax_triton  # pyright: ignore[reportMissingImports]

    return "out_type" if "out_type" in inspect.signature(jax_triton.triton_call).parameters else "out_shape"
