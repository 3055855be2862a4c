"""Static facts: what they hold, and what they refuse."""

import math

import numpy as np
import pytest

from mla_attn.specs import GQASpec, MLASpec

DEEPSEEK = {"num_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "scale": 192**-0.5}


def test_a_spec_is_a_static_argument():
    spec = MLASpec(**DEEPSEEK)
    assert spec.latent_dim == 576
    assert spec == MLASpec(**DEEPSEEK) and hash(spec) == hash(MLASpec(**DEEPSEEK))
    assert spec != MLASpec(**DEEPSEEK, window=4)
    assert MLASpec(**{**DEEPSEEK, "qk_rope_head_dim": 0}).latent_dim == 512


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_heads": 0}, "num_heads=0 must be an integer of at least 1"),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0 must be an integer of at least 1"),
        ({"qk_rope_head_dim": -1}, "qk_rope_head_dim=-1 must be an integer of at least 0"),
        ({"scale": 0.0}, "scale=0.0 must be a finite number above 0"),
        ({"scale": math.inf}, "scale=inf must be a finite number above 0"),
        ({"scale": math.nan}, "scale=nan must be a finite number above 0"),
        ({"num_heads": 3.5}, "num_heads=3.5 must be an integer of at least 1"),
        ({"window": 0}, "window=0 must be an integer from 1 to 2147483647"),
        ({"window": 2.5}, "window=2.5 must be an integer from 1"),
        ({"soft_cap": 0.0}, r"soft_cap=0.0 must be a finite number above 0 and of at most 1e\+30"),
        ({"soft_cap": math.nan}, "soft_cap=nan must be a finite number above 0"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=message):
        MLASpec(**{**DEEPSEEK, **change})


LLAMA = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "scale": 128**-0.5}


def test_values_have_the_width_of_keys_unless_said():
    spec = GQASpec(**LLAMA)
    assert spec.v_head_dim == 128 and spec == GQASpec(**LLAMA, v_head_dim=128)
    assert GQASpec(**LLAMA, v_head_dim=64).v_head_dim == 64
    assert hash(spec) == hash(GQASpec(**{**LLAMA, "num_heads": np.uint8(32)}))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_heads": 7, "num_kv_heads": 2}, "num_heads=7 must be a multiple of num_kv_heads=2"),
        ({"num_kv_heads": 0}, "num_kv_heads=0 must be an integer of at least 1"),
        ({"head_dim": 0.5}, "head_dim=0.5 must be an integer of at least 1"),
        ({"v_head_dim": 0}, "v_head_dim=0 must be an integer of at least 1"),
        ({"window": 0}, "window=0 must be an integer from 1"),
    ],
)
def test_errors_of_grouped_queries(change, message):
    with pytest.raises(ValueError, match=message):
        GQASpec(**{**LLAMA, **change})
