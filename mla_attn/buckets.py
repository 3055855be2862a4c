"""Programs compiled ahead of time over a ladder of shapes, chosen and padded per call. (Other engines capture CUDA
graphs for this.)

A step function takes ``(state, pool, inputs)`` and returns ``(outputs, pool)``. ``inputs`` is a pytree of arrays in
which zeros are padding: requests of length 0 write nothing and read nothing. ``Buckets`` compiles the function for each
rung of a ladder of input shapes before the first request comes, then picks the smallest rung that holds a call and pads
its inputs with zeros.
"""

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_COMPILERS = 8  # most programs compiled at once; no more than processors


def ladder(largest: int, *, smallest: int = 1) -> tuple[int, ...]:
    """Powers of two from ``smallest`` up to the first that holds ``largest``: (1, 2, 4, 8, ...)."""
    if min(smallest, largest) < 1:
        raise ValueError(f"smallest={smallest} and largest={largest} must be at least 1")
    sizes = [1 << (smallest - 1).bit_length()]
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


class Buckets:
    """One step function, compiled for a ladder of input shapes.

    Args:
        name: shown in progress, warnings and profiles.
        fn: ``fn(state, pool, inputs) -> (outputs, pool)``, jittable; the pool is donated. Buckets of one ``jit_step``
            share what it compiled.
        rungs: input pytrees of ``jax.ShapeDtypeStruct``, all of one structure, cheapest first.

    Attributes:
        compiles: programs compiled so far.
        cold_compiles: programs compiled by a call rather than before it; each is logged as a warning.
        compile_seconds: XLA's seconds for all programs; those of programs compiled at once add up.
    """

    def __init__(self, name: str, fn: Callable[..., tuple[Any, Any]], rungs: Iterable[Any]):
        self.name = name
        self._jitted: Any = fn if hasattr(fn, "lower") else jit_step(fn, name)
        self._rungs = list(rungs)
        if not self._rungs:
            raise ValueError(f"rungs of {name!r} is empty, must hold at least one input shape")
        self._structure = jax.tree.structure(self._rungs[0])
        self._shapes = [tuple(leaf.shape for leaf in jax.tree.leaves(r)) for r in self._rungs]
        self._dtypes = [leaf.dtype for leaf in jax.tree.leaves(self._rungs[0])]
        self._programs: dict[int, Any] = {}
        self._choices: dict[tuple[tuple[int, ...], ...], int] = {}
        self.cold_compiles = 0
        self.compile_seconds = 0.0

    @property
    def compiles(self) -> int:
        return len(self._programs)

    @property
    def pending(self) -> list[int]:
        """Numbers of the rungs that are not compiled yet."""
        return [index for index in range(len(self._rungs)) if index not in self._programs]

    def label(self, index: int) -> str:
        """Name and sizes of a rung, for progress and warnings."""
        sizes = dict.fromkeys(n for shape in self._shapes[index] for n in shape)
        return f"{self.name} {'x'.join(map(str, sizes))}"

    def compile(self, index: int, state: Any, pool: Any) -> Any:
        """Compiles a rung for a state and a pool of these shapes; returns the program."""
        return self._compile(index, self._lower(index, state, pool))

    def _lower(self, index: int, state: Any, pool: Any) -> jax.stages.Lowered:
        return self._jitted.lower(_abstract(state), _abstract(pool), self._rungs[index])

    def _compile(self, index: int, lowered: jax.stages.Lowered) -> Any:
        begin = time.perf_counter()
        program = self._programs[index] = lowered.compile()
        self.compile_seconds += time.perf_counter() - begin
        return program

    def __call__(self, state: Any, pool: Any, inputs: Any) -> tuple[Any, Any]:
        """Runs the program of the smallest rung that holds ``inputs``.

        Host arrays (NumPy) are padded with zeros to the rung. Device arrays must already have its shapes, so that state
        that stays on the device is never copied. Outputs have the rung's shapes.

        Raises:
            ValueError: no rung holds the inputs, their structure or a dtype differs, or a device array does not have
                the rung's shape.
        """
        leaves, structure = jax.tree.flatten(inputs)
        if structure != self._structure:
            raise ValueError(f"inputs of {self.name!r} have structure {structure}, must be {self._structure}")
        index = self._choose(tuple(np.shape(leaf) for leaf in leaves))
        padded = [
            _pad(self.name, leaf, shape, dtype)
            for leaf, shape, dtype in zip(leaves, self._shapes[index], self._dtypes, strict=True)
        ]
        program = self._programs.get(index)
        if program is None:
            logger.warning("%s: compiled by a call; warm_up() would have done it before", self.label(index))
            self.cold_compiles += 1
            program = self.compile(index, state, pool)
        return program(state, pool, jax.tree.unflatten(structure, padded))

    def _choose(self, shapes: tuple[tuple[int, ...], ...]) -> int:
        index = self._choices.get(shapes)
        if index is None:
            index = next((i for i, rung in enumerate(self._shapes) if _holds(rung, shapes)), None)
            if index is None:
                raise ValueError(f"inputs of {self.name!r} have shapes {shapes}, must fit one of {self._shapes}")
            self._choices[shapes] = index
        return index


