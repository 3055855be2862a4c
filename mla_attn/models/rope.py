"""Rotary position embeddings: interleaved (DeepSeek) or half-split pairs; plain, YaRN or Llama 3 frequencies.

YaRN is arXiv:2309.00071; the two ``mscale`` factors are DeepSeek's (arXiv:2405.04434, and the modelling code published
with the checkpoints). All of it is computed in float32.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """Parameters of YaRN context extension, named as in ``config.json``.

    Attributes:
        factor: how many times longer than trained the context may be.
        original_max_position_embeddings: trained context length.
        beta_fast: dimensions that turn more often than this over the trained context keep their frequency.
        beta_slow: dimensions that turn less often than this have it divided by ``factor``.
        mscale: weight of the attention temperature on cos and sin.
        mscale_all_dim: weight of the attention temperature on the whole softmax, which cos and sin divide by.
        truncate: whether the ramp between kept and divided frequencies begins and ends at whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @property
    def rotation_scale(self) -> float:
        """Factor of cos and sin: m(mscale) / m(mscale_all_dim)."""
        return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """Factor of the softmax scale: m(mscale_all_dim) squared, once each for query and key."""
        return self._temperature(self.mscale_all_dim) ** 2

    def _temperature(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def stretched(self, dim: int, theta: float) -> np.ndarray:
        """Weight of the division by ``factor`` for each pair: 0 below the pair that makes ``beta_fast`` turns in the
        trained context, 1 above the pair that makes ``beta_slow``, linear in the pair's index between them."""

        def pair_turning(turns: float) -> float:
            wavelength = self.original_max_position_embeddings / turns
            return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_turning(self.beta_fast), pair_turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3:
    """Parameters of Llama 3's context extension (arXiv:2407.21783 and the code published with it), named as in
    ``config.json``.

    Attributes:
        factor: how many times longer than trained the context may be.
        original_max_position_embeddings: trained context length.
        low_freq_factor: pairs that make fewer turns than this over the trained context have their frequency divided by
            ``factor``.
        high_freq_factor: pairs that make more turns keep theirs; above ``low_freq_factor``.
    """

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float

    rotation_scale = 1.0  # factor of cos and sin

    def stretched(self, dim: int, theta: float) -> np.ndarray:
        """Weight of the division by ``factor`` for each pair: linear in its turns between the two factors."""
        frequencies = theta ** (-2.0 * np.arange(dim // 2) / dim)
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return 1.0 - np.clip(kept, 0.0, 1.0)


RopeScaling = Yarn | Llama3


def inverse_frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians per position of each of the ``dim // 2`` pairs, float32.

    Scaled frequencies are a blend of ``theta ** (-2 i / dim)`` and that divided by ``factor``. Scaling applies at every
    length, also short ones, as in training.
    """
    trained = theta ** (-2.0 * np.arange(dim // 2, dtype=np.float64) / dim)
    if scaling is None:
        return trained.astype(np.float32)
    stretched = scaling.stretched(dim, theta)
    return (trained * (1.0 - stretched) + trained / scaling.factor * stretched).astype(np.float32)


def rotation(
    positions: Int[Array, "T"], dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """cos and sin of every pair's angle at each position, float32, computed once for all layers."""
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(dim, theta, scaling)[None]
    scale = 1.0 if scaling is None else scaling.rotation_scale
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "T *heads E"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    *,
    interleaved: bool = True,
) -> Float[Array, "T *heads E"]:
    """Rotates pairs of the last axis, in float32; the result has the dtype of ``x``.

    Pairs are ``(x[2i], x[2i + 1])`` if interleaved, as in DeepSeek checkpoints, and otherwise ``(x[i], x[i + E/2])``,
    as in other families. The order of channels does not change, as in the caches of other engines; another order, the
    same for queries and keys, would give the same scores but other cache bytes.
    """
    heads = (1,) * (x.ndim - 2)
    cos, sin = (t.reshape(t.shape[0], *heads, t.shape[1]) for t in (cos, sin))
    axis = -1 if interleaved else -2  # axis of the two elements of a pair
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], *((-1, 2) if interleaved else (2, -1)))
    first, second = (jnp.take(pairs, i, axis=axis) for i in (0, 1))
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=axis)
    return turned.reshape(x.shape).astype(x.dtype)
