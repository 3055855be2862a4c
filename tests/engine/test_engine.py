"""The engine: what it answers, whoever else it serves and however short pages are."""

import asyncio
import collections
import dataclasses
import logging
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints import V3
from mla_attn.engine import Engine, Output, QueueFull, SamplingParams, inputs, launching
from mla_attn.models import load_checkpoint
from mla_attn.speculative import DraftTree
from traffic import (
    CHAIN,
    KINDS,
    MAX_LEN,
    TREE,
    assert_idle,
    check_tokens,
    collect,
    logits_of,
    serve,
    small_engine,
    small_model,
    some_prompt,
)

# What is answered.


@pytest.mark.slow
def test_a_trained_checkpoint():
    """The fixture's greedy tokens from requests of all kinds, side by side; the same draws with drafts as without."""
    stored, chain, tree = np.load(V3 / "expected.npz"), DraftTree.chain(3), DraftTree((3, 2))
    model = load_checkpoint(V3, dtype=jnp.float32)
    engine = Engine(
        model, max_batch=4, num_pages=60, page_size=16, max_len=364, speculation=(chain, tree), prompt_tokens=64,
        batches=(4,),
    )  # fmt: skip
    engine.warm_up(progress=False)
    made = {}
    for kind in (None, chain, tree):
        for i in range(4):
            params = SamplingParams(max_new_tokens=64, speculation=kind)
            made[engine.add_request(stored[f"prompt_{i}"].tolist(), params)] = i
        params = SamplingParams(max_new_tokens=48, temperature=0.8, top_p=0.95, seed=5, speculation=kind)
        made[engine.add_request(stored["prompt_0"].tolist(), params)] = "drawn"
    found = collect(engine.run())
    drawn = [found[name][0] for name, what in made.items() if what == "drawn"]
    assert drawn[0] == drawn[1] == drawn[2] != found[0][0][:48]
    for name, what in made.items():
        if what != "drawn":
            assert found[name] == (stored[f"greedy_{what}"].tolist(), "length")
    statistics = engine.statistics
    assert statistics.acceptance_length > 1.7
    assert statistics.compiles_after_warm_up == 0
    assert statistics.new_tokens == 12 * 64 + 3 * 48
    assert statistics.reused_tokens > 300  # each prompt came three times, of which twice for drafting
    assert 0 < statistics.inter_token_time < statistics.time_to_first_token < statistics.step_seconds


def test_what_draft_passes_are_told():
    """Which pass it is, and how many drafts precede those it takes: a wrong one costs drafts, never a token."""
    for widths, wanted in {(1, 1, 1): [(0, 0), (1, 1)], (2, 2, 1): [(0, 0), (1, 2)], (3,): []}.items():
        told = inputs.draft_steps(DraftTree(widths))
        assert [(int(step["step"]), int(step["num_drafted"])) for step in told] == wanted


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "chain", "tree"])
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 2.0, "top_k": 4, "top_p": 0.8, "seed": 2**32 - 1}],
    ids=["greedy", "drawn", "narrowed"],
)
def test_tokens(engine, kind, params):
    rng = np.random.default_rng(0)
    wanted = {}
    for _ in range(6):
        prompt, options = some_prompt(rng), SamplingParams(max_new_tokens=20, speculation=kind, **params)
        wanted[engine.add_request(prompt, options)] = (prompt, options)
    for name, (tokens, reason) in collect(engine.run()).items():
        assert (len(tokens), reason) == (20, "length")
        check_tokens(engine.model, wanted[name][0], tokens, wanted[name][1])


