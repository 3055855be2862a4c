"""Blockwise attention with an online softmax (Milakov and Gimelshein, arXiv:1805.02867) in plain JAX.

The work is divided into *tiles* (a few consecutive query rows of one request), and each tile's visible keys into
*blocks*; a pair (tile, block) is one item. Items are numbered tile by tile, so the cost of a tile is proportional to
its visible keys, and the cost of a batch to the sum over its requests, whatever the table's width.

A fixed number of *lanes* processes the items in parallel, each a contiguous range of equal length. Lane i keeps the
running maximum, sum and output of tile n in state row ``n + i``. From one (tile, lane) pair to the next along the
items, i or n increases and neither decreases, so no two pairs share a row. One lane (on a CPU) needs no merging; with
more lanes, the rows of a tile are merged in key order at the end.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from mla_attn.checks import INT32_MAX
from mla_attn.metadata import row_owners
from mla_attn.varying import vary_together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of tiles and blocks; results are the same up to rounding.

    Attributes:
        tile_rows: target for query rows times heads of a tile. Larger tiles read keys less often in prefill, smaller
            tiles waste less work on missing rows.
        block_keys: target for keys of a block. On a CPU a block should fit in its cache, on a GPU large blocks make few
            iterations.
        lane_rows: rows of all lanes together. The scores of all lanes are stored in float32, ``lane_rows`` times the
            keys of a block.
        max_lanes: most items computed in parallel. A GPU needs many to be busy.
    """

    tile_rows: int = 256
    block_keys: int
    lane_rows: int = 16384
    max_lanes: int


CPU, PARALLEL = Config(block_keys=512, max_lanes=1), Config(block_keys=1024, max_lanes=256)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static sizes of a call's tiles and blocks."""

    tile: int  # query tokens per tile
    tiles: int  # tiles per request
    block: int  # keys per block
    blocks: int  # blocks that cover the longest possible request
    lanes: int


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows and lengths of the call; fields as in ``AttentionMetadata``."""

    q_starts: Int[Array, "B"]
    q_lens: Int[Array, "B"]
    kv_lens: Int[Array, "B"]
    kv_offsets: Int[Array, "B"]
    kv_stride: int
    positions: Any = None  # int32 [T], for trees with a window
    phases: Any = None  # int32 [B], offset of each table's first key in its block; None for 0


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules for visible keys and for scores."""

    scale: float
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    tree_mask: Bool[Array, "B S M"] | None = None
    sinks: Float[Array, "H"] | None = None
    skip_threshold: float | None = None


# fetch(requests [lanes], first_keys [lanes], seen bool [lanes, n]) -> keys [lanes, n, K, D], values [lanes, n, K, V],
# both zero where not seen, because a weight of 0 times NaN is NaN.
Fetch = Callable[[Array, Array, Array], tuple[Array, Array]]


def by_platform[T](config: Config | None, run: Callable[[Config], T]) -> T:
    """Calls ``run`` with a given config or, if that is None, with that of the platform the program is lowered for."""
    if config is not None:
        return run(config)
    return lax.platform_dependent(cpu=functools.partial(run, CPU), default=functools.partial(run, PARALLEL))


