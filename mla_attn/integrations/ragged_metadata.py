"""Metadata from the arguments of ragged paged attention, in which nothing static tells how long requests are."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from mla_attn.checks import as_int32, check_integer
from mla_attn.metadata import AttentionMetadata, for_mixed, page_table_from_packed

_MOST_ROWS = 64  # of a part of a request


def ragged_metadata(
    kv_lens: Int[Array, "B"],
    pages: Int[Array, "n"] | AttentionMetadata,
    cu_q_lens: Int[Array, "ends"],
    distribution: Int[Array, "3"] | None = None,
    *,
    num_rows: int,
    page_size: int,
    cu_kv_lens: Int[Array, "ends"] | None = None,
    table_width: int | None = None,
    max_q_len: int | None = None,
) -> AttentionMetadata:
    """Metadata of a call of ``ragged_paged.py``, whose module describes the arrays.

    Implementations reserve memory for ``max_q_len`` rows of every request. Where that is unknown, it would be all rows
    of the call for each; so requests are cut in parts of few rows, each a request of its own with the same pages. A row
    sees the same keys, because the call's rows are written before any attends, and causal masks count from a part's
    end. The cuts therefore need causal attention without a tree.

    Args:
        kv_lens, pages, cu_q_lens, distribution, cu_kv_lens: arrays; if ``pages`` is metadata, it is the result.
        num_rows: rows T of the call.
        page_size: tokens P of a page.
        table_width: pages W of a request in a packed list; None for all in the list.
        max_q_len: static bound of a request's rows, with which nothing is cut; None if unknown.

    Raises:
        ValueError: a wrong shape, dtype or static value.
    """
    if isinstance(pages, AttentionMetadata):
        return pages
    kv_lens, pages, ends = as_int32("kv_lens", kv_lens), as_int32("pages", pages), as_int32("cu_q_lens", cu_q_lens)
    if kv_lens.ndim != 1 or kv_lens.shape[0] == 0:
        raise ValueError(f"kv_lens has shape {kv_lens.shape}, must be [B], 1 at least")
    batch = kv_lens.shape[0]
    if ends.shape != (batch + 1,):
        raise ValueError(f"cu_q_lens has shape {ends.shape}, must be ({batch + 1},): B of kv_lens, and 1")
    if pages.ndim != 1 or pages.shape[0] == 0:
        raise ValueError(f"pages has shape {pages.shape}, must be [n], 1 at least")
    q_lens = ends[1:] - ends[:-1]
    if distribution is not None:
        distribution = as_int32("distribution", distribution)
        if distribution.shape != (3,):
            raise ValueError(f"distribution has shape {distribution.shape}, must be (3,)")
        live = jnp.arange(batch, dtype=jnp.int32) < distribution[2]
        kv_lens, q_lens = jnp.where(live, kv_lens, 0), jnp.where(live, q_lens, 0)
    if cu_kv_lens is not None:
        width = pages.shape[0] if table_width is None else check_integer("table_width", table_width, 1)
        table = page_table_from_packed(pages, cu_kv_lens, page_size=page_size, table_width=width)
        if table.shape[0] != batch:
            raise ValueError(f"cu_kv_lens has shape {cu_kv_lens.shape}, must be ({batch + 1},): B of kv_lens, and 1")
    elif pages.shape[0] % batch:
        raise ValueError(f"pages has shape {pages.shape}, must be [B * W] with B = {batch}; or pass cu_kv_lens")
    else:
        table = pages.reshape(batch, -1)
    # A padding request has a length of 0, less than its rows: the builder drops them, but counts them for the others.
    most = max(num_rows, 1) if max_q_len is None else max_q_len
    metadata = for_mixed(table, kv_lens, q_lens, max_q_len=most, page_size=page_size, num_rows=num_rows)
    return metadata if max_q_len is not None or num_rows == 0 else _in_parts(metadata, num_rows)


def _in_parts(m: AttentionMetadata, num_rows: int) -> AttentionMetadata:
    """Cuts requests in parts of few rows: 1 where every request can only have one, more where there are more rows."""
    batch = m.q_lens.shape[0]
    rows = min(_MOST_ROWS, max(1, num_rows // batch))
    most = min(num_rows, batch + num_rows // rows)  # parts that there can be
    count = -(-m.q_lens // rows)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    part = jnp.arange(most, dtype=jnp.int32)
    request = jnp.minimum(jnp.searchsorted(ends, part, side="right").astype(jnp.int32), batch - 1)
    first = (part - ends[request] + count[request]) * rows  # of the part's rows, within the request
    used = part < ends[-1]
    q_lens = jnp.where(used, jnp.minimum(m.q_lens[request] - first, rows), 0)
    return dataclasses.replace(
        m,
        q_starts=jnp.where(used, m.q_starts[request] + first, num_rows),
        q_lens=q_lens,
        kv_lens=jnp.where(used, m.kv_lens[request] - m.q_lens[request] + first + q_lens, 0),
        page_table=m.page_table[request],
        kv_offsets=m.kv_offsets[request],
        max_q_len=rows,
    )
