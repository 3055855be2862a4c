"""What a step needs to know about its batch, and one builder per serving mode.

Every system has its own meaning of ``seq_lens`` in each mode; here the meaning is settled once, by the builder, and the
ops see only ``kv_lens``: every key the request's last query token may see, the tokens of this call included. Each
builder says which meaning it takes:

=====================  ==============================================  =====================================
builder                length argument                                  rows of a request
=====================  ==============================================  =====================================
``for_decode``         ``seq_lens`` counts the token of this call       1
``for_target_verify``  ``prefix_lens`` does not count the draft tokens  the anchor and its drafts
``for_draft_extend``   ``seq_lens`` counts the accepted tokens          the accepted tokens
``for_draft_decode``   ``seq_lens`` counts none of the drafted tokens   1, standing at ``seq_len + step``
``for_extend``         ``seq_lens`` counts the tokens of this call      the new part of a prompt
``for_mixed``          ``seq_lens`` counts the tokens of this call      1 when decoding, more when extending
=====================  ==============================================  =====================================

All builders are pure functions of device arrays with static shapes, to be called inside ``jax.jit``.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jaxtyping import Array, Bool, Int

from mla_attn.checks import as_int32, check_index, check_integer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """Rows, lengths and pages of one call, for all layers.

    Request b owns query rows ``q_starts[b] : q_starts[b] + q_lens[b]`` (0 rows allowed; ranges disjoint and ascending);
    rows nobody owns are padding. Row j of request b stands at position ``kv_lens[b] - q_lens[b] + j``. Table slot i
    holds the key at position ``kv_offsets[b] + i * kv_stride``.

    Attributes:
        q_starts: int32 [B], first query row of each request.
        q_lens: int32 [B], query rows of each request.
        kv_lens: int32 [B], keys the last query row may see, this call's tokens included.
        page_table: int32 [B, W], page ids within a layer; entries past the length may hold anything.
        kv_offsets: int32 [B], position of table slot 0 (windowed pools, context-parallel shards).
        slots: int32 [T], where row t's key is written (``page * P + offset``); -1 writes nothing.
        positions: int32 [T], position of row t, for rotary embeddings; 0 on padding.
        work: work list of split-KV kernels, empty where an implementation needs none.
        max_q_len: static bound S of ``q_lens``.
        kv_stride: static position step between table slots.
        work_plan: static, what ``work`` was made for by ``plan_mla``; None while it is empty.
        page_size: static, tokens per page P that ``slots`` were counted with, so that another pool is refused; None if
            made by hand without it.
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


def for_decode(
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    *,
    page_size: int,
    max_len: int | None = None,
    page_map: Int[Array, "V"] | None = None,
) -> AttentionMetadata:
    """One new token per request.

    Args:
        page_table: page ids of each request.
        seq_lens: tokens of each request **counting the one of this call** (sglang and vLLM ``seq_lens`` in decode,
            tpu-inference ``seq_lens``, FlashMLA ``cache_seqlens``). 0 marks a padding row.
        page_size: tokens per page P.
        max_len: most tokens a request may hold; W * P if None. Rows at or past it are dropped: they write nothing and
            give zeros.
        page_map: int32 virtual-to-physical page ids, applied to the table and the slots; ids outside it stay unmapped
            and out of range.
    """
    page_table, page_map, seq_lens = _int32(page_table, page_map, seq_lens=seq_lens)
    q_lens = (seq_lens > 0).astype(jnp.int32)
    starts = jnp.arange(seq_lens.shape[0], dtype=jnp.int32)
    return _build(page_table, starts, q_lens, seq_lens - q_lens, seq_lens.shape[0], 1, page_size, max_len, page_map)


