"""Checks of metadata values that are known only at run time."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from mla_attn.checks import INT32_MAX, check_integer, check_window
from mla_attn.metadata.structure import AttentionMetadata, check_requests, check_rows


def check_metadata(
    metadata: AttentionMetadata, *, num_pages: int, page_size: int, causal: bool = True, window: int | None = None
) -> None:
    """Checks the values of a metadata object: lengths, row ranges, page ids, slots.

    For concrete arrays a violation raises ``ValueError`` with the field, the first bad request or row, and its value.
    Under a trace it becomes a ``jax.experimental.checkify`` check: wrap the function in ``checkify.checkify``.

    Args:
        metadata: metadata from a builder, or made by hand.
        num_pages: pages N of a layer.
        page_size: tokens per page P.
        causal: ``causal`` of the calls that will use the metadata. If False, a request may have fewer keys than rows.
        window: window of those calls. Page ids whose keys all lie left of every row's window are not checked, because a
            windowed cache has freed those pages.

    Raises:
        ValueError: a violation, or a wrong static value.
    """
    page_size = check_integer("page_size", page_size, 1, INT32_MAX)
    num_pages = check_integer("num_pages", num_pages, 1, INT32_MAX // page_size)
    if metadata.page_size not in (None, page_size):
        raise ValueError(
            f"metadata was built with page_size={metadata.page_size}, but the pool has page_size={page_size}"
        )
    stride, window = check_integer("kv_stride", metadata.kv_stride, 1), check_window(window)
    if window is not None and not causal:
        raise ValueError(f"window={window} with causal={causal}: a window needs causal=True")
    check_requests(metadata)
    check_rows(metadata)
    xp = jnp if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(metadata)) else np
    m = jax.tree.map(xp.asarray, metadata)
    rows, width = m.slots.shape[0], m.page_table.shape[1]
    used, ends = m.q_lens > 0, m.q_starts + m.q_lens
    outside = used & ((m.q_starts < 0) | (m.q_starts > rows - m.q_lens))  # not ends > rows: a sum may overflow
    # The largest end of the earlier requests with rows: ranges ascend if no request starts before it.
    reach = xp.concatenate([xp.zeros(1, xp.int32), _running_max(xp, xp.where(used, ends, 0))[:-1]])
    held = -(-(m.kv_lens - m.kv_offsets) // stride)  # keys in the table
    first_page = xp.arange(width)[None] * page_size
    columns = first_page < held[:, None]
    if window is not None:  # the first row sees keys at positions above its own minus the window
        after = xp.maximum(m.kv_lens - m.q_lens, 0) - m.kv_offsets  # another order of these terms may overflow
        hidden = xp.where(after < window, 0, (xp.maximum(after, window) - window) // stride + 1)
        columns &= (first_page + page_size > hidden[:, None]) & (hidden < held)[:, None]
    order = xp.argsort(m.slots, stable=True)  # stable: of rows with equal slots, the first is correct
    taken = m.slots[order]
    later = xp.concatenate([xp.zeros(min(rows, 1), bool), (taken[1:] == taken[:-1]) & (taken[1:] >= 0)])
    again = later[xp.argsort(order)]
    least = m.q_lens if causal else xp.zeros_like(m.q_lens)
    for field, values, wrong, allowed in (
        ("q_lens", m.q_lens, (m.q_lens < 0) | (m.q_lens > m.max_q_len), f"must be 0 to max_q_len={m.max_q_len}"),
        ("q_starts", m.q_starts, outside, f"rows must lie in 0 to T={rows}"),
        ("q_starts", m.q_starts, used & (m.q_starts < reach), "row ranges must be disjoint and ascending"),
        ("kv_lens", m.kv_lens, m.kv_lens < least, f"must be at least {'q_lens' if causal else 0}"),
        ("kv_offsets", m.kv_offsets, m.kv_offsets < 0, "must be at least 0"),
        ("kv_lens", m.kv_lens, held > width * page_size, f"needs more keys than W * P = {width * page_size}"),
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
