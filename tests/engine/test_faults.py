"""Host and device agree, or the request ends with "error": whatever a step raises, wherever."""

import collections
import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import soak
from faults import Fault
from mla_attn.engine import SamplingParams
from soak import Soak, with_weights
from traffic import CHAIN, KINDS, TREE, assert_idle, check_tokens, collect, serve, small_engine

PROMPT = [5, 1, 4, 4, 9, 2, 6, 8, 11]


def keep_stepping(engine, errors=(RuntimeError, MemoryError, KeyboardInterrupt), into=None, most=400):
    """As a server does: whatever a step raises, the next one follows."""
    found, raised, steps = {} if into is None else into, [], 0
    while engine.busy:
        steps += 1
        assert steps < most
        try:
            collect(engine.step(), found)
        except errors as error:
            raised.append(error)
    return found, raised


def once(method, error, when=lambda *_, **__: True, *, after=False):
    """The method, raising once, where ``when`` holds: before it runs or after."""
    left = [error]

    def run(*arguments, **options):
        if not (left and when(*arguments, **options)):
            return method(*arguments, **options)
        if after:
            method(*arguments, **options)
        raise left.pop()

    return run


DRAFTING = ("prefill", "extend", "draft_prefill", "draft_decode", "target_verify", "draft_extend")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((None, name) for name in ("prefill", "extend", "decode")),
        *((tree, name) for tree in (CHAIN, TREE) for name in DRAFTING),
    ],
)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_pass_that_raises(engine, monkeypatch, kind, name, after):
    """Before it ran, or after it took the pools: all tokens come, and what is kept is what the pages hold."""
    params = SamplingParams(max_new_tokens=14, temperature=1.0, seed=3, speculation=kind)
    before, passes = engine.statistics, []

    def second(bucket, **_):
        passes.append(bucket.name)
        return bucket.name == name and passes.count(name) == (1 if "fill" in name or name == "extend" else 2)

    prompt = PROMPT * 2  # in two parts
    monkeypatch.setattr(engine, "_run", once(engine._run, RuntimeError("out of memory"), second, after=after))
    request = engine.add_request(prompt, params)
    found, raised = keep_stepping(engine)
    done = engine.statistics  # before the judge compiles programs of its own
    assert (done.faults, done.compiles_after_warm_up) == (before.faults + 1, before.compiles_after_warm_up)
    assert [str(error) for error in raised] == ["out of memory"]
    tokens, reason = found[request]
    assert (len(tokens), reason) == (14, "length")
    check_tokens(engine.model, prompt, tokens, params)
    monkeypatch.undo()
    # The next turn of a chat continues the text, over pages that are found.
    follow = [*prompt, *tokens[:-1], 3, 4]
    check_tokens(engine.model, follow, serve(engine, follow, **vars(params)), params)
    assert engine.statistics.reused_tokens > done.reused_tokens


class Interrupted:
    """Tokens for which the host waits, when Ctrl-C arrives."""

    ndim = 1

    def __array__(self, *arguments, **options):
        raise KeyboardInterrupt


