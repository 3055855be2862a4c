"""Hugging Face DeepSeek checkpoints into the NNX model, one tensor at a time.

``_weights`` is the whole map: which tensors of the checkpoint fill which parameter, and how. Everything else here
checks the checkpoint against it or carries bytes.
"""

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from mla_attn.models.config import DeepseekConfig
from mla_attn.models.deepseek import Attention, DecoderLayer, DeepseekForCausalLM
from mla_attn.models.files import CheckpointError, exists, read_json
from mla_attn.models.keys import END_TOKENS
from mla_attn.models.layers import MLP
from mla_attn.models.moe import MoE
from mla_attn.models.safetensors import DTYPES, Stored, list_tensors
from mla_attn.models.settings import read_settings
from mla_attn.text import some

logger = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SCALE = "_scale_inv"  # of an FP8 block; multiplied, in spite of its name


def load_checkpoint(path: str | os.PathLike, *, dtype: DTypeLike | None = None) -> DeepseekForCausalLM:
    """Load a folder with ``config.json`` and ``model.safetensors`` (or its shards and their index).

    FP8 weights with block scales are dequantised to ``dtype``. One tensor is in host memory at a time (for experts, one
    projection of one layer). Passed over knowingly: ``rotary_emb.inv_freq`` buffers, which are computed; tensors
    without elements; and ``lm_head.weight`` where the embedding is tied to it, with a warning if it differs.

    The draft layer has its own embedding and head; a checkpoint that leaves these copies out gets those of the target.
    A checkpoint without any tensor of the draft layer that its config.json promises, as transformers saves them, is
    loaded with a warning, and cannot draft.

    Args:
        path: checkpoint folder.
        dtype: bfloat16 or float32, of parameters and activations. If None, float32 where the checkpoint's embedding is
            stored so, else bfloat16.

    Raises:
        CheckpointError: whatever is wrong with the folder: missing or damaged files, settings that make no sense or
            are not supported, missing, unexpected or misshapen tensors, a dtype that is not read. With the file.
        ValueError: a wrong ``dtype``.
    """
    return open_checkpoint(path, dtype=dtype).load()


class Checkpoint:
    """A checkpoint folder whose files match its ``config.json``; of its weights nothing was read yet.

    Attributes:
        model: its parameters have shapes and dtypes, and arrays once ``load`` was called.
    """

    def __init__(
        self, folder: Path, config: DeepseekConfig, tensors: dict[str, Stored], model, weights: list["Weight"]
    ):
        self.model: DeepseekForCausalLM = model
        self._folder, self._config, self._tensors, self._weights = folder, config, tensors, weights

    def load(self) -> DeepseekForCausalLM:
        """The model, its weights read: one tensor at a time."""
        _check_tied_head(self._folder, self._tensors, self._config)
        for weight in self._weights:
            weight.fill(lambda name: dequantise(self._tensors, name, self._config.weight_block_size))
        return self.model


def open_checkpoint(path: str | os.PathLike, *, dtype: DTypeLike | None = None) -> Checkpoint:
    """Check a folder as ``load_checkpoint`` does, without reading weights: arguments and errors are the same."""
    folder = Path(path)
    config = read_config(folder)
    tensors = list_tensors(folder)
    drafts = config.num_nextn_predict_layers > 0 and _has_draft_layer(config, tensors)
    _check_sizes(folder, config, tensors, drafts=drafts)
    if dtype is None:
        dtype = "float32" if EMBEDDING in tensors and tensors[EMBEDDING].dtype == "F32" else "bfloat16"
    model = nnx.eval_shape(lambda: DeepseekForCausalLM(config, dtype=dtype, rngs=nnx.Rngs(0), draft_layer=drafts))
    weights = [_resolve(weight, tensors) for weight in _weights(model)]
    _check_names(folder, weights, tensors, config)
    for weight in weights:
        _check_stored(weight, tensors, config)
    if config.num_nextn_predict_layers and not drafts:
        logger.warning(
            "%s: num_nextn_predict_layers=%d, but there are no tensors of the draft layer: loaded without, it cannot "
            "draft",
            folder / CONFIG,
            config.num_nextn_predict_layers,
        )
    return Checkpoint(folder, config, tensors, model, weights)


