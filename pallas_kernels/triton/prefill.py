# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
"""Attention of packed queries over packed, unpaged keys and values in Triton: prompts and chunks of cached prefixes.

A program computes one head of one tile of query tokens. The tiles stand in a list, those with most keys first.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike

from mla_attn.pallas_kernels.triton.attention import block, operand
from mla_attn.pallas_kernels.triton.call import triton_call
from mla_attn.pallas_kernels.triton.prefill_configs import PrefillConfig
from mla_attn.pallas_kernels.triton.prefill_list import RECORD

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, tiles_ptr, sinks_ptr, factor_ptr, out_ptr, lse_ptr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, FIELDS: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, NUM_KEYS: tl.constexpr,
    DIM: tl.constexpr, FIRST: tl.constexpr, FIRST_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    VALUES: tl.constexpr, VALUES_BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_FACTOR: tl.constexpr,
):  # fmt: skip
    """The channels of keys are divided in two: the ``FIRST``, and the rest, so that neither block has much padding."""
    head = tl.program_id(0)
    record = tiles_ptr + tl.program_id(1) * FIELDS
    token, rows, first_key = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    keys, position = tl.load(record + 3), tl.load(record + 4)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    row, key_of, value = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, VALUES_BLOCK)
    first, rest = tl.arange(0, FIRST_BLOCK), tl.arange(0, REST_BLOCK)
    live = row < rows
    packed = (token + row).to(tl.int64) * HEADS + head

    # The keys [begin, end) that a row may see, and those [all_begin, all_end) that all rows see.
    at = position + row
    end = tl.minimum(tl.maximum(at + 1, 0), keys) if CAUSAL else keys + 0 * row
    end = tl.where(live, end, 0)
    high, all_end = tl.max(end, 0), tl.min(tl.where(live, end, 0x7FFFFFFF), 0)
    begin, low, all_begin = 0 * row, 0, 0
    if WINDOW > 0:
        begin = tl.maximum(tl.maximum(at, 0) - WINDOW + 1, 0)
        low, all_begin = tl.min(begin, 0), tl.max(tl.where(live, begin, 0), 0)

    q = tl.load(
        q_ptr + packed[:, None] * DIM + first[None, :], mask=live[:, None] & (first < FIRST)[None, :], other=0.0
    )
    if FIRST < DIM:
        in_rest = FIRST + rest < DIM
        q_rest = tl.load(
            q_ptr + packed[:, None] * DIM + FIRST + rest[None, :], mask=live[:, None] & in_rest[None, :], other=0.0
        )
    factor = 2 * _LOG2E * SCALE / SOFT_CAP if SOFT_CAP > 0 else _LOG2E * SCALE
    if HAS_FACTOR:
        factor = factor * tl.load(factor_ptr)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUES_BLOCK], tl.float32)
    kv_head = head * KV_HEADS // HEADS
    for start in tl.range(low // KEYS * KEYS, high, KEYS, num_stages=STAGES):
        key = start + key_of
        place = first_key + key
        read = (key >= low) & (key < high) & (place >= 0) & (place < NUM_KEYS)
        k_row = k_ptr + (place.to(tl.int64) * KV_HEADS + kv_head) * DIM
        k = tl.load(k_row[:, None] + first[None, :], mask=read[:, None] & (first < FIRST)[None, :], other=0)
        k = operand(k, FORMAT, dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
        if FIRST < DIM:
            k_rest = tl.load(k_row[:, None] + FIRST + rest[None, :], mask=read[:, None] & in_rest[None, :], other=0)
            k_rest = operand(k_rest, FORMAT, dtype)
            scores += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee") * factor
        v_row = v_ptr + (place.to(tl.int64) * KV_HEADS + kv_head) * VALUES
        v = tl.load(v_row[:, None] + value[None, :], mask=read[:, None] & (value < VALUES)[None, :], other=0)
        v = operand(v, FORMAT, dtype)
        if SOFT_CAP > 0:
            scores = (SOFT_CAP * _LOG2E) * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
        if (start < all_begin) | (start + KEYS > all_end):
            seen = key[None, :] < end[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] >= begin[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        largest = tl.maximum(most, tl.max(scores, 1))
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp2(scores - shift[:, None])
        kept = tl.exp2(most - shift)
        total = total * kept + tl.sum(weights, 1)
        acc = tl.dot(weights.to(dtype), v, acc * kept[:, None], input_precision="ieee")
        most = largest

    filled = total != 0.0  # true for NaN, which must be kept
    divisor = tl.where(filled, total, 1.0)
    out = tl.where(filled[:, None], acc / divisor[:, None], 0.0)
    lse = tl.where(filled, tl.where(most == float("-inf"), 0.0, most) + tl.log2(divisor), float("-inf"))
    if HAS_SINKS:
        share = 1.0 / (1.0 + tl.exp2(tl.load(sinks_ptr + head) * _LOG2E - lse))
        out = tl.where((lse == float("-inf"))[:, None], 0.0, out * share[:, None])
    held = live[:, None] & (value < VALUES)[None, :]
    tl.store(out_ptr + packed[:, None] * VALUES + value[None, :], out.to(out_ptr.dtype.element_ty), mask=held)
    tl.store(lse_ptr + packed, lse / _LOG2E, mask=live)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillCall:
    """Static facts of a call: softmax scale, format of keys and values, and which keys rows see."""

    scale: float
    format: str
    causal: bool
    window: int | None
    soft_cap: float | None


def prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: jax.Array,
    sinks: jax.Array | None,
    factor: jax.Array | None,
    *,
    call: PrefillCall,
    config: PrefillConfig,
    out_dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """Attends to packed keys: ``(out [T, H, V], lse float32 [T, H])``.

    Args:
        q: queries [T, H, D]; products are in their dtype.
        k: keys [Tk, K, D], of the queries' dtype, or bytes of float8 numbers.
        v: values [Tk, K, V], likewise.
        tiles: the list of tiles, int32 [n, RECORD], from ``prefill_list``.
        sinks: float32 [H].
        factor: float32 [1], by which scores are multiplied in addition.
        call, config: static facts and sizes.
        out_dtype: dtype of ``out``.
    """
    (tokens, heads, dim), (num_keys, kv_heads, values) = q.shape, v.shape
    first = first_channels(dim)
    constants = {
        "ROWS": config.rows, "KEYS": config.keys, "STAGES": config.stages, "FIELDS": len(RECORD),
        "HEADS": heads, "KV_HEADS": kv_heads, "NUM_KEYS": num_keys,
        "DIM": dim, "FIRST": first, "FIRST_BLOCK": block(first), "REST_BLOCK": block(max(dim - first, 1)),
        "VALUES": values, "VALUES_BLOCK": block(values), "FORMAT": call.format,
        "SCALE": call.scale, "SOFT_CAP": call.soft_cap or 0.0, "CAUSAL": call.causal, "WINDOW": call.window or 0,
        "HAS_SINKS": sinks is not None, "HAS_FACTOR": factor is not None,
    }  # fmt: skip
    outs = [
        jax.ShapeDtypeStruct((tokens, heads, values), out_dtype),
        jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
    ]
    absent = tiles  # a pointer that the kernel does not read
    arrays = [q, k, v, tiles, absent if sinks is None else sinks, absent if factor is None else factor]
    out, lse = triton_call(
        prefill_kernel, arrays, outs, name="triton_prefill", grid=(heads, tiles.shape[0]),
        warps=config.warps, stages=config.stages, target=config.target, constants=constants,
    )  # fmt: skip
    return out, lse


def first_channels(dim: int) -> int:
    """The first part of a key's channels: 128 of 192, all where a power of 2 is hardly more than them."""
    return 128 if 128 < dim <= 192 else dim
