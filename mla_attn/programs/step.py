"""A jitted step function, which is lowered here or read from a folder where another process stored it."""

import logging
from collections.abc import Callable
from typing import Any

import jax
from jax import export

from mla_attn.programs.folder import Folder
from mla_attn.programs.naming import Unknown, identity, source_is_as_imported, surroundings

logger = logging.getLogger(__name__)

# Custom calls for which ``jax.export`` does not guarantee compatibility between versions; names include the version.
_CUSTOM_CALLS = ("mosaic_gpu", "mosaic_gpu_v2", "triton_kernel_call", "__gpu$xla.gpu.triton", "tpu_custom_call")
_UNCHECKED = [export.DisabledSafetyCheck.custom_call(name) for name in _CUSTOM_CALLS]


class Step:
    """A jitted function ``fn(state, pool, inputs) -> (outputs, pool)`` that donates the pool.

    Args:
        fn: the function; ``outputs`` are dicts, lists and tuples of arrays, and the returned pool has its structure.
        name: name shown in profiles.
        facts: values that together determine what ``fn`` computes; None if unknown, in which case it is not stored.

    Attributes:
        jitted: the jitted function.
    """

    def __init__(self, fn: Callable[..., tuple[Any, Any]], name: str, facts: Any = None):
        self._fn, self._name, self._facts = fn, name, facts
        self.jitted = self._jit(lambda state, pool, inputs: fn(state, pool, inputs))
        self._identity: str | None = None
        self._kept: dict[str, tuple[Any, export.Exported]] = {}

    def lower(self, arguments: tuple[Any, Any, Any], folder: Folder | None = None) -> jax.stages.Lowered:
        """Lowers the function for a state, a pool and inputs of these shapes. Programs in ``folder`` are not traced
        again; others are stored there."""
        name = None if folder is None else self._name_of(arguments)
        if folder is None or name is None:
            return self.jitted.lower(*arguments)
        missing = name not in folder
        if name not in self._kept:
            program = _read(folder, name, arguments)
            missing = program is None
            program = self._export(arguments) if program is None else program
            if program is None:
                return self.jitted.lower(*arguments)
            # One object per program, because JAX caches compiled programs by object.
            self._kept[name] = self._jit(_caller(program)), program
        jitted, program = self._kept[name]
        if missing and source_is_as_imported():
            _write(folder, name, program)
        return jitted.lower(*arguments)

    def _jit(self, function: Callable[..., tuple[Any, Any]]) -> Any:
        function.__name__ = function.__qualname__ = self._name
        return jax.jit(function, donate_argnums=1)

    def _name_of(self, arguments: tuple[Any, Any, Any]) -> str | None:
        if self._facts is None:
            return None
        try:
            self._identity = self._identity or identity(self._name, self._facts)
            leaves, structure = jax.tree.flatten(arguments)
            return identity(self._identity, surroundings(), structure, leaves)
        except Unknown as reason:
            logger.warning("%s is not kept: it depends on %s", self._name, reason)
            self._facts = None  # told once
            return None

    def _export(
        self, arguments: tuple[Any, Any, Any], platforms: tuple[str, ...] | None = None
    ) -> export.Exported | None:
        """Exports the program as a function of flat arrays, which can be stored; None if it cannot be."""
        leaves, structure = jax.tree.flatten(arguments)
        pools = []

        def flat(*leaves):
            outputs, pool = self._fn(*jax.tree.unflatten(structure, leaves))
            pools.append(jax.tree.structure(pool))
            return outputs, tuple(jax.tree.leaves(pool))

        flat.__name__ = flat.__qualname__ = self._name
        try:
            program = export.export(jax.jit(flat), platforms=platforms, disabled_checks=_UNCHECKED)(*leaves)
        except (
            ValueError,
            NotImplementedError,
        ) as reason:  # from JAX, or from ``fn``, which will raise again
            logger.warning("%s is not kept: %s", self._name, reason)
            return None
        return program if pools[0] == jax.tree.structure(arguments[1]) else None


def _caller(program: export.Exported) -> Callable[..., tuple[Any, Any]]:
    def call(state, pool, inputs):
        outputs, leaves = program.call(*jax.tree.leaves((state, pool, inputs)))
        return outputs, jax.tree.unflatten(jax.tree.structure(pool), leaves)

    return call


def _read(folder: Folder, name: str, arguments: tuple[Any, Any, Any]) -> export.Exported | None:
    if (data := folder.load(name)) is None:
        return None
    try:
        program = export.deserialize(bytearray(data))
    except Exception as reason:  # any, because JAX does not check what it reads
        logger.warning("a program of %s cannot be read, it is lowered again: %s", folder.path, reason)
        return None
    wanted = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments)]
    return program if [(aval.shape, aval.dtype) for aval in program.in_avals] == wanted else None


def _write(folder: Folder, name: str, program: export.Exported) -> None:
    try:
        data = program.serialize()
    except (ImportError, ValueError, NotImplementedError, TypeError) as reason:  # unsupported containers
        logger.warning("%s is not kept: %s", program.fun_name, reason)
        return
    folder.store(name, bytes(data))
