"""Recovery after a fault, so that host and device agree again (the rule is in ``Engine``'s docstring)."""

import copy
from typing import TYPE_CHECKING

import jax

from mla_attn.engine.requests import EngineDead

if TYPE_CHECKING:
    from mla_attn.engine.engine import Engine

MAX_FAULTS = 3  # faults without a token between them after which a request ends with "error"


def settle(engine: "Engine") -> None:
    """Resets scheduler and cache if host and device may disagree. If it is interrupted, it can be called again."""
    if not engine._in_doubt:
        return
    _charge(engine)
    engine._unread.clear()
    # Released before the new cache is allocated, because frames of a traceback may reference the old one.
    for array in jax.tree.leaves(engine._device):
        if not array.is_deleted():
            array.delete()
    engine._device = None
    engine._outbox.record_again()
    with engine._adding:
        engine._new.clear()
        live = sorted((r for r in engine._live.values() if not r.finished), key=lambda r: r.id)
        engine._scheduler.reset(live)
    engine._cancels.extend(r for r in live if r.cancelled)
    engine._outbox.tell_again()
    for request in live:
        if request.num_faults >= MAX_FAULTS and not request.finished:
            engine._outbox.hand_out(request, (), "error", request.fault)
    try:
        engine._device = engine._create_device()
    except Exception as error:
        engine._dead = EngineDead("the engine cannot go on: its cache could not be allocated again")
        raise engine._dead from error
    engine._dead, engine._in_doubt = None, False


def _charge(engine: "Engine") -> None:
    """Counts the last step's fault for the requests of the launch that raised it. If no launch is known, it counts for
    the oldest request, so that a fault that always recurs ends after finitely many steps."""
    (fault, engine._fault), (involved, engine._involved) = (engine._fault, None), (engine._involved, ())
    if isinstance(fault, Exception) and not isinstance(fault, EngineDead):
        text = _without_traceback(fault)
        for request in involved or sorted(engine._live.copy().values(), key=lambda r: r.id)[:1]:
            request.num_faults, request.fault = request.num_faults + 1, text


def _without_traceback(error: Exception) -> Exception:
    """A copy of the error without tracebacks, because their frames reference arrays."""
    try:
        return copy.copy(error)
    except Exception:  # any: the constructor may take other arguments, or __reduce__ may fail
        return RuntimeError(f"{type(error).__name__}: {error}")
