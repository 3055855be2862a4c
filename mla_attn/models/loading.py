"""The loader of Hugging Face checkpoints, which reads one tensor at a time.

``deepseek_weights`` and ``decoder_weights`` map tensors to parameters. This module checks a checkpoint against its map,
and reads it.
"""

import dataclasses
import logging
import math
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from mla_attn.models import decoder_weights, deepseek_weights
from mla_attn.models.cache_scales import is_cache_scale, read_cache_scales
from mla_attn.models.config import DeepseekConfig
from mla_attn.models.decoder_weights import EMBEDDING, HEAD
from mla_attn.models.deepseek_weights import draft_prefix
from mla_attn.models.families import Config, Model, make_model, read_model_config
from mla_attn.models.files import CheckpointError, exists, read_json
from mla_attn.models.keys import END_TOKENS
from mla_attn.models.safetensors import DTYPES, Stored, list_tensors
from mla_attn.models.settings import read_settings
from mla_attn.models.sharding import mark, parameters
from mla_attn.models.weights import BLOCKS, MXFP4_BLOCK, Weight, dequantise, scale_name
from mla_attn.parallel import Parallelism
from mla_attn.text import some

logger = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


def load_checkpoint(
    path: str | os.PathLike, *, dtype: DTypeLike | None = None, parallelism: Parallelism | None = None
) -> Model:
    """Loads a folder with ``config.json`` and ``model.safetensors`` (or its shards and their index).

    The ``model_type`` determines the family. FP8 weights with block scales, and experts in MXFP4, are dequantised to
    ``dtype``. One tensor is in host memory at a time (for experts, one projection of one layer). Ignored are
    ``rotary_emb.inv_freq`` buffers, which are computed; tensors without elements; and ``lm_head.weight`` if the
    embedding is tied to it, with a warning if it differs. Scales of a float8 cache become the model's
    ``cache_scales``, which a cache of another dtype ignores.

    DeepSeek's draft layer has its own embedding and head; if a checkpoint does not have these copies, those of the
    target are used. If config.json declares a draft layer but the checkpoint has none of its tensors, as saved by
    transformers, the model is loaded with a warning, and cannot draft.

    Args:
        path: checkpoint folder.
        dtype: bfloat16, float16 or float32, of parameters and activations. None for that of the checkpoint's embedding
            if it is one of these, else bfloat16.
        parallelism: mesh and layout to shard the model over. A tensor goes from the host to the devices part by part;
            none of them has the whole model. The model then runs inside ``jax.shard_map``, as ``Engine`` runs it.

    Raises:
        CheckpointError: the folder has missing or damaged files, invalid or unsupported settings, missing, unexpected
            or misshapen tensors, or a dtype that is not read. The message names the file.
        ValueError: a wrong ``dtype``, or devices that cannot share the model.
    """
    return open_checkpoint(path, dtype=dtype, parallelism=parallelism).load()


