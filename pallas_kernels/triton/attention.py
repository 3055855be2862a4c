# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# (Triton is an extra, which need not be installed where types are checked; its branches on constants are static.)
"""Attention over a paged cache in Triton, for absorbed MLA and for GQA, with any number of query tokens.

Rows are query tokens times the query heads of a set (part or all of the heads of a KV head), packed into row tiles.
MLA is the case with one KV head whose values are the first channels of its keys: a tile of keys is read once.

A persistent grid follows an ``even_list``: each program takes the items of its team, and of each item one set of heads.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike

from mla_attn.pallas_kernels.even_list import ITEM, EvenPlan
from mla_attn.pallas_kernels.triton.call import triton_call, triton_update
from mla_attn.pallas_kernels.triton.combine import merge_splits, merge_splits_aliased
from mla_attn.pallas_kernels.triton.configs import PagedConfig
from mla_attn.pallas_kernels.work_list import COMBINED, TILE

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _of_rows(x, TRANSPOSED: tl.constexpr):
    """Broadcasts a number per row against scores, [rows, keys] or transposed [keys, rows]."""
    return x[None, :] if TRANSPOSED else x[:, None]


@triton.jit
def _of_keys(x, TRANSPOSED: tl.constexpr):
    return x[:, None] if TRANSPOSED else x[None, :]


@triton.jit
def _product(q, k, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of queries [rows, n] and keys [keys, n]: [rows, keys], or transposed."""
    if TRANSPOSED:
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    else:
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    return scores


