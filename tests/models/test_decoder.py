"""Logits and tokens of the grouped-query families against what transformers computes (tests/fixtures), whole and in
parts, alone and side by side; and a Mistral against a dense float64 computation in here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints import GEMMA2, GPT_OSS, LLAMA3, QWEN3, read_checkpoint, write_checkpoint
from mla_attn import metadata as build
from mla_attn import steps
from mla_attn.generation import generate
from mla_attn.models import load_checkpoint

TOLERANCE = 1e-3  # float32 against float32; a float64 model differs from the expected logits by 3.5e-5
PAGE, WIDTH = 16, 19  # 304 tokens a request
PART = 7
REQUESTS = 3
NEW = 48


def expected_of(path):
    """Prompts, logits and tokens, by name and number."""
    with np.load(path / "expected.npz") as file:
        return dict(file)


@pytest.fixture(scope="module", params=[QWEN3, GPT_OSS, GEMMA2, LLAMA3], ids=lambda path: path.name.split("-")[0])
def fixture(request):
    """A model and what is expected of it."""
    return load_checkpoint(request.param, dtype=jnp.float32), expected_of(request.param)


@pytest.fixture(scope="module")
def gpt_oss():
    return load_checkpoint(GPT_OSS, dtype=jnp.float32)


@nnx.jit(static_argnames="mode", donate_argnames="pools")
def forward(model, tokens, pools, metadata, *, mode):
    hidden, pools = model(tokens, pools, metadata, mode=mode)
    return model.logits(hidden), pools


def lens(*values):
    return jnp.asarray(values, jnp.int32)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


class Cache:
    """Pools of NaN with scattered pages, other ones in every cache group: what is read before it is written shows, and
    so does a layer that takes another group's pages."""

    def __init__(self, model):
        pages = REQUESTS * WIDTH + 3
        self.model = model
        self.pools = jax.tree.map(
            lambda data: jnp.full_like(data, jnp.nan), model.create_pools(num_pages=pages, page_size=PAGE)
        )
        rng = np.random.default_rng(0)
        shape = (REQUESTS, WIDTH)
        self.tables = {
            name: jnp.asarray(rng.permutation(pages)[: REQUESTS * WIDTH].reshape(shape), jnp.int32)
            for name in self.pools
        }
        self.held = np.zeros(REQUESTS, np.int32)

    def run(self, tokens, build_metadata, mode):
        metadata = {name: build_metadata(table) for name, table in self.tables.items()}
        logits, self.pools = forward(self.model, jnp.asarray(tokens, jnp.int32), self.pools, metadata, mode=mode)
        return np.asarray(logits)

    def extend(self, parts):
        """Up to PART more tokens of each request; logits of their rows."""
        block, counts = np.full((REQUESTS, PART), -1, np.int32), np.array([len(part) for part in parts], np.int32)
        for row, part in zip(block, parts, strict=True):
            row[: len(part)] = part
        self.held += counts
        rows = lens(*self.held), lens(*counts)
        logits = self.run(
            block.reshape(-1),
            lambda table: build.for_extend(table, *rows, max_q_len=PART, page_size=PAGE),
            "extend",
        )
        return [row[:count] for row, count in zip(logits.reshape(REQUESTS, PART, -1), counts, strict=True)]

    def decode(self, tokens):
        self.held += 1
        kv_lens = lens(*self.held)
        return self.run(tokens, lambda table: build.for_decode(table, kv_lens, page_size=PAGE), "decode")


def in_parts(cache, prompts):
    """Logits of all rows of prompts that are computed side by side, PART tokens of each at a time."""
    logits = [[] for _ in prompts]
    for begin in range(0, max(map(len, prompts)), PART):
        for rows, part in zip(logits, cache.extend([prompt[begin : begin + PART] for prompt in prompts]), strict=True):
            rows.append(part)
    return [np.concatenate(rows) for rows in logits]


def test_whole_prompts_in_one_call(fixture):
    model, expected = fixture
    prompts = [expected[f"prompt_{i}"] for i in range(REQUESTS)]
    lengths = lens(*map(len, prompts))
    tokens = np.concatenate([*prompts, [-7, 10**6, 5]])  # padding rows may hold anything
    logits = Cache(model).run(
        tokens,
        lambda table: build.for_extend(
            table, lengths, lengths, max_q_len=max(map(len, prompts)), num_rows=len(tokens), page_size=PAGE
        ),
        "prefill",
    )
    assert np.isfinite(logits).all()
    begins = np.cumsum([0, *map(len, prompts)])
    for i in range(REQUESTS):
        close(logits[begins[i] : begins[i + 1]], expected[f"logits_{i}"])