@pytest.mark.parametrize(
    "implementation",
    [pytest.param("xla", marks=pytest.mark.slow), pytest.param("mosaic_gpu", marks=pytest.mark.gpu)],
)
def test_bfloat16_at_the_sizes_of_kernels(monkeypatch, implementation):
    """Every pass through ``implementation``, or an error; judged by the same weights in float32.

    Sixteen heads are rows for one kernel in decode and, 16 tokens at a time, for the other in prompts.
    """
    sizes = {"num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    model, judge = small_model(dtype=jnp.bfloat16, **sizes), small_model.__wrapped__(**sizes)
    nnx.update(judge, jax.tree.map(lambda w: w.astype(jnp.float32), nnx.state(model)))
    tie = 3 / 64  # three times what lies between numbers of bfloat16 from 2 to 4, where the logits are
    monkeypatch.setenv("MLA_ATTN_IMPLEMENTATION", implementation)
    engine = small_engine(model=model, page_size=16, num_pages=6)
    engine.warm_up(progress=False)
    rng, wanted = np.random.default_rng(0), {}
    for kind in 3 * KINDS:
        prompt, params = some_prompt(rng), SamplingParams(max_new_tokens=20, speculation=kind)
        wanted[engine.add_request(prompt, params)] = (prompt, params)
    found = collect(engine.run())
    assert engine.statistics.compiles_after_warm_up == 0
    monkeypatch.delenv("MLA_ATTN_IMPLEMENTATION")  # the judge expands keys and values, which XLA does
    for name, (prompt, params) in wanted.items():
        tokens, reason = found[name]
        assert (len(tokens), reason) == (20, "length")
        check_tokens(judge, prompt, tokens, params, tie=tie)


def test_the_judge_notices(engine):
    """check_tokens refuses a text with one other token in it."""
    prompt = [1, 2, 3]
    for params in (
        SamplingParams(max_new_tokens=12),
        SamplingParams(max_new_tokens=12, temperature=1.0, top_k=5, seed=0),
    ):
        tokens = serve(engine, prompt, **dataclasses.asdict(params))
        check_tokens(engine.model, prompt, tokens, params)
        for at in range(12):
            other = [*tokens[:at], (tokens[at] + 1) % 13, *tokens[at + 1 :]]
            with pytest.raises(AssertionError, match="token"):
                check_tokens(engine.model, prompt, other, params)


def test_one_prompt_many_times(engine):
    """Alone, beside others, and found in the cache: the same tokens; full pages are computed once."""
    prompt = [5, 1, 4, 4, 9, 2, 6, 8, 11, 0, 3, 7, 7]
    for params in ({}, {"temperature": 1.0, "seed": 3}):
        alone = serve(engine, prompt, max_new_tokens=12, **params)
        before = engine.statistics
        for _ in range(5):
            engine.add_request(prompt, SamplingParams(max_new_tokens=12, **params))
        assert {tuple(tokens) for tokens, _ in collect(engine.run()).values()} == {tuple(alone)}
        after = engine.statistics
        assert after.reused_tokens - before.reused_tokens == 5 * 12
        assert after.prompt_tokens - before.prompt_tokens == 5
    assert len({tuple(serve(engine, prompt, max_new_tokens=12, temperature=1.0, seed=s)) for s in range(5)}) > 1


def test_without_a_prefix_cache():
    engine, prompt = small_engine(prefix_cache=False), [1] * 9
    assert serve(engine, prompt, max_new_tokens=4) == serve(engine, prompt, max_new_tokens=4)
    statistics = engine.statistics
    assert (statistics.reused_tokens, statistics.pages_idle, statistics.prompt_tokens) == (0, 0, 18)


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "chain", "tree"])
def test_stop_tokens(engine, kind):
    text = serve(engine, [3, 1, 2], max_new_tokens=24, temperature=1.5, seed=1)
    for stop in {text[0], text[5], text[11]}:
        name = engine.add_request(
            [3, 1, 2],
            SamplingParams(max_new_tokens=24, temperature=1.5, seed=1, stop_token_ids=(stop, 99), speculation=kind),
        )
        assert collect(engine.run())[name] == (text[: text.index(stop) + 1], "stop")


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "chain", "tree"])
def test_c55_stop_and_limit_in_one_verify_step(engine, kind):
    """Whichever comes first ends the request, also where one step accepts tokens past both."""
    draws = {"temperature": 1.5, "seed": 1}
    text = serve(engine, [3, 1, 2], max_new_tokens=6, **draws)
    expected = {}
    for limit in range(1, 7):
        for stop in set(text):
            params = SamplingParams(max_new_tokens=limit, stop_token_ids=(stop,), speculation=kind, **draws)
            at = text.index(stop) + 1
            name = engine.add_request([3, 1, 2], params)
            expected[name] = (text[:at], "stop") if at <= limit else (text[:limit], "length")
    assert collect(engine.run()) == expected


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("length", [1, MAX_LEN - 9, MAX_LEN - 1])
def test_c17_up_to_the_longest(engine, kind, length):
    """Up to max_len exactly, drafts past it included; neighbours keep their pages and their tokens."""
    rng = np.random.default_rng(length)
    prompt, neighbour = rng.integers(13, size=length).tolist(), rng.integers(13, size=9).tolist()
    params = SamplingParams(max_new_tokens=MAX_LEN - length, speculation=kind)
    beside = SamplingParams(max_new_tokens=MAX_LEN - 9, speculation=kind)
    names = [engine.add_request(neighbour, beside), engine.add_request(prompt, params)]
    found = collect(engine.run())
    for name, (text, options) in zip(names, ((neighbour, beside), (prompt, params)), strict=True):
        tokens, reason = found[name]
        assert (len(text) + len(tokens), reason) == (MAX_LEN, "length")
        check_tokens(engine.model, text, tokens, options)


