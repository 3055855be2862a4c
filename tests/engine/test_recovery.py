"""What a fault, an interrupt or a refused call leaves behind: nothing but what was asked for."""

import asyncio
import collections
import logging

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mla_attn.engine import EngineDead, SamplingParams, outputs
from traffic import CHAIN, collect, serve

PROMPT = [5, 1, 4, 4, 9]
SHORT = SamplingParams(max_new_tokens=4)


def failing(engine, monkeypatch, error, name=None, *, times=1):
    """Let passes of a name (or all) raise, so many times."""
    run, left = engine._run, [times]

    def broken(bucket, **arrays):
        if left[0] and name in (None, bucket.name):
            left[0] -= 1
            raise error
        return run(bucket, **arrays)

    monkeypatch.setattr(engine, "_run", broken)


def keep_stepping(engine):
    found, raised = {}, []
    while engine.busy:
        try:
            collect(engine.step(), found)
        except Exception as error:
            raised.append(error)
            assert len(raised) < 10
    return found, raised


def test_the_old_pool_is_gone_before_the_new_one_is_made(engine, monkeypatch):
    """Whoever keeps the exception, whose frames hold it."""
    old, create, at_create = jax.tree.leaves(engine._device), engine._create_device, []

    def create_device():
        at_create.extend(array.is_deleted() for array in old)
        return create()

    monkeypatch.setattr(engine, "_create_device", create_device)
    failing(engine, monkeypatch, RuntimeError("out of memory"))
    engine.add_request(PROMPT, SamplingParams(max_new_tokens=2))
    with pytest.raises(RuntimeError, match="out of memory") as kept:
        engine.step()
    engine.step()
    assert kept.value.__traceback__ is not None
    assert at_create and all(at_create)
    collect(engine.run())


def test_the_error_of_a_request_holds_no_frames(engine, monkeypatch):
    failing(engine, monkeypatch, OSError("the device is gone"), times=3)
    seen = []
    engine.add_request(PROMPT, SamplingParams(max_new_tokens=2), on_output=seen.append)
    _, raised = keep_stepping(engine)
    assert len(raised) == 3
    assert (type(seen[-1].error), str(seen[-1].error)) == (OSError, "the device is gone")
    assert seen[-1].error.__traceback__ is seen[-1].error.__context__ is None


def test_weights_changed_in_place_are_compared_with_those_held(engine):
    model = engine.model
    scale = model.norm.scale[...]
    try:
        for wrong, message in (
            (jnp.zeros(17), r"float32\[17\] at 'norm.scale', must be float32\[16\]"),
            (scale.astype(jnp.bfloat16), r"bfloat16\[16\] at 'norm.scale', must be float32\[16\]"),
            (jax.ShapeDtypeStruct((16,), jnp.float32), r"a ShapeDtypeStruct at 'norm.scale', must be float32\[16\]"),
            (1.0, r"a float at 'norm.scale', must be float32\[16\]"),
        ):
            model.norm.scale.set_value(wrong)
            for given in (model, nnx.state(model)):
                with pytest.raises(ValueError, match=message):
                    engine.update_weights(given)
    finally:
        model.norm.scale.set_value(scale)
    assert len(serve(engine, PROMPT, max_new_tokens=3)) == 3


class Interrupting(collections.deque):
    """New requests, when Ctrl-C arrives once one is in."""

    def append(self, request):
        super().append(request)
        raise KeyboardInterrupt


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_whose_adding_is_interrupted_is_cancelled(engine, monkeypatch, streamed):
    async def stream():
        engine.stream(PROMPT, SHORT)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_new", Interrupting())
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(stream()) if streamed else engine.add_request(PROMPT, SHORT)
        new = engine._new
    engine._new.extend(new)
    assert [(o.tokens, o.finish_reason) for o in engine.step()] == [([], "cancelled")]


def test_a_new_request_is_live_before_a_step_can_take_it(engine, monkeypatch):
    """Else it could end in between, and then be put among the live for good."""
    live = []

    class Watched(collections.deque):
        def append(self, request):
            live.append((request.id in engine._live, engine._adding.locked()))
            super().append(request)

    monkeypatch.setattr(engine, "_new", Watched())
    serve(engine, PROMPT, max_new_tokens=2)
    assert live == [(True, True)]


