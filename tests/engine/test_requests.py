"""What an engine and its requests refuse, by name, before anything runs."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import V2
from mla_attn.engine import SamplingParams
from mla_attn.models import load_checkpoint
from mla_attn.speculative import DraftTree
from traffic import CHAIN, serve, small_engine


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch=0 must be an integer of at least 1"),
        ({"num_pages": 0}, "num_pages=0 must be an integer of at least 1"),
        ({"page_size": -1}, "page_size=-1 must be an integer of at least 1"),
        ({"prompt_tokens": 0}, "prompt_tokens=0 must be an integer of at least 1"),
        ({"max_waiting": 0}, "max_waiting=0 must be an integer of at least 1"),
        ({"max_len": 5000}, "max_len=5000 must be at most max_position_embeddings=4096"),
        ({"max_len": 48.0}, "max_len=48.0 must be an integer of at least 1"),
        ({"batches": (1, 2)}, r"batches=\(1, 2\) must be at least 1, the largest at least max_batch=4"),
        ({"batches": (2.5, 8)}, "batches holds 2.5, must be a sequence of integers"),
        ({"batches": 8}, "batches=8 must be a sequence of integers"),
        ({"speculation": CHAIN}, r"speculation=DraftTree\(widths=\(1, 1\)\) must be a sequence of DraftTree"),
        ({"speculation": ("2x2",)}, r"speculation=\('2x2',\) must be a sequence of DraftTree"),
        ({"implementation": "foo"}, "implementation='foo' must be one of mosaic_gpu"),
    ],
)
def test_wrong_engines(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        small_engine(**options)


def test_an_implementation_that_does_not_serve(monkeypatch):
    for name in ("xla", "reference"):
        small_engine(implementation=name)
    monkeypatch.setenv("MLA_ATTN_IMPLEMENTATION", "triton")
    with pytest.raises(NotImplementedError, match="mla_attention has no 'triton' implementation"):
        small_engine()
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu: .* must be"):
        small_engine(implementation="mosaic_gpu")


def test_a_model_without_draft_layer():
    with pytest.raises(ValueError, match="the model has no MTP layer"):
        small_engine(model=load_checkpoint(V2, dtype=jnp.float32))


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1, 13], {}, "prompt holds token 13, must be 0 to 12"),
        ([-1], {}, "prompt holds token -1"),
        ([1] * 40, {"max_new_tokens": 9}, "prompt has 40 tokens and max_new_tokens=9: together they must be at most"),
        ([1], {"max_new_tokens": 5, "speculation": DraftTree.chain(4)}, r"widths \(1, 1, 1, 1\) must be one of the"),
        ([1, 1.5], {}, "prompt holds 1.5, must be a sequence of integers"),
        ([True], {}, "prompt holds True, must be a sequence of integers"),
        ("abc", {}, "prompt holds 'a', must be a sequence of integers"),
        (np.ones((2, 2), np.int32), {}, r"prompt holds \[1, 1\], must be a sequence of integers"),
        (np.int32(1), {}, r"prompt=np.int32\(1\) must be a sequence of integers"),
        ((n for n in range(2)), {}, "prompt=<generator .* must be a sequence of integers"),
        (None, {}, "prompt=None must be a sequence of integers"),
    ],
)
def test_wrong_requests(engine, prompt, params, message, unchecked):
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, SamplingParams(**params))


@pytest.mark.parametrize("kind", [tuple, np.array, jnp.array, bytes])
def test_prompts_of_any_kind(engine, kind, unchecked):
    prompt = [1, 2, 3]
    assert serve(engine, kind(prompt), max_new_tokens=2) == serve(engine, prompt, max_new_tokens=2)


def test_a_request_that_could_never_run():
    with pytest.raises(ValueError, match="they need 12 pages, must be at most num_pages=11"):
        small_engine(num_pages=11).add_request([1] * 40, SamplingParams(max_new_tokens=8))


@pytest.mark.parametrize(
    "params",
    [{"max_new_tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")},
     {"temperature": 1e39}, {"temperature": "a"}, {"temperature": None}, {"top_p": None}, {"speculation": "2x2"},
     {"speculation": 3}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}, {"seed": 2**32}, {"seed": 1.5},
     {"max_new_tokens": 2.5}, {"max_new_tokens": True}, {"stop_tokens": None}, {"stop_tokens": (1.5,)}],
)  # fmt: skip
def test_wrong_params(params, unchecked):
    ((name, value),) = params.items()
    with pytest.raises(ValueError, match=rf"{name}={re.escape(repr(value))} must be|{name} holds 1.5, must be"):
        SamplingParams(**params)


def test_stop_tokens_of_any_kind(unchecked):
    for tokens in ([3, 4], np.array([3, 4]), (token for token in (3, 4))):
        assert SamplingParams(stop_tokens=tokens).stop_tokens == (3, 4)