def test_acceptance_is_counted_as_emitted(engine):
    before = engine.statistics
    outputs = []
    name = engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=30, speculation=CHAIN), on_output=outputs.append)
    collect(engine.run())
    after = engine.statistics
    assert after.target_steps - before.target_steps in (len(outputs) - 1, len(outputs))  # one may be launched in vain
    assert all(1 <= len(o.tokens) <= 3 for o in outputs)
    assert {o.request_id for o in outputs} == {name}
    assert after.new_tokens - before.new_tokens == sum(len(o.tokens) for o in outputs) == 30


@pytest.mark.slow
def test_speculation_leaves_the_distribution_unchanged():
    """Two tokens after a prompt, of many seeds, against the model's own probabilities: chi-square, vocabulary of 3."""
    model, prompt, temperature, count = small_model(3), [0, 2, 1], 20.0, 600
    engine = small_engine(model=model)

    def probabilities(tokens):
        scores = logits_of(model, tokens)[-1].astype(float) / temperature
        return np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()

    first = probabilities(prompt)
    wanted = np.array([first[a] * probabilities([*prompt, a]) for a in range(3)]).ravel()
    assert wanted.min() > 0.005
    for kind in (CHAIN, TREE):
        made = [
            engine.add_request(
                prompt, SamplingParams(max_new_tokens=3, temperature=temperature, seed=seed, speculation=kind)
            )
            for seed in range(count)
        ]
        found = collect(engine.run())
        counts = np.bincount([3 * found[name][0][0] + found[name][0][1] for name in made], minlength=9)
        # 8 degrees of freedom: a right sampler exceeds 31.8 once in 10,000.
        assert ((counts - count * wanted) ** 2 / (count * wanted)).sum() < 31.8
    assert engine.statistics.acceptance_length > 1.1


# Traffic.


@pytest.mark.slow
def test_five_hundred_requests(caplog):
    """Lengths, arrivals, cancellations, common beginnings, too few pages, all kinds of speculation and sampling, and
    callbacks that raise."""
    caplog.set_level(logging.CRITICAL)
    engine, rng = small_engine(max_waiting=500), np.random.default_rng(0)
    engine.warm_up(progress=False)
    beginnings = [some_prompt(rng, 12, 20) for _ in range(3)]
    requests, found, to_cancel, sizes = {}, {}, {}, []

    def raising(output):
        raise RuntimeError("as planned")

    def add(number):
        prompt = some_prompt(rng, 1, 12)
        if rng.random() < 0.4:
            prompt = beginnings[rng.integers(3)] + prompt
        params = SamplingParams(
            max_new_tokens=int(rng.integers(1, min(20, MAX_LEN - len(prompt)), endpoint=True)),
            stop_token_ids=(int(rng.integers(13)),) if rng.random() < 0.3 else (),
            temperature=float(rng.choice([0.0, 0.7, 1.5])),
            top_k=int(rng.choice([0, 0, 3])),
            top_p=float(rng.choice([1.0, 1.0, 0.8])),
            seed=number,
            speculation=KINDS[rng.integers(3)],
        )
        bad = rng.random() < 0.05
        name = engine.add_request(prompt, params, on_output=raising if bad else None)
        requests[name] = (prompt, params, bad)
        if rng.random() < 0.1:
            to_cancel[name] = int(rng.integers(30))

    number = 0
    while number < 500 or engine.busy:
        for _ in range(rng.poisson(0.5)):
            if number < 500:
                add(number)
                number += 1
        for name in list(to_cancel):
            to_cancel[name] -= 1
            if to_cancel[name] < 0:
                del to_cancel[name]
                engine.cancel(name)
        collect(engine.step(), found)
        sizes.append((number, sum(a.nbytes for a in jax.live_arrays())))

    statistics = engine.statistics  # before the judge compiles programs of its own
    reasons = collections.Counter()
    for name, (prompt, params, bad) in requests.items():
        tokens, reason = found[name]
        reasons[reason] += 1
        check_tokens(engine.model, prompt, tokens, params)
        assert tokens[:-1] == [t for t in tokens[:-1] if t not in params.stop_token_ids]
        if reason == "length":
            assert len(tokens) == params.max_new_tokens
        if reason == "stop":
            assert tokens[-1] in params.stop_token_ids
        if reason == "error":
            assert bad
    assert sum(reasons.values()) == 500
    assert min(reasons[r] for r in ("length", "stop", "cancelled", "error")) > 5
    assert reasons["length"] + reasons["stop"] == statistics.finished
    assert (statistics.cancelled, statistics.failed) == (reasons["cancelled"], reasons["error"])
    assert statistics.preemptions > 10
    assert statistics.reused_tokens > 1000
    assert statistics.compiles_after_warm_up == 0
    early, late = (max(size for n, size in sizes if low <= n <= high) for low, high in ((50, 150), (400, 500)))
    assert late <= 1.02 * early
    assert_idle(engine)


