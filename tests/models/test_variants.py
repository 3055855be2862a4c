"""Settings that no fixture has, ``rope_interleave=false`` with ``llama_4_scaling_beta``, in every mode.

What is expected was computed once by transformers 5.24.0 (``Mistral4ForCausalLM``, which is DeepSeek-V3 with scaled
queries; ``DeepseekV3ForCausalLM`` gives the same without them) on torch 2.13.0 in float64, from the weights below.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints import FIXTURES, write_checkpoint
from mla_attn import metadata as build
from mla_attn.models import load_checkpoint
from mla_attn.models.deepseek import GROUP

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": None,
    "max_position_embeddings": 64,
    "rope_interleave": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 4,  # short: the 20 tokens have five different scales
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    },
}
SHAPES = {
    "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
    "self_attn.q_a_proj": (12, 16),
    "self_attn.q_a_layernorm": (12,),
    "self_attn.q_b_proj": (32, 12),
    "self_attn.kv_a_proj_with_mqa": (24, 16),
    "self_attn.kv_a_layernorm": (16,),
    "self_attn.kv_b_proj": (32, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}
CUT, PAGE = 13, 4


def weights():
    shapes = {f"model.layers.{layer}.{name}.weight": shape for layer in (0, 1) for name, shape in SHAPES.items()}
    shapes |= {"model.embed_tokens.weight": (32, 16), "model.norm.weight": (16,), "lm_head.weight": (32, 16)}
    rng = np.random.default_rng(0)

    def draw(shape):
        return (1 + 0.1 * rng.standard_normal(shape)) if len(shape) == 1 else 0.4 * rng.standard_normal(shape)

    return {name: draw(shape).astype(np.float32) for name, shape in sorted(shapes.items())}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_checkpoint(write_checkpoint(tmp_path_factory.mktemp("variant"), CONFIG, weights()), dtype=jnp.float32)


@pytest.fixture(scope="module")
def expected():
    with np.load(FIXTURES / "half-split-scaled-queries.npz") as stored:
        return dict(stored)


@nnx.jit(static_argnames=("mode", "form"))
def forward(model, tokens, pools, metadata, *, mode, form=None):
    hidden, pools = model(tokens, pools, {GROUP: metadata}, mode=mode, form=form)
    return model.logits(hidden), pools


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def table():
    return ints([4, 1, 3, 0, 2])


REST = {"max_q_len": 20 - CUT, "page_size": PAGE}


@pytest.fixture(scope="module")
def prefilled(model, expected):
    """The first ``CUT`` tokens in the cache, their logits checked."""
    metadata = build.for_extend(table(), ints(CUT), ints(CUT), max_q_len=CUT, page_size=PAGE)
    pools = model.create_pools(num_pages=5, page_size=PAGE)
    logits, pools = forward(model, expected["tokens"][:CUT], pools, metadata, mode="prefill")
    np.testing.assert_allclose(logits, expected["logits"][:CUT], rtol=0, atol=1e-4)
    return pools


@pytest.mark.parametrize(
    ("mode", "form", "metadata"),
    [
        ("extend", "expanded", lambda: build.for_extend(table(), ints(20), ints(20 - CUT), **REST)),
        ("extend", "absorbed", lambda: build.for_extend(table(), ints(20), ints(20 - CUT), **REST)),
        ("draft_extend", None, lambda: build.for_draft_extend(table(), ints(20), ints(20 - CUT), **REST)),
        (
            "target_verify",
            None,
            lambda: build.for_target_verify(table(), ints(CUT), num_tokens=20 - CUT, page_size=PAGE),
        ),
    ],
)
def test_the_rest_in_one_call(model, expected, prefilled, mode, form, metadata):
    logits, _ = forward(model, expected["tokens"][CUT:], prefilled, metadata(), mode=mode, form=form)
    np.testing.assert_allclose(logits, expected["logits"][CUT:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", ["decode", "draft_decode"])
def test_the_next_token(model, expected, prefilled, mode):
    if mode == "decode":
        metadata = build.for_decode(table(), ints(CUT + 1), page_size=PAGE)
    else:
        metadata = build.for_draft_decode(table(), ints(CUT), 0, page_size=PAGE)
    logits, _ = forward(model, expected["tokens"][CUT : CUT + 1], prefilled, metadata, mode=mode)
    np.testing.assert_allclose(logits, expected["logits"][CUT : CUT + 1], rtol=0, atol=1e-4)