def for_target_verify(
    page_table: Int[Array, "B W"],
    prefix_lens: Int[Array, "B"],
    *,
    num_tokens: int,
    page_size: int,
    q_lens: Int[Array, "B"] | None = None,
    num_rows: int | None = None,
    depths: Int[Array, "*B S"] | None = None,
    max_len: int | None = None,
    page_map: Int[Array, "V"] | None = None,
) -> AttentionMetadata:
    """The anchor token and its drafts, judged by the target model.

    Args:
        page_table: page ids of each request.
        prefix_lens: committed tokens already cached, **not counting the anchor or the drafts** (sglang ``seq_lens`` in
            target-verify; add the tokens of the call to come to vLLM's or tpu-inference's meaning).
        num_tokens: static rows per request S = drafts + 1.
        page_size: tokens per page P.
        q_lens: rows of each request, at most ``num_tokens`` (ragged verify); 0 marks a padding request. All
            ``num_tokens`` if None.
        num_rows: None for a dense block of B * S rows, request b at ``b * S``; a number T for rows packed one request
            after the other in T rows, no fewer than ``q_lens`` has in all (which ``check_metadata`` checks).
        depths: for draft trees, drafts between each row and the anchor, [S] or [B, S]: row j is cached at
            ``prefix + j``, but its ``positions`` entry is ``prefix + depths[j]``. None for chains, where depth is j.
        max_len: as in ``for_decode``: drafts cached at or past it are dropped.
        page_map: as in ``for_decode``.
    """
    page_table, page_map, prefix_lens, q_lens = _int32(page_table, page_map, prefix_lens=prefix_lens, q_lens=q_lens)
    check_integer("num_tokens", num_tokens, 1)
    if q_lens is None:
        q_lens = jnp.full_like(prefix_lens, num_tokens)
    stand = None
    if depths is not None:
        depths = as_int32("depths", depths)
        if depths.shape not in ((num_tokens,), (*prefix_lens.shape, num_tokens)):
            raise ValueError(f"depths has shape {depths.shape}, must be [S] or [B, S] with S = {num_tokens}")
        stand = prefix_lens[:, None] + jnp.broadcast_to(depths, (*prefix_lens.shape, num_tokens))
    return _layout(page_table, prefix_lens, q_lens, num_tokens, num_rows, page_size, max_len, page_map, stand)


def for_draft_extend(
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    max_q_len: int,
    page_size: int,
    num_rows: int | None = None,
    max_len: int | None = None,
    page_map: Int[Array, "V"] | None = None,
) -> AttentionMetadata:
    """The accepted tokens of a verify step, run through the draft model.

    Args:
        page_table: page ids of each request.
        seq_lens: tokens of each request **counting the accepted ones of this call** (sglang ``seq_lens`` in
            draft-extend; tokenspeed's does not count them: add ``q_lens``).
        q_lens: accepted tokens of each request (correction or bonus token included); 0 marks a padding request.
        max_q_len: static bound S of ``q_lens``.
        page_size: tokens per page P.
        num_rows: dense block if None, else packed rows, as in ``for_target_verify``.
        max_len: as in ``for_decode``.
        page_map: as in ``for_decode``.
    """
    page_table, page_map, seq_lens, q_lens = _int32(page_table, page_map, seq_lens=seq_lens, q_lens=q_lens)
    return _layout(page_table, seq_lens - q_lens, q_lens, max_q_len, num_rows, page_size, max_len, page_map)


def for_draft_decode(
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    step: int | Int[Array, ""],
    *,
    page_size: int,
    num_tokens: int = 1,
    num_drafted: int | Int[Array, ""] | None = None,
    q_lens: Int[Array, "B"] | None = None,
    max_len: int | None = None,
    page_map: Int[Array, "V"] | None = None,
) -> AttentionMetadata:
    """Step ``step`` (0, 1, ...) of drafting: one token after the other, or one level of a draft tree.

    Args:
        page_table: page ids of each request.
        seq_lens: tokens in the draft model's cache before the first draft step, **counting none of the drafted ones**
            (sglang ``seq_lens`` for the whole multi-step draft): the rows stand at ``seq_len + step``.
        step: how many draft steps precede this one; may be traced.
        page_size: tokens per page P.
        num_tokens: static rows per request: the nodes of this level of a tree, 1 for a chain.
        num_drafted: nodes that earlier steps cached; row j is cached at ``seq_len + num_drafted + j``. ``step`` if
            None, as in a chain.
        q_lens: ``num_tokens``, or 0 for a padding request; all ``num_tokens`` if None.
        max_len: as in ``for_decode``.
        page_map: as in ``for_decode``.
    """
    page_table, page_map, seq_lens, q_lens = _int32(page_table, page_map, seq_lens=seq_lens, q_lens=q_lens)
    check_integer("num_tokens", num_tokens, 1)
    step = check_index("step", step, 0)
    if num_drafted is not None:
        num_drafted = check_index("num_drafted", num_drafted, 0)
    if q_lens is None:
        q_lens = jnp.full_like(seq_lens, num_tokens)
    prefix_lens = seq_lens + (step if num_drafted is None else num_drafted)
    stand = jnp.broadcast_to((seq_lens + step)[:, None], (*seq_lens.shape, num_tokens))
    return _layout(page_table, prefix_lens, q_lens, num_tokens, None, page_size, max_len, page_map, stand)


