"""Writing rows by slot, moving them, and reading a prefix back. Pure functions; in place under donation."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_attn.cache.latent import LatentPool


def write_latent(
    pool: LatentPool,
    latent: Float[Array, "T R"],
    rope: Float[Array, "T E"],
    slots: Int[Array, "T"],
    *,
    layer: int | Int[Array, ""] = 0,
) -> LatentPool:
    """Store the rows of this call at ``slots`` of ``layer``.

    Args:
        pool: cache of rows ``[R | E]``; donate it at the outermost jit and the write is in place.
        latent: compressed rows after their norm; converted to the pool's dtype.
        rope: rope keys after rotation, shared by all heads.
        slots: ``page * P + offset`` within the layer; a slot outside ``[0, N * P)`` writes nothing. Slots inside it
            must differ from each other.
        layer: which layer, a Python int or an int32 scalar (as inside ``lax.scan``).

    Raises:
        ValueError: widths that are not the pool's, row counts that differ, or a layer that does not exist. (A traced
            layer outside ``[0, L)`` writes nothing.)
    """
    _check_rows(pool, latent, rope, slots)
    pool.check_layer(layer)
    rows = jnp.concatenate([latent.astype(pool.dtype), rope.astype(pool.dtype)], axis=-1)
    return _scatter(pool, rows, slots, layer)


def read_latent(
    pool: LatentPool,
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    num_tokens: int,
    *,
    layer: int | Int[Array, ""] = 0,
) -> tuple[Float[Array, "B n R"], Float[Array, "B n E"]]:
    """Read table slots ``starts[b] : starts[b] + num_tokens`` of each request back out, in the pool's dtype.

    Slots past the table's end repeat its last entry; rows past a request's length hold whatever the page holds. The
    caller masks both by length.

    Raises:
        ValueError: wrong shape, dtype, count or layer.
    """
    pool.check_layer(layer)
    _check_integers(page_table=page_table, starts=starts)
    if page_table.ndim != 2:
        raise ValueError(f"page_table has shape {page_table.shape}, must be [B, W]")
    if starts.shape != page_table.shape[:1]:
        raise ValueError(f"starts has shape {starts.shape}, must be {page_table.shape[:1]}: [B] of page_table")
    if num_tokens < 0:
        raise ValueError(f"num_tokens={num_tokens} must be an integer of at least 0")
    slots = starts[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]
    rows = pool.data[gather_index(pool, page_table, slots, layer)]
    return rows[..., : pool.kv_lora_rank], rows[..., pool.kv_lora_rank :]


def gather_index(
    pool: LatentPool, page_table: Int[Array, "B W"], slots: Int[Array, "B n"], layer: int | Int[Array, ""]
) -> tuple[Int[Array, "B n"], Int[Array, "B n"]]:
    """Where table slots lie in ``pool.data``: (physical page, offset), both always in range.

    A table entry outside ``[0, N)`` (tails may hold anything) is clipped before strides apply, so that a foreign id
    cannot reach another layer or leave the pool.
    """
    column = jnp.clip(slots // pool.page_size, 0, page_table.shape[1] - 1)
    pages = jnp.clip(jnp.take_along_axis(page_table, column, axis=1), 0, pool.num_pages - 1)
    return pool.physical_pages(pages, layer), slots % pool.page_size


def move_rows(pool: LatentPool, src: Int[Array, "n"], dst: Int[Array, "n"]) -> LatentPool:
    """Copy rows from slots ``src`` to slots ``dst`` in every layer; all reads happen before all writes.

    A pair with either slot outside ``[0, N * P)`` moves nothing. Used to bring the accepted branch of a draft tree
    into place.
    """
    if src.shape != dst.shape:
        raise ValueError(f"src has shape {src.shape} and dst {dst.shape}: they must be equal")
    _check_integers(src=src, dst=dst)
    limit = pool.num_pages * pool.page_size
    readable = (src >= 0) & (src < limit)
    src, dst = jnp.where(readable, src, 0), jnp.where(readable, dst, -1)
    layers = jnp.arange(pool.num_layers, dtype=jnp.int32)[:, None]
    src, dst = (jnp.broadcast_to(slots, (pool.num_layers, *slots.shape)) for slots in (src, dst))
    rows = pool.data[pool.physical_pages(src // pool.page_size, layers), src % pool.page_size]
    return _scatter(pool, rows, dst, layers)


def _scatter(pool: LatentPool, rows: Float[Array, "... C"], slots: Int[Array, "..."], layer) -> LatentPool:
    # A negative index would wrap to the end of the pool before mode="drop" looks at it, and a slot past its layer
    # would land in the next one: both are sent to the first index that does not exist. So are all slots of a layer
    # that does not exist.
    layer = jnp.asarray(layer)
    inside = (slots >= 0) & (slots < pool.num_pages * pool.page_size) & (layer >= 0) & (layer < pool.num_layers)
    pages = pool.physical_pages(jnp.where(inside, slots // pool.page_size, 0), layer)
    pages = jnp.where(inside, pages, pool.data.shape[0])
    return dataclasses.replace(pool, data=pool.data.at[pages, slots % pool.page_size].set(rows, mode="drop"))


def _check_rows(pool, latent, rope, slots):
    _check_integers(slots=slots)
    if slots.ndim != 1:
        raise ValueError(f"slots has shape {slots.shape}, must be [T]")
    widths = pool.kv_lora_rank, pool.latent_dim - pool.kv_lora_rank
    for name, array, width in (("latent", latent, widths[0]), ("rope", rope, widths[1])):
        shape = (slots.shape[0], width)
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, must be {shape}: rows of slots, width of the pool")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}, must be a floating dtype")


def _check_integers(**arrays):
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {array.dtype}, must be an integer dtype")
