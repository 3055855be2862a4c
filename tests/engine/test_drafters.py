"""Who drafts changes how many tokens come at a time, never which."""

import numpy as np
import pytest

from mla_attn.engine import DraftModel, NgramDrafts, SamplingParams
from mla_attn.generation import generate
from mla_attn.speculative import DraftTree
from traffic import CHAIN, KINDS, MAX_LEN, TREE, assert_idle, check_tokens, collect, serve, small_engine, small_model
from windows import windowed_model

PROMPTS = ([5, 1, 4, 4, 9, 2, 6, 8, 11], [3], [7, 7, 7, 7, 7, 7], list(range(12)))
DRAFTERS = {
    "mtp": lambda: None,
    "model": lambda: DraftModel(windowed_model((5, None), seed=1)),
    "itself": lambda: DraftModel(small_model()),
    "ngrams": lambda: NgramDrafts(3),
}


@pytest.fixture(scope="module", params=DRAFTERS)
def engine(request):
    engine = small_engine(draft=DRAFTERS[request.param](), num_pages=44)
    yield engine
    assert_idle(engine)


def test_tokens_are_those_without_drafts(engine):
    """Greedy and drawn, chains and trees, side by side; one of them is a next turn whose beginning is found."""
    asked = {}
    for seed, prompt in enumerate(PROMPTS):
        for kind in KINDS:
            params = SamplingParams(max_new_tokens=24, temperature=0.8 * (seed % 2), seed=seed, speculation=kind)
            asked[engine.add_request(prompt, params)] = prompt, params
    found = collect(engine.run())
    for name, (prompt, params) in asked.items():
        assert found[name][1] == "length" and len(found[name][0]) == 24
        check_tokens(engine.model, prompt, found[name][0], params)
    before = engine.statistics
    for name, (prompt, params) in list(asked.items())[:3]:
        follow = [*prompt, *found[name][0], 1]
        options = vars(params) | {"max_new_tokens": 8}
        check_tokens(engine.model, follow, serve(engine, follow, **options), SamplingParams(**options))
    assert engine.statistics.reused_tokens > before.reused_tokens
    assert engine.statistics.compiles_after_warm_up >= before.compiles_after_warm_up


def acceptance(engine, prompt, kind, new=30) -> float:
    """Tokens of a verify step."""
    before = engine.statistics.target_steps
    tokens = serve(engine, prompt, max_new_tokens=new, speculation=kind)
    check_tokens(engine.model, prompt, tokens, SamplingParams(max_new_tokens=new))
    return (new - 1) / (engine.statistics.target_steps - before)


@pytest.mark.parametrize("kind", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("windows", [(None,), (None, 6)], ids=str)
def test_a_model_that_drafts_for_itself_is_always_right(windows, kind):
    """Each row that it caches is the one that the target has: after parts of prompts and prefixes that were found."""
    model = windowed_model(windows)
    engine = small_engine(model=model, draft=DraftModel(model), num_pages=44)
    prompt = np.random.default_rng(3).integers(13, size=17).tolist()  # more than a part
    for again in range(2):
        # 1 token of the prompt's pass, then 3 a step; one more step is on its way when the last one is read.
        assert acceptance(engine, prompt, kind, 28) >= 27 / 10
        assert (engine.statistics.reused_tokens > 0) == (again > 0)


def test_a_text_that_repeats_is_drafted_from():
    """Texts of a small random model end in circles, which n-grams follow; they are on the device as they are."""
    engine = small_engine(model=windowed_model((None, 6)), draft=NgramDrafts(3), num_pages=44)
    assert np.mean([acceptance(engine, [first, 5], CHAIN, 40) for first in range(3)]) > 1.8
    prompt = list(range(11)) * 2  # in two parts
    for kind in (CHAIN, TREE):
        text = [*prompt, *serve(engine, prompt, max_new_tokens=20, speculation=kind)]
        assert np.asarray(engine._device[1]["text"])[0, : len(text)].tolist() == text
        prompt = text[:24]  # the beginning of the next one is found, and on the device all the same
    assert engine.statistics.reused_tokens > 0


def test_what_cannot_draft_is_refused(unchecked):
    model = windowed_model((None, 6))
    for options, message in (
        ({"draft": None}, "must be None: the model has no draft layer; or draft must be"),
        ({"draft": DraftModel(windowed_model((None,), 14))}, "vocab_size=14, must be the model's: 13"),
        ({"draft": "ngram"}, "draft='ngram' must be a DraftModel, NgramDrafts, or None"),
        ({"draft": NgramDrafts(2), "speculation": ()}, "without speculation"),
        ({"draft": NgramDrafts(2), "speculation": (DraftTree((3, 2)),)}, "has 10 nodes, must be at most window=6"),
    ):
        with pytest.raises(ValueError, match=message):
            small_engine(model=model, **options)
    with pytest.raises(ValueError, match="must be a model: load_checkpoint"):
        DraftModel("a path")
    with pytest.raises(ValueError, match="n=0 must be an integer"):
        NgramDrafts(0)


@pytest.mark.parametrize("draft", [lambda: DraftModel(windowed_model((None, 5), seed=1)), lambda: NgramDrafts(2)])
@pytest.mark.parametrize("drafts", [{"num_drafts": 2}, {"tree": TREE}], ids=["chain", "tree"])
def test_generate_takes_them(draft, drafts):
    model = windowed_model((None, 6))
    options = {"max_new_tokens": 20, "page_size": 4, "prefill_chunk": 7}
    made = generate(model, PROMPTS, draft=draft(), **drafts, **options)
    for prompt, tokens in zip(PROMPTS, made.tokens, strict=True):
        assert len(tokens) == 20 and len(prompt) + 20 < MAX_LEN
        check_tokens(model, prompt, tokens, SamplingParams(max_new_tokens=20))
    assert made.statistics.acceptance_length is not None and made.statistics.compiles_after_warm_up == 0
    with pytest.raises(ValueError, match="without speculation"):
        generate(model, PROMPTS, draft=draft(), **options)