def jit_step(fn: Callable[..., tuple[Any, Any]], name: str) -> Any:
    """``fn(state, pool, inputs)`` jitted, the pool donated, under a name that profiles show."""

    def step(state, pool, inputs):
        return fn(state, pool, inputs)

    step.__name__ = step.__qualname__ = name
    return jax.jit(step, donate_argnums=1)


def warm_up(buckets: Iterable[Buckets], state: Any, pool: Any, *, progress: bool = True) -> float:
    """Compiles every rung of ``buckets``, several at a time, with a progress bar; returns the seconds it took.

    Ctrl-C is raised at once. What XLA is compiling then, which nothing interrupts, is finished in its threads, and
    kept; Python waits for them where it ends.
    """
    begin = time.perf_counter()
    work = [(b, index) for b in buckets for index in b.pending]
    # On a CPU one at a time: XLA uses all processors for it, and storing a program in JAX's compilation cache while
    # another thread compiled was seen to end the process (jaxlib 0.11.2).
    threads = 1 if jax.default_backend() == "cpu" else min(_COMPILERS, os.cpu_count() or 1)
    compilers = ThreadPoolExecutor(threads)
    with tqdm(total=len(work), desc="compiling", disable=not progress, leave=False) as bar:
        try:
            compiling = []
            for b, index in work:
                bar.set_postfix_str(b.label(index))
                # Traced in this thread: a trace may read its context. XLA compiles in others, without Python.
                compiling.append(compilers.submit(b._compile, index, b._lower(index, state, pool)))
                compiling[-1].add_done_callback(lambda _: bar.update())
            for program in compiling:
                program.result()
        finally:
            compilers.shutdown(wait=False, cancel_futures=True)
    return time.perf_counter() - begin


@dataclasses.dataclass
class _Counter:
    installed: bool = False
    count: int = 0
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)  # compilers run side by side

    def __call__(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        with self.lock:
            self.count += event == _COMPILE_EVENT


_counter = _Counter()


def backend_compiles() -> int:
    """Programs that XLA has compiled in this process since this function was first called, for any caller."""
    if not _counter.installed:
        jax.monitoring.register_event_duration_secs_listener(_counter)
        _counter.installed = True
    return _counter.count


def _holds(rung: tuple[tuple[int, ...], ...], shapes: tuple[tuple[int, ...], ...]) -> bool:
    return all(
        len(big) == len(small) and all(b >= s for b, s in zip(big, small, strict=True))
        for big, small in zip(rung, shapes, strict=True)
    )


def _pad(name: str, leaf: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    if isinstance(leaf, jax.Array):
        if (leaf.shape, leaf.dtype) != (shape, dtype):
            given = f"{leaf.dtype}{list(leaf.shape)}"
            raise ValueError(f"an input of {name!r} is a device array {given}, must be {dtype}{list(shape)}")
        return leaf
    array = np.asarray(leaf)
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(f"an input of {name!r} has dtype {array.dtype}, must be {dtype}")
    array = array.astype(dtype, copy=False)
    if array.shape == shape:
        return array
    padded = np.zeros(shape, dtype)
    padded[tuple(slice(n) for n in array.shape)] = array
    return padded


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
