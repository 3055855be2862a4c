"""The decorator for the steps that users call."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from mla_attn.checks import check_flag
from mla_attn.dispatch import requested

_FLAGS = ("return_lse", "batch_invariant")


class EntryPoint:
    """A jitted step that reads ``MLA_ATTN_IMPLEMENTATION`` at every call.

    JAX's cache does not depend on the environment, so ``implementation`` is resolved before ``jax.jit`` is called. The
    pool is donated; ``trace``, ``lower`` and ``eval_shape`` are those of ``jax.jit``.
    """

    def __init__(self, step: Callable[..., Any], static: tuple[str, ...]):
        functools.update_wrapper(self, step)
        self._static = static
        self._pool_at = list(inspect.signature(step).parameters).index("pool")
        self._program = jax.jit(step, static_argnames=("implementation", *static), donate_argnames="pool")

    def __call__(self, *args, implementation=None, **kwargs):
        return self._program(*args, **self._settled(args, kwargs, implementation))

    def trace(self, *args, implementation=None, **kwargs) -> jax.stages.Traced:
        return self._program.trace(*args, **self._settled(args, kwargs, implementation))

    def lower(self, *args, implementation=None, **kwargs) -> jax.stages.Lowered:
        return self._program.lower(*args, **self._settled(args, kwargs, implementation))

    def eval_shape(self, *args, implementation=None, **kwargs) -> Any:
        return self._program.eval_shape(*args, **self._settled(args, kwargs, implementation))

    def _settled(self, args: tuple[Any, ...], kwargs: dict[str, Any], implementation) -> dict[str, Any]:
        for name in self._static:
            if isinstance(kwargs.get(name), jax.Array):
                raise ValueError(f"{name}={kwargs[name]!r} must be static, not an array")
        # Checked before JAX hashes static arguments: a list would raise JAX's error, and NumPy's True would compile
        # another program than Python's.
        kwargs |= {name: check_flag(name, kwargs[name]) for name in _FLAGS if name in kwargs}
        pool = args[self._pool_at] if len(args) > self._pool_at else kwargs.get("pool")
        layer, placement = kwargs.get("layer"), getattr(pool, "placement", None)
        if layer is not None and placement is not None and not isinstance(layer, jax.ShapeDtypeStruct):
            kwargs["layer"] = placement.check_layer(layer)  # its value is unknown inside the trace
        return {**kwargs, "implementation": requested(implementation)}


def entry_point(*static: str) -> Callable[[Callable[..., Any]], EntryPoint]:
    """Decorator that makes a function a step; the arguments ``static``, and ``implementation``, are static."""
    return lambda step: EntryPoint(step, static)