def test_c51_an_interrupt_while_the_host_waits(engine):
    params = SamplingParams(max_new_tokens=8)
    wanted = serve(engine, PROMPT, max_new_tokens=8)
    names = [engine.add_request(PROMPT, params) for _ in range(2)]
    found = collect(engine.step())
    collect(engine.step(), found)
    engine._unread[0] = dataclasses.replace(engine._unread[0], tokens=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    found, raised = keep_stepping(engine, into=found)
    assert not raised
    assert [found[name] for name in names] == [(wanted, "length")] * 2


def test_u2_a_pool_whose_successor_was_lost(engine, monkeypatch):
    """Ctrl-C during a program is raised when the call returns: its result, the pools, is never assigned."""
    monkeypatch.setattr(engine, "_run", once(engine._run, KeyboardInterrupt(), after=True))
    run, lost = engine._run, []

    def donated(bucket, **arrays):
        lost.append(jax.tree.leaves(engine._device)[0])
        device = engine._device
        try:
            return run(bucket, **arrays)
        except KeyboardInterrupt:
            engine._device = device
            raise

    monkeypatch.setattr(engine, "_run", donated)
    name = engine.add_request(PROMPT, SamplingParams(max_new_tokens=8))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert lost[0].is_deleted()
    tokens, _ = collect(engine.run())[name]
    check_tokens(engine.model, PROMPT, tokens, SamplingParams(max_new_tokens=8))


def test_c48_run_left_early_loses_nothing(engine):
    for leave in (lambda o: True, lambda o: o.finish_reason):
        params = [SamplingParams(max_new_tokens=n) for n in (4, 12)]
        names, found = [engine.add_request(PROMPT, p) for p in params], {}
        while engine.busy:
            for output in engine.run():
                collect([output], found)
                if leave(output):
                    break
        assert [found[name][1] for name in names] == ["length"] * 2
        assert found[names[0]][0] == found[names[1]][0][:4] and len(found[names[1]][0]) == 12


def test_what_always_raises_ends_requests_with_it(engine, monkeypatch):
    """Three times without a token between; others, that came later, are not held up by it."""
    run, seen = engine._run, []

    def broken(bucket, **arrays):
        raise OSError("the device is gone")

    name = engine.add_request(PROMPT, SamplingParams(max_new_tokens=8), on_output=seen.append)
    collect(engine.step())
    monkeypatch.setattr(engine, "_run", broken)
    outputs, raised = [], 0
    while engine.busy:
        try:
            outputs += engine.step()
        except OSError:
            raised += 1
    assert raised == 3 and outputs == seen
    assert (outputs[-1].request_id, outputs[-1].finish_reason, str(outputs[-1].error)) == (
        name,
        "error",
        "the device is gone",
    )
    monkeypatch.setattr(engine, "_run", run)
    assert len(serve(engine, PROMPT, max_new_tokens=3)) == 3


def test_an_engine_that_cannot_go_on_says_so(engine, monkeypatch):
    monkeypatch.setattr(engine, "_run", once(engine._run, KeyboardInterrupt()))
    name = engine.add_request(PROMPT, SamplingParams(max_new_tokens=4))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    create = engine._create_device

    def full():
        raise MemoryError("no room for the pools")

    monkeypatch.setattr(engine, "_create_device", full)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="cannot go on") as caught:
            engine.step()
        assert isinstance(caught.value.__cause__, MemoryError)
    monkeypatch.setattr(engine, "_create_device", create)
    assert collect(engine.run())[name][1] == "length"


# Logits that are no numbers.


@pytest.fixture
def poisoned(engine):
    """An engine whose model gives NaN to who meets token 12."""
    model = engine.model
    engine.update_weights(with_weights(model, embed_tokens__embedding=lambda w: w.at[12].set(jnp.nan)))
    yield engine
    engine.update_weights(model)


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "chain", "tree"])
def test_c45_logits_that_are_not_finite_end_their_request(poisoned, kind):
    """Nobody else's; nor are the pages of a prompt that failed found by others."""
    engine, before, seen = poisoned, poisoned.statistics, []
    prompts = [[12, *PROMPT * 2], [3, 1, 2], [*PROMPT, 12], [7], [12], [5, 5, 5]]
    params = SamplingParams(max_new_tokens=4, temperature=1.0, seed=1, speculation=kind)
    names = [engine.add_request(prompt, params, on_output=seen.append) for prompt in prompts]
    outputs = list(engine.run())
    assert outputs == seen  # callbacks are told of the end too
    found, reasons = collect(outputs), []
    for name, prompt in zip(names, prompts, strict=True):
        tokens, reason = found[name]
        reasons.append(reason)
        check_invalid(engine.model, prompt, tokens, reason, params)
    errors = [o.error for o in outputs if o.finish_reason == "error"]
    assert all(isinstance(error, FloatingPointError) for error in errors) and "length" in reasons
    after = engine.statistics
    assert after.invalid_logits - before.invalid_logits == after.failed - before.failed == len(errors) >= 3
    again = engine.add_request([*PROMPT, 12], params)
    assert collect(engine.run())[again] == ([], "error")
    assert engine.statistics.reused_tokens == before.reused_tokens


def check_invalid(model, prompt, tokens, reason, params):
    """The request ends where token 12 is met; all tokens up to it are the model's."""
    check_tokens(model, prompt, tokens, params)
    if 12 in prompt:
        assert (tokens, reason) == ([], "error")
    elif 12 in tokens[: params.max_new_tokens - 1]:
        assert (tokens.index(12), reason) == (len(tokens) - 1, "error")
    elif params.speculation is None or reason != "error":
        assert (len(tokens), reason) == (params.max_new_tokens, "length")
    # Else a draft was 12: keys that some row of a request sees must be finite for all rows of that request.


