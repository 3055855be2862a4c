"""Dense attention, the specification of all ops: float32, with all scores in memory."""

import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Bool, Float, Int, Shaped


def attend(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B M K D"],
    v: Float[Array, "B M K V"],
    visible: Bool[Array, "B S M"],
    *,
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, "H"] | None = None,
) -> tuple[Float[Array, "B S H V"], Float[Array, "B S H"]]:
    """Softmax attention of dense blocks and its log-sum-exp; rows without visible keys give 0 and -inf."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    # Keys that no row sees may be NaN, and 0 * NaN is NaN.
    seen = visible.any(axis=1)[:, :, None, None]
    k, v = jnp.where(seen, k, 0.0), jnp.where(seen, v, 0.0)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = scale * jnp.einsum("bshd,bmhd->bshm", q, k, precision=Precision.HIGHEST)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, :, None, :], scores, -jnp.inf)
    m = scores.max(axis=-1, keepdims=True)
    m = jnp.where(jnp.isneginf(m), 0.0, m)  # without a visible key -inf - -inf would be NaN
    p = jnp.exp(scores - m)
    l = p.sum(axis=-1, keepdims=True)
    acc = jnp.einsum("bshm,bmhv->bshv", p, v, precision=Precision.HIGHEST)
    filled = l != 0  # true for NaN, which must be kept
    l = jnp.where(filled, l, 1.0)
    lse = jnp.where(filled, m + jnp.log(l), -jnp.inf)[..., 0]
    if sinks is not None:
        l += jnp.exp(sinks.astype(jnp.float32)[None, None, :, None] - m)
    return jnp.where(filled, acc / l, 0.0), lse


def scaled_queries(q: Float[Array, "T H D"], q_scale: Float[Array, "..."] | None) -> Float[Array, "T H D"]:
    """Queries times their scale, [] or [T, H]; as they are if that is None."""
    if q_scale is None:
        return q
    return q.astype(jnp.float32) * (q_scale if q_scale.ndim == 0 else q_scale[:, :, None])


def visible_keys(
    positions: Int[Array, "B M"],
    q_lens: Int[Array, "B"],
    kv_lens: Int[Array, "B"],
    max_q_len: int,
    *,
    causal: bool,
    window: int | None,
    tree_mask: Bool[Array, "B S C"] | None = None,
    row_positions: Int[Array, "B S"] | None = None,
) -> Bool[Array, "B S M"]:
    """The visible key positions of each row; row j has position ``kv_len - q_len + j``."""
    p, q_lens, kv_lens = positions[:, None, :], q_lens[:, None, None], kv_lens[:, None, None]
    rows = jnp.arange(max_q_len, dtype=jnp.int32)[None, :, None]
    at = kv_lens - q_lens + rows
    visible = (rows < q_lens) & (p < kv_lens)
    if causal:
        visible &= p <= at
    if window is not None and tree_mask is None:
        visible &= p > at - window
    if tree_mask is not None:
        width = tree_mask.shape[2]
        column = p - (kv_lens - q_lens) + width - max_q_len
        bits = jnp.take_along_axis(tree_mask, jnp.clip(column, 0, width - 1), axis=2)
        prefix = column < 0
        if window is not None and row_positions is not None:
            prefix &= p > jnp.maximum(row_positions, 0)[:, :, None] - window  # clipped: it would wrap
        visible &= jnp.where(column < 0, prefix, bits)
    return visible


def attend_paged(
    q: Float[Array, "T H D"],
    k: Float[Array, "B M K D"],
    v: Float[Array, "B M K V"],
    metadata,
    *,
    spec,
    causal: bool,
    tree_mask: Bool[Array, "B S C"] | None,
    sinks: Float[Array, "H"] | None,
) -> tuple[Float[Array, "T H V"], Float[Array, "T H"]]:
    """Attention of packed queries over all keys of the page tables."""
    m, keys = metadata, jnp.arange(k.shape[1], dtype=jnp.int32)
    visible = visible_keys(
        m.kv_offsets[:, None] + keys[None] * m.kv_stride,
        m.q_lens,
        m.kv_lens,
        m.max_q_len,
        causal=causal,
        window=spec.window,
        tree_mask=tree_mask,
        row_positions=to_blocks(m.positions, m.q_starts, m.q_lens, m.max_q_len),
    )
    blocks = to_blocks(q, m.q_starts, m.q_lens, m.max_q_len)
    out, lse = attend(blocks, k, v, visible, scale=spec.scale, soft_cap=spec.soft_cap, sinks=sinks)
    rows = q.shape[0]
    return to_rows(out, m.q_starts, m.q_lens, rows, 0.0), to_rows(lse, m.q_starts, m.q_lens, rows, -jnp.inf)


def to_blocks(
    rows: Shaped[Array, "T *rest"], starts: Int[Array, "B"], lens: Int[Array, "B"], length: int
) -> Shaped[Array, "B S *rest"]:
    """Unpacks rows to a dense block per request, with zeros past its length."""
    if rows.shape[0] == 0:
        return jnp.zeros((starts.shape[0], length, *rows.shape[1:]), rows.dtype)
    offset = jnp.arange(length, dtype=jnp.int32)[None]
    block = jnp.take(rows, starts[:, None] + offset, axis=0, mode="clip")
    kept = (offset < lens[:, None]).reshape(*block.shape[:2], *(1,) * (rows.ndim - 1))
    return jnp.where(kept, block, jnp.zeros((), block.dtype))


def to_rows(
    block: Float[Array, "B S *rest"], starts: Int[Array, "B"], lens: Int[Array, "B"], num_rows: int, fill: float
) -> Float[Array, "T *rest"]:
    """Packs dense blocks to rows, the inverse of ``to_blocks``; padding rows are ``fill``."""
    offset = jnp.arange(block.shape[1], dtype=jnp.int32)[None]
    target = starts[:, None] + offset
    owned = (starts[:, None] >= 0) & (offset < lens[:, None])
    target = jnp.where(owned & (target >= 0), target, num_rows)  # a negative index would wrap
    rows = jnp.full((num_rows, *block.shape[2:]), fill, block.dtype)
    return rows.at[target].set(block, mode="drop")