@triton.jit
def operand(x, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Decodes stored elements to operands, exactly. The bits of float8 are placed into wider numbers.

    This needs no float8 hardware, whose e4m3 is another format on some GPUs.
    """
    if FORMAT == "float8_e4m3fn":
        bits = x.to(tl.uint16)
        # Exponent and mantissa at float16's places are the number times 2**-8, subnormal ones included.
        number = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), number).to(dtype)
    elif FORMAT == "float8_e5m2":  # the first byte of a float16
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32).to(dtype)
    return x


@triton.jit
def _clip(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _keys_before(end, keys, STRIDE: tl.constexpr):
    """Keys at positions before ``end``, counted from the table's first key."""
    end = tl.maximum(end, 0)
    return tl.minimum(end // STRIDE + (end % STRIDE > 0), keys)


@triton.jit
def _locate(table, first, key_of, KEYS: tl.constexpr, PAGE_SIZE: tl.constexpr, TABLE_WIDTH: tl.constexpr):
    """The pages of keys from ``first`` on, as the table has them, and their places in them."""
    if PAGE_SIZE % KEYS == 0:  # all keys are in one page
        page = tl.load(table + tl.minimum(first // PAGE_SIZE, TABLE_WIDTH - 1))
        place = first % PAGE_SIZE + key_of
    else:
        key = first + key_of
        page = tl.load(table + tl.minimum(key // PAGE_SIZE, TABLE_WIDTH - 1))
        place = key % PAGE_SIZE
    return page, place


@triton.jit
def paged_attention_kernel(
    q_ptr, q_rope_ptr, k_ptr, v_ptr, table_ptr, layer_ptr, work_ptr, tree_ptr, begins_ptr, sinks_ptr, factors_ptr,
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, TRANSPOSED: tl.constexpr, STAGES: tl.constexpr,
    TEAM_LANES: tl.constexpr, ITEMS_AT: tl.constexpr, ITEM_FIELDS: tl.constexpr,
    TILE: tl.constexpr, TILE_ROWS: tl.constexpr,
    SETS: tl.constexpr, HEADS: tl.constexpr, HEAD_SETS: tl.constexpr, SHARED_VALUES: tl.constexpr,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, ROPE: tl.constexpr, ROPE_BLOCK: tl.constexpr, ROPE_AT: tl.constexpr,
    VALUES: tl.constexpr, VALUES_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, NUM_PAGES: tl.constexpr, TABLE_WIDTH: tl.constexpr, NUM_LAYERS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, LAYER_STRIDE: tl.constexpr,
    K_PAGE: tl.constexpr, K_TOKEN: tl.constexpr, K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr, V_TOKEN: tl.constexpr, V_HEAD: tl.constexpr, V_FIRST: tl.constexpr, GROUP: tl.constexpr,
    FORMAT: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, KEY_STRIDE: tl.constexpr,
    TREE_KEYS: tl.constexpr, MAX_Q_LEN: tl.constexpr, NUM_TOKENS: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_FACTORS: tl.constexpr,
):  # fmt: skip
    team, lane = tl.program_id(0) // TEAM_LANES, tl.program_id(0) % TEAM_LANES
    first_item, last_item = tl.load(work_ptr + 2 + team), tl.load(work_ptr + 3 + team)
    layer = _clip(tl.load(layer_ptr), 0, NUM_LAYERS - 1).to(tl.int64) * LAYER_STRIDE
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    row, key_of = tl.arange(0, ROWS), tl.arange(0, KEYS)
    dim, value = tl.arange(0, DIM_BLOCK), tl.arange(0, VALUES_BLOCK)
    # In the shuffled layout a token's channels lie in groups far apart, those of a value a group of tokens apart.
    k_channel = dim // GROUP * (PAGE_SIZE * GROUP) + dim % GROUP if GROUP > 0 else dim
    v_channel = value * GROUP if GROUP > 0 else value
    for item in range(first_item, last_item):
        record = work_ptr + ITEMS_AT + item * ITEM_FIELDS
        request, token, nth, rows = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
        tile, tiles, partial, keys = tl.load(record + 4), tl.load(record + 5), tl.load(record + 6), tl.load(record + 7)
        position, of_team = tl.load(record + 8), tl.load(record + 9)
        head_set = of_team * TEAM_LANES + lane
        live = row < rows
        token = token + row // HEADS
        packed = (token.to(tl.int64) * SETS + head_set) * HEADS + row % HEADS

        # The keys [begin, end) that a row may see, by their numbers in the page table.
        at = position + nth + row // HEADS
        end = _keys_before(at + 1, keys, KEY_STRIDE) if CAUSAL else keys + 0 * row
        end = tl.where(live, end, 0)
        if TREE_KEYS > 0 and WINDOW > 0:
            begin = tl.load(begins_ptr + token, mask=live, other=0x7FFFFFFF)
            low = tl.minimum(tl.min(begin, 0), _keys_before(position + MAX_Q_LEN - TREE_KEYS, keys, KEY_STRIDE))
        elif WINDOW > 0:
            begin = tl.where(live, _keys_before(tl.maximum(at, 0) - WINDOW + 1, keys, KEY_STRIDE), 0x7FFFFFFF)
            low = tl.min(begin, 0)
        else:
            begin = 0 * row
            low = 0
        high = tl.max(end, 0)
        # Keys in [all_begin, all_end) are seen by all rows that exist.
        all_begin, all_end = 0, tl.min(tl.where(live, end, 0x7FFFFFFF), 0)
        if WINDOW > 0:
            all_begin = tl.max(tl.where(live, begin, 0), 0)
        if TREE_KEYS > 0:
            all_end = tl.minimum(all_end, tl.maximum(position + MAX_Q_LEN - TREE_KEYS, 0) // KEY_STRIDE)

        q = tl.load(q_ptr + packed[:, None] * DIM + dim[None, :], mask=live[:, None] & (dim < DIM)[None, :], other=0.0)
        if ROPE > 0:
            rope = tl.arange(0, ROPE_BLOCK)
            of_rope = live[:, None] & (rope < ROPE)[None, :]
            q_rope = tl.load(q_rope_ptr + packed[:, None] * ROPE + rope[None, :], mask=of_rope, other=0.0)
        factor = 2 * _LOG2E * SCALE / SOFT_CAP if SOFT_CAP > 0 else _LOG2E * SCALE
        if HAS_FACTORS:
            factor = _of_rows(factor * tl.load(factors_ptr + packed, mask=live, other=0.0), TRANSPOSED)

        most = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if TRANSPOSED:
            acc = tl.zeros([VALUES_BLOCK, ROWS], tl.float32)
        else:
            acc = tl.zeros([ROWS, VALUES_BLOCK], tl.float32)
        head = (head_set // HEAD_SETS).to(tl.int64)
        table = table_ptr + request.to(tl.int64) * TABLE_WIDTH
        start = tl.maximum(tile, low // TILE) * TILE
        stop = tl.minimum((tile + tiles) * TILE, high)
        # The page of a step is read a step ahead: otherwise keys would wait for it, and have a stage less.
        page, place = _locate(table, start, key_of, KEYS, PAGE_SIZE, TABLE_WIDTH)
        for first in tl.range(start, stop, KEYS, num_stages=STAGES):
            key = first + key_of
            read = (key >= low) & (key < high)
            physical = _clip(page, 0, NUM_PAGES - 1).to(tl.int64) * PAGE_STRIDE + layer
            k_row = k_ptr + physical * K_PAGE + head * K_HEAD + place * K_TOKEN
            k = tl.load(k_row[:, None] + k_channel[None, :], mask=read[:, None] & (dim < DIM)[None, :], other=0)
            k = operand(k, FORMAT, dtype)
            if not SHARED_VALUES:
                v_place = place // GROUP * V_TOKEN + place % GROUP if GROUP > 0 else place * V_TOKEN + V_FIRST
                v_row = v_ptr + physical * V_PAGE + head * V_HEAD + v_place
                v = tl.load(
                    v_row[:, None] + v_channel[None, :], mask=read[:, None] & (value < VALUES)[None, :], other=0
                )
                v = operand(v, FORMAT, dtype)
            if ROPE > 0:
                read_rope = read[:, None] & (rope < ROPE)[None, :]
                k_rope = tl.load(k_row[:, None] + ROPE_AT + rope[None, :], mask=read_rope, other=0)
                k_rope = operand(k_rope, FORMAT, dtype)
            page, place = _locate(table, first + KEYS, key_of, KEYS, PAGE_SIZE, TABLE_WIDTH)
            # Scaled before they are added: a product added to another would be one with two steps for Triton.
            scores = _product(q, k, TRANSPOSED, PRECISION) * factor
            if ROPE > 0:
                scores += _product(q_rope, k_rope, TRANSPOSED, PRECISION) * factor
            if SHARED_VALUES:
                v = k
            if SOFT_CAP > 0:
                scores = (SOFT_CAP * _LOG2E) * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
            # Besides being faster, the branch hides from Triton that one product follows the other: it would have all
            # warps share the rows of the scores, and those that rows do not suffice for compute the same.
            if (first < all_begin) | (first + KEYS > all_end):
                columns = _of_keys(key, TRANSPOSED)
                seen = columns < _of_rows(end, TRANSPOSED)
                if TREE_KEYS > 0:
                    column = columns * KEY_STRIDE - position + (TREE_KEYS - MAX_Q_LEN)
                    inside = seen & (column >= 0) & (column < TREE_KEYS)
                    word = tl.zeros([KEYS, ROWS] if TRANSPOSED else [ROWS, KEYS], tl.int32)
                    for number in tl.static_range((TREE_KEYS + 31) // 32):
                        of_rows = tl.load(tree_ptr + number * NUM_TOKENS + token, mask=live, other=0)
                        word = tl.where(column // 32 == number, _of_rows(of_rows, TRANSPOSED), word)
                    bit = ((word >> (column % 32)) & 1) != 0
                    before = column < 0
                    if WINDOW > 0:
                        before = before & (columns >= _of_rows(begin, TRANSPOSED))
                    seen = seen & (before | (inside & bit))
                elif WINDOW > 0:
                    seen = seen & (columns >= _of_rows(begin, TRANSPOSED))
                scores = tl.where(seen, scores, float("-inf"))
            largest = tl.maximum(most, tl.max(scores, 0 if TRANSPOSED else 1))
            shift = tl.where(largest == float("-inf"), 0.0, largest)
            weights = tl.exp2(scores - _of_rows(shift, TRANSPOSED))
            kept = tl.exp2(most - shift)
            total = total * kept + tl.sum(weights, 0 if TRANSPOSED else 1)
            acc = acc * _of_rows(kept, TRANSPOSED)
            if TRANSPOSED:
                acc = tl.dot(tl.trans(v), weights.to(dtype), acc, input_precision=PRECISION)
            else:
                acc = tl.dot(weights.to(dtype), v, acc, input_precision=PRECISION)
            most = largest

        filled = total != 0.0  # true for NaN, which must be kept
        divisor = tl.where(filled, total, 1.0)
        out = tl.where(_of_rows(filled, TRANSPOSED), acc / _of_rows(divisor, TRANSPOSED), 0.0)
        lse = tl.where(filled, tl.where(most == float("-inf"), 0.0, most) + tl.log2(divisor), float("-inf"))
        values = _of_keys(value, TRANSPOSED)
        held = _of_rows(live, TRANSPOSED) & (values < VALUES)
        if partial < 0:
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + head_set * HEADS + row % HEADS) * _LOG2E
                share = 1.0 / (1.0 + tl.exp2(sink - lse))
                out = tl.where(_of_rows(lse == float("-inf"), TRANSPOSED), 0.0, out * _of_rows(share, TRANSPOSED))
            tl.store(
                out_ptr + _of_rows(packed, TRANSPOSED) * VALUES + values, out.to(out_ptr.dtype.element_ty), mask=held
            )
            tl.store(lse_ptr + packed, lse / _LOG2E, mask=live)
        else:
            stored = (partial.to(tl.int64) * TEAM_LANES + lane) * TILE_ROWS + row
            tl.store(partial_ptr + _of_rows(stored, TRANSPOSED) * VALUES + values, out, mask=held)
            tl.store(partial_lse_ptr + stored, lse, mask=live)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Where the keys, or the values, of a head and a token lie in an array of a cache, in elements.

    Attributes:
        page: from a physical page to the next.
        token: from a token to the next; of shuffled values from a group of tokens to the next.
        head: from a KV head to the next.
        first: of a token's first element.
    """

    page: int
    token: int
    head: int = 0
    first: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Static facts of a call.

    Attributes:
        scale: softmax scale.
        dim: channels of a key's first part.
        rope: channels of its second part, for MLA; 0 for none.
        rope_at: element at which the second part begins, counted from the first.
        values: channels of a value.
        k_part: where keys lie.
        v_part: where values lie; None if they are the first channels of the keys.
        group: elements that lie together in the shuffled layout; 0 for the others.
        head_sets: sets of query heads that read the same KV head.
        format: name of the row format.
        page_size, num_pages, num_layers, page_stride, layer_stride: as in ``Placement``.
        max_q_len: most query tokens of a request.
        causal: whether rows see keys up to their own position only.
        window: keys that a row may see, itself included; None for all.
        soft_cap: scores become ``cap * tanh(score / cap)``; None for no cap.
        kv_stride: positions from one key index to the next.
        tree_keys: columns of the tree mask; 0 for none.
    """

    scale: float
    dim: int
    rope: int = 0
    rope_at: int = 0
    values: int
    k_part: Part
    v_part: Part | None
    group: int = 0
    head_sets: int
    format: str
    page_size: int
    num_pages: int
    num_layers: int
    page_stride: int
    layer_stride: int
    max_q_len: int
    causal: bool
    window: int | None
    soft_cap: float | None
    kv_stride: int
    tree_keys: int


def paged_attention(
    q: jax.Array,
    q_rope: jax.Array | None,
    k: jax.Array,
    v: jax.Array | None,
    page_table: jax.Array,
    layer: jax.Array,
    work: jax.Array,
    tree: jax.Array | None,
    begins: jax.Array | None,
    sinks: jax.Array | None,
    factors: jax.Array | None,
    *,
    call: Call,
    plan: EvenPlan,
    config: PagedConfig,
    out_dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """Attends over a paged cache and merges KV splits: ``(out [N, values], lse float32 [N])`` of the N packed rows.

    Args:
        q: first parts of the queries, [N, dim], row ``(token * sets + set) * heads + head`` of ``plan``; products are
            in its dtype.
        q_rope: second parts, [N, rope]; None for none.
        k: array of the keys, of pages.
        v: array of the values; None if they are in ``k``.
        page_table: int32 [B, W].
        layer: int32 [1].
        work: the ``even_list`` of ``plan``.
        tree: words of the tree mask, int32 [words, T], from ``tree_words``.
        begins: with a tree and a window, the number of each token's first key in its window, int32 [T].
        sinks: float32 [heads of all sets].
        factors: float32 [N], by which the scores of a row are multiplied in addition.
        call, plan, config: static facts and sizes.
        out_dtype: dtype of ``out``.
    """
    absent = work  # a pointer that the kernel does not read
    given = [q_rope, k, v, page_table, layer, work, tree, begins, sinks, factors]
    arrays = [q, *(absent if x is None else x for x in given)]
    rows, values, f32 = q.shape[0], call.values, jnp.float32
    partials = max(plan.num_partials, 1) * plan.lanes * plan.tile_rows
    shapes = (((rows, values), out_dtype), ((rows,), f32), ((partials, values), f32), ((partials,), f32))
    outs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    shared = {"TEAM_LANES": plan.lanes, "TILE_ROWS": plan.tile_rows, "SETS": plan.kv_heads, "HEADS": plan.heads}
    shared |= {"VALUES": values, "VALUES_BLOCK": block(values), "HAS_SINKS": sinks is not None}
    launch = {"warps": config.warps, "stages": config.stages, "target": config.target}
    constants = {**shared, **_constants(call, plan, config), "TABLE_WIDTH": page_table.shape[1]}
    constants |= {"NUM_TOKENS": plan.num_tokens, "HAS_FACTORS": factors is not None}
    name = "triton_paged_attention"
    grid = (plan.blocks,)
    out, lse, *partial = triton_call(
        paged_attention_kernel, arrays, outs, name=name, grid=grid, **launch, constants=constants
    )
    if plan.num_combined == 0:
        return out, lse
    grid = (plan.num_combined, plan.lanes * plan.tile_rows)
    constants = {**shared, "SPLITS": 16, "COMBINED_AT": plan.combined_at, "COMBINED_FIELDS": len(COMBINED)}
    arrays = [work, *partial, absent if sinks is None else sinks]
    out, lse = triton_update(
        (merge_splits, merge_splits_aliased), arrays, (out, lse), name="triton_merge_splits", grid=grid,
        warps=4 if values > 128 else 1, stages=1, target=config.target, constants=constants,
    )  # fmt: skip
    return out, lse


def block(channels: int) -> int:
    """The channels of a block in registers: a power of 2, at least the 16 of a product."""
    return max(16, 1 << (channels - 1).bit_length())


def _constants(call: Call, plan: EvenPlan, config: PagedConfig) -> dict:
    v = Part(page=0, token=0) if call.v_part is None else call.v_part
    return {
        "ROWS": config.rows, "KEYS": config.keys, "TRANSPOSED": config.transposed, "STAGES": config.stages,
        "ITEMS_AT": plan.items_at, "ITEM_FIELDS": len(ITEM), "TILE": TILE,
        "HEAD_SETS": call.head_sets, "SHARED_VALUES": call.v_part is None,
        "DIM": call.dim, "DIM_BLOCK": block(call.dim),
        "ROPE": call.rope, "ROPE_BLOCK": block(call.rope) if call.rope else 16, "ROPE_AT": call.rope_at,
        "PAGE_SIZE": call.page_size, "NUM_PAGES": call.num_pages, "NUM_LAYERS": call.num_layers,
        "PAGE_STRIDE": call.page_stride, "LAYER_STRIDE": call.layer_stride,
        "K_PAGE": call.k_part.page, "K_TOKEN": call.k_part.token, "K_HEAD": call.k_part.head,
        "V_PAGE": v.page, "V_TOKEN": v.token, "V_HEAD": v.head, "V_FIRST": v.first,
        "GROUP": call.group,
        "FORMAT": call.format, "PRECISION": "ieee", "SCALE": call.scale, "SOFT_CAP": call.soft_cap or 0.0,
        "CAUSAL": call.causal, "WINDOW": call.window or 0, "KEY_STRIDE": call.kv_stride,
        "TREE_KEYS": call.tree_keys, "MAX_Q_LEN": call.max_q_len,
    }  # fmt: skip