def test_preempted_requests_go_on_where_they_were(engine):
    """Pages for one and a half: the youngest gives way, and its text is that of its run alone."""
    rng, wanted, before = np.random.default_rng(3), {}, engine.statistics.preemptions
    for kind in (*KINDS, None):
        prompt, params = some_prompt(rng, 8, 12), SamplingParams(max_new_tokens=30, speculation=kind, seed=4)
        params = dataclasses.replace(params, temperature=0.0 if kind is None else 1.0)
        wanted[engine.add_request(prompt, params)] = (prompt, params)
    found = collect(engine.run())
    assert engine.statistics.preemptions > before
    for name, (prompt, params) in wanted.items():
        assert len(found[name][0]) == 30
        check_tokens(engine.model, prompt, found[name][0], params)
        assert found[name][0] == serve(engine, prompt, **vars(params))
    assert next(iter(found)) == min(wanted)  # the oldest never waits for a younger one


def test_c16_placeholder_drafts(engine, monkeypatch):
    """Drafts that are not there are never accepted, nor emitted; a step then gives the target's own token."""
    wanted = serve(engine, [3, 1, 2], max_new_tokens=12)
    outputs, launch = [], launching.launch_tokens
    monkeypatch.setattr(launching, "launch_tokens", lambda *args: (forget_drafts(engine), launch(*args)))
    engine.add_request([3, 1, 2], SamplingParams(max_new_tokens=12, speculation=TREE), on_output=outputs.append)
    collect(engine.run())
    assert [token for o in outputs for token in o.tokens] == wanted
    assert all(len(o.tokens) == 1 for o in outputs)  # the second level was drafted, but nobody gets there


def forget_drafts(engine):
    pools, states = engine._device
    engine._device = pools, states | {"drafts": np.full_like(states["drafts"], -1)}


def test_pages_for_all_are_enough_for_all(engine):
    """Pages for exactly what each request may need: all run side by side, none is preempted."""
    before = engine.statistics
    for n in range(4):  # 18 pages in all: 2 + 4 + 6 + 6
        engine.add_request([n] * (3, 10, 18, 21)[n], SamplingParams(max_new_tokens=(5, 6, 6, 3)[n], speculation=None))
    running = []
    while engine.busy:
        engine.step()
        running.append(engine.statistics.running)
    assert max(running) == 4
    assert engine.statistics.preemptions == before.preemptions


def test_prompts_in_parts_do_not_hold_up_others(engine):
    """A prompt of three parts arrives while another request decodes: that one gets a token at every step."""
    first = engine.add_request([1, 2], SamplingParams(max_new_tokens=30))
    while not collect(engine.step()):
        pass
    late = engine.add_request([3] * 44, SamplingParams(max_new_tokens=2))
    steps = []
    while engine.busy:
        steps.append({o.request_id for o in engine.step()})
        if late in steps[-1]:
            break
    assert len(steps) >= 3
    assert all(first in step for step in steps)
    collect(engine.run())


