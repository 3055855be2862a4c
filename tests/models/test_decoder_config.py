"""Configs of the grouped-query families: what their keys mean, by family, and what is refused."""

import json

import pytest

from checkpoints import GEMMA2, GPT_OSS, LLAMA3, QWEN3
from mla_attn.models import DecoderConfig, DeepseekConfig
from mla_attn.models.families import read_model_config
from mla_attn.models.rope import Llama3, Yarn

FOLDERS = {"qwen3": QWEN3, "gpt_oss": GPT_OSS, "gemma2": GEMMA2, "llama": LLAMA3}
FULL, SLIDING = "full_attention", "sliding_attention"


def hub(family):
    """A family's ``config.json``; Mistral's is the Llama's with a window, Qwen2's the Qwen3's."""
    data = json.loads(
        (FOLDERS.get(family) or {"mistral": LLAMA3, "qwen2": QWEN3}[family]).joinpath("config.json").read_text()
    )
    return data | {"model_type": family} | ({"sliding_window": 16} if family == "mistral" else {})


def read(family, **changes):
    return DecoderConfig.from_hf({**hub(family), **changes})


def windows(config):
    return [config.window(layer) for layer in range(config.num_hidden_layers)]


def test_fixtures_are_read():
    qwen = read("qwen3")
    assert (qwen.qk_norms, qwen.qkv_bias, qwen.output_bias, qwen.tie_word_embeddings) == (True, False, False, True)
    assert (qwen.rope_theta, qwen.rope_scaling, qwen.softmax_scale) == (1e6, None, 0.125)
    gpt = read("gpt_oss")
    assert (gpt.sinks, gpt.qkv_bias, gpt.output_bias, gpt.num_experts, gpt.swiglu_limit) == (True, True, True, 4, 2.5)
    assert gpt.rope_scaling == Yarn(factor=32, original_max_position_embeddings=512, truncate=False)
    gemma = read("gemma2")
    assert (gemma.gemma, gemma.tie_word_embeddings, gemma.soft_cap, gemma.logits_soft_cap) == (True, True, 8.0, 12.0)
    assert gemma.softmax_scale == pytest.approx(48**-0.5)
    llama = read("llama")
    assert llama.eos_token_ids == (257, 258) and not llama.tie_word_embeddings
    scaling = Llama3(factor=8, original_max_position_embeddings=256, low_freq_factor=1, high_freq_factor=4)
    assert (llama.rope_theta, llama.rope_scaling) == (500000.0, scaling)
    assert hash(qwen) != hash(gpt)


def test_windows_by_family_and_by_layer():
    assert windows(read("gemma2")) == windows(read("gpt_oss")) == [16, None, 16, None]
    assert windows(read("gpt_oss", layer_types=None)) == [16, None, 16, None]
    assert windows(read("gemma2", layer_types=[FULL, FULL, SLIDING, SLIDING])) == [None, None, 16, 16]
    assert windows(read("mistral")) == [16] * 3
    assert windows(read("mistral", layer_types=[FULL, SLIDING, FULL])) == [None, 16, None]
    assert windows(read("mistral", sliding_window=None)) == [None] * 3
    for family in ("qwen2", "qwen3"):
        window = {"sliding_window": 9, "max_window_layers": 3}
        assert windows(read(family, **window)) == [None] * 4  # use_sliding_window is false
        assert windows(read(family, **window, use_sliding_window=True)) == [None, None, None, 9]
        typed = {"use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL, FULL, FULL]}
        assert windows(read(family, **typed)) == [9, None, None, None]
    assert windows(read("llama", layer_types=[FULL] * 3)) == [None] * 3


def test_what_is_left_out():
    data = {key: value for key, value in hub("llama").items() if key not in ("head_dim", "num_key_value_heads")}
    plain = DecoderConfig.from_hf(data | {"rope_parameters": None})
    assert (plain.head_dim, plain.num_key_value_heads, plain.rope_theta) == (8, 8, 10000.0)
    assert read("llama", head_dim=None).head_dim == 8
    data = {
        key: value for key, value in hub("gpt_oss").items() if key not in ("rope_theta", "rms_norm_eps", "swiglu_limit")
    }
    data |= {"rope_scaling": None, "attention_bias": None}
    gpt = DecoderConfig.from_hf(data)
    assert (gpt.rope_theta, gpt.rms_norm_eps, gpt.swiglu_limit, gpt.qkv_bias) == (150000.0, 1e-5, 7.0, True)
    assert read("gemma2", tie_word_embeddings=False).tie_word_embeddings is False
    qwen2 = read("qwen2")
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norms) == (True, False, False)
    biased = read("qwen3", attention_bias=True)
    assert (biased.qkv_bias, biased.output_bias) == (True, True)


