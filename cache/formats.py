"""Row formats: how the channels of a token are stored.

A row has two parts: latent and rope, or keys and values. Three things are kept apart. What is *stored*: elements of
``storage_dtype``, of which the parts take ``widths`` each, whatever the number of channels. What is *computed with*:
``decode`` gives channels in ``dtype``. What an implementation is *asked about*: the format itself, by ``name``. A
format that packs more than one element a channel, or fewer, or scales beside them, is another subclass here; pools, ops
and implementations need not know of it.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """One element a channel, in the dtype that is computed with.

    Attributes:
        dtype: of decoded channels.
    """

    dtype: np.dtype

    @property
    def name(self) -> str:
        """What errors, ``supports`` and command lines call it."""
        return self.dtype.name

    @property
    def storage_dtype(self) -> np.dtype:
        """Dtype of the pool's array."""
        return self.dtype

    def widths(self, first: int, second: int) -> tuple[int, int]:
        """Stored elements of parts of so many channels."""
        return first, second

    def row_bytes(self, first: int, second: int) -> int:
        """Bytes of both parts."""
        return sum(self.widths(first, second)) * self.storage_dtype.itemsize

    def encode(
        self, first: Float[Array, "*rows A"], second: Float[Array, "*rows B"]
    ) -> tuple[Shaped[Array, "*rows a"], Shaped[Array, "*rows b"]]:
        """Channels of any floating dtype as they are stored, rounded to nearest; in float16 above 65504 infinite."""
        return first.astype(self.storage_dtype), second.astype(self.storage_dtype)

    def decode(
        self, first: Shaped[Array, "*rows a"], second: Shaped[Array, "*rows b"]
    ) -> tuple[Float[Array, "*rows A"], Float[Array, "*rows B"]]:
        """Channels in ``dtype`` of what is stored."""
        return first, second


FORMATS = {
    format.name: format
    for format in map(RowFormat, (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)))
}


def format_of(name: str, dtype: np.dtype) -> RowFormat:
    """The format that stores rows as they are, in ``dtype``.

    Raises:
        ValueError: none does; ``name`` is what the message calls it.
    """
    if dtype.name not in FORMATS:
        raise ValueError(f"{name}={dtype.name} must be one of {', '.join(FORMATS)}")
    return FORMATS[dtype.name]
