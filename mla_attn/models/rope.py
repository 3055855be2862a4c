"""Rotary position embeddings as DeepSeek uses them: interleaved or half-split pairs, plain or YaRN frequencies.

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
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def rotation_scale(self) -> float:
        """What cos and sin are multiplied with: m(mscale) / m(mscale_all_dim)."""
        return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """What the softmax scale is multiplied with: m(mscale_all_dim) squared, once each for query and key."""
        return self._temperature(self.mscale_all_dim) ** 2

    def _temperature(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def inverse_frequencies(dim: int, theta: float, yarn: Yarn | None = None) -> np.ndarray:
    """Radians per position of each of the ``dim // 2`` pairs, float32.

    With YaRN they are a blend of ``theta ** (-2 i / dim)`` and the same over ``factor``: the first below the pair that
    makes ``beta_fast`` turns in the trained context, the second above the pair that makes ``beta_slow``, and linear in
    the pair's index between them. It applies at every length, short ones included: the model was trained so.
    """
    pairs = np.arange(dim // 2, dtype=np.float64)
    trained = theta ** (-2.0 * pairs / dim)
    if yarn is None:
        return trained.astype(np.float32)

    def pair_turning(turns: float) -> float:
        wavelength = yarn.original_max_position_embeddings / turns
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), dim - 1)
    stretched = np.clip((pairs - low) / max(high - low, 1e-3), 0.0, 1.0)
    return (trained * (1.0 - stretched) + trained / yarn.factor * stretched).astype(np.float32)


def rotation(
    positions: Int[Array, "T"], dim: int, theta: float, yarn: Yarn | None = None
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """cos and sin of every pair's angle at each position, float32, computed once for all layers."""
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies(dim, theta, yarn)[None]
    scale = 1.0 if yarn is None else yarn.rotation_scale
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "T *heads E"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    *,
    interleaved: bool = True,
) -> Float[Array, "T *heads E"]:
    """Rotate pairs of the last axis, in float32; result in the dtype of ``x``.

    Pairs are ``(x[2i], x[2i + 1])`` if interleaved, as DeepSeek checkpoints order the rope dimensions, and otherwise
    ``(x[i], x[i + E/2])``. They stay where they are, as in the caches of the engines that serve these models; any other
    order, the same for queries and keys, would give the same scores but other cache bytes.
    """
    heads = (1,) * (x.ndim - 2)
    cos, sin = (t.reshape(t.shape[0], *heads, t.shape[1]) for t in (cos, sin))
    axis = -1 if interleaved else -2  # of the two of a pair
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], *((-1, 2) if interleaved else (2, -1)))
    first, second = (jnp.take(pairs, i, axis=axis) for i in (0, 1))
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=axis)
    return turned.reshape(x.shape).astype(x.dtype)
