"""Streams of a request's outputs under asyncio. One task of an event loop steps the engine for all its streams."""

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING

from mla_attn.engine.requests import Output, SamplingParams

if TYPE_CHECKING:
    from mla_attn.engine.engine import Engine
    from mla_attn.engine.scheduler import Request


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


def stream(engine: "Engine", prompt, params: SamplingParams) -> Stream:
    """Add a request and return its outputs as they come; to be called where an event loop runs."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue()
    request = engine._add(prompt, params, lambda output: loop.call_soon_threadsafe(queue.put_nowait, output))
    leave = functools.partial(_leave, engine, request)
    return Stream(_outputs_of(engine, queue, leave), leave)


def _leave(engine: "Engine", request: "Request") -> None:
    request.on_output = None  # the loop may be gone when the cancelled request ends
    engine.cancel(request.id)


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
        driver.result()  # raises what the step raised
    return queue.get_nowait()


async def _drive(engine: "Engine") -> None:
    while engine.busy:
        await asyncio.to_thread(engine.step)
