"""Engines over several devices: the tokens of independent models (tests/fixtures), no program compiled by a call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import traffic
from checkpoints import GEMMA2, GPT_OSS, LLAMA3, QWEN3, V2, V3
from mla_attn.engine import Engine, NgramDrafts, SamplingParams
from mla_attn.generation import generate
from mla_attn.models import load_checkpoint, shard_model
from mla_attn.parallel import Layout, Parallelism
from mla_attn.speculative import DraftTree

NEW = 20  # tokens of each request
TREE = DraftTree((2, 1))


def over(heads, contexts, layout, kind=AxisType.Auto):
    devices = jax.devices("cpu")[: heads * contexts]
    mesh = jax.make_mesh((heads, contexts), ("x", "y"), axis_types=(kind,) * 2, devices=devices)
    return Parallelism(mesh, layout)


HEADS, CONTEXTS = Layout(heads="x"), Layout(context="y")
ALL = Layout(heads="x", context="y", experts=("x", "y"))
MODELS = {
    "v3, heads": (V3, over, (2, 1, HEADS), {}),
    "v3, contexts and a draft tree": (V3, over, (1, 2, CONTEXTS), {"speculation": (TREE,)}),
    "v3, everything": (V3, over, (2, 2, ALL), {}),
    "v2, experts over explicit axes": (V2, over, (2, 2, ALL, AxisType.Explicit), {}),
    "qwen3, fewer KV heads than devices": (QWEN3, over, (4, 1, HEADS), {}),
    "gpt-oss, experts": (GPT_OSS, over, (2, 2, ALL), {}),
    "gpt-oss, widths of experts": (GPT_OSS, over, (2, 1, HEADS), {}),
    "gemma2, windows": (GEMMA2, over, (2, 2, Layout(heads="x", context="y")), {}),
    "llama3": (LLAMA3, over, (2, 2, ALL), {"speculation": (TREE,), "draft": NgramDrafts(2)}),
}


@pytest.mark.parametrize("case", MODELS)
def test_tokens(case):
    path, make, arguments, options = MODELS[case]
    parallelism = make(*arguments)
    sizes = {"max_batch": 2, "batches": (2,), "page_size": 16, "num_pages": 24, "max_len": 112, "prompt_tokens": 64}
    engine = Engine.from_checkpoint(path, dtype=jnp.float32, parallelism=parallelism, **sizes, **options, cache_dir="")
    with np.load(path / "expected.npz") as file:
        prompts = [file[f"prompt_{i}"].tolist()[:80] for i in range(2)]
        greedy = [file[f"greedy_{i}"][:NEW].tolist() for i in range(2)]
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, speculation=options.get("speculation", (None,))[0])
    prompts = prompts[: 1 + (len(prompts[1]) < 80)]  # a prompt that is cut has other tokens
    results = engine.generate(prompts, params, progress=False)
    assert [result.tokens for result in results] == greedy[: len(prompts)]
    again = engine.generate(prompts, params, progress=False)  # the prompts' pages are found
    assert [result.tokens for result in again] == greedy[: len(prompts)]
    assert engine.statistics.compiles_after_warm_up == 0


@functools.cache
def small_model(layout, devices):
    """A sharded copy of the small model, and its parallelism."""
    parallelism = over(*devices, layout)
    graphdef, state = nnx.split(traffic.small_model())
    return shard_model(nnx.merge(graphdef, jax.tree.map(jnp.copy, state)), parallelism), parallelism


def test_no_device_has_the_whole_model():
    """A checkpoint's tensors are read part by part; only norms, routers and low-rank projections are everywhere."""
    model = load_checkpoint(V3, dtype=jnp.float32, parallelism=over(2, 2, ALL))
    whole = load_checkpoint(V3, dtype=jnp.float32)
    arrays = jax.tree.leaves(nnx.state(model))
    own = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    total = sum(array.nbytes for array in jax.tree.leaves(nnx.state(whole)))
    assert sum(array.nbytes for array in arrays) == total and own < 0.4 * total
    for array, wanted in zip(arrays, jax.tree.leaves(nnx.state(whole)), strict=True):
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize("layout", [HEADS, CONTEXTS], ids=["heads", "contexts"])
def test_traffic(layout):
    """Preemption, prefixes, chains and trees: every token is judged by a whole prefill on one device."""
    model, parallelism = small_model(layout, (2, 1) if layout is HEADS else (1, 2))
    engine = traffic.small_engine(model=model, parallelism=parallelism)
    rng, requests, found = np.random.default_rng(0), {}, {}
    for number in range(9):
        prompt, kind = traffic.some_prompt(rng), traffic.KINDS[number % 3]
        params = SamplingParams(max_new_tokens=int(rng.integers(1, 24)), speculation=kind)
        requests[engine.add_request(prompt, params)] = (prompt, params)
        traffic.collect(engine.step(), found)
    traffic.collect(engine.run(), found)
    for name, (prompt, params) in requests.items():
        tokens, reason = found[name]
        assert reason in ("stop", "length")
        traffic.check_tokens(traffic.small_model(), prompt, tokens, params)
    assert engine.statistics.preemptions > 0
    traffic.assert_idle(engine)


def test_what_is_refused():
    model, parallelism = small_model(HEADS, (2, 1))
    with pytest.raises(ValueError, match=r"model is sharded by Layout\(heads=\('x',\).*must be by None"):
        Engine(model, num_pages=8, page_size=4)
    with pytest.raises(ValueError, match=r"model is sharded by None, must be by Layout"):
        Engine(traffic.small_model(), parallelism=parallelism, num_pages=8, page_size=4)
    with pytest.raises(ValueError, match=r"model is sharded by Layout.*must be by None"):
        generate(model, [[1]], max_new_tokens=1)
    with pytest.raises(ValueError, match="model is on the mesh"):
        Engine(model, parallelism=over(2, 1, HEADS, AxisType.Explicit), num_pages=8, page_size=4)
    with pytest.raises(ValueError, match="model is sharded already"):
        shard_model(model, parallelism)
    with pytest.raises(ValueError, match="page_size=5 must be a multiple of the 2 context ranks"):
        Engine(small_model(CONTEXTS, (1, 2))[0], parallelism=over(1, 2, CONTEXTS), num_pages=8, page_size=5)
    with pytest.raises(ValueError, match="num_heads=4 must be a multiple of the 8 devices"):
        load_checkpoint(V3, parallelism=over(8, 1, HEADS))
    with pytest.raises(NotImplementedError, match=r"an engine over batch=\('x',\) is not supported"):
        batch, parallelism = small_model(Layout(batch="x"), (2, 1))
        Engine(batch, parallelism=parallelism, num_pages=8, page_size=4)