class Checkpoint:
    """A checkpoint folder whose files match its ``config.json`` and whose weights were not read yet.

    Attributes:
        model: the model; its parameters are abstract until ``load`` is called.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        tensors: dict[str, Stored],
        model: Model,
        weights: list[Weight],
        shardings: dict[int, Any],
    ):
        self.model, self._shardings = model, shardings
        self._folder, self._config, self._tensors, self._weights = folder, config, tensors, weights

    def load(self) -> Model:
        """Reads the weights, one tensor at a time, and returns the model."""
        _check_tied_head(self._folder, self._tensors, self._config)
        for weight in self._weights:
            weight.fill(
                lambda name, row: dequantise(self._tensors, name, self._config.weight_block_size, row), self._shardings
            )
        layers, latent = self._config.num_hidden_layers, isinstance(self._config, DeepseekConfig)
        layers += latent and self.model.can_draft
        if scales := read_cache_scales(self._folder, self._tensors, layers, latent=latent):
            self.model.cache_scales = scales
        return self.model


def open_checkpoint(
    path: str | os.PathLike, *, dtype: DTypeLike | None = None, parallelism: Parallelism | None = None
) -> Checkpoint:
    """Checks a folder without reading weights; arguments and errors are those of ``load_checkpoint``."""
    folder = Path(path)
    config = read_config(folder)
    tensors = list_tensors(folder)
    drafts = isinstance(config, DeepseekConfig) and _has_draft_layer(config, tensors)
    _check_sizes(folder, config, tensors, drafts=drafts)
    if dtype is None:
        stored = tensors[EMBEDDING].dtype if EMBEDDING in tensors else "BF16"
        dtype = {"F32": "float32", "F16": "float16"}.get(stored, "bfloat16")
    made = jnp.dtype(dtype)
    model = nnx.eval_shape(lambda: make_model(config, dtype=made, rngs=nnx.Rngs(0), draft_layer=drafts))
    weights = [_resolve(weight, tensors) for weight in _map(config).weights(model)]
    _check_names(folder, weights, tensors, config)
    for weight in weights:
        _check_stored(weight, tensors, config)
    _warn(folder, config, tensors, drafts=drafts)
    shardings: dict[int, Any] = dict.fromkeys(map(id, parameters(model)))
    if parallelism is not None:
        shardings = dict.fromkeys(shardings, parallelism.sharding(PartitionSpec())) | mark(model, parallelism)
    return Checkpoint(folder, config, tensors, model, weights, shardings)


def _map(config: Config) -> Any:
    """The module with the map of a family."""
    return deepseek_weights if isinstance(config, DeepseekConfig) else decoder_weights


def _warn(folder: Path, config: Config, tensors: dict[str, Stored], *, drafts: bool) -> None:
    """Logs warnings for ignored parts of a checkpoint."""
    if isinstance(config, DeepseekConfig) and config.num_nextn_predict_layers and not drafts:
        logger.warning(
            "%s: num_nextn_predict_layers=%d, but there are no tensors of the draft layer: loaded without, it cannot "
            "draft",
            folder / CONFIG,
            config.num_nextn_predict_layers,
        )


def read_config(folder: Path) -> Config:
    """Reads a folder's ``config.json``, and adds the end tokens of ``generation_config.json``, because chat models
    often have theirs only there.

    Raises:
        CheckpointError: a file is damaged, ``config.json`` is missing, or a value is invalid or not supported. The
            message names the file.
    """
    data, more = read_json(folder / CONFIG), {}
    if exists(folder / GENERATION_CONFIG):
        more = read_json(folder / GENERATION_CONFIG)
    file = folder / CONFIG
    try:
        config = read_model_config(data)
        file = folder / GENERATION_CONFIG
        ends = read_settings(more, END_TOKENS)["eos_token_id"]
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ends))))


def _resolve(weight: Weight, tensors: dict[str, Stored]) -> Weight:
    """The weight with the first of its names that the checkpoint has."""
    found = [name for name in (*weight.names[:1], *weight.fallbacks) if name in tensors]
    return dataclasses.replace(weight, names=(found[0],)) if weight.fallbacks and found else weight


def _has_draft_layer(config: DeepseekConfig, tensors: dict[str, Stored]) -> bool:
    """Whether the config declares a draft layer and the checkpoint has a tensor of it that is not ignored."""
    prefix = draft_prefix(config)
    return config.num_nextn_predict_layers > 0 and any(
        name.startswith(prefix) and not _is_passed_over(name, stored) for name, stored in tensors.items()
    )


def _is_passed_over(name: str, stored: Stored) -> bool:
    """Whether a tensor is ignored: a buffer that is computed, or a tensor without elements."""
    return name.endswith("rotary_emb.inv_freq") or 0 in stored.shape


def _check_sizes(folder: Path, config: Config, tensors: dict[str, Stored], *, drafts: bool) -> None:
    """Compares sizes in the config with the files before anything of these sizes is allocated."""
    named, least = _map(config).least_tensors(config, drafts=drafts)
    if least > len(tensors):
        raise CheckpointError(
            f"{folder / CONFIG}: {named} need at least {least} tensors, the checkpoint has {len(tensors)}"
        )
    largest = max((math.prod(tensor.shape) for tensor in tensors.values()), default=0)
    for sizes, elements in _map(config).matrices(config, drafts=drafts).items():
        if elements > largest:
            raise CheckpointError(
                f"{folder / CONFIG}: a matrix of {sizes} has {elements} elements, the largest tensor of the checkpoint "
                f"has {largest}"
            )


def _check_names(folder: Path, weights: list[Weight], tensors: dict[str, Stored], config: Config) -> None:
    wanted = {name for weight in weights for name in weight.names}
    scales = {scale for name in wanted if name in tensors and (scale := scale_name(name, tensors[name].dtype))}
    ignored = {name for name, stored in tensors.items() if _is_passed_over(name, stored) or is_cache_scale(name)}
    if config.tie_word_embeddings:
        ignored.add(HEAD)
    missing = sorted((wanted | scales) - tensors.keys())
    extra = sorted(tensors.keys() - wanted - scales - ignored)
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {some(missing)}")
    if extra:
        problems.append(f"{len(extra)} unexpected: {some(extra)}")
        deepseek = config if isinstance(config, DeepseekConfig) and not config.num_nextn_predict_layers else None
        if deepseek and all(name.startswith(draft_prefix(deepseek)) for name in extra):
            problems.append("it has a draft layer: num_nextn_predict_layers must be 1 in its config.json")
    if problems:
        raise CheckpointError(f"{folder}: tensors do not match config.json: " + "; ".join(problems))


def _check_tied_head(folder: Path, tensors: dict[str, Stored], config: Config) -> None:
    if not config.tie_word_embeddings or HEAD not in tensors or EMBEDDING not in tensors:
        return
    head, embedding = tensors[HEAD], tensors[EMBEDDING]
    if (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and np.array_equal(head.read(), embedding.read()):
        return
    logger.warning("%s: tie_word_embeddings=True, but %s is not %s: passed over", folder / CONFIG, HEAD, EMBEDDING)


def _check_stored(weight: Weight, tensors: dict[str, Stored], config: Config) -> None:
    for name in weight.names:
        tensor = tensors[name]
        try:
            if tensor.shape != weight.shape:
                raise CheckpointError(f"{name} has shape {tensor.shape}, must be {weight.shape}")
            packed = name.endswith(BLOCKS)
            allowed = ("U8",) if packed else tuple(each for each in DTYPES if each != "U8")
            if tensor.dtype not in allowed:
                raise CheckpointError(f"{name} has dtype {tensor.dtype}, must be one of {', '.join(allowed)}")
            if packed:
                _check_scale(name, tensors, tensor.shape[:-1], MXFP4_BLOCK, "U8")
            elif tensor.dtype == "F8_E4M3":
                _check_fp8_scale(name, tensors, config.weight_block_size)
        except CheckpointError as error:
            raise CheckpointError(f"{tensor.file}: {error}") from None


def _check_fp8_scale(name: str, tensors: dict[str, Stored], block: tuple[int, int] | None) -> None:
    shape = tensors[name].shape
    if block is None:
        raise CheckpointError(f"{name} is F8_E4M3, but config.json has no quantization_config with weight_block_size")
    if len(shape) != 2:
        raise CheckpointError(f"{name} is F8_E4M3 with shape {shape}; only matrices can be")
    blocks = tuple(-(-size // each) for size, each in zip(shape, block, strict=True))
    _check_scale(name, tensors, blocks, block, "F32")


def _check_scale(name: str, tensors: dict[str, Stored], shape: tuple[int, ...], block: object, dtype: str) -> None:
    scales = scale_name(name, tensors[name].dtype) or ""
    scale = tensors[scales]
    if scale.shape != shape:
        raise CheckpointError(f"{scales} has shape {scale.shape}, must be {shape}: one for each {block} block")
    if scale.dtype != dtype:
        raise CheckpointError(f"{scales} has dtype {scale.dtype}, must be {dtype}")
