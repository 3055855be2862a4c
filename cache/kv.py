"""The paged keys and values of grouped-query attention: a pool in four layouts, ``write_kv`` and ``read_kv``.

All functions are pure; a write is in place when the pool is donated.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from mla_attn.cache.formats import RowFormat, check_stored, format_of, format_of_array
from mla_attn.cache.placement import Axes, PagedPool, Placement, check_slots, read_rows
from mla_attn.cache.scales import check_scale, make_scale, scale_of_layer
from mla_attn.checks import check_array, check_dtype, check_integer, check_out_dtype, check_shape, check_type
from mla_attn.specs import GQASpec

# For each array of a layout its axes, and what errors call them.
LAYOUTS = {
    "nhd": ((Axes.TOKENS, "[pages, P, K, D]"), (Axes.TOKENS, "[pages, P, K, V]")),
    "hnd": ((Axes.HEADS_TOKENS, "[pages, K, P, D]"), (Axes.HEADS_TOKENS, "[pages, K, P, V]")),
    "interleaved": ((Axes.TOKENS, "[pages, P, K, 2, D]"),),
    "shuffled": ((Axes.CHANNEL_GROUPS, "[pages, K, D / X, P, X]"), (Axes.TOKEN_GROUPS, "[pages, K, P / X, V, X]")),
}
GROUP_BYTES = 16  # of the last axis of the shuffled layout

_DERIVED: Any = None  # default of fields that ``__post_init__`` derives from the others


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPool(PagedPool):
    """Paged cache of keys and values for all layers of a model, in one of four layouts.

    ===============  =====================================================  ===========================
    ``layout``       ``k``                                                  ``v``
    ===============  =====================================================  ===========================
    ``nhd``          ``[pages, P, K, D]``                                   ``[pages, P, K, V]``
    ``hnd``          ``[pages, K, P, D]``                                   ``[pages, K, P, V]``
    ``interleaved``  ``[pages, P, K, 2, D]``, each head's key, then value   None
    ``shuffled``     ``[pages, K, D / X, P, X]``                            ``[pages, K, P / X, V, X]``
    ===============  =====================================================  ===========================

    The shuffled layout, which engines for AMD GPUs keep, has groups of X = 16 / itemsize elements: 8 in bfloat16, 16 in
    float8. Channel d of token t of a page is ``k[page, h, d // X, t, d % X]`` and ``v[page, h, t // X, d, t % X]``; P
    and D are multiples of X.

    Layers, pages and strides are as in ``LatentPool``: page p of layer l is physical page ``p * page_stride + l *
    layer_stride``, which only the ops of this library compute. Rows may be wider than D and V (128 for heads of 64, as
    in JAX serving engines): the elements beside them are neither read nor written.

    Arrays of float8 numbers are bytes: numbers divided by the scales of their layer, or of their layer and KV head.

    Attributes:
        k: keys; in the ``interleaved`` layout keys and values.
        v: values, or None.
        num_layers: layers L.
        num_pages: pages N of each layer.
        layout: ``nhd``, ``hnd``, ``interleaved`` or ``shuffled``.
        head_dim: channels D of a key; None for the width of its row.
        v_head_dim: channels V of a value; None for the width of its row, or for D in the ``interleaved`` layout.
        page_stride: physical pages from a page of a layer to the next.
        layer_stride: physical pages from a layer to the next; N if None.
        format: row format; None if ``k`` stores the numbers unchanged.
        k_scale, v_scale: float32 scales of a scaled format, [], [L] or [L, K]; ignored by other formats.
    """

    PAGED: ClassVar = ("k", "v")

    k: Shaped[Array, "pages ..."]
    v: Shaped[Array, "pages ..."] | None
    num_layers: int = dataclasses.field(metadata={"static": True})
    num_pages: int = dataclasses.field(metadata={"static": True})
    layout: str = dataclasses.field(default="nhd", metadata={"static": True})
    head_dim: int = dataclasses.field(default=_DERIVED, metadata={"static": True})
    v_head_dim: int = dataclasses.field(default=_DERIVED, metadata={"static": True})
    page_stride: int = dataclasses.field(default=1, metadata={"static": True})
    layer_stride: int = dataclasses.field(default=_DERIVED, metadata={"static": True})
    format: RowFormat = dataclasses.field(default=_DERIVED, metadata={"static": True})
    k_scale: Float[Array, "..."] | None = None
    v_scale: Float[Array, "..."] | None = None

    def __post_init__(self):
        # JAX also unflattens pools whose leaves are not arrays; their static fields are set already.
        if self.format is None:
            object.__setattr__(self, "format", format_of_array(self.k))
        if self.layer_stride is None:
            object.__setattr__(self, "layer_stride", self.num_pages)
        if self.head_dim is None and np.ndim(self.k):
            object.__setattr__(self, "head_dim", self.row_widths[0])
        if self.v_head_dim is None and (self.v is None or np.ndim(self.v)):
            object.__setattr__(self, "v_head_dim", self.head_dim if self.v is None else self.row_widths[1])

    @classmethod
    def create(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        spec: GQASpec,
        dtype: DTypeLike = jnp.bfloat16,
        layout: str = "nhd",
        k_scale: float | Float[Array, "..."] | None = None,
        v_scale: float | Float[Array, "..."] | None = None,
    ) -> "KVPool":
        """Creates an all-zero pool of ``num_layers * num_pages`` pages of ``page_size`` tokens.

        Args:
            num_layers: layers L.
            num_pages: pages N of each layer.
            page_size: tokens P of a page.
            spec: KV heads, and channels of keys and values.
            dtype: dtype of the stored numbers: bfloat16, float16, float32, float8_e4m3fn or float8_e5m2.
            layout: ``nhd``, ``hnd``, ``interleaved`` or ``shuffled``.
            k_scale, v_scale: positive divisors of keys and values stored in float8; [], [L] or [L, K], None for 1.
                Other dtypes ignore them.

        Raises:
            ValueError: a size below 1, an unknown layout, dtype or scale, sizes that the shuffled layout cannot store,
                or so many tokens per layer or pages in total that ids do not fit int32.
        """
        format = format_of(check_dtype("dtype", dtype))
        placement = Placement(num_layers, num_pages, page_size, 1, num_pages)
        heads, (dim, v_dim) = spec.num_kv_heads, format.widths(spec.head_dim, spec.v_head_dim)
        pages, tokens = placement.num_physical_pages, placement.page_size
        if _check_layout(layout) == "interleaved":
            shapes = ((pages, tokens, heads, 2, max(dim, v_dim)),)
        elif layout == "hnd":
            shapes = (pages, heads, tokens, dim), (pages, heads, tokens, v_dim)
        elif layout == "shuffled":
            group = GROUP_BYTES // format.storage_dtype.itemsize
            _check_groups(group, tokens, dim)
            shapes = (pages, heads, dim // group, tokens, group), (pages, heads, tokens // group, v_dim, group)
        else:
            shapes = (pages, tokens, heads, dim), (pages, tokens, heads, v_dim)
        k, *v = (jnp.zeros(shape, format.storage_dtype) for shape in shapes)
        sizes = (placement.num_layers, placement.num_pages, layout, spec.head_dim, spec.v_head_dim)
        scales = _make_scales(format, placement.num_layers, heads, k_scale=k_scale, v_scale=v_scale)
        return cls(k, v[0] if v else None, *sizes, format=format, **scales)

    @classmethod
    def of(
        cls,
        array: Shaped[Array, "N ..."],
        values: Shaped[Array, "N ..."] | None = None,
        *,
        layout: str = "interleaved",
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        dtype: DTypeLike | None = None,
        k_scale: float | Float[Array, "..."] | None = None,
        v_scale: float | Float[Array, "..."] | None = None,
    ) -> "KVPool":
        """Wraps another system's cache arrays as a pool of one layer, without a copy.

        sglang-jax, ejkernel and tpu-inference store ``[N, P, 2K / pack, pack, width]``. Reshape that to ``[N, P, K, 2,
        width]`` for ``array``; inside ``jax.jit`` the reshape does not copy.

        Args:
            array: bfloat16, float16 or float32, or uint8 that holds the bytes of float8 numbers; keys and values, or
                only the keys.
            values: the values, for all layouts but ``interleaved``.
            layout: layout of the arrays.
            head_dim: channels D of a key, the first of its row; None for the whole row.
            v_head_dim: channels V of a value; None for its whole row, or for ``head_dim`` where there is one array.
            dtype: dtype of the stored numbers; None for that of ``array``.
            k_scale, v_scale: as in ``create``, with one layer.

        Raises:
            ValueError: an unknown layout, a wrong rank, dtype or scale, or rows too narrow for their channels.
        """
        check_array("array", array)
        if np.ndim(array) == 0:
            raise ValueError(f"array has shape {array.shape}, must have pages, tokens, heads and channels")
        format = format_of_array(array) if dtype is None else format_of(check_dtype("dtype", dtype))
        derived: Any = {"head_dim": head_dim, "v_head_dim": v_head_dim, "format": format}
        pool = cls(array, values, 1, array.shape[0], _check_layout(layout), **derived)
        pool.check_arrays()
        scales = _make_scales(pool.format, 1, pool.num_kv_heads, k_scale=k_scale, v_scale=v_scale)
        return dataclasses.replace(pool, **scales)

    @property
    def placement(self) -> Placement:
        return Placement(self.num_layers, self.num_pages, self.page_size, self.page_stride, self.layer_stride)

    @property
    def axes(self) -> tuple[Axes, ...]:
        k, *v = (axes for axes, _ in LAYOUTS.get(self.layout, LAYOUTS["nhd"]))  # ``check`` refuses unknown ones
        return k, *(v or [k])

    @property
    def page_size(self) -> int:
        """Tokens per page, P."""
        return self.axes[0].page_size(self.k.shape)

    @property
    def num_kv_heads(self) -> int:
        """KV heads K."""
        return self.k.shape[self.axes[0].of_heads]

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Elements per row and head of each array."""
        arrays = (array for array in (self.k, self.v) if array is not None)  # which may be abstract
        return tuple(axes.row_width(array.shape) for axes, array in zip(self.axes, arrays, strict=False))

    @property
    def row_bytes(self) -> int:
        """Bytes per token that are written and read; padding of the arrays' rows does not count."""
        return self.format.row_bytes(self.num_kv_heads * self.head_dim, self.num_kv_heads * self.v_head_dim)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the stored numbers."""
        return self.format.dtype

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The pool's one or two arrays."""
        return (self.k,) if self.v is None else (self.k, self.v)

    def check(self) -> None:
        self.check_arrays()
        if self.format.scaled:
            shapes = _scale_shapes(self.num_layers, self.num_kv_heads)
            check_scale("pool.k_scale", self.k_scale, shapes)
            check_scale("pool.v_scale", self.v_scale, shapes)

    def check_arrays(self) -> None:
        """Does the checks of ``check`` that concern the arrays of pages."""
        layout = LAYOUTS[_check_layout(self.layout)]
        if (self.v is None) != (self.layout == "interleaved"):
            raise ValueError(f"layout={self.layout!r} with {len(self.arrays)} array(s): only 'interleaved' has one")
        for name, array, (axes, words) in zip(("pool.k", "pool.v"), self.arrays, layout, strict=False):
            check_array(name, array)
            if array.ndim != words.count(",") + 1 or (self.v is None and array.shape[3] != 2):
                raise ValueError(f"{name} has shape {array.shape}, must be {words}")
            if self.layout == "shuffled":
                self._check_shuffled(name, array, words)
            sizes = (array.shape[0], axes.page_size(array.shape), array.shape[axes.of_heads], array.dtype)
            if sizes != (self.k.shape[0], self.page_size, self.num_kv_heads, self.k.dtype):
                raise ValueError(
                    f"{name} is {array.dtype}{list(array.shape)}, must be as pool.k, {self.k.dtype}{list(self.k.shape)}"
                )
        if self.k.shape[0] < self.placement.num_physical_pages:
            raise ValueError(
                f"pool.k has shape {self.k.shape}, must have {self.placement.num_physical_pages} pages for "
                f"num_layers={self.num_layers}, num_pages={self.num_pages}, page_stride={self.page_stride}, "
                f"layer_stride={self.layer_stride}"
            )
        check_stored("pool.k", self.k, self.format)
        if self.format.latent_only:
            raise ValueError(f"pool.format={self.format.name} is of latent rows: must be plain")
        check_integer("num_kv_heads", self.num_kv_heads, 1)
        widths = self.format.widths(
            check_integer("head_dim", self.head_dim, 1), check_integer("v_head_dim", self.v_head_dim, 1)
        )
        stored = self.row_widths[0], self.row_widths[-1]
        for name, width, most in zip(("head_dim", "v_head_dim"), widths, stored, strict=True):
            if width > most:
                raise ValueError(f"{name}={getattr(self, name)} must be at most {most}, the pool's row")

    def _check_shuffled(self, name, array, words):
        group = GROUP_BYTES // array.dtype.itemsize
        if array.shape[-1] != group:
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, must be {words} with X = {group}")
        _check_groups(group, self.page_size, check_integer("head_dim", self.head_dim, 1))

    def check_spec(self, spec: GQASpec) -> None:
        """Raises ValueError unless heads and channels are those of ``spec``."""
        held = {name: getattr(self, name) for name in ("num_kv_heads", "head_dim", "v_head_dim")}
        if held != (wanted := {name: getattr(spec, name) for name in held}):
            raise ValueError(f"pool has {_shown(held)}, but spec has {_shown(wanted)}")

    def scales_of(self, layer: int | Int[Array, ""]) -> tuple[Float[Array, "..."], Float[Array, "..."]] | None:
        """Returns the scales of a layer's keys and values, float32 [] or [K]; None where the format has no scales."""
        if not self.format.scaled or self.k_scale is None or self.v_scale is None:
            return None
        return scale_of_layer(self.k_scale, layer), scale_of_layer(self.v_scale, layer)

    def encode(
        self, k: Float[Array, "T K D"], v: Float[Array, "T K V"], layer: int | Int[Array, ""]
    ) -> list[tuple[str, int, Shaped[Array, "..."]]]:
        """Encodes the rows of a write: for each part its field, its first element in a head's row, its elements.

        Elements are [T, K, width]. In the ``interleaved`` layout a head's key and value are one row, and the value
        begins in the middle of it.
        """
        k, v = self.format.encode(k, v, self.scales_of(layer))
        if self.v is not None:
            return [("k", 0, k), ("v", 0, v)]
        width = self.k.shape[-1]
        if k.shape[-1] == v.shape[-1] == width:
            return [("k", 0, jnp.concatenate([k, v], axis=-1))]
        return [("k", 0, k), ("k", width, v)]

    def operands(
        self, *rows: Shaped[Array, "..."], dtype: DTypeLike
    ) -> tuple[Float[Array, "*rows K D"], Float[Array, "*rows K V"]]:
        """Decodes rows of the arrays, [*rows, K, width] or interleaved [*rows, K, 2, width], to operands."""
        return self.format.operands(*self._parts(rows), dtype)

    def decode(
        self, *rows: Shaped[Array, "..."], layer: int | Int[Array, ""], dtype: DTypeLike | None = None
    ) -> tuple[Float[Array, "*rows K D"], Float[Array, "*rows K V"]]:
        """Decodes rows of a layer, as in ``operands``, to the values of keys and values."""
        return self.format.decode(*self._parts(rows), self.scales_of(layer), dtype)

    def _parts(self, rows):
        k, v = (rows[0][..., 0, :], rows[0][..., 1, :]) if self.v is None else rows
        k_width, v_width = self.format.widths(self.head_dim, self.v_head_dim)
        return k[..., :k_width], v[..., :v_width]


def write_kv(
    pool: KVPool,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K V"],
    slots: Int[Array, "T"],
    *,
    layer: int | Int[Array, ""] = 0,
) -> KVPool:
    """Stores the keys and values of this call at ``slots`` of ``layer``; float8 formats round as in ``write_latent``.

    Args:
        pool: the cache; donate it at the outermost jit to write in place.
        k: keys after rotation, converted to the pool's format, where float16 makes values above 65504 infinite.
        v: values.
        slots: ``page * P + offset`` within the layer, of any integer dtype; a slot outside ``[0, N * P)`` writes
            nothing. The slots inside must be distinct.
        layer: index of the layer, a static integer or an array (as inside ``lax.scan``).

    Raises:
        ValueError: heads or widths other than the pool's, unequal numbers of rows, wrong dtypes, or a layer that does
            not exist. (A traced layer outside ``[0, L)`` writes nothing.)
    """
    pool.check()
    slots = check_slots(slots)
    for name, array, width in (("k", k, pool.head_dim), ("v", v, pool.v_head_dim)):
        check_shape(
            name, array, (slots.shape[0], pool.num_kv_heads, width), "rows of slots, heads and width of the pool"
        )
        check_type(name, array, jnp.floating)
    layer = pool.placement.check_layer(layer)
    for field, first, rows in pool.encode(k, v, layer):
        array = getattr(pool, field)
        joined = array.reshape(*array.shape[:3], -1) if pool.v is None else array  # one row per head: key, then value
        axes = pool.axes[pool.PAGED.index(field)]
        if axes is Axes.TOKENS and rows.shape[2] < joined.shape[3]:
            axes = Axes.TOKENS_HEADS
        joined = pool.placement.scatter(joined, rows, slots, layer, first=first, axes=axes)
        pool = dataclasses.replace(pool, **{field: joined.reshape(array.shape)})
    return pool


def read_kv(
    pool: KVPool,
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    num_tokens: int,
    *,
    layer: int | Int[Array, ""] = 0,
    dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "B n K D"], Float[Array, "B n K V"]]:
    """Reads the values of key indices ``starts[b]`` to ``starts[b] + num_tokens`` of each request.

    Key indices past the table's end read its last page again; rows past a request's length are undefined. The caller
    masks both by length. Arguments and errors are those of ``read_latent``.
    """
    pool.check()
    check_out_dtype(dtype, "dtype")
    pages, offsets = pool.placement.locate_reads(page_table, starts, num_tokens, layer)
    rows = (read_rows(array, pages, offsets, axes) for array, axes in zip(pool.arrays, pool.axes, strict=False))
    return pool.decode(*rows, layer=layer, dtype=dtype)


def _check_layout(layout: str) -> str:
    if layout not in tuple(LAYOUTS):
        raise ValueError(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}")
    return layout


def _check_groups(group: int, page_size: int, head_dim: int) -> None:
    if page_size % group or head_dim % group:
        raise ValueError(
            f"layout='shuffled' with page_size={page_size}, head_dim={head_dim}: must be multiples of {group}, the "
            f"elements of {GROUP_BYTES} bytes"
        )


def _make_scales(format: RowFormat, num_layers: int, heads: int, **scales) -> dict[str, Any]:
    """The scales of a new pool, or None for each if its format has no scales."""
    if not format.scaled:
        return dict.fromkeys(scales)
    return {name: make_scale(name, value, _scale_shapes(num_layers, heads)) for name, value in scales.items()}


def _scale_shapes(num_layers: int, heads: int) -> dict[str, tuple[int, ...]]:
    return {"[]": (), "[L]": (num_layers,), "[L, K]": (num_layers, heads)}


def _shown(fields: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items())
