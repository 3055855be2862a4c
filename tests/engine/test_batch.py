"""``Engine.generate``: prompts in, results out, in their order, beside whatever else the engine does."""

import logging

import pytest

from checkpoints import V3
from mla_attn.engine import EngineDead, SamplingParams
from mla_attn.engine.engine import Engine
from mla_attn.models.tokenizer import ByteTokenizer
from traffic import CHAIN, check_tokens, collect, serve, small_engine

SHORT = SamplingParams(max_new_tokens=4)
PROMPTS = [[5, 1, 4], [1], [9, 2, 6, 8], [5, 1, 4], [7, 7]]


def test_results_in_order(engine, capsys):
    params = [
        SamplingParams(max_new_tokens=n, temperature=1.0, speculation=CHAIN if n % 2 else None) for n in range(1, 6)
    ]
    results = engine.generate(PROMPTS, params)
    assert [result.prompt for result in results] == PROMPTS
    assert [(len(r.tokens), r.finish_reason, r.text, r.error) for r in results] == [
        (n, "length", None, None) for n in range(1, 6)
    ]
    for result, own in zip(results, params, strict=True):
        again = {**vars(own), "seed": result.seed}
        check_tokens(engine.model, result.prompt, result.tokens, SamplingParams(**again))
    assert "generating: 100%" in capsys.readouterr().err
    assert engine.generate([], progress=False) == []
    assert "generating" not in capsys.readouterr().err


def test_more_prompts_than_may_wait_and_requests_beside_them():
    """What others got is for ``run``."""
    engine = small_engine(max_waiting=2)
    other = engine.add_request([3], SamplingParams(max_new_tokens=30))
    results = engine.generate([[n] for n in range(9)], SamplingParams(max_new_tokens=3), progress=False)
    found = collect(engine.run())
    assert list(found) == [other] and (len(found[other][0]), found[other][1]) == (30, "length")
    assert [r.tokens for r in results] == [serve(engine, [n], max_new_tokens=3) for n in range(9)]


def test_nothing_is_in_flight_afterwards(engine):
    """A stop token is read one step late: by then another pass is on its way, whose tokens nobody wants."""
    text = serve(engine, [5, 1, 4], max_new_tokens=6)
    stopped = SamplingParams(max_new_tokens=20, stop_token_ids=(text[2],))
    (result,) = engine.generate([[5, 1, 4]], stopped, progress=False)
    assert result.tokens == text[: text.index(text[2]) + 1]
    assert not engine.busy


def test_what_is_wrong_with_which_prompt(engine, unchecked):
    for prompts, params, message in (
        ([[1], []], SHORT, r"prompts\[1\]: prompt is empty"),
        ([[1], "abc"], SHORT, r"prompts\[1\]: prompt='abc' is text, must be token ids"),
        ("abc", SHORT, r"prompts='abc' must be a sequence of prompts: \['abc'\]"),
        ([[1]], [SamplingParams()] * 2, "params has 2 elements, must have as many as prompts: 1"),
        ([[1]], {"seed": 3}, "is a dict, must be SamplingParams"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts, params, progress=False)
    assert not engine.busy


def test_a_fault_ends_no_batch(engine, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    run, left = engine._run, [RuntimeError("out of memory"), KeyboardInterrupt()]

    def broken(bucket, **arrays):
        if bucket.name == "decode" and left:
            raise left.pop(0)
        return run(bucket, **arrays)

    monkeypatch.setattr(engine, "_run", broken)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, SHORT, progress=False)
    assert {output.finish_reason for output in engine.run()} == {"cancelled"}
    left[:] = [RuntimeError("out of memory")]
    results = engine.generate(PROMPTS, SHORT, progress=False)
    assert [r.tokens for r in results] == [serve(engine, prompt, max_new_tokens=4) for prompt in PROMPTS]
    left[:] = [OSError("the device is gone")] * 3
    (result,) = engine.generate([[1]], SHORT, progress=False)
    assert (result.finish_reason, str(result.error), result.tokens) == ("error", "the device is gone", [])

    def full():
        raise MemoryError

    with monkeypatch.context() as patch:
        left[:] = [RuntimeError("out of memory")]
        patch.setattr(engine, "_create_device", full)
        with pytest.raises(EngineDead):
            engine.generate([[1]], SHORT, progress=False)
    list(engine.run())


def test_from_a_callback_it_is_refused(engine, caplog):
    caplog.set_level(logging.CRITICAL)
    engine.add_request([1], SHORT, on_output=lambda _: engine.generate([[1]], SHORT, progress=False))
    assert "generate() was called from a callback" in str(list(engine.run())[-1].error)


@pytest.mark.slow
def test_text_in_text_out():
    """From a checkpoint folder, in three lines; what is streamed is token ids all the same."""
    engine = Engine.from_checkpoint(V3, max_batch=2, batches=(2,), max_len=64, page_size=16, prompt_tokens=32)
    assert engine.model.dtype == "bfloat16" and isinstance(engine.tokenizer, ByteTokenizer)
    prompt = "The GNU General Public"
    (result,) = engine.generate([prompt], SamplingParams(max_new_tokens=16), progress=False)
    assert result.prompt == list(prompt.encode()) and result.text == bytes(result.tokens).decode()
    assert engine.statistics.compiles_after_warm_up == 0
    name = engine.add_request(prompt, SamplingParams(max_new_tokens=16))
    assert collect(engine.run())[name][0] == result.tokens