def test_a_full_queue_refuses():
    engine = small_engine(max_waiting=2)
    for _ in range(2):
        engine.add_request([1], SamplingParams(max_new_tokens=1))
    with pytest.raises(QueueFull, match="2 requests wait, at most max_waiting=2 may"):
        engine.add_request([1], SamplingParams(max_new_tokens=1))
    assert len(collect(engine.run())) == 2
    engine.add_request([1], SamplingParams(max_new_tokens=1))
    assert len(collect(engine.run())) == 1


def test_cancel(engine):
    params = SamplingParams(max_new_tokens=30, speculation=CHAIN)
    names = [engine.add_request([n, 2, 3], params) for n in range(6)]
    found = collect(engine.step())
    collect(engine.step(), found)
    # One that runs, one that waits, one that has not been looked at.
    names.append(engine.add_request([9], params))
    cancelled = (names[0], names[5], names[6])
    assert all(engine.cancel(name) for name in cancelled)
    collect(engine.run(), found)
    for name in names:
        assert found[name][1] == ("cancelled" if name in cancelled else "length")
        check_tokens(
            engine.model,
            [*range(6), 9][name - names[0] : name - names[0] + 1] + ([2, 3] if name != names[6] else []),
            found[name][0],
            params,
        )
    assert not engine.cancel(names[0])
    assert not engine.cancel(12345678)


def test_a_callback_that_raises_harms_no_other(engine, caplog):
    def raise_at(count):
        seen = []

        def callback(output):
            seen.append(output)
            if len(seen) == count:
                raise ValueError("no more")

        return callback

    params = SamplingParams(max_new_tokens=8)
    good = engine.add_request([1], params)
    bad = [engine.add_request([1], params, on_output=raise_at(n)) for n in (1, 3)]
    last = engine.add_request([1], params, on_output=raise_at(8))  # at the last token: there is nothing left to end
    outputs = list(engine.run())
    found = collect(outputs)
    assert [found[name][1] for name in (good, *bad, last)] == ["length", "error", "error", "length"]
    assert [len(found[name][0]) for name in bad] == [1, 3]
    errors = [o.error for o in outputs if o.error is not None]
    assert [str(error) for error in errors] == ["no more", "no more"]
    assert [record.exc_info[1].args for record in caplog.records] == [("no more",)] * 3


def test_a_callback_may_add_and_cancel_but_not_step(engine, caplog):
    added = []

    def callback(output):
        if not added:
            added.append(engine.add_request([2], SamplingParams(max_new_tokens=3)))
            engine.cancel(output.request_id)

    name = engine.add_request([1], SamplingParams(max_new_tokens=30), on_output=callback)
    found = collect(engine.run())
    assert found[name][1] == "cancelled"
    assert len(found[added[0]][0]) == 3
    name = engine.add_request([1], SamplingParams(max_new_tokens=30), on_output=lambda _: engine.step())
    assert collect(engine.run())[name][1] == "error"
    assert "called from a callback" in caplog.text


def test_whatever_a_callback_raises_loses_nobody_elses_token(engine):
    def interrupted(output):
        raise KeyboardInterrupt

    def cancelled(output):
        raise asyncio.CancelledError

    found = {}
    good = engine.add_request([1], SamplingParams(max_new_tokens=8))
    bad = [engine.add_request([1], SamplingParams(max_new_tokens=8), on_output=f) for f in (cancelled, interrupted)]
    with pytest.raises(KeyboardInterrupt):
        collect(engine.run(), found)
    collect(engine.run(), found)
    assert len(found[good][0]) == 8
    assert [found[name][1] for name in bad] == ["error", "error"]


def test_requests_that_draft_find_nothing_of_those_that_do_not(engine):
    """The draft layer's rows are not there: drafts from them would be worth nothing."""
    prompt = [5, 1, 4, 4, 9, 2, 6, 8, 11, 0, 3, 7, 7]
    serve(engine, prompt, max_new_tokens=2)
    before = engine.statistics.reused_tokens
    serve(engine, prompt, max_new_tokens=2, speculation=CHAIN)
    assert engine.statistics.reused_tokens == before
    serve(engine, prompt, max_new_tokens=2, speculation=TREE)
    assert engine.statistics.reused_tokens == before + 12


