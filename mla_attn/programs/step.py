"""A step function, jitted: lowered here, or read from a folder where another process has lowered it."""

import logging
from collections.abc import Callable
from typing import Any

import jax
from jax import export

from mla_attn.programs.folder import Folder
from mla_attn.programs.naming import Unknown, identity, source_is_as_imported, surroundings

logger = logging.getLogger(__name__)

# Custom calls that ``jax.export`` does not promise to keep from version to version; a name has the version in it.
_CUSTOM_CALLS = ("mosaic_gpu", "mosaic_gpu_v2", "triton_kernel_call", "__gpu$xla.gpu.triton", "tpu_custom_call")
_UNCHECKED = [export.DisabledSafetyCheck.custom_call(name) for name in _CUSTOM_CALLS]


class Step:
    """``fn(state, pool, inputs) -> (outputs, pool)`` jitted, the pool donated, under a name that profiles show.

    Args:
        fn: the function; ``outputs`` are dicts, lists and tuples of arrays, and the pool comes back as it was built.
        name: shown in profiles.
        facts: values that say, together, what ``fn`` computes; None if nobody can say, and then no folder keeps it.

    Attributes:
        jitted: the function.
    """

    def __init__(self, fn: Callable[..., tuple[Any, Any]], name: str, facts: Any = None):
        self._fn, self._name, self._facts = fn, name, facts
        self.jitted = self._jit(lambda state, pool, inputs: fn(state, pool, inputs))
        self._identity: str | None = None
        self._kept: dict[str, tuple[Any, export.Exported]] = {}

    def lower(self, arguments: tuple[Any, Any, Any], folder: Folder | None = None) -> jax.stages.Lowered:
        """Lowers it for a state, a pool and inputs of these shapes; what ``folder`` has is not traced again, and what
        it does not have, it keeps."""
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
            # One object for each: JAX keeps what it compiled by object.
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
            logger.info("%s is not kept: it depends on %s", self._name, reason)
            return None

    def _export(
        self, arguments: tuple[Any, Any, Any], platforms: tuple[str, ...] | None = None
    ) -> export.Exported | None:
        """The program as data, of arrays alone: trees of other packages have no form on disk. None if it has none."""
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
        ) as reason:  # JAX's, or that of ``fn``, which comes again
            logger.info("%s is not kept: %s", self._name, reason)
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
    except Exception as reason:  # any: JAX checks nothing of what it reads
        logger.warning("a program of %s cannot be read, it is made anew: %s", folder.path, reason)
        return None
    wanted = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments)]
    return program if [(aval.shape, aval.dtype) for aval in program.in_avals] == wanted else None


def _write(folder: Folder, name: str, program: export.Exported) -> None:
    try:
        data = program.serialize()
    except (ImportError, ValueError, NotImplementedError, TypeError) as reason:  # outputs of other containers
        logger.warning("%s is not kept: %s", program.fun_name, reason)
        return
    folder.store(name, bytes(data))