def test_c45_tokens_before_the_invalid_one_are_handed_out(poisoned):
    """Amid the tokens of a verify step too."""
    rng, reasons = np.random.default_rng(0), collections.Counter()
    for seed in range(24):
        prompt = rng.integers(12, size=6).tolist()
        params = SamplingParams(max_new_tokens=16, temperature=8.0, seed=seed, speculation=KINDS[seed % 3])
        name = poisoned.add_request(prompt, params)
        tokens, reason = collect(poisoned.run())[name]
        check_invalid(poisoned.model, prompt, tokens, reason, params)
        reasons[reason, len(tokens) > 1] += 1
    assert reasons["error", True] > 5 and reasons["length", True] > 0


def test_drafts_that_are_not_finite_cost_no_request(engine):
    model = engine.model
    engine.update_weights(with_weights(model, mtp__head__kernel=lambda w: w * jnp.nan))
    for kind in (CHAIN, TREE):
        params = SamplingParams(max_new_tokens=8, speculation=kind)
        check_tokens(model, PROMPT, serve(engine, PROMPT, **vars(params)), params)
    engine.update_weights(model)


# Other weights.


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "chain", "tree"])
def test_c49_other_weights_between_steps(engine, kind):
    """Tokens from then on are those of the new weights, after the text so far; nothing old is found."""
    old = engine.model
    new = with_weights(old, embed_tokens__embedding=lambda w: jnp.roll(w, 1, axis=0))
    params, before = SamplingParams(max_new_tokens=16, speculation=kind), engine.statistics
    serve(engine, PROMPT, **vars(params))
    name, found = engine.add_request(PROMPT, params), {}
    while len(found.get(name, ([],))[0]) < 5:
        collect(engine.step(), found)
    reused, done = engine.statistics.reused_tokens, found[name][0]
    engine.update_weights(nnx.state(new) if kind else new)
    tokens = collect(engine.run(), found)[name][0]
    assert engine.statistics.compiles_after_warm_up == before.compiles_after_warm_up
    check_tokens(old, PROMPT, done, params)
    check_tokens(new, [*PROMPT, *done], tokens[len(done) :], params)
    assert len(tokens) == 16 and engine.statistics.reused_tokens == reused
    check_tokens(engine.model, PROMPT, serve(engine, PROMPT, **vars(params)), params)
    check_tokens(new, PROMPT, serve(engine, PROMPT, **vars(params)), params)
    engine.update_weights(old)
    check_tokens(old, PROMPT, serve(engine, PROMPT, **vars(params)), params)
    assert engine.statistics.faults == before.faults