def for_extend(
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    max_q_len: int,
    page_size: int,
    num_rows: int | None = None,
    max_len: int | None = None,
    page_map: Int[Array, "V"] | None = None,
) -> AttentionMetadata:
    """A new part of each prompt on top of what is cached; a whole prompt (prefill) is a part on top of nothing.

    Args:
        page_table: page ids of each request.
        seq_lens: tokens of each request **counting the ones of this call** (sglang ``seq_lens`` in extend, where
            ``extend_prefix_lens = seq_lens - q_lens``; vLLM and tpu-inference ``seq_lens``).
        q_lens: new tokens of each request; 0 marks a padding request.
        max_q_len: static bound S of ``q_lens``.
        page_size: tokens per page P.
        num_rows: dense block if None, else packed rows, as in ``for_target_verify``.
        max_len: as in ``for_decode``.
        page_map: as in ``for_decode``.
    """
    page_table, page_map, seq_lens, q_lens = _int32(page_table, page_map, seq_lens=seq_lens, q_lens=q_lens)
    return _layout(page_table, seq_lens - q_lens, q_lens, max_q_len, num_rows, page_size, max_len, page_map)


def for_mixed(
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    max_q_len: int,
    page_size: int,
    num_rows: int,
    max_len: int | None = None,
    page_map: Int[Array, "V"] | None = None,
) -> AttentionMetadata:
    """Decoding and extending requests in one packed call, in any order.

    Args:
        page_table: page ids of each request.
        seq_lens: tokens of each request **counting the ones of this call** (vLLM and tpu-inference ``seq_lens``, with
            ``q_lens`` the differences of ``query_start_loc``).
        q_lens: 1 for a decoding request, the new tokens of an extending one, 0 for padding.
        max_q_len: static bound S of ``q_lens``.
        page_size: tokens per page P.
        num_rows: rows T of the call, as in ``for_target_verify``.
        max_len: as in ``for_decode``.
        page_map: as in ``for_decode``.
    """
    page_table, page_map, seq_lens, q_lens = _int32(page_table, page_map, seq_lens=seq_lens, q_lens=q_lens)
    return _layout(page_table, seq_lens - q_lens, q_lens, max_q_len, num_rows, page_size, max_len, page_map)