def test_prompts_in_parts_and_new_tokens(fixture):
    """Side by side, each with its own length, past windows in prompt and text; then the middle one alone."""
    model, expected = fixture
    prompts, greedy = ([expected[f"{name}_{i}"] for i in range(REQUESTS)] for name in ("prompt", "greedy"))
    cache = Cache(model)
    logits = in_parts(cache, prompts)
    for i in range(REQUESTS):
        close(logits[i], expected[f"logits_{i}"])
    last, tokens = np.stack([rows[-1] for rows in logits]), []
    for _ in range(NEW):
        tokens.append(last.argmax(-1))  # ties are wider than the tolerance in all fixtures
        last = cache.decode(tokens[-1])
    np.testing.assert_array_equal(np.stack(tokens, 1), np.stack(greedy))
    (_, alone, _) = in_parts(Cache(model), [[], prompts[1], []])
    close(alone, expected["logits_1"])


def test_verifying_past_a_window(gpt_oss):
    """The anchor and three drafts of each request, on top of what is cached of its prompt."""
    expected = expected_of(GPT_OSS)
    prompts = [expected[f"prompt_{i}"] for i in range(REQUESTS)]
    cache, cuts = Cache(gpt_oss), (6, 70, 35)
    in_parts(cache, [prompt[:cut] for prompt, cut in zip(prompts, cuts, strict=True)])
    rows = np.stack([prompt[cut : cut + 4] for prompt, cut in zip(prompts, cuts, strict=True)])
    logits = cache.run(
        rows.reshape(-1),
        lambda table: build.for_target_verify(table, lens(*cuts), num_tokens=4, page_size=PAGE),
        "target_verify",
    )
    for i, cut in enumerate(cuts):
        close(logits.reshape(REQUESTS, 4, -1)[i], expected[f"logits_{i}"][cut : cut + 4])


def test_the_engine_runs_two_cache_groups(gpt_oss):
    expected = expected_of(GPT_OSS)
    prompts = [expected["prompt_0"].tolist(), expected["prompt_1"].tolist()]
    result = generate(gpt_oss, prompts, max_new_tokens=NEW, ignore_eos=True)
    assert result.tokens == [expected["greedy_0"].tolist(), expected["greedy_1"].tolist()]
    assert result.statistics.compiles_after_warm_up == 0


def test_cache_groups(gpt_oss):
    groups = gpt_oss.cache_groups
    assert [(g.name, g.num_layers, g.window, g.sinks) for g in groups] == [
        ("full", 2, None, True),
        ("window", 2, 16, True),
    ]
    (full,) = load_checkpoint(QWEN3).cache_groups
    assert (full.name, full.num_layers, full.window, full.sinks, full.dtype) == ("full", 4, None, False, np.float32)
    pools = gpt_oss.create_pools(num_pages={"full": 3, "window": 2}, page_size=4)
    assert {name: pool.k.shape for name, pool in pools.items()} == {"full": (6, 4, 2, 64), "window": (4, 4, 2, 64)}


def test_layers_of_a_group_are_traced_once(gpt_oss, monkeypatch):
    """In every mode: the mode's own step, the window of the group, the sinks."""
    calls = []
    for mode in ("prefill", "extend", "decode", "target_verify", "draft_extend", "draft_decode"):
        real = getattr(steps, f"gqa_{mode}")

        def watched(*args, mode=mode, step=real, **kwargs):
            calls.append((mode, args[5].window, kwargs["implementation"], kwargs["sinks"].shape))
            return step(*args, **kwargs)

        monkeypatch.setattr(steps, f"gqa_{mode}", watched)

        def run(mode=mode):
            metadata = build.for_extend(lens(0)[None], lens(1), lens(1), max_q_len=1, page_size=PAGE)
            pools = gpt_oss.create_pools(num_pages=1, page_size=PAGE)
            metadata = dict.fromkeys(pools, metadata)
            return gpt_oss(lens(5), pools, metadata, mode=mode, implementation="xla")

        hidden, pools = jax.eval_shape(run)
        assert hidden.shape == (1, 128) and list(pools) == ["full", "window"]
        assert calls == [(mode, window, "xla", (8,)) for window in (16, None)]
        calls.clear()


def test_each_layer_writes_to_its_place_in_its_group(gpt_oss):
    """Layers 0 and 2 to the first pool, 1 and 3 to the second, whether they are traced or not."""
    pools = gpt_oss.create_pools(num_pages=1, page_size=PAGE)
    metadata = dict.fromkeys(pools, build.for_extend(lens(0)[None], lens(1), lens(1), max_q_len=1, page_size=PAGE))

    def run(tokens):
        return gpt_oss(tokens, pools, metadata, mode="extend", implementation="xla")[1]

    traced, untraced = jax.jit(run)(lens(5)), run(lens(5))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5), traced, untraced)


