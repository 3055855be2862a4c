"""The scales of a float8 cache that a checkpoint has, under the names that several tools give them."""

import logging
import math
import re
from pathlib import Path

import numpy as np

from mla_attn.models.files import CheckpointError
from mla_attn.models.safetensors import Stored

logger = logging.getLogger(__name__)

# Of compressed-tensors, ModelOpt, Quark and older tools; ``kv_scale`` is that of both.
_K_NAMES = ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
_V_NAMES = ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")
_NAME = re.compile(rf"model\.layers\.[0-9]+\.self_attn\.({'|'.join(map(re.escape, (*_K_NAMES, *_V_NAMES)))})")

CacheScales = tuple[tuple[float, float], ...]  # of the keys and of the values of each layer


def is_cache_scale(name: str) -> bool:
    """Whether this is the name of a scale of a float8 cache."""
    return _NAME.fullmatch(name) is not None


def read_cache_scales(folder: Path, tensors: dict[str, Stored], num_layers: int, *, latent: bool) -> CacheScales | None:
    """Reads the scales of each layer, 1 where a layer has none; None if no layer has any.

    A latent row is key and value, so its scale is that of the keys; if that of the values differs, a warning is logged.

    Raises:
        CheckpointError: a scale is not one positive finite number.
    """
    if not any(map(is_cache_scale, tensors)):
        return None
    scales = []
    for layer in range(num_layers):
        k, v = (_read(tensors, f"model.layers.{layer}.self_attn.", names) for names in (_K_NAMES, _V_NAMES))
        scales.append((k, v))
    if latent and (odd := [layer for layer, (k, v) in enumerate(scales) if v not in (k, 1.0)]):
        logger.warning("%s: v_scale differs from k_scale (layer %d): latent rows have the latter", folder, odd[0])
    return tuple(scales)


def _read(tensors: dict[str, Stored], prefix: str, names: tuple[str, ...]) -> float:
    name = next((prefix + name for name in names if prefix + name in tensors), None)
    if name is None:
        return 1.0
    stored = tensors[name]
    if stored.shape not in ((), (1,)):
        raise CheckpointError(f"{stored.file}: {name} has shape {stored.shape}, must be () or (1,)")
    scale = float(stored.read().astype(np.float32).reshape(()))
    if not (math.isfinite(scale) and scale >= float(np.finfo(np.float32).tiny)):
        raise CheckpointError(f"{stored.file}: {name}={scale} must be a positive finite number")
    return scale
