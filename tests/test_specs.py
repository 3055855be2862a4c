"""Static facts: what they hold, and what they refuse."""

import math

import pytest

from mla_attn.specs import MLASpec

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
