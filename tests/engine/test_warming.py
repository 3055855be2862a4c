"""An engine that serves while its programs compile, and one whose programs another process has lowered."""

import contextlib
import gc
import threading

import jax
import pytest

from checkpoints import GEMMA2, GPT_OSS, LLAMA3, QWEN3, V2, V3
from mla_attn import buckets
from mla_attn.buckets import Buckets
from mla_attn.engine import Engine, SamplingParams
from mla_attn.models import open_checkpoint
from mla_attn.passes.passes import forget_programs
from traffic import CHAIN, MAX_LEN, TREE, check_tokens, serve, small_model

FEW = {"max_batch": 2, "num_pages": 18, "page_size": 4, "max_len": MAX_LEN, "prompt_tokens": 16}


def make(**options):
    return Engine(small_model(), **{**FEW, **options})


@pytest.fixture
def held(monkeypatch):
    """An event until which only the largest rung of each pass is compiled."""
    go_on, compile_one = threading.Event(), Buckets._compile

    def compile_largest(self, index, lowered):
        if index < len(self._rungs) - 1:
            assert go_on.wait(120)
        return compile_one(self, index, lowered)

    monkeypatch.setattr(Buckets, "_compile", compile_largest)
    monkeypatch.setattr(buckets, "_on_cpu", contextlib.nullcontext())
    yield go_on
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "warm-up":
            thread.join()


def served(engine, kind=None):
    """Serves a request and judges its tokens."""
    prompt, options = [3, 1, 4, 1, 5, 9, 2, 6, 5], {"max_new_tokens": 6, "speculation": kind, "ignore_eos": True}
    tokens = serve(engine, prompt, **options)
    assert len(tokens) == 6
    check_tokens(small_model(), prompt, tokens, SamplingParams(**options))
    return tokens


@pytest.mark.parametrize("kind", [None, pytest.param(CHAIN, marks=pytest.mark.slow)])
def test_requests_are_served_while_programs_compile(held, kind, caplog):
    """One request, with the programs for two."""
    engine = make(speculation=() if kind is None else (kind,))
    engine.warm_up(progress=False, background=True)
    served(engine, kind)
    waiting = [bucket for bucket in engine._programs() if len(bucket._rungs) > 1]
    assert len(waiting) == (1 if kind is None else 4) and all(bucket.awaits(0) for bucket in waiting)
    held.set()
    assert engine.warm_up(progress=False) > 0
    served(engine, kind)
    statistics = engine.statistics
    assert statistics.compiles_after_warm_up == 0 and statistics.warm_up_seconds > 0
    assert statistics.programs == sum(len(bucket._rungs) for bucket in engine._programs())
    assert not [record for record in caplog.records if "compiled by a call" in record.getMessage()]


@pytest.mark.parametrize("kind", [None, pytest.param(CHAIN, marks=pytest.mark.slow)])
def test_the_first_token_waits_for_no_more_than_its_prompt(monkeypatch, kind):
    """While the programs of the next tokens are still compiled."""
    go_on, compile_one = threading.Event(), Buckets._compile

    def prompts_only(self, index, lowered):
        assert "prefill" in self.name or go_on.wait(120)
        return compile_one(self, index, lowered)

    monkeypatch.setattr(Buckets, "_compile", prompts_only)
    monkeypatch.setattr(buckets, "_on_cpu", contextlib.nullcontext())
    engine = make(speculation=() if kind is None else (kind,), batches=(2,))
    engine.warm_up(progress=False, background=True)
    prompt, params = [3, 1, 4, 1, 5], SamplingParams(max_new_tokens=4, speculation=kind, ignore_eos=True)
    engine.add_request(prompt, params)
    late = threading.Timer(60, go_on.set)  # a failure must not wait forever
    late.start()
    outputs = engine.run()
    tokens = list(next(outputs).tokens)
    assert not go_on.is_set() and len(tokens) == 1
    late.cancel()
    go_on.set()
    for output in outputs:
        tokens += output.tokens
    check_tokens(small_model(), prompt, tokens, params)
    assert len(tokens) == 4
    engine.warm_up(progress=False)


def test_a_warm_up_ends_with_its_engine(held):
    engine = make()
    engine.warm_up(progress=False, background=True)
    programs = engine._programs()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "warm-up"]
    del engine
    gc.collect()
    held.set()
    thread.join(120)
    assert not thread.is_alive()
    assert any(bucket.pending for bucket in programs)


def test_a_program_that_does_not_compile_is_told(monkeypatch, caplog):
    """And its call raises, or compiles it."""
    engine = make()
    with monkeypatch.context() as patch:
        patch.setattr(Buckets, "_compile", lambda *_: 1 / 0)
        engine.warm_up(progress=False, background=True)
        for thread in threading.enumerate():
            if thread.name == "warm-up":
                thread.join(120)
    assert "a program did not compile ahead of time" in caplog.text
    served(engine)


def test_an_engine_whose_programs_are_kept(tmp_path):
    """The same tokens, and nothing is lowered; another model finds nothing."""
    tokens, counts = set(), []
    for max_len in (MAX_LEN, MAX_LEN, MAX_LEN - 4):
        forget_programs()  # as in another process
        engine = make(cache_dir=tmp_path / "programs", batches=(2,), max_len=max_len)
        engine.warm_up(progress=False)
        tokens.add(tuple(served(engine)))
        statistics = engine.statistics
        counts.append((statistics.programs, statistics.programs_read, engine.folder.written))
    assert counts == [(3, 0, 3), (3, 3, 0), (3, 0, 3)] and len(tokens) == 1
    forget_programs()


@pytest.mark.parametrize("path", [V2, V3, QWEN3, GPT_OSS, GEMMA2, LLAMA3], ids=lambda path: path.name)
def test_the_programs_of_every_model_have_names(path):
    """Else they would be lowered in every process; and no two programs of an engine have the same one."""
    opened = open_checkpoint(path)
    drafts = (CHAIN, TREE) if opened.model.can_draft else ()
    engine = Engine(opened.model, max_batch=2, num_pages=4, max_len=64, speculation=drafts)
    arguments = jax.eval_shape(lambda: (engine._passes.state, engine._device))
    rungs = [(bucket._step, rung) for bucket in engine._programs() for rung in bucket._rungs]
    names = [step._name_of((*arguments, rung)) for step, rung in rungs]
    assert None not in names and len(set(names)) == len(names)
