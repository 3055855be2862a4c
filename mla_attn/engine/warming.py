"""Ahead-of-time compilation of an engine's programs, before it serves or in the background."""

import logging
import threading
import weakref
from typing import TYPE_CHECKING

import jax

from mla_attn.buckets import backend_compiles, promise, struct_of
from mla_attn.buckets import warm_up as compile_all

if TYPE_CHECKING:
    from mla_attn.engine.engine import Engine

logger = logging.getLogger(__name__)


def warm_up(engine: "Engine", *, progress: bool, background: bool) -> float:
    """Implements ``Engine.warm_up``, without its lock."""
    arguments = jax.tree.map(struct_of, (engine._passes.state, engine._device))
    if background:
        weak, programs = weakref.ref(engine), engine._programs()
        promise(programs)  # here, because the next call may come before the thread runs
        threading.Thread(target=_work, args=(weak, programs, arguments, progress), name="warm-up").start()
        return 0.0
    seconds = compile_all(engine._programs(), *arguments, progress=progress)
    _note(engine, seconds)
    return seconds


def _work(weak: "weakref.ref[Engine]", programs, arguments, progress: bool) -> None:
    def wanted() -> bool:
        return weak() is not None and threading.main_thread().is_alive()  # when Python exits, stop

    try:
        seconds = compile_all(programs, *arguments, progress=progress, wanted=wanted)
    except Exception:  # any, because the call that needs the program will compile it and raise
        logger.exception("a program did not compile ahead of time")
        return
    if (engine := weak()) is not None:
        _note(engine, seconds)


def _note(engine: "Engine", seconds: float) -> None:
    engine._counters.warm_up_seconds += seconds
    engine._compiles_at_warm_up = backend_compiles()
