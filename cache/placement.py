"""The memory layout of a paged pool, for rows of any kind. Every rule about indices is in this module."""

import abc
import dataclasses
import enum
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from mla_attn.checks import INT32_MAX, as_int32, check_index, check_integer


class Axes(enum.Enum):
    """The axes of an array of pages, each of P tokens. X is the size of the last axis of arrays that have groups.

    TOKENS indexes whole rows, of one head or all. The others have a row per head; all write to an array in place.
    """

    TOKENS = "pages, P, ..."
    TOKENS_HEADS = "pages, P, heads, row"
    HEADS_TOKENS = "pages, heads, P, row"
    CHANNEL_GROUPS = "pages, heads, row / X, P, X"
    TOKEN_GROUPS = "pages, heads, P / X, row, X"

    @property
    def of_tokens(self) -> int:
        """The axis of tokens, or of their groups."""
        return {Axes.TOKENS: 1, Axes.TOKENS_HEADS: 1, Axes.CHANNEL_GROUPS: 3}.get(self, 2)

    @property
    def of_heads(self) -> int:
        """The axis of heads; of TOKENS the one after P."""
        return 2 if self.of_tokens == 1 else 1

    def page_size(self, shape: tuple[int, ...]) -> int:
        """Tokens P per page of an array of this shape."""
        return shape[self.of_tokens] * (shape[-1] if self is Axes.TOKEN_GROUPS else 1)

    def row_width(self, shape: tuple[int, ...]) -> int:
        """Elements per row of an array of this shape; of TOKENS those of the last axis."""
        if self is Axes.CHANNEL_GROUPS:
            return math.prod((*shape[2:3], *shape[4:5]))  # of a shape of another rank too, which is refused later
        return math.prod(shape[3:4]) if self is Axes.TOKEN_GROUPS else shape[-1]

    def tokens_first(self, pages: Shaped[Array, "lanes ..."]) -> Shaped[Array, "lanes tokens ..."]:
        """Rows [lanes, tokens, ...] of pages, which have this order and any number of tokens."""
        if self is Axes.HEADS_TOKENS:
            return pages.swapaxes(1, 2)
        if self is Axes.CHANNEL_GROUPS:
            pages = pages.transpose(0, 3, 1, 2, 4)
            return pages.reshape(*pages.shape[:3], -1)
        if self is Axes.TOKEN_GROUPS:
            pages = pages.transpose(0, 2, 4, 1, 3)
            return pages.reshape(pages.shape[0], -1, *pages.shape[3:])
        return pages


