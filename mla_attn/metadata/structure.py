"""The metadata pytree that every paged op takes, and the mapping from rows to requests."""

import dataclasses
from collections.abc import Hashable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mla_attn.checks import as_int32, check_array, check_shape, check_type


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """Rows, lengths and pages of one call, for all layers.

    Request b has query rows ``q_starts[b] : q_starts[b] + q_lens[b]``, possibly none; ranges are disjoint and
    ascending. Rows outside all ranges are padding. Row j of request b has position ``kv_lens[b] - q_lens[b] + j``. The
    request's key with index i is in page ``page_table[b, i // P]`` and has position ``kv_offsets[b] + i * kv_stride``.

    Attributes:
        q_starts: int32 [B], first query row of each request.
        q_lens: int32 [B], query rows of each request.
        kv_lens: int32 [B], tokens of the request including this call's: position of the last query row plus 1.
        page_table: int32 [B, W], page ids within a layer; entries past the length may hold anything.
        kv_offsets: int32 [B], position of the key with index 0 (windowed pools, context-parallel shards).
        slots: int32 [T], where row t's key is written (``page * P + offset``); -1 writes nothing.
        positions: int32 [T], position of row t, for rotary embeddings; 0 on padding.
        work: work list of the kernels; empty if the implementation needs none.
        max_q_len: static bound S of ``q_lens``.
        kv_stride: static step in position from one key index to the next.
        work_plan: static description of the calls that ``plan_mla`` made ``work`` for; None if ``work`` is empty.
        page_size: static tokens per page P that ``slots`` were computed with; ops refuse a pool with another page size.
            None, in metadata made by hand, disables that check.
        ranks: static number of devices whose metadata these arrays hold, one after the other (``parallel.plan``); an op
            of one device refuses any but 1.
    """

    q_starts: Int[Array, "B"]
    q_lens: Int[Array, "B"]
    kv_lens: Int[Array, "B"]
    page_table: Int[Array, "B W"]
    kv_offsets: Int[Array, "B"]
    slots: Int[Array, "T"]
    positions: Int[Array, "T"]
    work: Int[Array, "items"]
    max_q_len: int = dataclasses.field(metadata={"static": True})
    kv_stride: int = dataclasses.field(default=1, metadata={"static": True})
    work_plan: Hashable = dataclasses.field(default=None, metadata={"static": True})
    page_size: int | None = dataclasses.field(default=None, metadata={"static": True})
    ranks: int = dataclasses.field(default=1, metadata={"static": True})


def check_requests(metadata: AttentionMetadata) -> None:
    """Checks shapes and dtypes of the per-request fields, because metadata may be made by hand.

    Raises:
        ValueError: a field is not an int32 array, or its shape does not match ``q_lens`` [B].
    """
    for name in ("q_lens", "page_table"):
        check_array(f"metadata.{name}", getattr(metadata, name))
    q_lens, page_table = metadata.q_lens, metadata.page_table
    if q_lens.ndim != 1:
        raise ValueError(f"metadata.q_lens has shape {q_lens.shape}, must be [B]")
    batch = q_lens.shape[0]
    for name in ("q_starts", "kv_lens", "kv_offsets"):
        check_shape(f"metadata.{name}", getattr(metadata, name), (batch,), "B of metadata.q_lens")
    if page_table.ndim != 2 or page_table.shape[0] != batch or page_table.shape[1] < 1:
        raise ValueError(f"metadata.page_table has shape {page_table.shape}, must be [B, W] = [{batch}, at least 1]")
    for name in ("q_starts", "q_lens", "kv_lens", "kv_offsets", "page_table"):
        check_type(f"metadata.{name}", getattr(metadata, name), jnp.int32)


def check_rows(metadata: AttentionMetadata) -> None:
    """Checks shapes and dtypes of the per-row fields, as ``check_requests`` does."""
    check_array("metadata.slots", metadata.slots)
    if metadata.slots.ndim != 1:
        raise ValueError(f"metadata.slots has shape {metadata.slots.shape}, must be [T]")
    check_shape("metadata.positions", metadata.positions, metadata.slots.shape, "T of metadata.slots")
    for name in ("slots", "positions"):
        check_type(f"metadata.{name}", getattr(metadata, name), jnp.int32)


def row_owners(
    q_starts: Int[Array, "B"], q_lens: Int[Array, "B"], num_rows: int
) -> tuple[Int[Array, "T"], Bool[Array, "T"]]:
    """Finds the request of each row, and whether it has one (False for padding rows, whose request is arbitrary).

    A request that starts at a negative row has no rows.
    """
    q_starts, q_lens = as_int32("q_starts", q_starts), as_int32("q_lens", q_lens)
    if q_starts.shape[0] == 0:
        return jnp.zeros(num_rows, jnp.int32), jnp.zeros(num_rows, bool)
    requests = jnp.arange(q_starts.shape[0], dtype=jnp.int32)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    starts = jnp.where((q_lens > 0) & (q_starts >= 0), q_starts, num_rows)  # a negative index would wrap
    owner = jax.lax.cummax(jnp.zeros(num_rows, jnp.int32).at[starts].max(requests, mode="drop"))
    offset = rows - q_starts[owner]
    return owner, (q_starts[owner] >= 0) & (offset >= 0) & (offset < q_lens[owner])
