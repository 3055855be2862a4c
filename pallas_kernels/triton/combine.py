"""The merge of the partial results of row tiles that were divided into KV splits, in the order of their keys."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def merge_splits(
    work_ptr, partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr,
    ROWS: tl.constexpr, VALUES: tl.constexpr, VALUES_BLOCK: tl.constexpr, STAGES: tl.constexpr,
    TEAM_LANES: tl.constexpr, COMBINED_AT: tl.constexpr, COMBINED_FIELDS: tl.constexpr, TILE_ROWS: tl.constexpr,
    SETS: tl.constexpr, HEADS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merges some rows of one set of heads of one row tile."""
    if tl.program_id(0) < tl.load(work_ptr + 1):
        record = work_ptr + COMBINED_AT + tl.program_id(0) * COMBINED_FIELDS
        first_row, partial, splits, rows = (
            tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3),
        )  # fmt: skip
        lane = tl.program_id(1)
        row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        live = row < rows
        value = tl.arange(0, VALUES_BLOCK)
        held = live[:, None] & (value < VALUES)[None, :]
        most = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, VALUES_BLOCK], tl.float32)
        for split in tl.range(0, splits, num_stages=STAGES):
            place = ((partial + split).to(tl.int64) * TEAM_LANES + lane) * TILE_ROWS + row
            part_lse = tl.load(partial_lse_ptr + place, mask=live, other=float("-inf"))
            part = tl.load(partial_ptr + place[:, None] * VALUES + value[None, :], mask=held, other=0.0)
            largest = tl.maximum(most, part_lse)
            shift = tl.where(largest == float("-inf"), 0.0, largest)
            weight, kept = tl.exp2(part_lse - shift), tl.exp2(most - shift)
            total = total * kept + weight
            acc = acc * kept[:, None] + part * weight[:, None]
            most = largest
        filled = total != 0.0  # true for NaN, which must be kept
        divisor = tl.where(filled, total, 1.0)
        out = tl.where(filled[:, None], acc / divisor[:, None], 0.0)
        lse = tl.where(filled, tl.where(most == float("-inf"), 0.0, most) + tl.log2(divisor), float("-inf"))
        head = lane * HEADS + row % HEADS
        packed = first_row.to(tl.int64) + (row // HEADS) * (SETS * HEADS) + head
        if HAS_SINKS:
            # Heads of the row tile's set: the record's row is that of the set's first head.
            sink = tl.load(sinks_ptr + packed % (SETS * HEADS), mask=live, other=0.0) * _LOG2E
            share = 1.0 / (1.0 + tl.exp2(sink - lse))
            out = tl.where((lse == float("-inf"))[:, None], 0.0, out * share[:, None])
        tl.store(out_ptr + packed[:, None] * VALUES + value[None, :], out.to(out_ptr.dtype.element_ty), mask=held)
        tl.store(lse_ptr + packed, lse / _LOG2E, mask=live)


@triton.jit
def merge_splits_aliased(
    work_ptr, partial_ptr, partial_lse_ptr, sinks_ptr, given_out_ptr, given_lse_ptr, out_ptr, lse_ptr,
    ROWS: tl.constexpr, VALUES: tl.constexpr, VALUES_BLOCK: tl.constexpr, STAGES: tl.constexpr,
    TEAM_LANES: tl.constexpr, COMBINED_AT: tl.constexpr, COMBINED_FIELDS: tl.constexpr, TILE_ROWS: tl.constexpr,
    SETS: tl.constexpr, HEADS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """``merge_splits`` for callers that pass what is updated in place twice, as an input and as an output."""
    merge_splits(
        work_ptr, partial_ptr, partial_lse_ptr, sinks_ptr, out_ptr, lse_ptr,
        ROWS, VALUES, VALUES_BLOCK, STAGES, TEAM_LANES, COMBINED_AT, COMBINED_FIELDS, TILE_ROWS, SETS, HEADS, HAS_SINKS,
    )  # fmt: skip
