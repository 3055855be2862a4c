"""Small random models against transformers, token by token; `make test-hf` installs what it needs and runs it."""

import functools
import json
import random

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_attn import metadata as build
from mla_attn.models import load_checkpoint
from mla_attn.specs import MLASpec

torch = pytest.importorskip("torch", reason="an extra")
transformers = pytest.importorskip("transformers", reason="an extra")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # theirs are no errors of ours
]
PAGE, LENGTH = 16, 40
TOLERANCE = 2e-3  # of logits of about 1, float32 against float32

# Settings in which the two differ, and why ours is right; each must be seen to differ.
DIFFERENT = {
    "rms_norm_eps in the norms of the latents: theirs is 1e-6 always, as DeepSeek's training file; ours is the "
    "config's, as serving engines have it": ("v3", {"rms_norm_eps": 1e-2}),
    "norm_topk_prob in V2: theirs passes it over; ours makes the weights sum to 1, then scales them, as DeepSeek's "
    "own router and serving engines do": ("v2", {"norm_topk_prob": True, "routed_scaling_factor": 1.5}),
}


GROUPED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_oss")


def draw(family, rng):
    """Settings of a small model of a family."""
    if family in GROUPED:
        return draw_grouped(family, rng)
    heads, groups = rng.choice([1, 2, 4]), rng.choice([1, 2, 4])
    experts = groups * rng.choice([2, 4])
    kept = rng.randint(1, groups)
    settings = {
        "vocab_size": rng.choice([50, 97]),
        "hidden_size": 16 * heads,
        "intermediate_size": rng.choice([24, 40]),
        "moe_intermediate_size": rng.choice([8, 20]),
        "num_hidden_layers": rng.randint(1, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_shared_experts": rng.randint(0, 2),
        "n_routed_experts": experts,
        "num_experts_per_tok": rng.randint(1, experts // groups * kept),
        "n_group": groups,
        "topk_group": kept,
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "kv_lora_rank": rng.choice([8, 32]),
        "q_lora_rank": rng.choice([None, 12]),
        "qk_nope_head_dim": rng.choice([8, 24]),
        "qk_rope_head_dim": rng.choice([4, 8]),
        "v_head_dim": rng.choice([8, 12]),
        "first_k_dense_replace": rng.randint(0, 2),
        "tie_word_embeddings": rng.random() < 0.3,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([100.0, 10000.0])},
    }
    if rng.random() < 0.6:
        settings["rope_parameters"] |= {
            "rope_type": "yarn",
            "factor": rng.choice([4.0, 40.0]),
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": rng.choice([0.7, 1.0]),
            "mscale_all_dim": rng.choice([0.7, 1.0]),
        }
    if family == "v2":
        return settings | {"topk_method": rng.choice(["greedy", "group_limited_greedy"])}
    settings |= {"norm_topk_prob": rng.random() < 0.7, "rope_interleave": rng.random() < 0.7}
    return settings | {"num_mtp_layers": rng.randint(0, 1)}


def draw_grouped(family, rng):
    """The same of one with grouped-query attention; windows are shorter than the text."""
    kv_heads, head_dim, layers = rng.choice([1, 2]), rng.choice([8, 16]), rng.randint(2, 4)
    settings = {
        "vocab_size": rng.choice([50, 97]),
        "hidden_size": rng.choice([48, 96]),  # Llama wants multiples of the heads
        "intermediate_size": rng.choice([24, 40]),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * rng.choice([1, 3]),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 256,
        "tie_word_embeddings": family == "gemma2" or rng.random() < 0.3,
        "rms_norm_eps": rng.choice([1e-6, 1e-2]),
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([100.0, 10000.0])},
    }
    scaling = {"llama": "llama3", "qwen3": "yarn", "gpt_oss": "yarn"}.get(family)
    if scaling and rng.random() < 0.7:
        settings["rope_parameters"] |= {"rope_type": scaling, "factor": 8.0, "original_max_position_embeddings": 16}
        settings["rope_parameters"] |= {
            "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "yarn": {"beta_fast": 32.0, "beta_slow": 1.0, **({"truncate": False} if family == "gpt_oss" else {})},
        }[scaling]
    window = rng.choice([5, 16])
    kinds = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    if family in ("llama", "qwen3"):
        settings["attention_bias"] = rng.random() < 0.5
    if family == "mistral":
        settings["sliding_window"] = rng.choice([None, window])
    if family in ("qwen2", "qwen3") and rng.random() < 0.6:
        settings |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": rng.randint(0, layers)}
    if family in ("gemma2", "gpt_oss"):
        settings |= {"sliding_window": window, "layer_types": kinds}
    if family == "gemma2":
        settings |= {"query_pre_attn_scalar": rng.choice([8, 20]), "attn_logit_softcapping": rng.choice([5.0, 50.0])}
        settings |= {"final_logit_softcapping": rng.choice([10.0, 30.0])}
    if family == "gpt_oss":
        settings |= {"num_local_experts": rng.choice([2, 4]), "num_experts_per_tok": rng.choice([1, 2])}
    return settings


