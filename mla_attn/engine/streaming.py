"""Streams of outputs under asyncio. One task per event loop steps the engine for all streams of that loop."""

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING

from mla_attn.engine.requests import EngineDead, Output, SamplingParams

if TYPE_CHECKING:
    from mla_attn.engine.engine import Engine

logger = logging.getLogger(__name__)


class Stream(AsyncIterator[Output]):
    """Async iterator over a request's outputs that cancels the request when the caller abandons it.

    A bare async generator cannot do this: if it is dropped before its first ``anext``, its ``finally`` block never
    runs.
    """

    def __init__(self, outputs: AsyncGenerator[Output, None], leave: Callable[[], None]):
        self._outputs, self._leave = outputs, leave

    async def __anext__(self) -> Output:
        return await anext(self._outputs)

    async def aclose(self) -> None:
        await self._outputs.aclose()
        self._leave()

    def __del__(self):
        self._leave()


def stream(engine: "Engine", prompt, params: SamplingParams | None) -> Stream:
    """Adds a request and returns its stream; must be called while an event loop runs."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue()
    request = engine._request(prompt, params, lambda output: loop.call_soon_threadsafe(queue.put_nowait, output))
    leave = functools.partial(engine._leave, request)  # not through the loop, which may be closed by then
    try:
        engine._add(request)
        return Stream(_outputs_of(engine, queue, leave), leave)
    except BaseException:
        leave()
        raise


async def _outputs_of(
    engine: "Engine", queue: asyncio.Queue, leave: Callable[[], None]
) -> AsyncGenerator[Output, None]:
    try:
        while True:
            yield (output := await _next(engine, queue))
            if output.finish_reason is not None:
                return
    finally:
        leave()


async def _next(engine: "Engine", queue: asyncio.Queue) -> Output:
    while queue.empty():
        loop = asyncio.get_running_loop()
        driver = engine._drivers.get(loop)
        if driver is None or driver.done():
            driver = engine._drivers[loop] = asyncio.create_task(_drive(engine))
        waiting = asyncio.ensure_future(queue.get())
        try:
            await asyncio.wait((waiting, driver), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
        finally:
            waiting.cancel()
        driver.result()  # raises the exception that ended the driver
    return queue.get_nowait()


async def _drive(engine: "Engine") -> None:
    """Steps while there is work. A fault is logged; the next step ends the affected requests with "error" or computes
    them again, and their streams continue."""
    while engine.busy:
        try:
            await asyncio.to_thread(engine.step)
        except EngineDead:
            raise
        except Exception:  # any, because the engine recovers from every fault; interrupts propagate
            logger.exception("a step was cut short; the next one computes its requests again")
