import json

import pytest

from checkpoints import V2, V3
from mla_attn.models import DeepseekConfig
from mla_attn.models.rope import Yarn
from mla_attn.steps import QueryScaling


@pytest.fixture
def v3():
    return json.loads((V3 / "config.json").read_text())


@pytest.fixture
def v2():
    return json.loads((V2 / "config.json").read_text())


def test_fixtures_are_read(v3, v2):
    config = DeepseekConfig.from_hf(v3)
    assert (config.topk_method, config.scoring_func, config.norm_topk_prob) == ("noaux_tc", "sigmoid", True)
    assert (config.n_group, config.topk_group, config.routed_scaling_factor) == (4, 2, 2.5)
    assert config.yarn == Yarn(factor=16, original_max_position_embeddings=256, mscale=1, mscale_all_dim=1)
    assert config.softmax_scale == pytest.approx(128**-0.5 * 1.277259**2)
    assert config.eos_token_ids == (257,)
    assert [config.is_moe(layer) for layer in range(4)] == [False, True, True, True]
    plain = DeepseekConfig.from_hf(v2)
    assert (plain.topk_method, plain.scoring_func, plain.norm_topk_prob) == ("greedy", "softmax", False)
    assert (plain.q_lora_rank, plain.yarn, plain.num_nextn_predict_layers) == (None, None, 0)
    assert plain.softmax_scale == pytest.approx(96**-0.5)
    assert hash(config) != hash(plain)


def test_deepseek_r1_softmax_scale(v3):
    rope = v3["rope_scaling"] | {"factor": 40, "original_max_position_embeddings": 4096}
    config = DeepseekConfig.from_hf(v3 | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_scaling": rope})
    assert config.softmax_scale == pytest.approx(0.1352, abs=5e-5)


def test_spellings_of_rope_agree(v3):
    want = DeepseekConfig.from_hf(v3)
    rope = dict(v3["rope_scaling"])
    rope["rope_type"] = rope.pop("type")
    assert DeepseekConfig.from_hf(v3 | {"rope_scaling": rope}) == want
    assert DeepseekConfig.from_hf(v3 | {"rope_scaling": rope | {"type": "yarn"}}) == want
    newer = {name: value for name, value in v3.items() if name not in ("rope_scaling", "rope_theta")}
    parameters = rope | {"rope_theta": 12345.0}
    config = DeepseekConfig.from_hf(newer | {"rope_parameters": parameters})
    assert (config.rope_theta, config.yarn) == (12345.0, want.yarn)
    plain = DeepseekConfig.from_hf(newer | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
    assert (plain.rope_theta, plain.yarn) == (500.0, None)


def test_keys_that_transformers_leaves_out(v3, v2):
    for data in (v3, v2):
        want = DeepseekConfig.from_hf(data)
        for name in ("topk_method", "scoring_func", "moe_layer_freq", "hidden_act", "attention_bias"):
            data.pop(name)
        assert DeepseekConfig.from_hf(data) == want


def test_scaling_of_queries(v3):
    want, rope = DeepseekConfig.from_hf(v3), v3["rope_scaling"]
    assert want.query_scaling is None
    scaled = DeepseekConfig.from_hf(v3 | {"rope_scaling": rope | {"llama_4_scaling_beta": 0.1}})
    assert (scaled.query_scaling, scaled.yarn) == (QueryScaling(beta=0.1, original_max_position=256), want.yarn)
    plain = {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8}
    config = DeepseekConfig.from_hf(v3 | {"rope_scaling": plain})
    assert (config.query_scaling, config.yarn) == (QueryScaling(beta=0.1, original_max_position=8), None)
    assert DeepseekConfig.from_hf(v3 | {"rope_scaling": rope | {"max_position_embeddings": 4096}}) == want
    assert DeepseekConfig.from_hf(v3 | {"rope_scaling": rope | {"llama_4_scaling_beta": None}}) == want


def test_variants_that_are_supported(v3, v2):
    kimi = DeepseekConfig.from_hf(v3 | {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1})
    assert kimi.topk_method == "noaux_tc"
    grouped = v2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    assert DeepseekConfig.from_hf(grouped).topk_group == 2
    assert DeepseekConfig.from_hf(v2 | {"n_group": None, "topk_group": None}) == DeepseekConfig.from_hf(v2)
    dense = DeepseekConfig.from_hf(v2 | {"n_routed_experts": None})
    assert not any(map(dense.is_moe, range(3)))
    assert DeepseekConfig.from_hf(v2 | {"n_shared_experts": None}).n_shared_experts == 0
    assert DeepseekConfig.from_hf(v2 | {"eos_token_id": [1, 2]}).eos_token_ids == (1, 2)
    assert DeepseekConfig.from_hf(v2 | {"eos_token_id": None}).eos_token_ids == ()
    assert not DeepseekConfig.from_hf(v3 | {"rope_interleave": False}).rope_interleave
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 64]}
    assert DeepseekConfig.from_hf(v3 | {"quantization_config": fp8}).weight_block_size == (128, 64)


