"""Buckets: programs compiled ahead of time for a ladder of input shapes. (Other engines capture CUDA graphs for this.)

A step function takes ``(state, pool, inputs)`` and returns ``(outputs, pool)``. ``inputs`` is a pytree of arrays in
which zeros are padding: requests of length 0 write nothing and read nothing. ``Buckets`` compiles the function for each
rung of a ladder of input shapes before the first request arrives, then picks the smallest rung that holds a call and
pads its inputs with zeros. While ``warm_up`` is compiling in another thread, a call takes a larger compiled rung rather
than wait for its own.
"""

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from mla_attn.programs import Folder, Step

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_COMPILERS = 8  # most programs compiled in parallel, but not more than processors
_FIRST = 2  # programs that have the processors for themselves: a first prompt pass, and the pass after it
# On a CPU one at a time: XLA uses all processors for it, and jaxlib 0.11.2 has crashed when a program was stored in
# JAX's compilation cache while another thread compiled.
_on_cpu = threading.Lock()


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
        name: name shown in progress, warnings and profiles.
        fn: ``fn(state, pool, inputs) -> (outputs, pool)``, jittable; the pool is donated. Buckets of one ``Step`` share
            compiled programs.
        rungs: input pytrees of ``jax.ShapeDtypeStruct`` with equal structures, cheapest first.
        folder: folder of programs lowered by other processes, to which missing ones are added; None for no folder.

    Attributes:
        compiles: programs compiled so far.
        cold_compiles: programs compiled during a call rather than before it; each is logged as a warning.
        lower_seconds: seconds to trace and lower, or to read, all programs.
        compile_seconds: XLA's seconds for all programs; parallel compilations are summed.
    """

    def __init__(
        self, name: str, fn: Callable[..., tuple[Any, Any]] | Step, rungs: Iterable[Any], folder: Folder | None = None
    ):
        self.name = name
        self._step = fn if isinstance(fn, Step) else Step(fn, name)
        self._folder, self._rungs = folder, list(rungs)
        if not self._rungs:
            raise ValueError(f"rungs of {name!r} is empty, must hold at least one input shape")
        self._structure = jax.tree.structure(self._rungs[0])
        self._shapes = [tuple(leaf.shape for leaf in jax.tree.leaves(r)) for r in self._rungs]
        self._dtypes = [leaf.dtype for leaf in jax.tree.leaves(self._rungs[0])]
        self._programs: dict[int, Any] = {}
        self._making: dict[int, Future] = {}  # rungs that a thread is compiling
        self._promised: set[int] = set()  # rungs that a running warm-up will compile
        self._lock = threading.Lock()  # for the decision which thread compiles a rung
        self._choices: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        self.cold_compiles = 0
        self.lower_seconds = self.compile_seconds = 0.0

    @property
    def compiles(self) -> int:
        return len(self._programs)

    @property
    def pending(self) -> list[int]:
        """Indices of the rungs that are not compiled yet."""
        return [index for index in range(len(self._rungs)) if index not in self._programs]

    def label(self, index: int) -> str:
        """Name and sizes of a rung, for progress and warnings."""
        sizes = dict.fromkeys(n for shape in self._shapes[index] for n in shape)
        return f"{self.name} {'x'.join(map(str, sizes))}"

    @property
    def cold(self) -> bool:
        """Whether a running warm-up has not compiled the first program yet, so that every call would wait."""
        return not self._programs and bool(self._promised)

    def awaits(self, index: int) -> bool:
        """Whether a rung is not compiled yet, but a running warm-up will compile it."""
        return index not in self._programs and index in self._promised

    def compile(self, index: int, state: Any, pool: Any) -> Any:
        """Compiles a rung for a state and a pool of these shapes, or waits for another thread that is compiling it;
        returns the program."""
        theirs = self._making.get(index)
        if theirs is None or theirs.exception() is not None:  # an exception is raised in the other thread
            theirs = self.begin(index, state, pool, _Here())
        return theirs.result()

    def begin(self, index: int, state: Any, pool: Any, compilers: Executor) -> Future:
        """Lowers a rung in this thread and compiles it in ``compilers``, unless a thread is compiling it already;
        returns a future of the program."""
        with self._lock:
            program = self._making.get(index, Future())
            if index in self._programs and not program.done():
                program.set_result(self._programs[index])
            if index in self._making or index in self._programs:
                return program
            self._making[index] = program

        def end(compiled: Future) -> None:
            del self._making[index]  # the program is there before
            if compiled.cancelled():
                program.set_exception(RuntimeError(f"{self.label(index)} was given up"))
            elif (error := compiled.exception()) is not None:
                program.set_exception(error)
            else:
                program.set_result(compiled.result())

        # Traced in this thread, because a trace may read its context. XLA compiles in others without Python's lock.
        try:
            lowered = self._lower(index, state, pool)
            compilers.submit(self._compile, index, lowered).add_done_callback(end)
        except BaseException:
            if index in self._making:
                (failed := Future()).cancel()
                end(failed)
            raise
        return program

    def _lower(self, index: int, state: Any, pool: Any) -> Any:
        begin = time.perf_counter()
        lowered = self._step.lower((_abstract(state), _abstract(pool), self._rungs[index]), self._folder)
        self.lower_seconds += time.perf_counter() - begin
        return lowered

    def _compile(self, index: int, lowered: Any) -> Any:
        with _on_cpu if jax.default_backend() == "cpu" else contextlib.nullcontext():
            begin = time.perf_counter()
            program = self._programs[index] = lowered.compile()
            self.compile_seconds += time.perf_counter() - begin
        return program

    def __call__(self, state: Any, pool: Any, inputs: Any) -> tuple[Any, Any]:
        """Runs the program of the smallest rung that holds ``inputs``; during a warm-up, of the smallest compiled one.

        Host arrays (NumPy) are padded with zeros to the rung. Device arrays must already have its shapes, so that state
        on the device is never copied. Outputs have the rung's shapes.

        Raises:
            ValueError: no rung holds the inputs, their structure or a dtype differs, or a device array does not have
                the rung's shape.
        """
        leaves, structure = jax.tree.flatten(inputs)
        if structure != self._structure:
            raise ValueError(f"inputs of {self.name!r} have structure {structure}, must be {self._structure}")
        index = self._choose(leaves)
        padded = [
            _pad(self.name, leaf, shape, dtype)
            for leaf, shape, dtype in zip(leaves, self._shapes[index], self._dtypes, strict=True)
        ]
        program = self._programs.get(index)
        if program is None:
            if index not in self._promised:
                logger.warning("%s: compiled by a call; warm_up() would have done it before", self.label(index))
                self.cold_compiles += 1
            program = self.compile(index, state, pool)
        return program(state, pool, jax.tree.unflatten(structure, padded))

    def _choose(self, leaves: list[Any]) -> int:
        shapes = tuple(np.shape(leaf) for leaf in leaves)
        fitting = self._choices.get(shapes)
        if fitting is None:
            fitting = [i for i, rung in enumerate(self._shapes) if _holds(rung, shapes)]
            if not fitting:
                raise ValueError(f"inputs of {self.name!r} have shapes {shapes}, must fit one of {self._shapes}")
            self._choices[shapes] = fitting
        if not self.awaits(fitting[0]) or any(isinstance(leaf, jax.Array) for leaf in leaves):
            return fitting[0]
        return best(fitting, there=self._programs, coming=self._making)


def best(fitting: list[int], *, there: Iterable[int], coming: Iterable[int] = ()) -> int:
    """The rung for a call during a warm-up: the smallest that is ``there``, else the first of those ``coming``, else
    the largest, which later calls can use too, and which warm-ups begin with."""
    ready = [i for i in fitting if i in there] or [i for i in list(coming) if i in fitting]
    return ready[0] if ready else fitting[-1]


def in_order(buckets: Iterable[Buckets]) -> list[tuple[Buckets, int]]:
    """The pending rungs in the order to compile them: first the largest rung of each, which holds every call."""
    pending = [(b, b.pending[::-1]) for b in buckets if b.pending]
    largest = [(b, indices[0]) for b, indices in pending]
    return largest + [(b, index) for b, indices in pending for index in sorted(indices[1:])]


def promise(buckets: Iterable[Buckets]) -> list[tuple[Buckets, int]]:
    """Marks the pending rungs as those that a warm-up will compile, so that calls use larger ones until then; returns
    them in the order to compile them."""
    work = in_order(buckets)
    for b, index in work:
        b._promised.add(index)
    return work


def warm_up(
    buckets: Iterable[Buckets],
    state: Any,
    pool: Any,
    *,
    progress: bool = True,
    wanted: Callable[[], bool] = lambda: True,
) -> float:
    """Compiles every rung of ``buckets``, several at a time, with a progress bar; returns the seconds it took.

    The first two are compiled alone, because requests wait for them; the others are lowered meanwhile, and compiled
    later. Other threads may run programs at the same time. Ctrl-C is raised at once. XLA cannot be interrupted, so
    programs that it is compiling then are finished in its threads and kept; Python waits for them when it exits.

    Args:
        buckets: buckets in the order of use.
        state, pool: arguments of the programs, or their shapes.
        progress: whether to show a progress bar.
        wanted: function called before each program; once it returns False, no further program is started.
    """
    begin = time.perf_counter()
    work = promise(buckets)
    programs: list[Future] = []
    count = 1 if jax.default_backend() == "cpu" else min(_COMPILERS, os.cpu_count() or 1)
    first = ThreadPoolExecutor(min(_FIRST, count))
    rest = ThreadPoolExecutor(count, initializer=lambda: wait(programs[:_FIRST]))
    with tqdm(total=len(work), desc="compiling", disable=not progress, leave=False) as bar:
        try:
            for b, index in work:
                if not wanted():
                    break
                bar.set_postfix_str(b.label(index))
                if index not in b._programs:  # a call may have compiled it first
                    programs.append(b.begin(index, state, pool, first if len(programs) < _FIRST else rest))
                    programs[-1].add_done_callback(lambda _: bar.update())
                else:
                    bar.update()
            for program in programs:
                program.result()
        finally:
            for compilers in (first, rest):
                compilers.shutdown(wait=False, cancel_futures=True)
            for b, index in work:
                b._promised.discard(index)
    return time.perf_counter() - begin


class _Here(Executor):
    """An executor that runs each function at once, in the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # including interrupts, which ``result`` raises
            future.set_exception(error)
        return future


@dataclasses.dataclass
class _Counter:
    installed: bool = False
    count: int = 0
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)  # for programs compiled in parallel

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


def struct_of(array: Any) -> jax.ShapeDtypeStruct:
    """The abstract array, with its sharding if it is on several devices, for which a program must be compiled."""
    sharding = getattr(array, "sharding", None)
    on_mesh = isinstance(sharding, jax.sharding.NamedSharding)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding if on_mesh else None)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(struct_of, tree)
