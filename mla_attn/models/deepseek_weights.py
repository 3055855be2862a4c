"""The map from tensors of a DeepSeek checkpoint to parameters."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from mla_attn.models.config import DeepseekConfig
from mla_attn.models.deepseek import Attention, DecoderLayer, DeepseekForCausalLM
from mla_attn.models.layers import MLP
from mla_attn.models.moe import MoE
from mla_attn.models.weights import Weight, matrix, plain, transposed

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def weights(model: DeepseekForCausalLM) -> Iterator[Weight]:
    """Every weight of a model, with the names and shapes its checkpoint has ([out, in] for matrices)."""
    yield plain(model.embed_tokens.embedding, EMBEDDING)
    for index, layer in enumerate(model.layers):
        yield from _layer(layer, f"model.layers.{index}")
    yield plain(model.norm.scale, "model.norm.weight")
    tied = model.config.tie_word_embeddings
    if not tied:
        yield matrix(model.lm_head.kernel, HEAD)
    if not model.can_draft:
        return
    mtp, prefix = model.mtp, draft_prefix(model.config).rstrip(".")
    head = matrix(mtp.head.kernel, f"{prefix}.shared_head.head.weight")
    yield dataclasses.replace(
        plain(mtp.embed_tokens.embedding, f"{prefix}.embed_tokens.weight"), fallbacks=(EMBEDDING,)
    )
    yield dataclasses.replace(head, fallbacks=(EMBEDDING if tied else HEAD,))
    yield plain(mtp.enorm.scale, f"{prefix}.enorm.weight")
    yield plain(mtp.hnorm.scale, f"{prefix}.hnorm.weight")
    yield plain(mtp.norm.scale, f"{prefix}.shared_head.norm.weight")
    yield matrix(mtp.eh_proj.kernel, f"{prefix}.eh_proj.weight")
    yield from _layer(mtp.block, prefix)


def _layer(layer: DecoderLayer, prefix: str) -> Iterator[Weight]:
    yield plain(layer.input_layernorm.scale, f"{prefix}.input_layernorm.weight")
    yield plain(layer.post_attention_layernorm.scale, f"{prefix}.post_attention_layernorm.weight")
    yield from _attention(layer.self_attn, f"{prefix}.self_attn")
    if isinstance(layer.mlp, MoE):
        yield from _moe(layer.mlp, f"{prefix}.mlp")
    else:
        yield from _mlp(layer.mlp, f"{prefix}.mlp")


def _attention(attention: Attention, prefix: str) -> Iterator[Weight]:
    for name in ("q_proj", "q_a_proj", "q_b_proj", "o_proj"):
        if hasattr(attention, name):
            yield matrix(getattr(attention, name).kernel, f"{prefix}.{name}.weight")
    yield matrix(attention.kv_a_proj.kernel, f"{prefix}.kv_a_proj_with_mqa.weight")
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        if hasattr(attention, name):
            yield plain(getattr(attention, name).scale, f"{prefix}.{name}.weight")
    heads, nope, rank = attention.w_uk.shape
    width = nope + attention.w_uv.shape[1]

    def split(tensor):  # per head: first the rows for the nope part of the key, then the rows for the value
        return tuple(np.split(tensor.reshape(heads, width, rank), [nope], axis=1))

    yield Weight((attention.w_uk, attention.w_uv), (f"{prefix}.kv_b_proj.weight",), (heads * width, rank), split)


def _mlp(mlp: MLP, prefix: str) -> Iterator[Weight]:
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield matrix(getattr(mlp, name).kernel, f"{prefix}.{name}.weight")


def _moe(moe: MoE, prefix: str) -> Iterator[Weight]:
    yield matrix(moe.gate.kernel, f"{prefix}.gate.weight")
    if hasattr(moe.gate, "e_score_correction_bias"):
        yield plain(moe.gate.e_score_correction_bias, f"{prefix}.gate.e_score_correction_bias")
    for name in ("gate_proj", "up_proj", "down_proj"):
        param = getattr(moe, name)
        count, dim_in, dim_out = param.shape
        names = tuple(f"{prefix}.experts.{expert}.{name}.weight" for expert in range(count))
        yield Weight((param,), names, (dim_out, dim_in), transposed, stacked=True)
    if moe.has_shared:
        yield from _mlp(moe.shared_experts, f"{prefix}.shared_experts")


def draft_prefix(config: DeepseekConfig) -> str:
    """The prefix of the names of the draft layer's tensors."""
    return f"model.layers.{config.num_hidden_layers}."


def least_tensors(config: DeepseekConfig, *, drafts: bool) -> tuple[str, int]:
    """The settings that determine the number of tensors of a checkpoint, and its least value."""
    layers = config.num_hidden_layers + drafts
    least = layers + _moe_layers(config, layers) * config.n_routed_experts
    named = f"num_hidden_layers={config.num_hidden_layers} and n_routed_experts={config.n_routed_experts}"
    return named, least


def matrices(config: DeepseekConfig, *, drafts: bool) -> dict[str, int]:
    """Elements of the matrices that the checkpoint must have, by the settings that determine them."""
    layers = config.num_hidden_layers + drafts
    moe_layers = _moe_layers(config, layers)
    heads, hidden, rank = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
    sizes = {
        "vocab_size x hidden_size": config.vocab_size * hidden,
        "num_attention_heads x qk head dim x (q_lora_rank or hidden_size)": heads
        * config.qk_head_dim
        * (config.q_lora_rank or hidden),
        "q_lora_rank x hidden_size": (config.q_lora_rank or 0) * hidden,
        "(kv_lora_rank + qk_rope_head_dim) x hidden_size": (rank + config.qk_rope_head_dim) * hidden,
        "num_attention_heads x (qk_nope_head_dim + v_head_dim) x kv_lora_rank": heads
        * (config.qk_nope_head_dim + config.v_head_dim)
        * rank,
        "num_attention_heads x v_head_dim x hidden_size": heads * config.v_head_dim * hidden,
    }
    if moe_layers < layers:
        sizes["intermediate_size x hidden_size"] = config.intermediate_size * hidden
    if moe_layers:
        width = config.moe_intermediate_size * max(config.n_shared_experts, 1)
        sizes["moe_intermediate_size x n_shared_experts x hidden_size"] = width * hidden
    return sizes


def _moe_layers(config: DeepseekConfig, layers: int) -> int:
    return max(layers - config.first_k_dense_replace, 0) if config.n_routed_experts else 0