INF, NAN = float("inf"), float("nan")
YARN = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256}
UNTYPED = {name: value for name, value in YARN.items() if name != "type"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
REFUSED = [
    ({"model_type": "llama"}, "model_type='llama'.*'deepseek_v2', 'deepseek_v3', 'kimi_k2'"),
    ({"model_type": None}, "model_type=None"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ({"moe_layer_freq": [0, 1, 1]}, "moe_layer_freq="),
    ({"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling="),
    ({"topk_method": "seq"}, "topk_method='seq'.*noaux_tc"),
    ({"scoring_func": "softmax"}, "scoring_func='softmax'.*'sigmoid'"),
    ({"scoring_func": "tanh"}, "scoring_func='tanh'"),
    ({"n_group": 3}, "n_group=3 must divide n_routed_experts=8"),
    ({"n_group": 8}, "n_group=8 leaves groups of one"),
    ({"n_group": None}, "n_group=None"),
    ({"topk_group": 5}, "topk_group=5"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok=5 must be 1 to 4"),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2"),
    ({"hidden_size": "192"}, "hidden_size='192' must be an integer"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ({"num_attention_heads": True}, "num_attention_heads=True"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63 must be even"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling type='linear'.*'default', 'yarn'"),
    ({"rope_scaling": {"rope_type": "yarn", "type": "linear"}}, "rope_scaling type='linear' is not supported"),
    ({"rope_scaling": YARN | {"factor": None}}, "factor is missing"),
    ({"rope_scaling": {"type": "yarn", "factor": 16.0}}, "original_max_position_embeddings is missing"),
    ({"rope_scaling": YARN | {"factor": -1}}, "factor=-1 must be a finite number of at least 1.0, as float32"),
    ({"rope_scaling": YARN | {"mscale": "1"}}, "mscale='1' must be a finite number"),
    ({"routed_scaling_factor": None}, "routed_scaling_factor=None must be a finite number above 0"),
    ({"rope_scaling": YARN | {"truncate": False}}, "truncate=False"),
    ({"rope_scaling": YARN | {"attention_factor": 1.2}}, "attention_factor=1.2"),
    ({"rope_scaling": YARN | {"short_factor": [1.0]}}, "short_factor"),
    ({"rope_parameters": {"rope_type": "default"}}, "give one"),
    ({"quantization_config": FP8 | {"quant_method": "awq"}}, "quant_method='awq'"),
    ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt='e5m2'"),
    ({"quantization_config": FP8 | {"weight_block_size": None}}, "weight_block_size=None"),
    ({"quantization_config": FP8 | {"activation_scheme": "static"}}, "activation_scheme='static'"),
    # Values that make no sense.
    *(({"quantization_config": value}, "quantization_config=") for value in ([1], "fp8", 0)),
    *(({"rope_scaling": value}, "rope_scaling=") for value in (5, "yarn", 0, False, "")),
    ({"rope_scaling": UNTYPED}, "type 'default' has keys that are not supported: 'factor', 'original_max_position"),
    ({"rope_scaling": UNTYPED | {"type": "default"}}, "type 'default' has keys that are not supported: 'factor'"),
    ({"rope_scaling": YARN | {"rope_type": "default"}}, "rope_type='default' and type='yarn' must be the same"),
    ({"rope_scaling": YARN | {"type": ["yarn"]}}, r"rope_scaling type=\['yarn'\]"),
    *(
        ({"rope_scaling": YARN | {"original_max_position_embeddings": value}}, f"rope_scaling original_.*={value} must")
        for value in (INF, 0.5, 256.0)
    ),
    ({"rope_scaling": YARN | {"beta_fast": 0}}, "rope_scaling beta_fast=0 must be a finite number above 0"),
    ({"rope_scaling": YARN | {"beta_fast": INF}}, "rope_scaling beta_fast=inf must be a finite number"),
    ({"rope_scaling": YARN | {"beta_slow": -1}}, "rope_scaling beta_slow=-1 must be a finite number above 0"),
    ({"rope_scaling": YARN | {"mscale": NAN}}, "rope_scaling mscale=nan must be a finite number"),
    (
        {"rope_scaling": YARN | {"mscale_all_dim": 3e38}},
        r"mscale_all_dim=3e\+38.*\): softmax_factor=.* must be a finite",
    ),
    (
        {"rope_scaling": YARN | {"mscale_all_dim": -1}},
        "rope_scaling mscale_all_dim=-1 must be a finite number of at least 0.0",
    ),
    (
        {"rope_scaling": YARN | {"max_position_embeddings": 64}},
        "max_position_embeddings=64 is not the file's own: 4096",
    ),
    ({"rope_scaling": YARN | {"llama_4_scaling_beta": "0.1"}}, "llama_4_scaling_beta='0.1' must be a finite number"),
    ({"rope_scaling": {"llama_4_scaling_beta": 0.1}}, "original_max_position_embeddings is missing"),
    ({"topk_method": ["noaux_tc"]}, r"topk_method=\['noaux_tc'\]"),
    *(
        ({"eos_token_id": value}, "eos_token_id=.* must be a token id")
        for value in (1.0, "x", {"a": 1}, True, -1, [1.0])
    ),
    ({"bos_token_id": 1.0}, "bos_token_id=1.0 must be an integer"),
    ({"bos_token_id": [1]}, r"bos_token_id=\[1\] must be an integer"),
    *(({"tie_word_embeddings": value}, "tie_word_embeddings=.* must be true or false") for value in ("false", 0)),
    *(({"norm_topk_prob": value}, "norm_topk_prob=.* must be true or false") for value in ("false", {})),
    *(({"rms_norm_eps": value}, f"rms_norm_eps={value} must be") for value in (NAN, -1, INF, 0, 1e-60)),
    *(({"rope_theta": value}, f"rope_theta={value} must be") for value in (NAN, -1, 1, INF)),
    ({"rope_theta": 10**400}, r"rope_theta=1000.*\(401 characters\) must be a finite number"),
    *(({"routed_scaling_factor": value}, f"routed_scaling_factor={value} must be") for value in (INF, -2.5, 0)),
    ({"max_position_embeddings": 2**31}, "max_position_embeddings=2147483648 must be an integer from 1 to"),
    ({"max_position_embeddings": 4096.0}, "max_position_embeddings=4096.0 must be an integer"),
]


@pytest.mark.parametrize(("patch", "message"), REFUSED, ids=[str(patch)[1:60] for patch, _ in REFUSED])
def test_what_is_not_supported_is_refused(v3, patch, message):
    with pytest.raises(ValueError, match=message):
        DeepseekConfig.from_hf(v3 | patch)


@pytest.mark.parametrize(
    "name", ["hidden_size", "q_lora_rank", "kv_lora_rank", "norm_topk_prob", "first_k_dense_replace", "n_group"]
)
def test_missing_keys_are_named(v3, name):
    del v3[name]
    with pytest.raises(ValueError, match=f"{name} is missing"):
        DeepseekConfig.from_hf(v3)