def page_table_from_tokens(
    req_to_token: Int[Array, "requests tokens"],
    request_ids: Int[Array, "B"],
    *,
    page_size: int,
    table_width: int | None = None,
) -> Int[Array, "B W"]:
    """Page table of a token-granular map, computed on the device (sglang ``req_to_token``, ``req_pool_indices``).

    Entry j is the page of token ``j * P``: ``req_to_token[request_ids[b], j * P] // P``. Tokens of a page must lie in
    one page in order, as page-aligned allocators guarantee. Entries past a request's length are whatever the map holds.

    Args:
        req_to_token: slot (``page * P + offset``) of each token of each request.
        request_ids: rows of the map to take; for an id outside it, which a padding request may have, the nearest.
        page_size: tokens per page P.
        table_width: pages per request W; the whole map if None.
    """
    req_to_token, request_ids = as_int32("req_to_token", req_to_token), as_int32("request_ids", request_ids)
    if req_to_token.ndim != 2:
        raise ValueError(f"req_to_token has shape {req_to_token.shape}, must be [requests, tokens]")
    if request_ids.ndim != 1:
        raise ValueError(f"request_ids has shape {request_ids.shape}, must be [B]")
    check_integer("page_size", page_size, 1)
    width = -(-req_to_token.shape[1] // page_size) if table_width is None else table_width
    if not 1 <= width <= -(-req_to_token.shape[1] // page_size):
        raise ValueError(f"table_width={table_width} must be 1 to {-(-req_to_token.shape[1] // page_size)}")
    firsts = req_to_token[:, : width * page_size : page_size]
    return jnp.take(firsts, request_ids, axis=0, mode="clip") // page_size


def row_owners(
    q_starts: Int[Array, "B"], q_lens: Int[Array, "B"], num_rows: int
) -> tuple[Int[Array, "T"], Bool[Array, "T"]]:
    """The request of each row and whether it has one (False on padding rows, whose request is arbitrary)."""
    requests = jnp.arange(q_starts.shape[0], dtype=jnp.int32)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    starts = jnp.where((q_lens > 0) & (q_starts >= 0), q_starts, num_rows)  # a negative index would wrap
    owner = jax.lax.cummax(jnp.zeros(num_rows, jnp.int32).at[starts].max(requests, mode="drop"))
    offset = rows - q_starts[owner]
    return owner, (offset >= 0) & (offset < q_lens[owner])


def _int32(page_table, page_map, **lengths) -> tuple[Any, ...]:
    """What a builder is given as int32, its ranks checked; None is what it is not given."""
    page_table = as_int32("page_table", page_table)
    if page_table.ndim != 2:
        raise ValueError(f"page_table has shape {page_table.shape}, must be [B, W]")
    page_map = None if page_map is None else as_int32("page_map", page_map)
    if page_map is not None and (page_map.ndim != 1 or page_map.size == 0):
        raise ValueError(f"page_map has shape {page_map.shape}, must be [V], V at least 1")
    lengths = {name: None if array is None else as_int32(name, array) for name, array in lengths.items()}
    batch = page_table.shape[0]
    for name, array in lengths.items():
        if array is not None and array.shape != (batch,):
            raise ValueError(f"{name} has shape {array.shape}, must be ({batch},), one for each row of page_table")
    return page_table, page_map, *lengths.values()


def _layout(
    page_table, prefix_lens, q_lens, max_q_len, num_rows, page_size, max_len, page_map, stand=None
) -> AttentionMetadata:
    """Place the rows: a dense block of ``max_q_len`` rows per request, or packed into ``num_rows``."""
    check_integer("max_q_len", max_q_len, 1)
    batch = q_lens.shape[0]
    if num_rows is None:
        starts = jnp.arange(batch, dtype=jnp.int32) * max_q_len
        num_rows = batch * max_q_len
    else:
        starts = jnp.cumsum(q_lens, dtype=jnp.int32) - q_lens
    return _build(page_table, starts, q_lens, prefix_lens, num_rows, max_q_len, page_size, max_len, page_map, stand)


def _build(
    page_table, q_starts, q_lens, prefix_lens, num_rows, max_q_len, page_size, max_len, page_map, stand=None
) -> AttentionMetadata:
    """Rows are cached from ``prefix_lens`` on; ``stand`` [B, S], if given, is where they stand instead."""
    batch, width = page_table.shape
    check_integer("page_size", page_size, 1)
    check_integer("num_rows", num_rows, 0)
    if width == 0:
        raise ValueError(f"page_table has shape {page_table.shape}, must be [B, W] with W at least 1")
    max_len = width * page_size if max_len is None else max_len
    if not 1 <= max_len <= width * page_size:
        raise ValueError(f"max_len={max_len} must be 1 to W * P = {width * page_size}")

    # Rows past the limit are no rows: the rest keep their positions, because q_lens and kv_lens shrink together. A
    # negative prefix is no request: its positions would wrap to the end of the table.
    room = jnp.where(prefix_lens < 0, 0, jnp.clip(max_len - prefix_lens, 0, max_q_len))
    q_lens = jnp.clip(q_lens, 0, room)
    kv_lens = jnp.where(q_lens > 0, prefix_lens + q_lens, 0)
    if page_map is not None:
        mapped = jnp.take(page_map, page_table, mode="fill", fill_value=-1)
        page_table = jnp.where(page_table < 0, -1, mapped)  # a negative index would wrap
    if batch == 0:  # there is nothing to look up
        slots, positions = jnp.full(num_rows, -1, jnp.int32), jnp.zeros(num_rows, jnp.int32)
    else:
        slots, positions = _place(page_table, q_starts, q_lens, prefix_lens, num_rows, page_size, stand)
    return AttentionMetadata(
        q_starts=q_starts,
        q_lens=q_lens,
        kv_lens=kv_lens,
        page_table=page_table,
        kv_offsets=jnp.zeros(batch, jnp.int32),
        slots=slots,
        positions=positions,
        work=jnp.zeros(0, jnp.int32),
        max_q_len=max_q_len,
        page_size=page_size,
    )


def _place(page_table, q_starts, q_lens, prefix_lens, num_rows, page_size, stand):
    """Slot and position of every row; -1 and 0 on padding."""
    owner, owned = row_owners(q_starts, q_lens, num_rows)
    offset = jnp.where(owned, jnp.arange(num_rows, dtype=jnp.int32) - q_starts[owner], 0)
    cached = jnp.where(owned, prefix_lens[owner] + offset, 0)
    pages = page_table[owner, cached // page_size]
    known = (pages >= 0) & (pages < np.iinfo(np.int32).max // page_size)  # a foreign id must not overflow into range
    slots = jnp.where(owned & known, pages * page_size + cached % page_size, -1)
    return slots, cached if stand is None else jnp.where(owned, stand[owner, offset], 0)


def check_metadata(metadata: AttentionMetadata, *, num_pages: int, page_size: int) -> None:
    """Check the values of a metadata object: lengths, row ranges, page ids, slots.

    On concrete arrays a violation is a ``ValueError`` naming the field, the first bad request or row, and its value.
    Under a trace it becomes a ``jax.experimental.checkify`` check, so wrap the function in ``checkify.checkify``.

    Args:
        metadata: what a builder, or hand, made.
        num_pages: pages N of a layer.
        page_size: tokens per page P.
    """
    if metadata.page_size not in (None, page_size):
        raise ValueError(f"page_size={page_size} must be metadata's {metadata.page_size}")
    xp = jnp if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(metadata)) else np
    m = jax.tree.map(xp.asarray, metadata)
    rows, width = m.slots.shape[0], m.page_table.shape[1]
    used, ends = m.q_lens > 0, m.q_starts + m.q_lens
    outside = used & ((m.q_starts < 0) | (m.q_starts > rows - m.q_lens))  # not ends > rows: a sum may overflow
    # The end of the nearest earlier request that has rows: ranges are ascending when none starts before it.
    reach = xp.concatenate([xp.zeros(1, xp.int32), _running_max(xp, xp.where(used, ends, 0))[:-1]])
    held = -(-(m.kv_lens - m.kv_offsets) // m.kv_stride)  # table slots in use
    columns = xp.arange(width)[None] * page_size < held[:, None]
    order = xp.argsort(m.slots, stable=True)  # of rows with one slot, the first comes first
    taken = m.slots[order]
    later = xp.concatenate([xp.zeros(min(rows, 1), bool), (taken[1:] == taken[:-1]) & (taken[1:] >= 0)])
    again = later[xp.argsort(order)]
    for field, values, wrong, allowed in (
        ("q_lens", m.q_lens, (m.q_lens < 0) | (m.q_lens > m.max_q_len), f"must be 0 to max_q_len={m.max_q_len}"),
        ("q_starts", m.q_starts, outside, f"rows must lie in 0 to T={rows}"),
        ("q_starts", m.q_starts, used & (m.q_starts < reach), "row ranges must be disjoint and ascending"),
        ("kv_lens", m.kv_lens, m.kv_lens < m.q_lens, "must be at least q_lens"),
        ("kv_offsets", m.kv_offsets, m.kv_offsets < 0, "must be at least 0"),
        ("kv_lens", m.kv_lens, held > width * page_size, f"needs more table slots than W * P = {width * page_size}"),
        (
            "page_table",
            m.page_table,
            columns & ((m.page_table < 0) | (m.page_table >= num_pages)),
            f"must be 0 to N - 1 = {num_pages - 1}",
        ),
        ("slots", m.slots, m.slots >= num_pages * page_size, f"must be below N * P = {num_pages * page_size}"),
        ("slots", m.slots, again, "written twice"),
    ):
        _require(xp, field, values, wrong, allowed)


def _running_max(xp, values):
    return np.maximum.accumulate(values) if xp is np else jax.lax.cummax(values)


def _require(xp, field: str, values, wrong, allowed: str) -> None:
    if xp is jnp:
        first = jnp.argmax(wrong) if wrong.size else 0
        value = jnp.ravel(jnp.asarray(values))[first] if wrong.size else jnp.int32(0)
        message = f"{field}: {{value}} at flat index {{index}}: {allowed}"
        checkify.check(~jnp.any(wrong), message, value=value, index=jnp.asarray(first))
    elif np.any(wrong):
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        where = index[0] if len(index) == 1 else index
        raise ValueError(f"{field}[{where}]={np.asarray(values)[index]}: {allowed}")
