"""Row formats: how the channels of a token are stored.

A row has two parts: latent and rope, or key and value. A format defines how they are stored: as elements of
``storage_dtype``, where each part takes as many elements as ``widths`` says, which need not be its number of channels.
``operands`` decodes them to the numbers that enter products, ``decode`` to values: operands times the pool's scales if
the format is ``scaled``. ``supports`` refuses a format by its ``name``.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt8

BLOCK = 128  # latents that share a scale, in rows of ``BlockFormat``
FLOAT8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))

Scales = tuple[Float[Array, "..."], Float[Array, "..."]] | None  # of both parts: [], or [K] of the last axis but one


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Stores one element per channel, in the dtype that ops compute with.

    Attributes:
        dtype: dtype of the stored numbers.
        scaled: whether numbers are divided by the pool's scales before they are stored.
        latent_only: whether the format stores latent rows, and no keys and values.
    """

    dtype: np.dtype
    scaled: ClassVar[bool] = False
    latent_only: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The format's name in errors, in ``supports`` and on command lines."""
        return self.dtype.name

    @property
    def storage_dtype(self) -> np.dtype:
        """Dtype of the pool's array."""
        return self.dtype

    @property
    def value_dtype(self) -> np.dtype:
        """Default dtype of values that are read."""
        return self.dtype

    def operand_dtype(self, q_dtype: DTypeLike) -> np.dtype:
        """Dtype that products with queries of ``q_dtype`` run in."""
        del q_dtype
        return self.dtype

    def check_channels(self, first: int) -> None:
        """Raises a ValueError unless the format can store a first part of ``first`` channels."""

    def widths(self, first: int, second: int) -> tuple[int, int]:
        """Numbers of stored elements for two parts of ``first`` and ``second`` channels."""
        return first, second

    def row_bytes(self, first: int, second: int) -> int:
        """Stored bytes of both parts together."""
        return sum(self.widths(first, second)) * self.storage_dtype.itemsize

    def encode(
        self, first: Float[Array, "*rows A"], second: Float[Array, "*rows B"], scales: Scales = None
    ) -> tuple[Shaped[Array, "*rows a"], Shaped[Array, "*rows b"]]:
        """Encodes channels of any floating dtype, rounded to nearest; float16 makes values above 65504 infinite."""
        del scales
        return first.astype(self.storage_dtype), second.astype(self.storage_dtype)

    def operands(
        self, first: Shaped[Array, "*rows a"], second: Shaped[Array, "*rows b"], dtype: DTypeLike
    ) -> tuple[Float[Array, "*rows A"], Float[Array, "*rows B"]]:
        """Decodes stored elements to operands in ``dtype``, which is ``operand_dtype``: exact and not yet scaled."""
        del dtype
        return first, second

    def decode(
        self,
        first: Shaped[Array, "*rows a"],
        second: Shaped[Array, "*rows b"],
        scales: Scales = None,
        dtype: DTypeLike | None = None,
    ) -> tuple[Float[Array, "*rows A"], Float[Array, "*rows B"]]:
        """Decodes stored elements to values in ``dtype``, None for ``value_dtype``."""
        dtype = self.value_dtype if dtype is None else dtype
        if scales is None:
            first, second = self.operands(first, second, self.operand_dtype(dtype))
            return first.astype(dtype), second.astype(dtype)
        first, second = self.operands(first, second, jnp.float32)
        first, second = (x * _aligned(scale, x) for x, scale in zip((first, second), scales, strict=True))
        return first.astype(dtype), second.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Float8Format(RowFormat):
    """Stores one byte per channel: the number divided by the pool's scale, clipped to ``dtype``'s range, and rounded.

    The array holds bytes, because XLA on CPUs scatters into uint8 in place but copies an array of float8.
    """

    scaled: ClassVar[bool] = True

    @property
    def storage_dtype(self) -> np.dtype:
        return jnp.dtype(jnp.uint8)

    @property
    def value_dtype(self) -> np.dtype:
        return jnp.dtype(jnp.bfloat16)

    def operand_dtype(self, q_dtype: DTypeLike) -> np.dtype:
        return operand_dtype(q_dtype)

    def encode(self, first, second, scales=None):
        first, second = (x.astype(jnp.float32) for x in (first, second))
        if scales is not None:
            first, second = (x / _aligned(scale, x) for x, scale in zip((first, second), scales, strict=True))
        return _to_bytes(saturated(first, self.dtype)), _to_bytes(saturated(second, self.dtype))

    def operands(self, first, second, dtype):
        return _from_bytes(first, self.dtype).astype(dtype), _from_bytes(second, self.dtype).astype(dtype)