def test_slots_do_not_wait_for_tokens_on_their_way(engine, monkeypatch):
    """Where somebody waits, a slot goes on as soon as its request is launched to its end; no step reads its own."""
    launched, read = [], launching.read
    monkeypatch.setattr(
        launching, "read", lambda e, before: (launched.append(e._counters.launches - before), read(e, before))
    )
    before = engine.statistics.steps
    for n in range(12):
        engine.add_request([n], SamplingParams(max_new_tokens=1))
    collect(engine.run())
    assert engine.statistics.steps - before == 3  # four prompts in each
    assert len(launched) <= 5
    assert all(count == 1 for count in launched[:3])


def test_requests_from_threads():
    """Six threads add and cancel while another steps; the bound of the queue holds, everyone is answered."""
    engine, answers, stop = small_engine(max_waiting=10), collections.Counter(), threading.Event()
    engine.warm_up(progress=False)
    waiting = []

    def client(number):
        rng, added = np.random.default_rng(number), 0
        while added < 20:
            try:
                params = SamplingParams(max_new_tokens=int(rng.integers(1, 5)))
                name = engine.add_request([number], params, on_output=lambda o: answers.update([o.finish_reason]))
            except QueueFull:
                time.sleep(0.001)
                continue
            added += 1
            if rng.random() < 0.2:
                engine.cancel(name)

    def watch():
        while not stop.is_set():
            statistics = engine.statistics
            waiting.append(statistics.waiting - statistics.preemptions)
            time.sleep(0.001)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
    watcher = threading.Thread(target=watch)
    for thread in [*threads, watcher]:
        thread.start()
    while engine.busy or any(thread.is_alive() for thread in threads):
        engine.step()
    stop.set()
    watcher.join()
    assert answers["length"] + answers["cancelled"] == 120
    assert max(waiting) <= 10
    assert_idle(engine)


# The device's side.


def test_c09_an_idle_engine_launches_nothing(engine):
    serve(engine, [1, 2, 3], max_new_tokens=3)
    pools, states = engine._device
    before, steps = np.asarray(pools["full"].data), engine.statistics.steps
    for _ in range(3):
        assert engine.step() == []
    assert engine.statistics.steps == steps
    assert engine._device[0] is pools
    np.testing.assert_array_equal(np.asarray(engine._device[0]["full"].data), before)
    assert states["tokens"].shape == (4,)


@pytest.mark.slow
def test_c22_programs_write_in_place():
    """Pools and states are aliased in every program, and scratch does not grow with the pools."""
    temps = []
    for num_pages in (18, 4000):
        engine = small_engine(num_pages=num_pages)
        engine.warm_up(progress=False)
        pool = engine._device[0]["full"].data.nbytes
        own = pool + sum(array.nbytes for array in engine._device[1].values())
        found = []
        for bucket in engine._programs():
            for program in bucket._programs.values():
                memory = program.memory_analysis()
                assert own <= memory.alias_size_in_bytes <= own + 4096
                found.append(memory.temp_size_in_bytes)
        temps.append(found)
    assert temps[0] == temps[1]
    assert max(temps[1]) < pool / 2


def test_steps_do_not_wait_for_the_tokens_of_the_one_before(engine, monkeypatch):
    """What a step reads was launched before it: the device has work while the host hands out tokens."""
    order, launch, emit = [], launching.launch_tokens, engine._outbox._emit
    monkeypatch.setattr(launching, "launch_tokens", lambda *a: (order.append("launch"), launch(*a))[1])
    monkeypatch.setattr(engine._outbox, "_emit", lambda *a, **k: (order.append("token"), emit(*a, **k))[1])
    engine.add_request([1], SamplingParams(max_new_tokens=6))
    collect(engine.run())
    # The prompt's token is still on the device when the second is made of it, and so on.
    assert order == ["launch", "launch", "token", "token", *["launch", "token"] * 3, "token"]


def test_output_is_what_callbacks_see(engine):
    seen = []
    engine.add_request([1, 2], SamplingParams(max_new_tokens=4), on_output=seen.append)
    assert list(engine.run()) == seen
    assert [type(o) for o in seen] == [Output] * 4
    assert [o.finish_reason for o in seen] == [None, None, None, "length"]