def test_calls_that_make_no_sense(gpt_oss, unchecked):
    pools = gpt_oss.create_pools(num_pages=1, page_size=PAGE)
    for given, metadata, options, message in (
        (pools, dict.fromkeys(pools), {"mode": "verify"}, "mode='verify' must be one of prefill, extend, decode"),
        (pools, dict.fromkeys(pools), {"mode": "extend", "tree_mask": True}, "tree_mask with mode='extend'"),
        ({"full": pools["full"]}, pools, {"mode": "decode"}, r"pools has the cache groups \['full'\], must be a dict"),
        (pools, pools["full"], {"mode": "decode"}, "metadata is a KVPool, must be a dict with 'full', 'window'"),
    ):
        with pytest.raises(ValueError, match=message):
            gpt_oss(lens(1), given, metadata, **options)
    assert not gpt_oss.can_draft
    for call in (
        lambda: gpt_oss.draft(jnp.zeros((1, 128)), lens(1), {}, {}, mode="decode"),
        lambda: gpt_oss.draft_logits(jnp.zeros((1, 128))),
        lambda: generate(gpt_oss, [[1]], max_new_tokens=1, num_drafts=2),
    ):
        with pytest.raises(ValueError, match="no MTP layer to draft with"):
            call()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_near(dtype):
    expected = expected_of(GEMMA2)
    model = load_checkpoint(GEMMA2, dtype=dtype)
    assert {group.dtype.name for group in model.cache_groups} == {dtype}
    logits = in_parts(Cache(model), [expected["prompt_0"], [], []])[0]
    assert logits.dtype == np.float32
    error = np.abs(logits - expected["logits_0"])
    assert error.max() > TOLERANCE  # it is not float32 by another name
    assert np.median(error) < {"bfloat16": 0.1, "float16": 0.01}[dtype]


# Mistral, from the weights of the Llama.


def mistral(folder, window):
    config, tensors = read_checkpoint(LLAMA3)
    config |= {"model_type": "mistral", "sliding_window": window, "rope_theta": 700.0}
    del config["rope_parameters"], config["quantization_config"]
    return write_checkpoint(folder, config, {name: x for name, x in tensors.items() if not name.endswith("_scale")})


def dense_logits(folder, tokens):
    """Float64, without a cache: every row sees the last ``sliding_window`` tokens, its own among them."""
    config, tensors = read_checkpoint(folder)
    tensors = {name: x.astype(np.float64) for name, x in tensors.items()}
    heads, kv_heads, dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    count = len(tokens)
    angles = np.arange(count)[:, None] * config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    turn = np.exp(1j * angles)[:, None]

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * tensors[f"{name}.weight"]

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T

    def rotated(x):
        pairs = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * turn
        return np.concatenate([pairs.real, pairs.imag], -1)

    ages = np.arange(count)[:, None] - np.arange(count)
    visible = (ages >= 0) & (ages < (config["sliding_window"] or count))
    x = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (linear(y, f"{at}.self_attn.{n}_proj").reshape(count, -1, dim) for n in "qkv")
        q, k = rotated(q), rotated(k)
        out = np.empty_like(q)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = np.where(visible, q[:, head] @ k[:, kv_head].T / np.sqrt(dim), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, kv_head]
        x = x + linear(out.reshape(count, -1), f"{at}.self_attn.o_proj")
        y = norm(x, f"{at}.post_attention_layernorm")
        gate, up = linear(y, f"{at}.mlp.gate_proj"), linear(y, f"{at}.mlp.up_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{at}.mlp.down_proj")
    return linear(norm(x, "model.norm"), "lm_head")


def test_mistral_has_a_window_on_all_layers(tmp_path):
    folder = mistral(tmp_path / "window", 9)
    model = load_checkpoint(folder)
    assert [(g.name, g.num_layers, g.window) for g in model.cache_groups] == [("window", 3, 9)]
    expected = expected_of(LLAMA3)
    prompts = [expected["prompt_0"], expected["prompt_1"], expected["prompt_2"][:30]]
    for logits, prompt in zip(in_parts(Cache(model), prompts), prompts, strict=True):
        close(logits, dense_logits(folder, prompt))
    (group,) = load_checkpoint(mistral(tmp_path / "none", None)).cache_groups
    assert (group.name, group.window) == ("full", None)
    wide = dense_logits(tmp_path / "none", prompts[1])
    assert np.abs(wide - dense_logits(folder, prompts[1])).max() > 0.1  # the window is seen