def test_weights_that_do_not_fit_are_refused_by_name(engine):
    model = engine.model
    state = nnx.state(model)
    wide = with_weights(model, norm__scale=lambda w: jnp.zeros(17))
    half = with_weights(model, norm__scale=lambda w: w.astype(jnp.bfloat16))
    less = nnx.State({key: value for key, value in state.items() if key != "norm"})
    other = nnx.clone(model)
    other.norm.eps = 0.5
    for given, message in (
        (wide, r"float32\[17\] at 'norm.scale', must be float32\[16\]"),
        (half, r"bfloat16\[16\] at 'norm.scale', must be float32\[16\]"),
        (less, r"no parameter at 'norm.scale', must be float32\[16\]"),
        (other, "its config must be the same"),
        ({}, "model_or_state is a dict, must be a model or an nnx.State"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.update_weights(given)
    assert engine.model is model


def test_what_a_callback_must_not_call(engine, caplog):
    caplog.set_level(logging.CRITICAL)
    for call in (engine.step, engine.clear_prefix_cache, lambda: engine.update_weights(engine.model)):
        name = engine.add_request([1], SamplingParams(max_new_tokens=3), on_output=lambda _, call=call: call())
        outputs = list(engine.run())
        assert (outputs[-1].request_id, outputs[-1].finish_reason) == (name, "error")
        assert "called from a callback" in str(outputs[-1].error)


def test_clear_prefix_cache_leaves_what_runs(engine):
    serve(engine, PROMPT, max_new_tokens=2)
    params = SamplingParams(max_new_tokens=12)
    name = engine.add_request([3, *PROMPT], params)
    found = collect([*engine.step(), *engine.step(), *engine.step()])
    engine.clear_prefix_cache()
    assert engine.statistics.pages_idle == 0 < engine.statistics.pages_used
    check_tokens(engine.model, [3, *PROMPT], collect(engine.run(), found)[name][0], params)
    reused = engine.statistics.reused_tokens
    serve(engine, PROMPT, max_new_tokens=2)
    assert engine.statistics.reused_tokens == reused


# Anywhere.


def test_faults_anywhere(engine, caplog):
    caplog.set_level(logging.CRITICAL)
    traffic = Soak(engine, 0)
    reasons = traffic.run(60)
    assert traffic.faults.total() > 20 and reasons["length"] + reasons["stop"] > 40


@pytest.mark.parametrize("name", ["windows", pytest.param("ngrams", marks=pytest.mark.slow)])
def test_faults_anywhere_of_other_cache_groups(name, caplog, unchecked):
    """Windows, a draft model beside the target, drafts from texts: all tables begin anew together."""
    caplog.set_level(logging.CRITICAL)
    engine = soak.warm_engine(4, 18, name)
    traffic = Soak(engine, 0, raises=0.05, places=soak.PLACES)
    old = engine.model
    new = with_weights(old, embed_tokens__embedding=lambda w: jnp.roll(w, 1, axis=0))
    reasons = traffic.run(40, [new, old])
    assert traffic.faults.total() > 10 and reasons["length"] + reasons["stop"] > 25
    assert_idle(engine)


def test_points_are_where_signals_arrive():
    """After a call and where a loop goes round, and each of them raises what it is told to."""
    scheduler = small_engine()._scheduler
    counting = Fault()
    with counting.armed():
        scheduler.reset(())
    assert counting.passed > 10
    for at in range(1, counting.passed + 1):
        with pytest.raises(KeyboardInterrupt), Fault(KeyboardInterrupt(), at).armed():
            scheduler.reset(())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mla", "windows"])
@pytest.mark.parametrize("number", range(len(soak.GEOMETRIES)))
def test_a_round_of_the_soak(number, name, caplog, unchecked):
    """One for each page size; `python -m tests.soak` goes on with them."""
    caplog.set_level(logging.CRITICAL)
    done = soak.one_round(0, number, name)
    engine = soak.warm_engine(*soak.GEOMETRIES[number], name)
    assert len(done.found) == soak.ROUND and len(done.faults) >= 5  # places
    assert engine.statistics.preemptions > 0 and engine.statistics.reused_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mla", "windows"])
def test_five_hundred_requests_on_a_bad_day(name, caplog, unchecked):
    """Cancellations, callbacks that raise, faults, preemptions and two changes of weights."""
    caplog.set_level(logging.CRITICAL)
    engine = small_engine(**soak.drafted(name))
    engine.warm_up(progress=False)
    old = engine.model
    new = with_weights(old, embed_tokens__embedding=lambda w: jnp.roll(w, 1, axis=0))
    traffic = Soak(engine, 1, raises=0.05, places=soak.PLACES)
    reasons = traffic.run(500, [new, old])
    print(dict(reasons), traffic.faults, engine.statistics)
    assert sum(reasons.values()) == 500 and min(reasons[r] for r in ("length", "stop", "cancelled", "error")) > 5
    assert engine.statistics.preemptions > 10 and engine.statistics.faults > 50
    assert_idle(engine)


def test_a_signal_at_any_time(engine):
    """Ctrl-C as it comes: the handler of a timer's signal raises it, wherever the engine is."""
    params, rng, interrupts = SamplingParams(max_new_tokens=12), np.random.default_rng(0), 0
    wanted = serve(engine, PROMPT, max_new_tokens=12)
    for _ in range(30):
        name, found = engine.add_request(PROMPT, params), {}
        while engine.busy:
            try:
                with soak.timer(KeyboardInterrupt(), float(rng.uniform(1e-4, 2e-2)) if rng.random() < 1 / 3 else 0):
                    outputs = engine.step()
            except KeyboardInterrupt:
                interrupts += 1
            else:
                collect(outputs, found)
        assert found[name] == (wanted, "length")
    assert interrupts > 0