def test_spellings_of_rope_agree():
    want, data = read("llama"), hub("llama")
    rope = dict(data.pop("rope_parameters"))
    older = data | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert DecoderConfig.from_hf(older) == want


def test_each_type_has_its_family():
    assert isinstance(read_model_config(hub("mistral")), DecoderConfig)
    deepseek = json.loads((QWEN3.parent / "deepseek-v3-tiny/config.json").read_text())
    assert isinstance(read_model_config(deepseek), DeepseekConfig)
    with pytest.raises(ValueError, match=r"model_type='bert' is not supported; supported: 'deepseek_v2'.*'gpt_oss'"):
        read_model_config({"model_type": "bert"})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
REFUSED = [
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
    ("qwen3", {"mlp_bias": True}, "mlp_bias=True"),
    ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("qwen3", {"head_dim": 63}, "head_dim=63 must be even"),
    ("qwen3", {"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=8"),
    ("qwen3", {"head_dim": None, "hidden_size": 100}, "num_attention_heads=8 does not divide hidden_size=100"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True, but sliding_window is missing"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": None}, "max_window_layers is mis"),
    ("qwen3", {"layer_types": [SLIDING] * 4}, "'sliding_attention', but the model has no window"),
    ("gemma2", {"layer_types": [FULL]}, "layer_types has 1 layers, must have num_hidden_layers=4"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 4}, "layer_types=.*'full_attention' and 'sliding_attention'"),
    ("gemma2", {"sliding_window": 0}, "sliding_window=0 must be an integer"),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'.*'gelu_pytorch_tanh'"),
    ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping=0.0 must be a finite number above 0"),
    ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("llama", {"sliding_window": 4}, "sliding_window=4 is not supported"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 4}}, "low_freq_factor=4.0 must be below high"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"rope_type": "longrope"}}, "type='longrope'.*'llama3', 'yarn'"),
    ("llama", {"rope_parameters": YARN | {"mscale": 1.0}}, "type 'yarn' has keys that are not supported: 'mscale'"),
    ("llama", {"rope_parameters": YARN | {"attention_factor": 2.0}}, "attention_factor=2.0"),
    ("mistral", {"attention_bias": True}, "attention_bias=True"),
    ("gpt_oss", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 must be 1 to num_local_experts=4"),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}, "hidden_size": 136}, "hidden_size=136 and interm"),
    ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "quant_method='mxfp4' with model_type='llama'"),
    ("llama", {"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'"),
    (
        "llama",
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}}},
        "config_groups=.* is not supported",
    ),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED, ids=[f"{f}-{str(c)[1:50]}" for f, c, _ in REFUSED])
def test_what_is_not_supported_is_refused(family, changes, message):
    with pytest.raises(ValueError, match=message):
        read(family, **changes)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mistral", "sliding_window"),
        ("gemma2", "query_pre_attn_scalar"),
        ("gemma2", "final_logit_softcapping"),
        ("gpt_oss", "num_local_experts"),
        ("qwen3", "max_position_embeddings"),
    ],
)
def test_missing_keys_are_named(family, name):
    data = hub(family)
    del data[name]
    with pytest.raises(ValueError, match=f"{name} is missing"):
        DecoderConfig.from_hf(data)
