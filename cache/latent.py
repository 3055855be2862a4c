"""Pools: what is stored. One array holds the rows of every layer; a layer is an offset added to page ids."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mla_attn.checks import check_integer
from mla_attn.specs import MLASpec

POOL_DTYPES = ("bfloat16", "float32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentPool:
    """Paged cache of MLA rows ``[latent R | rope E]`` for all layers of a model.

    ``data`` is one array ``[L * N, P, C]``: L layers, N pages each, P tokens a page, C = R + E channels. Page p of
    layer l lies at ``p * page_stride + l * layer_stride``; the defaults 1 and N put the layers one after the other,
    other values serve pools shared by several models. Only the ops of this library apply them.

    One array, because dispatching a jitted call costs host time per donated leaf, and because layers can then be
    scanned over without slicing (a slice given to a kernel would be copied).
    """

    data: Float[Array, "pages P C"]
    num_layers: int = dataclasses.field(metadata={"static": True})
    num_pages: int = dataclasses.field(metadata={"static": True})
    kv_lora_rank: int = dataclasses.field(metadata={"static": True})
    page_stride: int = dataclasses.field(default=1, metadata={"static": True})
    layer_stride: int = dataclasses.field(default=0, metadata={"static": True})

    @classmethod
    def create(
        cls, *, num_layers: int, num_pages: int, page_size: int, spec: MLASpec, dtype: DTypeLike = jnp.bfloat16
    ) -> "LatentPool":
        """An all-zero pool of ``num_layers * num_pages`` pages of ``page_size`` tokens.

        Raises:
            ValueError: a size below 1, a dtype other than bfloat16 or float32, or so many tokens a layer or pages in
                all that ids no longer fit int32.
        """
        for name, value in (("num_layers", num_layers), ("num_pages", num_pages), ("page_size", page_size)):
            check_integer(name, value, 1)
        if np.dtype(dtype).name not in POOL_DTYPES:
            raise ValueError(f"dtype={np.dtype(dtype).name} must be one of {', '.join(POOL_DTYPES)}")
        limit = np.iinfo(np.int32).max
        if num_layers * num_pages > limit or num_pages * page_size > limit:
            raise ValueError(
                f"num_layers={num_layers}, num_pages={num_pages}, page_size={page_size}: the pages of all layers and "
                f"the tokens of one layer must each be at most {limit}"
            )
        shape = (num_layers * num_pages, page_size, spec.latent_dim)
        return cls(jnp.zeros(shape, dtype), num_layers, num_pages, spec.kv_lora_rank, 1, num_pages)

    @property
    def page_size(self) -> int:
        """Tokens per page, P."""
        return self.data.shape[1]

    @property
    def latent_dim(self) -> int:
        """Channels of a row, C = R + E."""
        return self.data.shape[2]

    @property
    def dtype(self) -> np.dtype:
        """Type of the stored rows."""
        return np.dtype(self.data.dtype)

    def check_layer(self, layer: int | Int[Array, ""]) -> None:
        """Raise ValueError unless ``layer`` is one integer and, where its value is known, one of ``[0, L)``."""
        if isinstance(layer, jax.Array | np.ndarray):
            if layer.shape != () or not jnp.issubdtype(layer.dtype, jnp.integer):
                raise ValueError(f"layer is {layer.dtype}{list(layer.shape)}, must be one integer, []")
        elif not isinstance(layer, int | np.integer):
            raise ValueError(f"layer={layer} must be an integer")
        elif not 0 <= layer < self.num_layers:
            raise ValueError(f"layer={layer} must be 0 to {self.num_layers - 1}")

    def physical_pages(self, pages: Int[Array, "..."], layer: int | Int[Array, "..."]) -> Int[Array, "..."]:
        """Index into ``data``'s first axis of ``pages`` (ids within ``layer``; int32, in range stays in range)."""
        return pages * self.page_stride + jnp.asarray(layer, jnp.int32) * self.layer_stride