@dataclasses.dataclass(frozen=True)
class Placement:
    """Layers, pages and strides of arrays of pages in any order of ``Axes``, with one row per token.

    A *slot* is ``page * P + offset`` within a layer, in ``[0, N * P)``. Page p of layer l is the *physical page*
    ``p * page_stride + l * layer_stride``, an index of the first axis.

    Attributes:
        num_layers: layers L.
        num_pages: pages N of each layer.
        page_size: tokens P per page.
        page_stride: physical pages from a page of a layer to the next.
        layer_stride: physical pages from a layer to the next.
    """

    num_layers: int
    num_pages: int
    page_size: int
    page_stride: int
    layer_stride: int

    def __post_init__(self):
        for name, least in (
            ("num_layers", 1), ("num_pages", 1), ("page_size", 1), ("page_stride", 0), ("layer_stride", 0),
        ):  # fmt: skip
            object.__setattr__(self, name, check_integer(name, getattr(self, name), least))
        if max(self.num_physical_pages, self.num_slots) > INT32_MAX:
            raise ValueError(
                f"num_layers={self.num_layers}, num_pages={self.num_pages}, page_size={self.page_size}: the pages of "
                f"all layers and the tokens of one layer must each be at most {INT32_MAX}"
            )
        if self._overlaps():
            raise ValueError(
                f"page_stride={self.page_stride}, layer_stride={self.layer_stride}: {self.num_layers} layers of "
                f"{self.num_pages} pages must not share pages"
            )

    @property
    def num_slots(self) -> int:
        """Slots per layer, N * P."""
        return self.num_pages * self.page_size

    @property
    def num_physical_pages(self) -> int:
        """Least size of the first axis of an array."""
        return (self.num_pages - 1) * self.page_stride + (self.num_layers - 1) * self.layer_stride + 1

    def _overlaps(self) -> bool:
        """Whether two pages have one physical page. Pages that coincide are a multiple of ``layer_stride / gcd`` pages
        and of ``page_stride / gcd`` layers apart."""
        gcd = math.gcd(self.page_stride, self.layer_stride) or 1
        pages, layers = self.layer_stride // gcd, self.page_stride // gcd
        return pages < self.num_pages and layers < self.num_layers and self.num_pages * self.num_layers > 1

    def check_layer(self, layer: int | Int[Array, ""]) -> int | Int[Array, ""]:
        """``layer`` as an int or int32; ValueError unless it is one integer and, if static, in ``[0, L)``."""
        return check_index("layer", layer, 0, self.num_layers - 1)

    def physical_pages(self, pages: Int[Array, "..."], layer: int | Int[Array, "..."]) -> Int[Array, "..."]:
        """Physical pages of ``pages``, int32 ids within ``layer``; ids in range give physical pages in range."""
        return pages * self.page_stride + jnp.asarray(layer, jnp.int32) * self.layer_stride

    def locate_table_slots(
        self, page_table: Int[Array, "B W"], slots: Int[Array, "B n"], layer: int | Int[Array, ""]
    ) -> tuple[Int[Array, "B n"], Int[Array, "B n"]]:
        """Where to read key indices ``slots``: (physical page, offset), both always in range.

        A table entry outside ``[0, N)`` (entries past a length are undefined) is clipped before strides apply, so that
        it cannot reach another layer or leave the pool. Key indices outside the table read its first or last page.
        """
        column = jnp.clip(slots // self.page_size, 0, page_table.shape[1] - 1)
        pages = jnp.clip(jnp.take_along_axis(page_table, column, axis=1), 0, self.num_pages - 1)
        return self.physical_pages(pages, layer), slots % self.page_size

    def locate_reads(
        self,
        page_table: Int[Array, "B W"],
        starts: Int[Array, "B"],
        num_tokens: int,
        layer: int | Int[Array, ""],
    ) -> tuple[Int[Array, "B n"], Int[Array, "B n"]]:
        """Where to read key indices ``starts[b]`` to ``starts[b] + num_tokens``; arguments are of any integer dtype.

        Raises:
            ValueError: a wrong shape, dtype, count or layer.
        """
        layer = self.check_layer(layer)
        page_table, starts = as_int32("page_table", page_table), as_int32("starts", starts)
        if page_table.ndim != 2 or page_table.shape[1] == 0:
            raise ValueError(f"page_table has shape {page_table.shape}, must be [B, W] with W at least 1")
        if starts.shape != page_table.shape[:1]:
            raise ValueError(f"starts has shape {starts.shape}, must be {page_table.shape[:1]}: [B] of page_table")
        num_tokens = check_integer("num_tokens", num_tokens, 0, INT32_MAX)
        starts = jnp.minimum(starts, INT32_MAX - num_tokens)  # past any table; a sum must not wrap into it
        slots = starts[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
        return self.locate_table_slots(page_table, slots, layer)

    def inside(self, slots: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether each slot exists."""
        return (slots >= 0) & (slots < self.num_slots)

    def scatter(
        self,
        array: Shaped[Array, "pages ..."],
        rows: Shaped[Array, "..."],
        slots: Int[Array, "..."],
        layer: int | Int[Array, "..."],
        *,
        first: int = 0,
        axes: Axes = Axes.TOKENS,
    ) -> Shaped[Array, "pages ..."]:
        """Writes ``rows`` at ``slots`` of ``layer`` and returns the array; in place when ``array`` is donated.

        Rows are [*slots, ...], or [*slots, heads, width] of other axes than TOKENS. Those narrower than the array's are
        written from element ``first`` on (0 where there are groups); the other elements keep their values. A slot or
        layer that does not exist writes nothing.
        """
        # A negative index would wrap to the end of the pool before mode="drop" sees it, and a slot past its layer would
        # land in the next layer. Both become the first index that does not exist, as do all slots of a layer that does
        # not exist.
        layer = jnp.asarray(layer, jnp.int32)
        written = self.inside(slots) & (layer >= 0) & (layer < self.num_layers)
        pages = self.physical_pages(jnp.where(written, slots // self.page_size, 0), layer)
        pages = jnp.where(written, pages, array.shape[0])
        if axes is Axes.CHANNEL_GROUPS:
            rows = rows.reshape(*rows.shape[:-1], -1, array.shape[-1])
        elements = slice(first, first + rows.shape[slots.ndim + (axes is not Axes.TOKENS)])
        index = _row_index(array, pages, slots % self.page_size, axes, elements)
        return array.at[index].set(rows, mode="drop")

    def move(
        self,
        array: Shaped[Array, "pages ..."],
        src: Int[Array, "n"],
        dst: Int[Array, "n"],
        *,
        axes: Axes = Axes.TOKENS,
        context_axes: tuple[str, ...] = (),
    ) -> Shaped[Array, "pages ..."]:
        """Copies the rows at ``src`` to ``dst`` in every layer; all reads happen before all writes.

        A pair with either slot outside the layer copies nothing. Over ``context_axes`` the slots of a pair may be of
        two devices.
        """
        readable = self.inside(src)
        moved = jax.lax.psum(readable.astype(jnp.int32), context_axes) > 0 if context_axes else readable
        src, dst = jnp.where(readable, src, 0), jnp.where(moved, dst, -1)
        layers = jnp.arange(self.num_layers, dtype=jnp.int32)[:, None]
        src, dst = (jnp.broadcast_to(slots, (self.num_layers, *slots.shape)) for slots in (src, dst))
        pages = self.physical_pages(src // self.page_size, layers)
        rows = read_rows(array, pages, src % self.page_size, axes)
        if context_axes:
            rows = _from_owner(rows, readable, context_axes)
        return self.scatter(array, rows, dst, layers, axes=axes)


def _from_owner(
    rows: Shaped[Array, "L n ..."], owned: Bool[Array, "n"], axes: tuple[str, ...]
) -> Shaped[Array, "L n ..."]:
    """Each row as the one device has it that owns it; the bits of the others, which may be NaN, are left out."""
    bits = jax.lax.bitcast_convert_type(rows, jnp.dtype(f"uint{8 * rows.dtype.itemsize}"))
    owned = owned.reshape(1, -1, *(1,) * (rows.ndim - 2))
    return jax.lax.bitcast_convert_type(jax.lax.psum(jnp.where(owned, bits, 0), axes), rows.dtype)


def check_slots(slots: Int[Array, "T"]) -> Int[Array, "T"]:
    """``slots`` as int32; ValueError unless they are integers [T]."""
    slots = as_int32("slots", slots)
    if slots.ndim != 1:
        raise ValueError(f"slots has shape {slots.shape}, must be [T]")
    return slots


def read_rows(
    array: Shaped[Array, "pages ..."], pages: Int[Array, "*n"], offsets: Int[Array, "*n"], axes: Axes = Axes.TOKENS
) -> Shaped[Array, "..."]:
    """The rows at ``offsets`` of physical pages: [*n, ...], or [*n, heads, row] of other axes than TOKENS."""
    rows = array[_row_index(array, pages, offsets, axes, slice(None))]
    return rows.reshape(*rows.shape[:-2], -1) if axes is Axes.CHANNEL_GROUPS else rows


def _row_index(array, pages, offsets, axes, elements: slice) -> tuple[Array | slice, ...]:
    """Index of ``elements`` of rows, which are groups of X of a row in CHANNEL_GROUPS.

    The heads are indexed too: XLA then scatters rows of heads into the array without transposing it.
    """
    if axes is Axes.TOKENS:
        return pages, offsets, elements
    heads = jnp.arange(array.shape[axes.of_heads], dtype=jnp.int32).reshape(*(1,) * pages.ndim, -1)
    pages, offsets = pages[..., None], offsets[..., None]
    if axes is Axes.TOKENS_HEADS:
        return pages, offsets, heads, elements
    if axes is Axes.HEADS_TOKENS:
        return pages, heads, offsets, elements
    if axes is Axes.CHANNEL_GROUPS:
        return pages, heads, elements, offsets
    group = array.shape[-1]
    return pages, heads, offsets // group, elements, offsets % group


@dataclasses.dataclass(frozen=True)
class PagedPool(abc.ABC):
    """Interface that ``move_rows`` needs from a pool with rows of any kind. Pools are frozen dataclasses and pytrees.

    Attributes:
        PAGED: names of the fields that hold arrays of pages; a field may be None.
    """

    PAGED: ClassVar[tuple[str, ...]]

    @property
    @abc.abstractmethod
    def placement(self) -> Placement:
        """Memory layout of the rows."""

    def local(self, *, ranks: int) -> Any:
        """The pool on one of ``ranks`` devices that share its pages, to be called inside ``jax.shard_map``: there the
        arrays are a device's, but the number of pages is that of all devices.

        Raises:
            ValueError: ``ranks`` does not divide the pages of each layer, or equal parts of the arrays are not equal
                parts of the pages of every layer (several layers need ``page_stride`` of at least L * layer_stride).
        """
        p, ranks = self.placement, check_integer("ranks", ranks, 1)
        if p.num_pages % ranks:
            raise ValueError(f"ranks={ranks} must be a divisor of num_pages={p.num_pages}")
        if p.num_layers > 1 and p.page_stride < p.num_layers * p.layer_stride and ranks > 1:
            raise ValueError(
                f"ranks={ranks} with page_stride={p.page_stride} and layer_stride={p.layer_stride}: a part of the "
                f"arrays would have some of the {p.num_layers} layers, not some pages of each"
            )
        stride = p.num_pages // ranks if p.num_layers == 1 else p.layer_stride
        changed: Any = {"num_pages": p.num_pages // ranks, "layer_stride": stride}
        return dataclasses.replace(self, **changed)

    @property
    def axes(self) -> tuple[Axes, ...]:
        """Axes of each array of ``PAGED``."""
        return (Axes.TOKENS,) * len(self.PAGED)

    @abc.abstractmethod
    def check(self) -> None:
        """Raises ValueError unless the arrays have a supported format and room for every layer and page."""


def move_rows[Pool: PagedPool](
    pool: Pool, src: Int[Array, "n"], dst: Int[Array, "n"], *, context_axes: tuple[str, ...] = ()
) -> Pool:
    """Copies rows from slots ``src`` to slots ``dst`` in every layer of any pool; all reads happen before all writes.

    It moves the accepted branch of a draft tree to consecutive slots. A pair with either slot outside ``[0, N * P)``
    copies nothing.

    Args:
        pool: the cache; donate it at the outermost jit to copy in place.
        src: slots to read, of any integer dtype.
        dst: slots to write; those that exist must be distinct.
        context_axes: axes of the enclosing ``jax.shard_map`` over which cached tokens are sharded (``context`` of the
            builders). The devices pass the same pairs, each with -1 for the slots that are not its own.

    Raises:
        ValueError: wrong shapes or dtypes.
    """
    pool.check()
    src, dst = as_int32("src", src), as_int32("dst", dst)
    if src.ndim != 1 or src.shape != dst.shape:
        raise ValueError(f"src has shape {src.shape} and dst {dst.shape}: they must be equal, [n]")
    moved = {
        name: pool.placement.move(array, src, dst, axes=axes, context_axes=context_axes)
        for name, axes in zip(pool.PAGED, pool.axes, strict=True)
        if (array := getattr(pool, name)) is not None
    }
    return dataclasses.replace(pool, **moved)
