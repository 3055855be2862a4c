# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (Triton is an extra, which need not be installed where types are checked.)
"""The merge of the partial results of row tiles that were divided into KV splits, in the order of their keys."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def merge_splits(
    work_ptr, partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr,
    SPLITS: tl.constexpr, VALUES: tl.constexpr, VALUES_BLOCK: tl.constexpr,
    TEAM_LANES: tl.constexpr, COMBINED_AT: tl.constexpr, COMBINED_FIELDS: tl.constexpr, TILE_ROWS: tl.constexpr,
    SETS: tl.constexpr, HEADS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merges one row of one set of heads of one row tile, ``SPLITS`` partial results at a time."""
    lane, row = tl.program_id(1) // TILE_ROWS, tl.program_id(1) % TILE_ROWS
    record = work_ptr + COMBINED_AT + tl.program_id(0) * COMBINED_FIELDS
    exists = tl.program_id(0) < tl.load(work_ptr + 1)
    if exists & (row < tl.load(record + 3)):
        first_row, partial, splits = tl.load(record), tl.load(record + 1), tl.load(record + 2)
        value = tl.arange(0, VALUES_BLOCK)
        most, total = float("-inf"), 0.0
        acc = tl.zeros([VALUES_BLOCK], tl.float32)
        for first in range(0, splits, SPLITS):
            split = first + tl.arange(0, SPLITS)
            place = ((partial + split).to(tl.int64) * TEAM_LANES + lane) * TILE_ROWS + row
            lse = tl.load(partial_lse_ptr + place, mask=split < splits, other=float("-inf"))
            held = (split < splits)[:, None] & (value < VALUES)[None, :]
            part = tl.load(partial_ptr + place[:, None] * VALUES + value[None, :], mask=held, other=0.0)
            largest = tl.maximum(most, tl.max(lse, 0))
            shift = tl.where(largest == float("-inf"), 0.0, largest)
            weight, kept = tl.exp2(lse - shift), tl.exp2(most - shift)
            total = total * kept + tl.sum(weight, 0)
            acc = acc * kept + tl.sum(part * weight[:, None], 0)
            most = largest
        filled = total != 0.0  # true for NaN, which must be kept
        divisor = tl.where(filled, total, 1.0)
        out = tl.where(filled, acc / divisor, 0.0)
        lse = tl.where(filled, tl.where(most == float("-inf"), 0.0, most) + tl.log2(divisor), float("-inf"))
        # The record's row is that of the row tile's first token and the first head of its first set.
        packed = first_row.to(tl.int64) + (row // HEADS) * (SETS * HEADS) + lane * HEADS + row % HEADS
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + packed % (SETS * HEADS)) * _LOG2E
            out = tl.where(lse == float("-inf"), 0.0, out / (1.0 + tl.exp2(sink - lse)))
        tl.store(out_ptr + packed * VALUES + value, out.to(out_ptr.dtype.element_ty), mask=value < VALUES)
        tl.store(lse_ptr + packed, lse / _LOG2E)


@triton.jit
def merge_splits_aliased(
    work_ptr, partial_ptr, partial_lse_ptr, sinks_ptr, given_out_ptr, given_lse_ptr, out_ptr, lse_ptr,
    SPLITS: tl.constexpr, VALUES: tl.constexpr, VALUES_BLOCK: tl.constexpr,
    TEAM_LANES: tl.constexpr, COMBINED_AT: tl.constexpr, COMBINED_FIELDS: tl.constexpr, TILE_ROWS: tl.constexpr,
    SETS: tl.constexpr, HEADS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """``merge_splits`` for callers that pass what is updated in place twice, as an input and as an output."""
    merge_splits(
        work_ptr, partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr,
        SPLITS, VALUES, VALUES_BLOCK, TEAM_LANES, COMBINED_AT, COMBINED_FIELDS, TILE_ROWS, SETS, HEADS, HAS_SINKS,
    )  # fmt: skip
