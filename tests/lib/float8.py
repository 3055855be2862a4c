"""Float8 caches of test batches, made with NumPy and not by the library, whose writes have tests of their own."""

import ml_dtypes
import numpy as np

from mla_attn.cache.formats import FORMATS

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
CACHES = (*LARGEST, "float8_e4m3fn:blocks")
_SCALES = (3.1, 0.02)  # of layers in turn; never 1


def layer_scales(num_layers, seed=0):
    """float32 [L]: 3.1 and 0.02 in turn, beginning with either."""
    return np.resize(np.roll(np.asarray(_SCALES, np.float32), seed), num_layers)


def codes(x, dtype):
    """Bytes of float32 numbers, those too large clipped."""
    with np.errstate(invalid="ignore"):
        return np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(getattr(ml_dtypes, dtype)).view(np.uint8)


def blocks(latent, rope):
    """Rows of bytes: latents in blocks of 128 with their scales, then the rope part in bfloat16."""
    cut = latent.reshape(*latent.shape[:-1], -1, 128)
    with np.errstate(invalid="ignore", over="ignore"):
        scale = (np.abs(cut).max(axis=-1) / np.float32(448)).astype(np.float32)
        scale[scale == 0] = 1
        stored = codes(cut / scale[..., None], "float8_e4m3fn").reshape(latent.shape)
        parts = stored, scale.view(np.uint8), np.ascontiguousarray(rope.astype(ml_dtypes.bfloat16)).view(np.uint8)
    return np.concatenate([part.reshape(*latent.shape[:-1], part.shape[-1]) for part in parts], axis=-1)


def dequantized(pool_format, *parts):
    """Parts of rows of bytes as float64, not yet scaled; NumPy's."""
    first, second = (np.asarray(part) for part in parts)
    dtype = getattr(ml_dtypes, pool_format.dtype.name)
    if pool_format != FORMATS["float8_e4m3fn:blocks"]:
        return tuple(np.ascontiguousarray(part).view(dtype).astype(np.float64) for part in (first, second))
    channels = first.shape[-1] * 128 // 132
    latent = np.ascontiguousarray(first[..., :channels]).view(dtype).astype(np.float64)
    scale = np.ascontiguousarray(first[..., channels:]).view(np.float32).astype(np.float64)
    rope = np.ascontiguousarray(second).view(ml_dtypes.bfloat16).astype(np.float64)
    return latent * scale.repeat(128, axis=-1), rope
