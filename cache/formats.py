"""Row formats: how the channels of a token are stored.

Three things are kept apart. What is *stored*: elements of ``storage_dtype``, of which a row's latent part and rope part
take ``widths`` each, whatever the number of channels. What is *computed with*: ``decode`` gives channels in ``dtype``.
What an implementation is *asked about*: the format itself, by ``name``. A format that packs more than one element a
channel, or fewer, or scales beside them, is another subclass here; pools, ops and implementations need not know of it.
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

    def widths(self, kv_lora_rank: int, rope_dim: int) -> tuple[int, int]:
        """Stored elements of a row's latent part and of its rope part."""
        return kv_lora_rank, rope_dim

    def row_bytes(self, kv_lora_rank: int, rope_dim: int) -> int:
        """Bytes of both parts."""
        return sum(self.widths(kv_lora_rank, rope_dim)) * self.storage_dtype.itemsize

    def encode(
        self, latent: Float[Array, "*rows R"], rope: Float[Array, "*rows E"]
    ) -> tuple[Shaped[Array, "*rows latent_width"], Shaped[Array, "*rows rope_width"]]:
        """Channels of any floating dtype as they are stored, rounded to nearest."""
        return latent.astype(self.storage_dtype), rope.astype(self.storage_dtype)

    def decode(
        self, latent: Shaped[Array, "*rows latent_width"], rope: Shaped[Array, "*rows rope_width"]
    ) -> tuple[Float[Array, "*rows R"], Float[Array, "*rows E"]]:
        """Channels in ``dtype`` of what is stored."""
        return latent, rope


FORMATS = {format.name: format for format in map(RowFormat, (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)))}


def format_of(name: str, dtype: np.dtype) -> RowFormat:
    """The format that stores rows as they are, in ``dtype``.

    Raises:
        ValueError: none does; ``name`` is what the message calls it.
    """
    if dtype.name not in FORMATS:
        raise ValueError(f"{name}={dtype.name} must be one of {', '.join(FORMATS)}")
    return FORMATS[dtype.name]
