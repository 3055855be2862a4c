"""The paged rows of multi-head latent attention: the pool, ``write_latent`` and ``read_latent``.

All functions are pure; a write is in place when the pool is donated.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from mla_attn.cache.formats import RowFormat, Scales, check_stored, format_of, format_of_array
from mla_attn.cache.placement import PagedPool, Placement, check_slots
from mla_attn.cache.scales import check_scale, make_scale, scale_of_layer
from mla_attn.checks import check_array, check_dtype, check_integer, check_out_dtype, check_shape, check_type
from mla_attn.specs import MLASpec

_DERIVED: Any = None  # default of fields that ``__post_init__`` derives from the others


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentPool(PagedPool):
    """Paged cache of MLA rows, R latent and E rope channels, for all layers of a model.

    ``data`` is one array ``[pages, P, row_width]``: L layers of N pages of P tokens. Page p of layer l is physical page
    ``p * page_stride + l * layer_stride``. The defaults 1 and N put the layers one after the other; other strides are
    for pools that several models share. Only the ops of this library compute physical pages. A row's latent part comes
    first, its rope part begins at ``rope_offset``; the elements beside them are neither read nor written.

    It is one array because dispatching a jitted call costs host time per donated leaf, and because a scan over layers
    then slices nothing (a slice passed to a kernel would be copied).

    Rows of float8 numbers are bytes: those of the latent and of the rope part are numbers divided by the layer's
    ``scale``, the same for both, because the latent part is key and value. In ``row_format="blocks"`` of float8_e4m3fn
    a row has R such bytes, R / 128 scales of float32 for 128 latents each, and E rope channels in bfloat16.

    Attributes:
        data: the rows, in the storage dtype of ``format``; of float8 numbers uint8.
        num_layers: layers L.
        num_pages: pages N of each layer.
        kv_lora_rank: latent channels R of a row.
        page_stride: physical pages from a page of a layer to the next.
        layer_stride: physical pages from a layer to the next; None for N.
        rope_dim: rope channels E of a row; None for the rest of the row after the latent part.
        rope_offset: element of a row where the rope part begins; None for directly after the latent part.
        format: row format; None if ``data`` stores the numbers unchanged.
        scale: float32 scale of a scaled format, [] or [L]; ignored by other formats.
    """

    PAGED: ClassVar = ("data",)

    data: Shaped[Array, "pages P row_width"]
    num_layers: int = dataclasses.field(metadata={"static": True})
    num_pages: int = dataclasses.field(metadata={"static": True})
    kv_lora_rank: int = dataclasses.field(metadata={"static": True})
    page_stride: int = dataclasses.field(default=1, metadata={"static": True})
    layer_stride: int = dataclasses.field(default=_DERIVED, metadata={"static": True})
    rope_dim: int = dataclasses.field(default=_DERIVED, metadata={"static": True})
    rope_offset: int = dataclasses.field(default=_DERIVED, metadata={"static": True})
    format: RowFormat = dataclasses.field(default=_DERIVED, metadata={"static": True})
    scale: Float[Array, "..."] | None = None

    def __post_init__(self):
        # JAX also unflattens pools whose leaves are not arrays; their static fields are set already.
        if self.format is None:
            object.__setattr__(self, "format", format_of_array(self.data))
        if self.layer_stride is None:
            object.__setattr__(self, "layer_stride", self.num_pages)
        if self.rope_offset is None:
            latent_width = self.format.widths(self.kv_lora_rank, 0)[0] if self.format else self.kv_lora_rank
            object.__setattr__(self, "rope_offset", latent_width)
        if self.rope_dim is None and np.ndim(self.data) == 3:
            width = self.format.widths(0, 1)[1] if self.format else 1
            object.__setattr__(self, "rope_dim", (self.data.shape[2] - self.rope_offset) // width)

    @classmethod
    def create(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        spec: MLASpec,
        dtype: DTypeLike = jnp.bfloat16,
        row_format: str = "plain",
        scale: float | Float[Array, "..."] | None = None,
    ) -> "LatentPool":
        """Creates an all-zero pool of ``num_layers * num_pages`` pages of ``page_size`` tokens.

        Args:
            num_layers: layers L.
            num_pages: pages N of each layer.
            page_size: tokens P of a page.
            spec: latent and rope channels of a row.
            dtype: dtype of the stored numbers: bfloat16, float16, float32, float8_e4m3fn or float8_e5m2.
            row_format: "plain", or "blocks" for float8_e4m3fn, whose scales are computed at every write.
            scale: positive divisor of numbers stored in plain float8, [] or [L]; None for 1. Other dtypes ignore it.

        Raises:
            ValueError: a size below 1, an unknown dtype, row format or scale, or so many tokens per layer or pages in
                total that ids do not fit int32.
        """
        format = format_of(check_dtype("dtype", dtype), row_format)
        placement = Placement(num_layers, num_pages, page_size, 1, num_pages)
        width = sum(format.widths(spec.kv_lora_rank, spec.qk_rope_head_dim))
        data = jnp.zeros((placement.num_physical_pages, placement.page_size, width), format.storage_dtype)
        sizes, scale = (placement.num_layers, placement.num_pages), _make_scale(scale, format, placement.num_layers)
        pool = cls(data, *sizes, spec.kv_lora_rank, rope_dim=spec.qk_rope_head_dim, format=format, scale=scale)
        pool.check()
        return pool

    @classmethod
    def of(
        cls,
        array: Shaped[Array, "N P row_width"],
        *,
        kv_lora_rank: int,
        rope_dim: int | None = None,
        rope_offset: int | None = None,
        dtype: DTypeLike | None = None,
        row_format: str = "plain",
        scale: float | Float[Array, "..."] | None = None,
    ) -> "LatentPool":
        """Wraps ``array``, another system's cache, as a pool of one layer, without a copy.

        Rows may be wider than R + E (512 + 64 padded to 640, for example). Writes leave the padding as it is, and reads
        ignore it, even if it is NaN. ``move_rows`` moves whole rows.

        Args:
            array: bfloat16, float16 or float32, or uint8 that holds the bytes of float8 numbers, [N, P, row_width];
                becomes the pool's ``data``.
            kv_lora_rank: latent channels R, the first of a row.
            rope_dim: rope channels E; None for the rest of the row from ``rope_offset`` on.
            rope_offset: element where they begin; None for directly after the latent part.
            dtype: dtype of the stored numbers; None for that of ``array``.
            row_format, scale: as in ``create``, with one layer.

        Raises:
            ValueError: a wrong rank, dtype, row format or scale, or rows too narrow for their parts.
        """
        check_array("array", array)
        if array.ndim != 3:
            raise ValueError(f"array has shape {array.shape}, must be [N, P, row_width]")
        check_integer("kv_lora_rank", kv_lora_rank, 1)
        if rope_offset is not None:
            rope_offset = check_integer("rope_offset", rope_offset, kv_lora_rank)
        if rope_dim is not None:
            rope_dim = check_integer("rope_dim", rope_dim, 0)
        format = format_of_array(array)
        if dtype is not None or row_format != "plain":
            format = format_of(check_dtype("dtype", array.dtype if dtype is None else dtype), row_format)
        scale = None if format is None else _make_scale(scale, format, 1)
        derived: Any = {"rope_dim": rope_dim, "rope_offset": rope_offset, "format": format}
        pool = cls(array, 1, array.shape[0], kv_lora_rank, **derived, scale=scale)
        pool.check()
        return pool

    @property
    def placement(self) -> Placement:
        return Placement(self.num_layers, self.num_pages, self.page_size, self.page_stride, self.layer_stride)

    @property
    def page_size(self) -> int:
        """Tokens per page, P."""
        return self.data.shape[1]

    @property
    def latent_dim(self) -> int:
        """Channels per token, C = R + E, in any format."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def row_width(self) -> int:
        """Elements from a row of ``data`` to the next."""
        return self.data.shape[2]

    @property
    def row_bytes(self) -> int:
        """Bytes per token that are written and read; padding of the rows of ``data`` does not count."""
        return self.format.row_bytes(self.kv_lora_rank, self.rope_dim)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the stored numbers."""
        return self.format.dtype

    def check(self) -> None:
        check_array("pool.data", self.data)
        if self.data.ndim != 3:
            raise ValueError(f"pool.data has shape {self.data.shape}, must be [pages, P, row_width]")
        check_stored("pool.data", self.data, self.format)
        if self.data.shape[0] < self.placement.num_physical_pages:
            raise ValueError(
                f"pool.data has shape {self.data.shape}, must have {self.placement.num_physical_pages} pages for "
                f"num_layers={self.num_layers}, num_pages={self.num_pages}, page_stride={self.page_stride}, "
                f"layer_stride={self.layer_stride}"
            )
        self.format.check_channels(check_integer("kv_lora_rank", self.kv_lora_rank, 1))
        check_integer("rope_dim", self.rope_dim, 0)
        latent_width, rope_width = self.format.widths(self.kv_lora_rank, self.rope_dim)
        check_integer("rope_offset", self.rope_offset, latent_width)
        if self.rope_offset + rope_width > self.row_width:
            raise ValueError(
                f"pool.data has shape {self.data.shape}, must have rows of {self.rope_offset + rope_width} elements "
                f"for rope_dim={self.rope_dim} at rope_offset={self.rope_offset}"
            )
        if self.format.scaled:
            check_scale("pool.scale", self.scale, _scale_shapes(self.num_layers))

    def check_spec(self, spec: MLASpec) -> None:
        """Raises ValueError unless the parts of a row have the channels of ``spec``."""
        if (self.kv_lora_rank, self.latent_dim) != (spec.kv_lora_rank, spec.latent_dim):
            raise ValueError(
                f"pool stores {self.kv_lora_rank} latent + {self.rope_dim} rope channels per token, "
                f"but spec has {spec.kv_lora_rank} + {spec.qk_rope_head_dim}"
            )

    def scale_of(self, layer: int | Int[Array, ""]) -> Float[Array, ""] | None:
        """Returns the scale of a layer, float32 []; None where the format has no scales."""
        if not self.format.scaled or self.scale is None:
            return None
        return scale_of_layer(self.scale, layer)

    def _scales(self, layer: int | Int[Array, ""]) -> Scales:
        scale = self.scale_of(layer)
        return None if scale is None else (scale, scale)

    def encode(
        self, latent: Float[Array, "T R"], rope: Float[Array, "T E"], layer: int | Int[Array, ""]
    ) -> dict[int, Shaped[Array, "T width"]]:
        """Encodes the rows of a write: the elements of each part, keyed by its first element in a row."""
        latent_part, rope_part = self.format.encode(latent, rope, self._scales(layer))
        if self.rope_offset == latent_part.shape[-1]:
            return {0: jnp.concatenate([latent_part, rope_part], axis=-1)}
        return {0: latent_part, self.rope_offset: rope_part}

    def operands(self, rows: Shaped[Array, "*rows row_width"], dtype: DTypeLike) -> Float[Array, "*rows C"]:
        """Decodes rows of ``data`` to channels ``[latent R | rope E]``, as operands of products."""
        return jnp.concatenate(self.format.operands(*self._parts(rows), dtype), axis=-1)

    def decode(
        self, rows: Shaped[Array, "*rows row_width"], layer: int | Int[Array, ""], dtype: DTypeLike | None = None
    ) -> tuple[Float[Array, "*rows R"], Float[Array, "*rows E"]]:
        """Decodes rows of ``data``, of a layer, to the values of both parts."""
        return self.format.decode(*self._parts(rows), self._scales(layer), dtype)

    def _parts(self, rows):
        latent_width, rope_width = self.format.widths(self.kv_lora_rank, self.rope_dim)
        return rows[..., :latent_width], rows[..., self.rope_offset : self.rope_offset + rope_width]


def _make_scale(scale, format: RowFormat, num_layers: int):
    """The scale of a new pool, or None if its format has no scale."""
    if format.scaled:
        return make_scale("scale", scale, _scale_shapes(num_layers))
    if format.latent_only and scale is not None:
        raise ValueError("scale= with row_format='blocks': must be None, every block has its own")
    return None


def _scale_shapes(num_layers: int) -> dict[str, tuple[int, ...]]:
    return {"[]": (), "[L]": (num_layers,)}


def write_latent(
    pool: LatentPool,
    latent: Float[Array, "T R"],
    rope: Float[Array, "T E"],
    slots: Int[Array, "T"],
    *,
    layer: int | Int[Array, ""] = 0,
) -> LatentPool:
    """Stores the rows of this call at ``slots`` of ``layer``.

    Float8 formats compute in float32: the number divided by its scale is clipped to the finite numbers of the dtype
    (448 and 57344) and rounded. NaN stays NaN.

    Args:
        pool: the cache; donate it at the outermost jit to write in place.
        latent: compressed rows after their norm; converted to the pool's format, where float16 makes values above
            65504 infinite.
        rope: rope keys after rotation, shared by all heads.
        slots: ``page * P + offset`` within the layer, of any integer dtype; a slot outside ``[0, N * P)`` writes
            nothing. The slots inside must be distinct.
        layer: index of the layer, a static integer or an array (as inside ``lax.scan``).

    Raises:
        ValueError: widths other than the pool's, unequal numbers of rows, wrong dtypes, or a layer that does not
            exist. (A traced layer outside ``[0, L)`` writes nothing.)
    """
    pool.check()
    slots = check_slots(slots)
    for name, array, width in (("latent", latent, pool.kv_lora_rank), ("rope", rope, pool.rope_dim)):
        check_shape(name, array, (slots.shape[0], width), "rows of slots, width of the pool")
        check_type(name, array, jnp.floating)
    layer, data = pool.placement.check_layer(layer), pool.data
    for first, rows in pool.encode(latent, rope, layer).items():
        data = pool.placement.scatter(data, rows, slots, layer, first=first)
    return dataclasses.replace(pool, data=data)


def read_latent(
    pool: LatentPool,
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    num_tokens: int,
    *,
    layer: int | Int[Array, ""] = 0,
    dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "B n R"], Float[Array, "B n E"]]:
    """Reads the values of key indices ``starts[b]`` to ``starts[b] + num_tokens`` of each request.

    A key index counts the rows of a request in its page table. Key indices past the table's end read its last page
    again; rows past a request's length are undefined. The caller masks both by length.

    Args:
        pool: the cache.
        page_table: page ids of each request, of any integer dtype.
        starts: first key index of each request, of any integer dtype.
        num_tokens: rows to read of each request, static.
        layer: as in ``write_latent``; with a traced layer outside ``[0, L)`` the result is undefined.
        dtype: dtype of the result; None for the pool's, or for bfloat16 where that is float8.

    Raises:
        ValueError: a wrong shape, dtype, count or layer.
    """
    pool.check()
    check_out_dtype(dtype, "dtype")
    rows = pool.data[pool.placement.locate_reads(page_table, starts, num_tokens, layer)]
    return pool.decode(rows, layer, dtype)