@dataclasses.dataclass(frozen=True)
class BlockFormat(RowFormat):
    """Stores latents in blocks of 128 with a float32 scale for each block, and the rope part in bfloat16.

    A row has R bytes of latents, R / 128 scales of 4 bytes and E rope channels of 2 bytes: 656 bytes for 512 + 64. The
    write makes the scales. Products run in float32, because bfloat16 cannot hold a latent times its scale.
    """

    latent_only: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"{self.dtype.name}:blocks"

    @property
    def storage_dtype(self) -> np.dtype:
        return jnp.dtype(jnp.uint8)

    @property
    def value_dtype(self) -> np.dtype:
        return jnp.dtype(jnp.bfloat16)

    def operand_dtype(self, q_dtype: DTypeLike) -> np.dtype:
        del q_dtype
        return jnp.dtype(jnp.float32)

    def check_channels(self, first: int) -> None:
        if first % BLOCK:
            raise ValueError(f"row_format='blocks' with kv_lora_rank={first}: must be a multiple of {BLOCK}")

    def widths(self, first: int, second: int) -> tuple[int, int]:
        return first + first // BLOCK * 4, 2 * second

    def encode(self, first, second, scales=None):
        del scales
        blocks = first.astype(jnp.float32).reshape(*first.shape[:-1], -1, BLOCK)
        # NaN must not make the whole block NaN through its scale.
        largest = jnp.where(jnp.isnan(blocks), 0.0, jnp.abs(blocks)).max(axis=-1, keepdims=True, initial=0.0)
        scale = row_scale(largest, self.dtype)
        stored = _to_bytes(saturated(blocks / scale, self.dtype)).reshape(first.shape)
        scale = _to_bytes(scale[..., 0]).reshape(*first.shape[:-1], -1)
        rope = _to_bytes(second.astype(jnp.bfloat16)).reshape(*second.shape[:-1], -1)
        return jnp.concatenate([stored, scale], axis=-1), rope

    def operands(self, first, second, dtype):
        channels = first.shape[-1] * BLOCK // (BLOCK + 4)
        latent, scale = first[..., :channels], first[..., channels:]
        latent = _from_bytes(latent, self.dtype).astype(jnp.float32).reshape(*first.shape[:-1], -1, BLOCK)
        latent = latent * _from_bytes(scale, jnp.float32)[..., None]
        latent = latent.reshape(*first.shape[:-1], channels)
        return latent.astype(dtype), _from_bytes(second, jnp.bfloat16).astype(dtype)


_NATIVE = tuple(map(RowFormat, (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32))))
_PLAIN = {format.name: format for format in (*_NATIVE, *map(Float8Format, FLOAT8))}
_BLOCKS = BlockFormat(jnp.dtype(jnp.float8_e4m3fn))
FORMATS = {**_PLAIN, _BLOCKS.name: _BLOCKS}


def format_of(dtype: np.dtype, row_format: str = "plain") -> RowFormat:
    """The format that stores numbers of ``dtype``, "plain" or in "blocks".

    Raises:
        ValueError: no format does.
    """
    if row_format not in ("plain", "blocks"):
        raise ValueError(f"row_format={row_format!r} must be plain or blocks")
    if dtype.name not in _PLAIN:
        raise ValueError(f"dtype={dtype.name} must be one of {', '.join(_PLAIN)}")
    if row_format == "plain":
        return _PLAIN[dtype.name]
    if dtype != _BLOCKS.dtype:
        raise ValueError(f"row_format='blocks' with dtype={dtype.name}: must be {_BLOCKS.dtype.name}")
    return _BLOCKS


def format_of_array(array: Any) -> RowFormat | None:
    """The format whose stored elements are the numbers of ``array``; None if no format has that dtype."""
    return next((format for format in _NATIVE if format.dtype == getattr(array, "dtype", None)), None)


def check_stored(name: str, array: Any, row_format: RowFormat | None) -> None:
    """Raises a ValueError unless the array's dtype is the storage dtype of the format."""
    if row_format is None:
        native = ", ".join(format.name for format in _NATIVE)
        raise ValueError(f"{name}.dtype={array.dtype} must be one of {native}, or uint8 of a pool with a format")
    if array.dtype != row_format.storage_dtype:
        raise ValueError(f"{name}.dtype={array.dtype} must be {row_format.storage_dtype}: format {row_format.name}")


def operand_dtype(q_dtype: DTypeLike) -> np.dtype:
    """Dtype that products of float8 numbers with queries of ``q_dtype`` run in; it holds both exactly."""
    dtype = jnp.dtype(q_dtype)
    if dtype in FLOAT8:
        return jnp.dtype(jnp.bfloat16)
    return dtype if dtype.itemsize == 2 else jnp.dtype(jnp.float32)


def saturated(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Casts float32 numbers to a float8 dtype: clipped to its range, rounded to nearest; NaN stays NaN."""
    most = float(jnp.finfo(dtype).max)  # without the clip JAX's cast gives NaN or infinity
    return jnp.clip(x, -most, most).astype(dtype)


def row_scale(largest: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """The scale that brings float32 numbers of up to ``largest`` into the range of a float8 dtype; 1 where that is 0.

    XLA turns the division by a constant into a product, so the last bit may differ from a division's.
    """
    limits = jnp.finfo(jnp.float32)
    scale = jnp.minimum(largest, limits.max) / float(jnp.finfo(dtype).max)
    # XLA flushes numbers below the least normal one to 0.
    return jnp.where(largest == 0, 1.0, jnp.maximum(scale, limits.tiny))


def _aligned(scale: Float[Array, "..."], x: Array) -> Float[Array, "..."]:
    """Reshapes a scale, [] or [K], to broadcast against numbers [..., K, channels]."""
    return scale if scale.ndim == 0 else scale.reshape(*(1,) * (x.ndim - 2), -1, 1)


def _to_bytes(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """The bytes of numbers; a number of several bytes gets an axis for them."""
    return lax.bitcast_convert_type(x, jnp.uint8)


def _from_bytes(x: UInt8[Array, "... bytes"], dtype: DTypeLike) -> Float[Array, "... n"]:
    """The numbers whose bytes lie along the last axis."""
    size = jnp.dtype(dtype).itemsize
    grouped = x if size == 1 else x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return lax.bitcast_convert_type(grouped, dtype)
