"""The builders of metadata, one for each serving mode.

Serving systems define ``seq_lens`` differently in each mode. A builder converts its length argument to ``kv_lens``, the
number of keys up to and including this call's tokens, which is the only length that the ops see. The table shows what
each builder's argument counts:

=====================  ==============================================  =====================================
builder                length argument                                  rows of a request
=====================  ==============================================  =====================================
``for_decode``         ``seq_lens`` counts the token of this call       1
``for_target_verify``  ``prefix_lens`` does not count the draft tokens  the anchor and its drafts
``for_draft_extend``   ``seq_lens`` counts the accepted tokens          the accepted tokens
``for_draft_decode``   ``seq_lens`` counts none of the drafted tokens   1, at position ``seq_len + step``
``for_extend``         ``seq_lens`` counts the tokens of this call      a prefill chunk of a prompt
``for_mixed``          ``seq_lens`` counts the tokens of this call      1 when decoding, more when extending
=====================  ==============================================  =====================================

All builders are pure functions of device arrays of any integer dtype with static shapes, to be called inside
``jax.jit``.

A wrong length spoils the results of its own request only. A negative length counts as 0, a negative prefix marks
padding, and rows past ``max_q_len`` or ``max_len`` are dropped. The first packed row of a request is the sum of the
``q_lens`` of the requests before it, negative ones counted as 0, even if some of their rows are dropped.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mla_attn.checks import INT32_MAX, as_int32, check_array, check_index, check_integer
from mla_attn.metadata.layout import PageLayout
from mla_attn.metadata.structure import AttentionMetadata, row_owners

Context = tuple[int | Int[Array, ""], int] | None  # (rank, size) of the devices that hold a request's tokens in turn


def for_decode(
    page_table: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    *,
    page_size: int,
    active: Bool[Array, "B"] | Int[Array, "B"] | None = None,
    max_len: int | None = None,
    page_map: Int[Array, "V"] | None = None,
    kv_offsets: Int[Array, "B"] | None = None,
    context: Context = None,
) -> AttentionMetadata:
    """Metadata of a decode call: one new token per request.

    Args:
        page_table: page ids of each request.
        seq_lens: tokens of each request **counting the one of this call** (sglang and vLLM ``seq_lens`` in decode,
            tpu-inference ``seq_lens``, FlashMLA ``cache_seqlens``). 0 marks a padding row.
        page_size: tokens per page P.
        active: which rows are requests (bool, or nonzero integers), for systems that fill the lengths of padding rows
            with 1; None for those with a nonzero length.
        max_len: most tokens of a request; None for W * P. Rows at or past it are dropped: they write nothing and give
            zeros.
        page_map: int32 virtual-to-physical page ids, applied to the table and the slots; ids outside the map become
            out of range.
        kv_offsets: int32 [B], multiples of P: the position of each request's first key in the table, for pools that
            hold only the last pages of a request (``PageAllocator.offsets``); None for 0. Rows at positions below it,
            or past the table, write nothing. ``max_len`` may then exceed W * P; None means the end of the table.
        context: ``(rank, size)`` where ``size`` devices hold a request's tokens in turn, position p on rank ``p %
            size``; None for one device. ``rank`` may be traced (``jax.lax.axis_index``), ``size`` is static. Page ids
            are the same on every rank: a page stands for ``P * size`` positions, of which each rank holds its own.
            Table width, ``max_len`` and ``kv_offsets`` (multiples of ``P * size``) count accordingly, lengths and
            positions stay those of the request, and ``slots`` are -1 for rows of other ranks.
    """
    pages = {"page_size": page_size, "max_len": max_len, "page_map": page_map, "kv_offsets": kv_offsets}
    layout = PageLayout.of(page_table, **pages, context=context)
    seq_lens = layout.per_request("seq_lens", seq_lens)
    if active is not None:
        check_array("active", active)
        if active.dtype != jnp.bool_:
            active = as_int32("active", active)
        if active.shape != seq_lens.shape:
            raise ValueError(f"active has shape {active.shape}, must be {seq_lens.shape}: [B] of page_table")
        seq_lens = jnp.where(jnp.asarray(active, bool), seq_lens, 0)
    q_lens = (seq_lens > 0).astype(jnp.int32)
    return _build(layout, prefix_lens=seq_lens - q_lens, q_lens=q_lens, max_q_len=1)


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
    kv_offsets: Int[Array, "B"] | None = None,
    context: Context = None,
) -> AttentionMetadata:
    """Metadata of a verify call: the anchor token and its drafts, run through the target model.

    Args:
        page_table: page ids of each request.
        prefix_lens: committed tokens already cached, **not counting the anchor or the drafts** (sglang ``seq_lens`` in
            target-verify; vLLM's and tpu-inference's ``seq_lens`` minus the tokens of the call).
        num_tokens: static rows per request S = drafts + 1.
        page_size: tokens per page P.
        q_lens: rows of each request, at most ``num_tokens`` (ragged verify); 0 marks a padding request. None for
            ``num_tokens`` each.
        num_rows: None for a dense block of B * S rows, request b at ``b * S``; an integer T for packed rows, one
            request after the other. T must be at least the sum of ``q_lens`` (``check_metadata`` checks it).
        depths: for draft trees, the depth of each row below the anchor, [S] or [B, S]: row j is cached at
            ``prefix + j``, but its ``positions`` entry is ``prefix + depths[j]``. None for chains, where depth is j.
        max_len: as in ``for_decode``: drafts cached at or past it are dropped.
        page_map: as in ``for_decode``.
        kv_offsets: as in ``for_decode``.
        context: as in ``for_decode``.
    """
    pages = {"page_size": page_size, "max_len": max_len, "page_map": page_map, "kv_offsets": kv_offsets}
    layout = PageLayout.of(page_table, **pages, context=context)
    prefix_lens = layout.per_request("prefix_lens", prefix_lens)
    num_tokens = check_integer("num_tokens", num_tokens, 1, INT32_MAX)
    q_lens = jnp.full_like(prefix_lens, num_tokens) if q_lens is None else layout.per_request("q_lens", q_lens)
    positions = None
    if depths is not None:
        depths = as_int32("depths", depths)
        if depths.shape not in ((num_tokens,), (layout.batch, num_tokens)):
            raise ValueError(f"depths has shape {depths.shape}, must be [S] or [B, S] with S = {num_tokens}")
        positions = prefix_lens[:, None] + jnp.broadcast_to(depths, (layout.batch, num_tokens))
    return _build(
        layout,
        prefix_lens=prefix_lens,
        q_lens=q_lens,
        max_q_len=num_tokens,
        num_rows=num_rows,
        positions=positions,
    )


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
    kv_offsets: Int[Array, "B"] | None = None,
    context: Context = None,
) -> AttentionMetadata:
    """Metadata of a draft-extend call: the accepted tokens of a verify step, run through the draft model.

    Args:
        page_table: page ids of each request.
        seq_lens: tokens of each request **counting the accepted ones of this call** (sglang ``seq_lens`` in
            draft-extend; tokenspeed's ``seq_lens`` plus ``q_lens``).
        q_lens: accepted tokens of each request (correction or bonus token included); 0 marks a padding request.
        max_q_len: static bound S of ``q_lens``.
        page_size: tokens per page P.
        num_rows: dense block if None, else packed rows, as in ``for_target_verify``.
        max_len: as in ``for_decode``.
        page_map: as in ``for_decode``.
        kv_offsets: as in ``for_decode``.
        context: as in ``for_decode``.
    """
    pages = {"page_size": page_size, "max_len": max_len, "page_map": page_map, "kv_offsets": kv_offsets}
    layout = PageLayout.of(page_table, **pages, context=context)
    return _extend(layout, seq_lens, q_lens, max_q_len=max_q_len, num_rows=num_rows)


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
    kv_offsets: Int[Array, "B"] | None = None,
    context: Context = None,
) -> AttentionMetadata:
    """Metadata of draft step ``step`` (0, 1, ...): one more token of a chain, or one level of a draft tree.

    Args:
        page_table: page ids of each request.
        seq_lens: tokens in the draft model's cache before the first draft step, **counting none of the drafted ones**
            (sglang ``seq_lens`` for the whole multi-step draft): the rows have position ``seq_len + step``.
        step: number of draft steps before this one; may be traced.
        page_size: tokens per page P.
        num_tokens: static rows per request: the nodes of this level of a tree, 1 for a chain.
        num_drafted: nodes that earlier steps cached; row j is cached at ``seq_len + num_drafted + j``. None for
            ``step``, as in a chain.
        q_lens: ``num_tokens``, or 0 for a padding request; None for ``num_tokens`` each.
        max_len: as in ``for_decode``.
        page_map: as in ``for_decode``.
        kv_offsets: as in ``for_decode``.
        context: as in ``for_decode``.
    """
    pages = {"page_size": page_size, "max_len": max_len, "page_map": page_map, "kv_offsets": kv_offsets}
    layout = PageLayout.of(page_table, **pages, context=context)
    seq_lens = layout.per_request("seq_lens", seq_lens)
    num_tokens = check_integer("num_tokens", num_tokens, 1, INT32_MAX)
    step = check_index("step", step, 0)
    num_drafted = step if num_drafted is None else check_index("num_drafted", num_drafted, 0)
    q_lens = jnp.full_like(seq_lens, num_tokens) if q_lens is None else layout.per_request("q_lens", q_lens)
    return _build(
        layout,
        prefix_lens=jnp.where(seq_lens < 0, -1, seq_lens + num_drafted),
        q_lens=q_lens,
        max_q_len=num_tokens,
        positions=jnp.broadcast_to((seq_lens + step)[:, None], (layout.batch, num_tokens)),
    )


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
    kv_offsets: Int[Array, "B"] | None = None,
    context: Context = None,
) -> AttentionMetadata:
    """Metadata of an extend call: a prefill chunk of each prompt, after its cached tokens, if any.

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
        kv_offsets: as in ``for_decode``.
        context: as in ``for_decode``.
    """
    pages = {"page_size": page_size, "max_len": max_len, "page_map": page_map, "kv_offsets": kv_offsets}
    layout = PageLayout.of(page_table, **pages, context=context)
    return _extend(layout, seq_lens, q_lens, max_q_len=max_q_len, num_rows=num_rows)


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
    kv_offsets: Int[Array, "B"] | None = None,
    context: Context = None,
) -> AttentionMetadata:
    """Metadata of a mixed call: decoding and extending requests packed in any order.

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
        kv_offsets: as in ``for_decode``.
        context: as in ``for_decode``.
    """
    pages = {"page_size": page_size, "max_len": max_len, "page_map": page_map, "kv_offsets": kv_offsets}
    layout = PageLayout.of(page_table, **pages, context=context)
    return _extend(layout, seq_lens, q_lens, max_q_len=max_q_len, num_rows=num_rows)


def for_encoder(
    page_table: Int[Array, "B W"],
    encoder_lens: Int[Array, "B"],
    *,
    num_rows: int,
    page_size: int,
    context: Context = None,
) -> Int[Array, "T"]:
    """Slots for the packed rows of encoders, one request after the other, to pass to ``write_kv``; -1 for padding.

    An encoder has more or fewer rows than the queries, so the metadata of ``for_cross_attention`` has no slots.

    Args:
        page_table: page ids of each request.
        encoder_lens: rows of each request's encoder; rows past the table are dropped.
        num_rows: total rows T.
        page_size: tokens per page P.
        context: as in ``for_decode``.
    """
    layout = PageLayout.of(page_table, page_size=page_size, context=context)
    lens = layout.per_request("encoder_lens", encoder_lens)
    most = min(page_table.shape[1] * layout.page_size * layout.ranks, INT32_MAX)
    return _build(layout, prefix_lens=jnp.zeros_like(lens), q_lens=lens, max_q_len=most, num_rows=num_rows).slots


def for_cross_attention(
    page_table: Int[Array, "B W"],
    encoder_lens: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    *,
    max_q_len: int,
    page_size: int,
    num_rows: int | None = None,
    context: Context = None,
) -> AttentionMetadata:
    """Metadata of a cross-attention call: rows that see all keys of an encoder and write none (``causal=False``).

    A request may have fewer keys than rows. A request without keys gives 0 and a log-sum-exp of -inf. Positions are 0.

    Args:
        page_table: page ids of each request's encoder.
        encoder_lens: keys of each request, as given to ``for_encoder``.
        q_lens: rows of each request; 0 marks a padding request.
        max_q_len: static bound S of ``q_lens``.
        page_size: tokens per page P.
        num_rows: dense block if None, else packed rows, as in ``for_target_verify``.
        context: as in ``for_decode``.
    """
    layout = PageLayout.of(page_table, page_size=page_size, context=context)
    lens, q_lens = layout.per_request("encoder_lens", encoder_lens), layout.per_request("q_lens", q_lens)
    rows = dataclasses.replace(layout, max_len=INT32_MAX)  # rows are not cached, so the table does not limit them
    m = _build(rows, prefix_lens=jnp.zeros_like(lens), q_lens=q_lens, max_q_len=max_q_len, num_rows=num_rows)
    return dataclasses.replace(
        m,
        kv_lens=jnp.where(m.q_lens > 0, jnp.maximum(lens, 0), 0),
        slots=jnp.full_like(m.slots, -1),
        positions=jnp.zeros_like(m.positions),
    )


def _extend(layout: PageLayout, seq_lens, q_lens, *, max_q_len: int, num_rows: int | None) -> AttentionMetadata:
    """Metadata of new tokens after the cached ones; ``seq_lens`` counts both."""
    seq_lens, q_lens = layout.per_request("seq_lens", seq_lens), layout.per_request("q_lens", q_lens)
    # Both are clipped at 0, so that their difference cannot overflow to a positive prefix.
    prefix_lens = jnp.maximum(seq_lens, 0) - jnp.maximum(q_lens, 0)
    return _build(layout, prefix_lens=prefix_lens, q_lens=q_lens, max_q_len=max_q_len, num_rows=num_rows)


def _build(
    layout: PageLayout, *, prefix_lens, q_lens, max_q_len: int, num_rows: int | None = None, positions=None
) -> AttentionMetadata:
    """Metadata of rows that are cached from ``prefix_lens`` on.

    Args:
        layout: page layout of the batch.
        prefix_lens: int32 [B]; negative for padding.
        q_lens: int32 [B], of any value.
        max_q_len: most rows of a request.
        num_rows: None for a dense block of ``max_q_len`` rows per request, else the rows of a packed call.
        positions: int32 [B, S], positions of the rows; None if they are the positions at which rows are cached.
    """
    max_q_len = check_integer("max_q_len", max_q_len, 1, INT32_MAX)
    if num_rows is None:
        num_rows = layout.batch * max_q_len
        if num_rows > INT32_MAX:
            raise ValueError(f"max_q_len={max_q_len}: B * S = {num_rows} rows must be at most {INT32_MAX}")
        q_starts = jnp.arange(layout.batch, dtype=jnp.int32) * max_q_len
    else:
        num_rows = check_integer("num_rows", num_rows, 0, INT32_MAX // 2)
        q_starts = _packed_starts(q_lens, num_rows)
    # Rows past the limit are dropped. The others keep their positions, because q_lens and kv_lens shrink together.
    q_lens = jnp.clip(q_lens, 0, jnp.minimum(layout.room(prefix_lens), max_q_len))
    if layout.batch == 0:  # gathers below need at least one request
        slots, at = jnp.full(num_rows, -1, jnp.int32), jnp.zeros(num_rows, jnp.int32)
    else:
        owner, owned = row_owners(q_starts, q_lens, num_rows)
        offset = jnp.where(owned, jnp.arange(num_rows, dtype=jnp.int32) - q_starts[owner], 0)
        cached = jnp.where(owned, prefix_lens[owner] + offset, 0)
        slots = jnp.where(owned, layout.slots(owner, cached), -1)
        at = cached if positions is None else jnp.where(owned, positions[owner, offset], 0)
    return AttentionMetadata(
        q_starts=q_starts,
        q_lens=q_lens,
        kv_lens=jnp.where(q_lens > 0, prefix_lens + q_lens, 0),
        page_table=layout.page_table,
        kv_offsets=layout.first_keys,
        slots=slots,
        positions=at,
        work=jnp.zeros(0, jnp.int32),
        kv_stride=layout.ranks,
        max_q_len=max_q_len,
        page_size=layout.page_size,
    )


def _packed_starts(q_lens, num_rows: int):
    """First row of each request in a packed call.

    Requests that do not fit begin past the end of the call. Two lengths of at most ``num_rows`` have a sum that does
    not overflow, so a running sum passes the end before it can wrap, and ``cummax`` keeps it there.
    """
    ends = jax.lax.cummax(jnp.cumsum(jnp.clip(q_lens, 0, num_rows), dtype=jnp.int32))
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends])[: q_lens.shape[0]]
