"""The map from tensors of a Llama, Mistral, Qwen, Gemma 2 or gpt-oss checkpoint to parameters."""

from collections.abc import Iterator

import numpy as np

from mla_attn.models.decoder import Attention, DecoderForCausalLM, DecoderLayer
from mla_attn.models.decoder_config import DecoderConfig
from mla_attn.models.layers import Linear
from mla_attn.models.moe import ClampedMoE
from mla_attn.models.weights import BLOCKS, MXFP4_BLOCK, Weight, matrix, plain

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def weights(model: DecoderForCausalLM) -> Iterator[Weight]:
    """Every weight of a model, with the names and shapes its checkpoint has ([out, in] for matrices)."""
    yield plain(model.embed_tokens.embedding, EMBEDDING)
    for index, layer in enumerate(model.layers):
        yield from _layer(layer, f"model.layers.{index}", model.config)
    yield plain(model.norm.scale, "model.norm.weight")
    if not model.config.tie_word_embeddings:
        yield matrix(model.lm_head.kernel, HEAD)


def _layer(layer: DecoderLayer, prefix: str, config: DecoderConfig) -> Iterator[Weight]:
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ):
        if hasattr(layer, name):
            yield plain(getattr(layer, name).scale, f"{prefix}.{name}.weight")
    yield from _attention(layer.self_attn, f"{prefix}.self_attn")
    if isinstance(layer.mlp, ClampedMoE):
        yield from _experts(layer.mlp, f"{prefix}.mlp", mxfp4=config.mxfp4)
    else:
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield from _linear(getattr(layer.mlp, name), f"{prefix}.mlp.{name}")


def _attention(attention: Attention, prefix: str) -> Iterator[Weight]:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield from _linear(getattr(attention, name), f"{prefix}.{name}")
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            yield plain(getattr(attention, name).scale, f"{prefix}.{name}.weight")
    if hasattr(attention, "sinks"):
        yield plain(attention.sinks, f"{prefix}.sinks")


def _experts(moe: ClampedMoE, prefix: str, *, mxfp4: bool) -> Iterator[Weight]:
    """Experts have one tensor per projection, [experts, in, out]; gate and up alternate on the last axis."""
    yield from _linear(moe.router, f"{prefix}.router")
    count, dim, width = moe.gate_proj.shape
    for params, name, shape, convert in (
        ((moe.gate_proj, moe.up_proj), "gate_up_proj", (dim, 2 * width), _alternating),
        ((moe.down_proj,), "down_proj", (width, dim), lambda tensor: (tensor,)),
    ):
        if mxfp4:  # [experts, out, in], packed along the last axis
            blocks = (count, shape[1], -(-shape[0] // MXFP4_BLOCK), MXFP4_BLOCK // 2)
            names = (f"{prefix}.experts.{name}{BLOCKS}",)
            yield Weight(params, names, blocks, lambda tensor, convert=convert: convert(tensor.T), by_row=True)
        else:
            yield Weight(params, (f"{prefix}.experts.{name}",), (count, *shape), convert, by_row=True)
    biases = (moe.gate_bias, moe.up_bias)
    yield Weight(biases, (f"{prefix}.experts.gate_up_proj_bias",), (count, 2 * width), _alternating)
    yield plain(moe.down_bias, f"{prefix}.experts.down_proj_bias")


def _alternating(tensor: np.ndarray) -> tuple[np.ndarray, ...]:
    return tensor[..., 0::2], tensor[..., 1::2]


def _linear(linear: Linear, prefix: str) -> Iterator[Weight]:
    yield matrix(linear.kernel, f"{prefix}.weight")
    if hasattr(linear, "bias"):
        yield plain(linear.bias, f"{prefix}.bias")


def least_tensors(config: DecoderConfig, *, drafts: bool) -> tuple[str, int]:
    """As in ``deepseek_weights``."""
    del drafts
    return f"num_hidden_layers={config.num_hidden_layers}", config.num_hidden_layers


def matrices(config: DecoderConfig, *, drafts: bool) -> dict[str, int]:
    """As in ``deepseek_weights``."""
    del drafts
    hidden, width, experts = config.hidden_size, config.intermediate_size, config.num_experts
    sizes = {
        "vocab_size x hidden_size": config.vocab_size * hidden,
        "num_attention_heads x head_dim x hidden_size": config.num_attention_heads * config.head_dim * hidden,
    }
    if experts:
        packed = 2 if config.mxfp4 else 1  # elements per byte
        sizes["num_local_experts x 2 intermediate_size x hidden_size"] = experts * 2 * width * hidden // packed
    else:
        sizes["intermediate_size x hidden_size"] = width * hidden
    return sizes
