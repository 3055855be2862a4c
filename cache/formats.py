"""Row formats: how the channels of a token are stored.

A row has two parts: latent and rope, or key and value. A format defines how they are stored: as elements of
``storage_dtype``, where each part takes as many elements as ``widths`` says, which need not be its number of channels.
``decode`` gives channels in ``dtype``, the type that ops compute with. ``supports`` refuses a format by its ``name``. A
format that packs several channels into an element, or stores scales, is another subclass here; pools and ops do not
change for it.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Stores one element per channel, in the dtype that ops compute with.

    Attributes:
        dtype: dtype of decoded channels.
    """

    dtype: np.dtype

    @property
    def name(self) -> str:
        """The format's name in errors, in ``supports`` and on command lines."""
        return self.dtype.name

    @property
    def storage_dtype(self) -> np.dtype:
        """Dtype of the pool's array."""
        return self.dtype

    def widths(self, first: int, second: int) -> tuple[int, int]:
        """Numbers of stored elements for two parts of ``first`` and ``second`` channels."""
        return first, second

    def row_bytes(self, first: int, second: int) -> int:
        """Stored bytes of both parts together."""
        return sum(self.widths(first, second)) * self.storage_dtype.itemsize

    def encode(
        self, first: Float[Array, "*rows A"], second: Float[Array, "*rows B"]
    ) -> tuple[Shaped[Array, "*rows a"], Shaped[Array, "*rows b"]]:
        """Encodes channels of any floating dtype, rounded to nearest; float16 makes values above 65504 infinite."""
        return first.astype(self.storage_dtype), second.astype(self.storage_dtype)

    def decode(
        self, first: Shaped[Array, "*rows a"], second: Shaped[Array, "*rows b"]
    ) -> tuple[Float[Array, "*rows A"], Float[Array, "*rows B"]]:
        """Decodes stored elements to channels in ``dtype``."""
        return first, second


FORMATS = {
    format.name: format
    for format in map(RowFormat, (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)))
}


def format_of(name: str, dtype: np.dtype) -> RowFormat:
    """The format that stores rows unchanged in ``dtype``.

    Raises:
        ValueError: no format stores that dtype; the message calls the argument ``name``.
    """
    if dtype.name not in FORMATS:
        raise ValueError(f"{name}={dtype.name} must be one of {', '.join(FORMATS)}")
    return FORMATS[dtype.name]