def test_streams_go_on_after_a_fault(engine, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    wanted = serve(engine, PROMPT, max_new_tokens=8)
    failing(engine, monkeypatch, RuntimeError("out of memory"), "decode")

    async def read():
        return [o async for o in engine.stream(PROMPT, SamplingParams(max_new_tokens=8))]

    async def main():
        return await asyncio.wait_for(asyncio.gather(read(), read()), 60)

    for outputs_of_one in asyncio.run(main()):
        assert [token for output in outputs_of_one for token in output.tokens] == wanted
        assert outputs_of_one[-1].finish_reason == "length"


def test_streams_of_what_always_fails_end_with_it(engine, monkeypatch, caplog):
    """Also where no launch is at hand."""
    caplog.set_level(logging.CRITICAL)

    def broken():
        raise OSError("no admission")

    async def main():
        return [o async for o in engine.stream(PROMPT, SamplingParams(max_new_tokens=8))]

    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "admit", broken)
        (output,) = asyncio.run(asyncio.wait_for(main(), 60))
    list(engine.run())
    assert (output.finish_reason, str(output.error)) == ("error", "no admission")


def test_a_dead_engine_takes_no_requests(engine, monkeypatch):
    failing(engine, monkeypatch, RuntimeError("out of memory"))
    name = engine.add_request(PROMPT, SamplingParams(max_new_tokens=4))

    def full():
        raise MemoryError("no room")

    async def stream():
        engine.stream(PROMPT, SHORT)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_create_device", full)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
        for call in (engine.step, lambda: engine.add_request(PROMPT, SHORT), lambda: asyncio.run(stream())):
            with pytest.raises(EngineDead, match="cannot go on") as caught:
                call()
            assert isinstance(caught.value.__cause__, MemoryError)
    found = collect(engine.run())
    assert list(found) == [name] and found[name][1] == "length"
    serve(engine, PROMPT, max_new_tokens=1)


def test_only_the_launch_that_fails_is_charged(engine, monkeypatch):
    before = engine.statistics.faults
    failing(engine, monkeypatch, RuntimeError("bad drafts"), "target_verify", times=3)
    good = engine.add_request(PROMPT, SamplingParams(max_new_tokens=6))
    bad = engine.add_request(PROMPT, SamplingParams(max_new_tokens=6, speculation=CHAIN))
    found, raised = {}, 0
    while engine.busy:
        try:
            collect(engine.step(), found)
        except RuntimeError:
            raised += 1
            assert engine.statistics.faults == before + raised  # when it happens
    assert raised == 3
    assert (len(found[good][0]), found[good][1], found[bad][1]) == (6, "length", "error")


def test_warm_up_from_a_callback_is_refused(engine, caplog):
    caplog.set_level(logging.CRITICAL)
    engine.add_request([1], SamplingParams(max_new_tokens=3), on_output=lambda _: engine.warm_up(progress=False))
    assert "warm_up() was called from a callback" in str(list(engine.run())[-1].error)


def test_an_interrupt_while_a_callbacks_error_is_dealt_with(engine, monkeypatch):
    """Its request ends all the same, and its callback is not called again."""
    calls = []

    def callback(output):
        calls.append(output)
        raise ValueError("as planned")

    class Interrupted:
        def error(self, *_, **__):
            raise KeyboardInterrupt

        exception = error

    name = engine.add_request([1], SamplingParams(max_new_tokens=9), on_output=callback)
    with monkeypatch.context() as patch:
        patch.setattr(outputs, "logger", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            list(engine.run())
    monkeypatch.setattr(outputs, "logger", logging.Logger("silent", logging.CRITICAL))
    last = list(engine.run())[-1]
    assert (last.request_id, last.finish_reason, str(last.error), len(calls)) == (name, "error", "as planned", 1)


def test_recovery_forgets_a_callbacks_interrupt_that_was_raised(engine, monkeypatch, caplog):
    """Once, by the step that it belongs to, whatever else went wrong there."""
    caplog.set_level(logging.CRITICAL)

    def interrupt(_):
        raise KeyboardInterrupt

    engine.add_request([1], SamplingParams(max_new_tokens=9), on_output=interrupt)
    other, hand_out = engine.add_request([1], SamplingParams(max_new_tokens=3)), engine._outbox.hand_out

    def broken(*arguments, **options):
        hand_out(*arguments, **options)
        if engine._outbox.interrupt is not None:
            raise RuntimeError("after it")

    with monkeypatch.context() as patch:
        patch.setattr(engine._outbox, "hand_out", broken)
        found = collect(engine.step())
        with pytest.raises(KeyboardInterrupt) as caught:
            collect(engine.step(), found)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not engine._outbox.in_callback and engine._outbox.interrupt is None
    assert collect(engine.run(), found)[other][1] == "length"