def make_plan(
    config: Config, *, batch: int, max_q_len: int, heads: int, keys: int, block: int, tile: int | None = None
) -> Plan:
    """Computes the sizes from static shapes only.

    Args:
        config: target sizes.
        batch: requests.
        max_q_len: most query tokens of a request.
        heads: query heads.
        keys: most keys of a request.
        block: keys per block.
        tile: query tokens per tile; None for the target of ``config``.
    """
    tile = max(1, min(max_q_len, config.tile_rows // heads)) if tile is None else tile
    tiles, blocks = -(-max_q_len // tile), max(1, -(-keys // block))
    lanes = min(config.max_lanes, max(1, config.lane_rows // (tile * heads)), max(1, batch * tiles * blocks))
    return Plan(tile, tiles, block, blocks, lanes)


def score_factors(shape: tuple[int, ...], *scales):
    """The factors of the scores of queries [T, H, ...]: the product of scales [], [H] or [T, H], each of which may be
    None; None if all are."""
    given = [scale for scale in scales if scale is not None]
    if not given:
        return None
    rows = (jnp.broadcast_to(scale, shape[:2]) for scale in given)
    return functools.reduce(jnp.multiply, rows)


def blockwise_attention(
    q: Float[Array, "T H D"],
    fetch: Fetch,
    values: tuple[int, int],
    batch: Batch,
    plan: Plan,
    rules: Rules,
    factors: Float[Array, "T H"] | None = None,
) -> tuple[Float[Array, "T H V"], Float[Array, "T H"]]:
    """Attention of packed query rows over keys from ``fetch``, which reads one block per lane; ``values`` is (K, V).

    ``factors`` multiply the scores of each row and head, in addition to the scale of ``rules``: the scales of operands,
    which leave the products exact.

    Returns float32 ``out`` and natural-log ``lse``; rows without visible keys and padding rows give 0 and -inf.
    """
    requests = batch.q_starts.shape[0]
    rows, heads, _ = q.shape
    kv_heads, v_dim = values
    if rows == 0 or requests == 0:
        return jnp.zeros((rows, heads, v_dim), jnp.float32), jnp.full((rows, heads), -jnp.inf, jnp.float32)

    first, count = _block_ranges(batch, plan, rules)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    share = -(-ends[-1] // plan.lanes)
    lanes = jnp.arange(plan.lanes, dtype=jnp.int32)
    group = heads // kv_heads
    shape = (requests * plan.tiles + plan.lanes - 1, kv_heads, plan.tile * group)

    def step(i, state):
        item = lanes * share + i
        alive = item < ends[-1]
        tile = jnp.where(alive, jnp.searchsorted(ends, item, side="right").astype(jnp.int32), count.shape[0] - 1)
        block = first[tile] + item - (ends[tile] - count[tile])
        request, start = tile // plan.tiles, tile % plan.tiles * plan.tile
        visible = _visible(batch, plan, rules, request, start, block) & alive[:, None, None]
        k, v = fetch(request, _first_key(batch, plan, request, block), visible.any(axis=1))
        q_rows = (batch.q_starts[request] + start)[:, None] + jnp.arange(plan.tile, dtype=jnp.int32)[None]
        q_rows = jnp.clip(q_rows, 0, rows - 1)

        def of_tile(x):  # [T, H, n] to [lanes, K, rows, n]
            x = x[q_rows].reshape(plan.lanes, plan.tile, kv_heads, group, -1)
            return x.swapaxes(1, 2).reshape(plan.lanes, kv_heads, plan.tile * group, -1)

        index, scale = tile + lanes, rules.scale
        if factors is not None:
            scale *= of_tile(factors[..., None])
        least = None if rules.skip_threshold is None else _least_ratio(rules.skip_threshold, batch.kv_lens[request])
        return _put(state, index, _update(_take(state, index), of_tile(q), k, v, visible, rules, scale, least))

    f32 = jnp.float32
    state = (jnp.full(shape, -jnp.inf, f32), jnp.zeros(shape, f32), jnp.zeros((*shape, v_dim), f32))
    state = lax.fori_loop(0, share, step, vary_together(state, like=q))
    m, l, acc = _merge_lanes(state, count, ends, share, plan.lanes)
    filled = l != 0  # true for NaN, which must be kept
    out = jnp.where(filled[..., None], acc / jnp.where(filled, l, 1.0)[..., None], 0.0)
    lse = jnp.where(filled, m + jnp.log(jnp.where(filled, l, 1.0)), -jnp.inf)
    out, lse = _to_rows(out, lse, batch, plan, rows, group)
    return _with_sinks(out, lse, rules.sinks), lse


def _block_ranges(batch: Batch, plan: Plan, rules: Rules) -> tuple[Int[Array, "tiles"], Int[Array, "tiles"]]:
    """First block and number of blocks of every tile, covering exactly the keys that are visible to its rows."""
    start = jnp.arange(plan.tiles, dtype=jnp.int32)[None] * plan.tile
    q_lens, kv_lens, offsets = (x[:, None] for x in (batch.q_lens, batch.kv_lens, batch.kv_offsets))
    base = kv_lens - q_lens
    stop = jnp.minimum(kv_lens, base + jnp.minimum(start + plan.tile, q_lens)) if rules.causal else kv_lens
    # Not base + start - window, which could wrap for a window of 2**31 - 1 and a negative position.
    begin = jnp.zeros_like(stop) if rules.window is None else jnp.maximum(base + start, 0) - rules.window + 1
    if rules.window is not None and rules.tree_mask is not None:
        _, width, columns = rules.tree_mask.shape
        rows = start[:, :, None] + jnp.arange(plan.tile, dtype=jnp.int32)[None, None]
        at = _positions(batch, jnp.arange(q_lens.shape[0])[:, None, None], rows)
        at = jnp.where(rows < q_lens[:, :, None], at, INT32_MAX).min(axis=2)
        begin = jnp.minimum(at - rules.window + 1, base - (columns - width))

    def key_index(position):  # table index of the first key at or after `position`
        distance = jnp.maximum(position, offsets) - offsets
        distance = jnp.where(distance < 0, INT32_MAX, distance)  # it wrapped, with a negative offset
        index = -(-distance // batch.kv_stride)
        if batch.phases is None:
            return index
        phase = batch.phases[:, None]
        return jnp.where(index > 0, jnp.minimum(index, INT32_MAX - phase) + phase, 0)

    first = jnp.minimum(key_index(begin) // plan.block, plan.blocks)
    stop_block = jnp.minimum(-(-key_index(stop) // plan.block), plan.blocks)
    count = jnp.where(start < q_lens, jnp.maximum(stop_block - first, 0), 0)
    return jnp.broadcast_to(first, count.shape).ravel(), count.ravel()


def _visible(batch: Batch, plan: Plan, rules: Rules, request, start, block) -> Bool[Array, "lanes tile n"]:
    """The visible keys of its block for each row of a lane's tile."""
    slots = _first_key(batch, plan, request, block)[:, None] + jnp.arange(plan.block, dtype=jnp.int32)[None]
    p = (batch.kv_offsets[request][:, None] + slots * batch.kv_stride)[:, None, :]
    row = (start[:, None] + jnp.arange(plan.tile, dtype=jnp.int32)[None])[:, :, None]
    kv_len, q_len = (x[request][:, None, None] for x in (batch.kv_lens, batch.q_lens))
    at = kv_len - q_len + row
    visible = (row < q_len) & (p < kv_len)
    if batch.phases is not None:
        visible &= (slots >= 0)[:, None, :]
    if rules.causal:
        visible &= p <= at
    if rules.window is not None and rules.tree_mask is None:
        visible &= p > at - rules.window
    if rules.tree_mask is not None:
        after_prefix = (p - kv_len + q_len)[:, 0, :]
        visible &= _tree_visible(rules.tree_mask, request, row[:, :, 0], after_prefix)
        if rules.window is not None:
            _, width, columns = rules.tree_mask.shape
            in_mask = (after_prefix + columns - width >= 0)[:, None, :]
            visible &= in_mask | (p > _positions(batch, request[:, None, None], row) - rules.window)
    return visible


def _first_key(batch: Batch, plan: Plan, request, block):
    """Table index of a block's first key; negative if the table begins inside the block."""
    first = block * plan.block
    return first if batch.phases is None else first - batch.phases[request]


def _positions(batch: Batch, request, row):
    """Positions of rows, clipped at 0, because a window would wrap below."""
    at = jnp.clip(batch.q_starts[request] + row, 0, batch.positions.shape[0] - 1)
    return jnp.maximum(batch.positions[at], 0)


def _tree_visible(mask, request, row, after_prefix) -> Bool[Array, "lanes tile n"]:
    """Visibility by the tree mask: keys before its first column are visible, others if their bit is set."""
    width, columns = mask.shape[1:]
    column = after_prefix + columns - width
    rows = mask[request[:, None], jnp.minimum(row, width - 1)]
    bits = jnp.take_along_axis(rows, jnp.clip(column, 0, columns - 1)[:, None, :], axis=2)
    return bits | (column < 0)[:, None, :]


def _least_ratio(skip_threshold: float, kv_lens: Int[Array, "lanes"]) -> Float[Array, "lanes"]:
    """The log of the least probability, relative to the row's largest so far, for which a block is added (skip-softmax,
    arXiv:2512.12087): ``skip_threshold / kv_len``; -inf, which every block reaches, where that is 1 or more."""
    ratio = skip_threshold / jnp.maximum(kv_lens, 1).astype(jnp.float32)
    return jnp.where(ratio < 1, jnp.log(ratio), -jnp.inf)


def _update(state, q, k, v, visible, rules: Rules, scale, least=None):
    """One online-softmax step, which adds a block to the running maximum, sum and output of each lane's tile.

    With ``least``, the log of a probability per lane, the rows of a KV head leave the block out if none of its keys
    reaches that for any of them.
    """
    m, l, acc = state
    precision = lax.Precision.HIGHEST if k.dtype == jnp.float32 else None
    scores = scale * jnp.einsum(
        "lkrd,lnkd->lkrn", q.astype(k.dtype), k, precision=precision, preferred_element_type=jnp.float32
    )
    if rules.soft_cap is not None:
        scores = rules.soft_cap * jnp.tanh(scores / rules.soft_cap)
    group = q.shape[2] // visible.shape[1]
    scores = jnp.where(jnp.repeat(visible, group, axis=1)[:, None], scores, -jnp.inf)
    block_m = scores.max(axis=-1)

    def added():
        new_m = jnp.maximum(m, block_m)
        shift = _finite(new_m)
        p, alpha = jnp.exp(scores - shift[..., None]), jnp.exp(m - shift)
        pv = jnp.einsum(
            "lkrn,lnkv->lkrv", p.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32
        )
        return new_m, l * alpha + p.sum(axis=-1), acc * alpha[..., None] + pv

    if least is None:
        return added()
    # Comparisons with NaN are false, so that rows with a NaN score keep it.
    left_out = (jnp.isneginf(block_m) | (block_m < m + least[:, None, None])).all(axis=-1, keepdims=True)

    def selected():
        return tuple(
            jnp.where(left_out[..., None] if old.ndim == 4 else left_out, old, new)
            for old, new in zip(state, added(), strict=True)
        )

    return lax.cond(left_out.all(), lambda: state, selected)


def _finite(m):
    """The running maximum, or 0 if there is no key yet, because -inf - -inf would be NaN."""
    return jnp.where(jnp.isneginf(m), 0.0, m)


def _merge_lanes(state, count, ends, share, lanes: int):
    """Merges the rows of each tile's lanes, ``n + first_lane`` to ``n + last_lane``, in key order."""
    tiles = jnp.arange(count.shape[0], dtype=jnp.int32)
    if lanes == 1:
        return state
    share = jnp.maximum(share, 1)
    first = (ends - count) // share
    parts = jnp.where(count > 0, (ends - 1) // share - first + 1, 0)

    def add(i, merged):
        part = _take(state, jnp.minimum(tiles + first + i, state[0].shape[0] - 1))
        m, l, acc = merged
        # After a tile's last row comes another tile's, which may be NaN even if its weight is 0.
        own = (i < parts)[:, None, None]
        part_m = jnp.where(own, part[0], -jnp.inf)
        part_l, part_acc = jnp.where(own, part[1], 0.0), jnp.where(own[..., None], part[2], 0.0)
        new_m = jnp.maximum(m, part_m)
        shift = _finite(new_m)
        alpha, beta = jnp.exp(m - shift), jnp.exp(part_m - shift)
        return new_m, l * alpha + part_l * beta, acc * alpha[..., None] + part_acc * beta[..., None]

    empty = tuple(
        jnp.full((count.shape[0], *x.shape[1:]), fill, x.dtype) for x, fill in zip(state, (-jnp.inf, 0, 0), strict=True)
    )
    return lax.fori_loop(0, parts.max(), add, vary_together(empty, like=state))


def _to_rows(out, lse, batch: Batch, plan: Plan, rows: int, group: int):
    """Copies the results of tiles to packed rows."""
    owner, owned = row_owners(batch.q_starts, batch.q_lens, rows)
    offset = jnp.where(owned, jnp.arange(rows, dtype=jnp.int32) - batch.q_starts[owner], 0)
    tile, row = owner * plan.tiles + offset // plan.tile, offset % plan.tile
    kv_heads = out.shape[1]
    out = out.reshape(out.shape[0], kv_heads, plan.tile, group, -1)[tile, :, row]
    lse = lse.reshape(lse.shape[0], kv_heads, plan.tile, group)[tile, :, row]
    out = jnp.where(owned[:, None, None, None], out, 0.0).reshape(rows, kv_heads * group, -1)
    return out, jnp.where(owned[:, None, None], lse, -jnp.inf).reshape(rows, -1)


def _with_sinks(out, lse, sinks):
    """Adds ``exp(sink)`` to each head's denominator: out times ``exp(lse) / (exp(lse) + exp(sink))``."""
    if sinks is None:
        return out
    share = jax.nn.sigmoid(lse - sinks.astype(jnp.float32)[None])
    return jnp.where(jnp.isneginf(lse)[..., None], 0.0, out * share[..., None])


def _take(arrays, index):
    if index.shape[0] == 1:  # a slice copies memory at once; XLA's gather on a CPU goes element by element
        return tuple(lax.dynamic_index_in_dim(a, index[0]) for a in arrays)
    return tuple(a.at[index].get(unique_indices=True, mode="promise_in_bounds") for a in arrays)


def _put(arrays, index, values):
    if index.shape[0] == 1:
        return tuple(lax.dynamic_update_slice_in_dim(a, b, index[0], 0) for a, b in zip(arrays, values, strict=True))
    return tuple(
        a.at[index].set(b, unique_indices=True, mode="promise_in_bounds") for a, b in zip(arrays, values, strict=True)
    )