CONFIGS = {
    "v2": "DeepseekV2Config",
    "v3": "DeepseekV3Config",
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma2": "Gemma2Config",
    "gpt_oss": "GptOssConfig",
}


def write(folder, family, settings, seed):
    """A random model of theirs, saved as they save it, and its logits of random tokens."""
    config_class = getattr(transformers, CONFIGS[family])
    torch.manual_seed(seed)
    config = config_class(**settings, initializer_range=0.25, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.normal_(1.0, 0.2)
            elif "bias" in name:
                tensor.normal_(0.0, 0.1)
            elif "inv_freq" not in name and "embed_scale" not in name:
                tensor.normal_(0.0, 0.2)
        tokens = torch.randint(0, config.vocab_size, (LENGTH,))
        logits = model(tokens[None]).logits[0].numpy()
    model.save_pretrained(folder)
    return tokens.numpy().astype(np.int32), logits


def error(folder, tokens, want):
    """Of logits: of all tokens as a prompt, and of the later ones after a cached prefix, in the absorbed form if there
    are two forms."""
    model = load_checkpoint(folder, dtype=jnp.float32)
    names = [group.name for group in model.cache_groups]
    absorbed = "absorbed" if isinstance(model.cache_groups[0].spec, MLASpec) else None
    table, worst = jnp.array([[3, 0, 2]], jnp.int32), 0.0
    for begin, mode, form in ((0, "prefill", None), (LENGTH // 2, "extend", absorbed)):
        pools = model.create_pools(num_pages=4, page_size=PAGE)
        for first, last in ((0, begin), (begin, LENGTH)):
            if first < last:
                rows, seen = jnp.array([last - first], jnp.int32), jnp.array([last], jnp.int32)
                metadata = build.for_extend(table, seen, rows, max_q_len=last - first, page_size=PAGE)
                part, which = jnp.asarray(tokens[first:last]), (mode, form) if first == begin else ("prefill", None)
                hidden, pools = _call(model, part, pools, dict.fromkeys(names, metadata), *which)
        worst = max(worst, np.abs(np.asarray(hidden) - want[begin:]).max())
    return worst


@functools.partial(nnx.jit, static_argnums=(4, 5))
def _call(model, tokens, pools, metadata, mode, form):
    options = {} if form is None else {"form": form}
    hidden, pools = model(tokens, pools, metadata, mode=mode, **options)
    return model.logits(hidden), pools


@pytest.mark.parametrize("seed", range(20))
def test_a_random_model_agrees(tmp_path, seed):
    family = "v2" if seed % 2 else "v3"
    tokens, want = write(tmp_path, family, draw(family, random.Random(seed)), seed)
    assert np.ptp(want) > 1
    assert error(tmp_path, tokens, want) < TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", GROUPED)
def test_a_random_model_of_grouped_queries_agrees(tmp_path, family, seed):
    tokens, want = write(tmp_path, family, draw(family, random.Random(f"{family} {seed}")), seed)
    assert np.ptp(want) > 1
    assert error(tmp_path, tokens, want) < TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("reason", DIFFERENT)
def test_settings_in_which_the_two_differ(tmp_path, reason):
    family, change = DIFFERENT[reason]
    experts = {
        "first_k_dense_replace": 0,
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
    }
    settings = draw(family, random.Random(1)) | experts
    tokens, want = write(tmp_path, family, settings, 1)
    assert error(tmp_path, tokens, want) < TOLERANCE * np.abs(want).max()
    tokens, want = write(tmp_path / "other", family, settings | change, 1)
    assert json.loads((tmp_path / "other/config.json").read_text()).items() >= change.items()
    assert error(tmp_path / "other", tokens, want) > 10 * TOLERANCE * np.abs(want).max()
