"""What an engine and its requests refuse, by name, before anything runs."""

import dataclasses
import functools
import logging
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints import V2, V3
from mla_attn.engine import Engine, SamplingParams, sizes
from mla_attn.generation import generate
from mla_attn.models import load_checkpoint
from mla_attn.speculative import DraftTree
from traffic import CHAIN, collect, serve, small_engine, small_model


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
        ({"memory_fraction": 0}, "memory_fraction=0 must be a finite number above 0 and of at most 1"),
        ({"model": "a/path"}, r"model='a/path' is a str, must be a model: Engine.from_checkpoint\(path\) loads one"),
        ({"model": 3}, r"model=3 is a int, must be a model: load_checkpoint\(path\) loads one"),
    ],
)
def test_wrong_engines(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        small_engine(**options)


def test_an_implementation_that_does_not_serve(monkeypatch):
    for name in ("xla", "reference"):
        small_engine(implementation=name)
    monkeypatch.setenv("MLA_ATTN_IMPLEMENTATION", "triton")
    with pytest.raises(NotImplementedError, match=r"mla_attention is not supported here: triton: .* must be"):
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
        ("abc", {}, r"prompt='abc' is text, must be token ids: .* Engine.from_checkpoint\(path\)"),
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
     {"ignore_eos": 1}, {"max_new_tokens": 2.5}, {"max_new_tokens": True}, {"stop_token_ids": None},
     {"stop_token_ids": (1.5,)}],
)  # fmt: skip
def test_wrong_params(params, unchecked):
    ((name, value),) = params.items()
    with pytest.raises(ValueError, match=rf"{name}={re.escape(repr(value))} must be|{name} holds 1.5, must be"):
        SamplingParams(**params)


def test_stop_tokens_of_any_kind(unchecked):
    for tokens in ([3, 4], np.array([3, 4]), (token for token in (3, 4))):
        assert SamplingParams(stop_token_ids=tokens).stop_token_ids == (3, 4)


def test_parameters_as_a_dict(engine, unchecked):
    for call in (engine.add_request, engine.check_request):
        with pytest.raises(ValueError, match=r"params=\{'seed': 3\} is a dict, must be SamplingParams\(\*\*params\)"):
            call([1], {"seed": 3})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: SamplingParams(max_tokens=3),
            r"SamplingParams\(\) has no argument 'max_tokens': it is max_new_",
        ),
        (lambda: SamplingParams(stop_tokens=(3,)), "'stop_tokens': it is stop_token_ids here"),
        (lambda: SamplingParams(temprature=1.0), "'temprature': it is temperature here"),
        (lambda: SamplingParams(n=2), "has no argument 'n', must be one of max_new_tokens, stop_token_ids,"),
        (
            lambda: small_engine(gpu_memory_utilization=0.5),
            r"Engine\(\) has no argument 'gpu_memory_utilization': it is memory_fraction here",
        ),
        (lambda: small_engine(max_model_len=5), "'max_model_len': it is max_len here"),
        (lambda: generate(small_model(), [[1]], max_tokens=3), r"generate\(\) has no .* it is max_new_tokens here"),
    ],
)
def test_names_of_other_engines(call, message, unchecked):
    with pytest.raises(TypeError, match=message):
        call()


def test_a_seed_is_drawn_and_told(engine):
    """Two requests of one prompt differ; the seed that an output tells gives its tokens again."""
    params = SamplingParams(max_new_tokens=12, temperature=1.5)
    for _ in range(2):
        engine.add_request([1, 2, 3], params)
    found = {}
    for output in engine.run():
        tokens, seed = found.setdefault(output.request_id, ([], output.seed))
        assert output.seed == seed is not None
        tokens += output.tokens
    (first, seed), (second, other) = found.values()
    assert first != second and seed != other
    assert serve(engine, [1, 2, 3], max_new_tokens=12, temperature=1.5, seed=seed) == first
    engine.add_request([1], SamplingParams(max_new_tokens=1))
    assert [output.seed for output in engine.run()] == [None]


@pytest.mark.parametrize("kind", [None, CHAIN])
def test_requests_end_at_the_models_end_tokens(engine, monkeypatch, kind):
    text = serve(engine, [3, 1, 2], max_new_tokens=24, speculation=kind)
    model = engine.model
    end = text[7]
    config = dataclasses.replace(model.config, eos_token_ids=(99, end))
    monkeypatch.setattr(model, "config", config)
    cut = text[: text.index(end) + 1]
    for ignored, wanted in ((False, (cut, "stop")), (True, (text, "length"))):
        params = SamplingParams(max_new_tokens=24, speculation=kind, ignore_eos=ignored)
        name = engine.add_request([3, 1, 2], params)
        assert collect(engine.run())[name] == wanted
    if kind is None:
        generated = functools.partial(generate, model, [[3, 1, 2]], max_new_tokens=24, page_size=4)
        assert (generated().tokens, generated(ignore_eos=True).tokens) == ([cut], [text])


