"""Streams under asyncio: several at a time, left early, dropped, abandoned."""

import asyncio
import gc
import os
import signal

import pytest

from mla_attn.engine import EngineDead, SamplingParams
from traffic import KINDS, collect, serve, small_engine


def test_streams(engine, caplog):
    """Several at a time, one left early; the engine is driven by whoever waits."""
    params = [SamplingParams(max_new_tokens=16, temperature=1.0, seed=n, speculation=KINDS[n]) for n in range(3)]
    wanted = [serve(engine, [4, 2], **vars(p)) for p in params]

    async def read(p, count=None):
        tokens, stream = [], engine.stream([4, 2], p)
        async for output in stream:
            tokens += output.tokens
            assert (output.finish_reason is not None) == (len(tokens) == 16)
            if count is not None and len(tokens) >= count:
                await stream.aclose()
        return tokens

    async def main():
        return await asyncio.gather(*(read(p) for p in params), read(params[0], count=4))

    before = engine.statistics.cancelled
    for _ in range(2):  # another event loop each time
        *whole, part = asyncio.run(main())
        assert whole == wanted
        assert part == wanted[0][: len(part)]
    collect(engine.run())
    assert engine.statistics.cancelled == before + 2
    assert not caplog.records  # of a callback into a loop that is gone


async def read_all(stream):
    return [token async for output in stream for token in output.tokens]


async def read_one(engine, params):
    return await read_all(engine.stream([4, 2], params))


def with_asyncio_run(main):
    """Ctrl-C cancels the task that runs."""
    asyncio.run(main)


def with_a_loop(main):
    """Ctrl-C is raised in the loop, wherever it is."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()


@pytest.mark.parametrize("run", [with_asyncio_run, with_a_loop])
def test_ctrl_c_is_raised_once_and_the_engine_goes_on(engine, run):
    """While the engine's thread is in a step. What streams waited for is cancelled; what was added otherwise goes on,
    and so do later streams."""
    params, beside = SamplingParams(max_new_tokens=40), []
    wanted = serve(engine, [4, 2], max_new_tokens=40)

    def interrupt(output):
        if not beside:
            os.kill(os.getpid(), signal.SIGINT)
        beside.extend(output.tokens)

    async def main():
        engine.add_request([4, 2], params, on_output=interrupt)
        await asyncio.gather(*(read_all(engine.stream([4, 2], params)) for _ in range(2)))

    before, handler = engine.statistics, signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(main())
    finally:
        signal.signal(signal.SIGINT, handler)  # which ignores it where a shell started the tests in the background
    collect(engine.run())
    after = engine.statistics
    assert (after.cancelled, after.faults) == (before.cancelled + 2, before.faults)
    assert beside == wanted
    assert asyncio.run(read_one(engine, params)) == wanted


def test_a_stream_raises_that_the_engine_cannot_go_on(monkeypatch):
    engine = small_engine()

    def broken():
        raise EngineDead("the device is gone")

    monkeypatch.setattr(engine, "step", broken)

    async def main():
        async for _ in engine.stream([1], SamplingParams(max_new_tokens=4)):
            pass

    with pytest.raises(EngineDead, match="the device is gone"):
        asyncio.run(main())


def test_streams_that_fail_at_the_call(engine):
    async def main():
        with pytest.raises(ValueError, match="prompt is empty"):
            engine.stream([])

    asyncio.run(main())


@pytest.mark.parametrize("closed", [False, True], ids=["dropped", "closed"])
def test_a_stream_left_before_it_begins(engine, closed):
    """Its request has not run, nor will it."""

    async def main():
        streams = [engine.stream([1], SamplingParams(max_new_tokens=40))]
        if closed:
            await streams[0].aclose()
        else:
            streams.clear()
            gc.collect()
        return streams

    before = engine.statistics
    streams = asyncio.run(main())
    assert len(streams) == closed
    assert [(o.tokens, o.finish_reason) for o in engine.step()] == [([], "cancelled")]
    assert engine.statistics.prompt_tokens == before.prompt_tokens


def test_a_stream_is_not_left_while_somebody_awaits_it(engine):
    """Nobody else holds it."""

    async def main():
        return await asyncio.wait_for(anext(engine.stream([1], SamplingParams(max_new_tokens=40))), 60)

    assert len(asyncio.run(main()).tokens) == 1
    collect(engine.run())


def test_a_stream_abandoned_by_its_task(engine):
    """The consumer is cancelled while it waits: nothing is left but the request, which the next step ends."""

    async def main():
        async def read():
            async for _ in engine.stream([1], SamplingParams(max_new_tokens=40)):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        return [t.get_coro().__qualname__ for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    assert set(asyncio.run(main())) <= {"_drive"}
    collect(engine.run())