def read_config(folder: Path) -> DeepseekConfig:
    """A folder's ``config.json``, with the end tokens of its ``generation_config.json`` added to its own: chat models
    often name theirs in the latter alone.

    Raises:
        CheckpointError: a file that is damaged, or the first one missing; values that make no sense or are not
            supported. With the file.
    """
    data, more = read_json(folder / CONFIG), {}
    if exists(folder / GENERATION_CONFIG):
        more = read_json(folder / GENERATION_CONFIG)
    file = folder / CONFIG
    try:
        config = DeepseekConfig.from_hf(data)
        file = folder / GENERATION_CONFIG
        ends = read_settings(more, END_TOKENS)["eos_token_id"]
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ends))))


@dataclasses.dataclass(frozen=True)
class Weight:
    """One or more tensors of a checkpoint and the parameters they fill.

    Attributes:
        params: usually one; two for ``kv_b_proj``.
        names: usually one tensor; one for each expert where ``params[0]`` is stacked.
        shape: of each tensor in the checkpoint.
        convert: from a tensor to what each parameter, or each row of a stacked one, holds.
        fallbacks: other names for the tensor, tried in order.
    """

    params: tuple[nnx.Param, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    convert: Callable[[np.ndarray], tuple[np.ndarray, ...]] = lambda tensor: (tensor,)
    fallbacks: tuple[str, ...] = ()
    stacked: bool = False

    def fill(self, read: Callable[[str], np.ndarray]) -> None:
        """Read the tensors and set the parameters, in their dtypes."""
        if not self.stacked:
            for param, value in zip(self.params, self.convert(read(self.names[0])), strict=True):
                # A copy, for on CPU the device array may be the very memory it is given.
                param.set_value(jax.device_put(np.array(value, param.dtype, order="C")))
            return
        (param,) = self.params
        host = np.empty(param.shape, param.dtype)
        for row, name in zip(host, self.names, strict=True):
            (row[...],) = self.convert(read(name))
        param.set_value(jax.device_put(host))


def dequantise(tensors: dict[str, Stored], name: str, block: tuple[int, int] | None) -> np.ndarray:
    """A tensor as stored or, for FP8, times the scale of its block, in float32; last blocks may be partial."""
    value = tensors[name].read()
    if block is None or tensors[name].dtype != "F8_E4M3":
        return value
    scales = tensors[name + SCALE].read()
    rows, columns = (np.arange(size) // each for size, each in zip(value.shape, block, strict=True))
    return value.astype(np.float32) * scales[rows][:, columns]


def _weights(model: DeepseekForCausalLM) -> Iterator[Weight]:
    """Every weight of a model, with the names and shapes its checkpoint has ([out, in] for matrices)."""
    yield _plain(model.embed_tokens.embedding, EMBEDDING)
    for index, layer in enumerate(model.layers):
        yield from _layer(layer, f"model.layers.{index}")
    yield _plain(model.norm.scale, "model.norm.weight")
    tied = model.config.tie_word_embeddings
    if not tied:
        yield _matrix(model.lm_head.kernel, HEAD)
    if not model.can_draft:
        return
    mtp, prefix = model.mtp, _draft_prefix(model.config).rstrip(".")
    head = _matrix(mtp.head.kernel, f"{prefix}.shared_head.head.weight")
    yield dataclasses.replace(
        _plain(mtp.embed_tokens.embedding, f"{prefix}.embed_tokens.weight"), fallbacks=(EMBEDDING,)
    )
    yield dataclasses.replace(head, fallbacks=(EMBEDDING if tied else HEAD,))
    yield _plain(mtp.enorm.scale, f"{prefix}.enorm.weight")
    yield _plain(mtp.hnorm.scale, f"{prefix}.hnorm.weight")
    yield _plain(mtp.norm.scale, f"{prefix}.shared_head.norm.weight")
    yield _matrix(mtp.eh_proj.kernel, f"{prefix}.eh_proj.weight")
    yield from _layer(mtp.block, prefix)


def _layer(layer: DecoderLayer, prefix: str) -> Iterator[Weight]:
    yield _plain(layer.input_layernorm.scale, f"{prefix}.input_layernorm.weight")
    yield _plain(layer.post_attention_layernorm.scale, f"{prefix}.post_attention_layernorm.weight")
    yield from _attention(layer.self_attn, f"{prefix}.self_attn")
    if isinstance(layer.mlp, MoE):
        yield from _moe(layer.mlp, f"{prefix}.mlp")
    else:
        yield from _mlp(layer.mlp, f"{prefix}.mlp")


def _attention(attention: Attention, prefix: str) -> Iterator[Weight]:
    for name in ("q_proj", "q_a_proj", "q_b_proj", "o_proj"):
        if hasattr(attention, name):
            yield _matrix(getattr(attention, name).kernel, f"{prefix}.{name}.weight")
    yield _matrix(attention.kv_a_proj.kernel, f"{prefix}.kv_a_proj_with_mqa.weight")
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        if hasattr(attention, name):
            yield _plain(getattr(attention, name).scale, f"{prefix}.{name}.weight")
    heads, nope, rank = attention.w_uk.shape
    width = nope + attention.w_uv.shape[1]

    def split(tensor):  # per head: first the rows that make the nope part of the key, then those of the value
        return tuple(np.split(tensor.reshape(heads, width, rank), [nope], axis=1))

    yield Weight((attention.w_uk, attention.w_uv), (f"{prefix}.kv_b_proj.weight",), (heads * width, rank), split)


def _mlp(mlp: MLP, prefix: str) -> Iterator[Weight]:
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield _matrix(getattr(mlp, name).kernel, f"{prefix}.{name}.weight")


def _moe(moe: MoE, prefix: str) -> Iterator[Weight]:
    yield _matrix(moe.gate.kernel, f"{prefix}.gate.weight")
    if hasattr(moe.gate, "e_score_correction_bias"):
        yield _plain(moe.gate.e_score_correction_bias, f"{prefix}.gate.e_score_correction_bias")
    for name in ("gate_proj", "up_proj", "down_proj"):
        param = getattr(moe, name)
        count, dim_in, dim_out = param.shape
        names = tuple(f"{prefix}.experts.{expert}.{name}.weight" for expert in range(count))
        yield Weight((param,), names, (dim_out, dim_in), _transposed, stacked=True)
    if moe.has_shared:
        yield from _mlp(moe.shared_experts, f"{prefix}.shared_experts")


def _plain(param: nnx.Param, name: str) -> Weight:
    return Weight((param,), (name,), param.shape)


def _matrix(param: nnx.Param, name: str) -> Weight:
    return Weight((param,), (name,), param.shape[::-1], _transposed)


def _transposed(tensor: np.ndarray) -> tuple[np.ndarray, ...]:
    return (tensor.T,)


def _resolve(weight: Weight, tensors: dict[str, Stored]) -> Weight:
    """The weight under the first of its names that the checkpoint has."""
    found = [name for name in (*weight.names[:1], *weight.fallbacks) if name in tensors]
    return dataclasses.replace(weight, names=(found[0],)) if weight.fallbacks and found else weight


def _has_draft_layer(config: DeepseekConfig, tensors: dict[str, Stored]) -> bool:
    """Whether there is a tensor of it that is not passed over."""
    prefix = _draft_prefix(config)
    return any(name.startswith(prefix) and not _is_passed_over(name, stored) for name, stored in tensors.items())


def _is_passed_over(name: str, stored: Stored) -> bool:
    """A buffer that is computed, or a tensor without elements."""
    return name.endswith("rotary_emb.inv_freq") or 0 in stored.shape


def _draft_prefix(config: DeepseekConfig) -> str:
    return f"model.layers.{config.num_hidden_layers}."


def _check_sizes(folder: Path, config: DeepseekConfig, tensors: dict[str, Stored], *, drafts: bool) -> None:
    """Compare sizes with what the files hold before anything of these sizes is made."""
    layers = config.num_hidden_layers + drafts
    moe_layers = max(layers - config.first_k_dense_replace, 0) if config.n_routed_experts else 0
    least = layers + moe_layers * config.n_routed_experts
    if least > len(tensors):
        raise CheckpointError(
            f"{folder / CONFIG}: num_hidden_layers={config.num_hidden_layers} and n_routed_experts="
            f"{config.n_routed_experts} need at least {least} tensors, the checkpoint has {len(tensors)}"
        )
    heads, hidden, rank = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
    matrices = {
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
        matrices["intermediate_size x hidden_size"] = config.intermediate_size * hidden
    if moe_layers:
        width = config.moe_intermediate_size * max(config.n_shared_experts, 1)
        matrices["moe_intermediate_size x n_shared_experts x hidden_size"] = width * hidden
    largest = max((math.prod(tensor.shape) for tensor in tensors.values()), default=0)
    for sizes, elements in matrices.items():
        if elements > largest:
            raise CheckpointError(
                f"{folder / CONFIG}: a matrix of {sizes} has {elements} elements, the largest tensor of the checkpoint "
                f"has {largest}"
            )


def _check_names(folder: Path, weights: list[Weight], tensors: dict[str, Stored], config: DeepseekConfig) -> None:
    wanted = {name for weight in weights for name in weight.names}
    scales = {name + SCALE for name in wanted if name in tensors and tensors[name].dtype == "F8_E4M3"}
    ignored = {name for name, stored in tensors.items() if _is_passed_over(name, stored)}
    if config.tie_word_embeddings:
        ignored.add(HEAD)
    missing = sorted((wanted | scales) - tensors.keys())
    extra = sorted(tensors.keys() - wanted - scales - ignored)
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {some(missing)}")
    if extra:
        problems.append(f"{len(extra)} unexpected: {some(extra)}")
        if all(name.startswith(_draft_prefix(config)) for name in extra) and not config.num_nextn_predict_layers:
            problems.append("it has a draft layer: num_nextn_predict_layers must be 1 in its config.json")
    if problems:
        raise CheckpointError(f"{folder}: tensors do not match config.json: " + "; ".join(problems))


def _check_tied_head(folder: Path, tensors: dict[str, Stored], config: DeepseekConfig) -> None:
    if not config.tie_word_embeddings or HEAD not in tensors or EMBEDDING not in tensors:
        return
    head, embedding = tensors[HEAD], tensors[EMBEDDING]
    if (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and np.array_equal(head.read(), embedding.read()):
        return
    logger.warning("%s: tie_word_embeddings=True, but %s is not %s: passed over", folder / CONFIG, HEAD, EMBEDDING)


def _check_stored(weight: Weight, tensors: dict[str, Stored], config: DeepseekConfig) -> None:
    for name in weight.names:
        tensor = tensors[name]
        try:
            if tensor.shape != weight.shape:
                raise CheckpointError(f"{name} has shape {tensor.shape}, must be {weight.shape}")
            if tensor.dtype not in DTYPES:
                raise CheckpointError(f"{name} has dtype {tensor.dtype}, must be one of {', '.join(DTYPES)}")
            if tensor.dtype == "F8_E4M3":
                _check_scale(name, tensors, config.weight_block_size)
        except CheckpointError as error:
            raise CheckpointError(f"{tensor.file}: {error}") from None


def _check_scale(name: str, tensors: dict[str, Stored], block: tuple[int, int] | None) -> None:
    if block is None:
        raise CheckpointError(f"{name} is F8_E4M3, but config.json has no quantization_config with weight_block_size")
    shape, scale = tensors[name].shape, tensors[name + SCALE]
    if len(shape) != 2:
        raise CheckpointError(f"{name} is F8_E4M3 with shape {shape}; only matrices can be")
    blocks = tuple(-(-size // each) for size, each in zip(shape, block, strict=True))
    if scale.shape != blocks:
        raise CheckpointError(f"{name + SCALE} has shape {scale.shape}, must be {blocks}: one for each {block} block")
    if scale.dtype != "F32":
        raise CheckpointError(f"{name + SCALE} has dtype {scale.dtype}, must be F32")