# As large as memory allows.


def test_sizes_by_the_memory_that_is_free(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    model = small_model()
    each = sizes.page_bytes(model.cache_groups, 4)
    assert each == sum(leaf.nbytes for leaf in jax.tree.leaves(model.create_pools(num_pages=1, page_size=4)))
    free = [40 * each]
    monkeypatch.setattr(sizes, "free_bytes", lambda: free[0])

    def chosen(num_pages=None, max_len=None, memory_fraction=None):
        limits = dataclasses.replace(small_engine()._limits, max_batch=2, max_len=model.max_position_embeddings)
        facts = {"page_size": 4, "memory_fraction": memory_fraction}
        cache, limits = sizes.choose_sizes(model.cache_groups, limits, num_pages=num_pages, max_len=max_len, **facts)
        return cache.num_pages, limits.max_len

    assert [sizes.round_down(n) for n in (0, 1, 63, 64, 65, 127, 2**20 + 5)] == [0, 1, 63, 64, 64, 126, 2**20]
    assert chosen(num_pages=7) == (7, 28) and chosen(num_pages=7, max_len=5) == (7, 5)
    assert chosen() == (10, 40) and chosen(max_len=8) == (4, 8) and chosen(memory_fraction=0.5) == (20, 80)
    with pytest.raises(ValueError, match=r"max_len=44 needs 11 pages of 4 tokens, .* GiB: there is room for .* GiB"):
        chosen(max_len=44)
    free[0] = 1 << 40
    assert chosen() == (2 * 1024, 4096)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    free[0] = 40 * each
    assert chosen() == (36, 144) and chosen(max_len=8) == (36, 8)
    with pytest.raises(ValueError, match="max_len=None needs 1 pages of 4 tokens"):
        chosen(memory_fraction=0.02)
    free[0] = None
    with pytest.raises(ValueError, match="num_pages=None must be given"):
        chosen()
    assert "num_pages=36 of 4 tokens: " in caplog.text and "max_len=144, of max_position_embeddings" in caplog.text


def test_pages_by_what_a_gpu_says(monkeypatch):
    """Nine tenths, or the share given, of the allocator's limit less what arrays hold, rounded down."""
    groups, said = small_model().cache_groups, {"bytes_limit": 60 << 30, "bytes_in_use": 14 << 30}
    device = types.SimpleNamespace(platform="gpu", memory_stats=lambda: said)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    each, limits = sizes.page_bytes(groups, 64), dataclasses.replace(small_engine()._limits, max_len=4096)
    for fraction, share in ((None, 0.9), (0.05, 0.05), (1.0, 1.0)):
        facts = {"num_pages": None, "max_len": 4096, "page_size": 64, "memory_fraction": fraction}
        cache, _ = sizes.choose_sizes(groups, limits, **facts)
        assert cache.num_pages == sizes.round_down(int(share * (46 << 30)) // each)
    said["bytes_in_use"] = 60 << 30
    with pytest.raises(ValueError, match=r"max_len=4096 needs 64 pages of 64 tokens, .* room for 0 GiB"):
        sizes.choose_sizes(groups, limits, **facts)


@pytest.mark.gpu
def test_pages_on_a_gpu():
    """A twentieth of what is free when the engine is made, which it takes, and serves from."""
    model = load_checkpoint(V3)
    jax.block_until_ready(nnx.state(model))
    before = jax.devices()[0].memory_stats()
    free = before["bytes_limit"] - before["bytes_in_use"]
    engine = Engine(model, memory_fraction=0.05, max_batch=2)
    jax.block_until_ready(engine._device)
    taken = jax.devices()[0].memory_stats()["bytes_in_use"] - before["bytes_in_use"]
    each = sizes.page_bytes(model.cache_groups, engine._cache.page_size)
    assert sizes.round_down(int(0.0499 * free) // each) <= engine._cache.num_pages <= int(0.05 * free) // each
    assert 0.048 * free < taken < 0.0505 * free  # rounded down by up to 3 %
    assert [len(result.tokens) for result in engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))] == [4]


def test_an_engine_without_sizes(monkeypatch):
    monkeypatch.setattr(sizes, "free_bytes", lambda: 72 * sizes.page_bytes(small_model().cache_groups, 4))
    engine = small_engine(num_pages=None, max_len=None)
    assert (engine.max_len, engine._cache.num_pages) == (72, 18)
