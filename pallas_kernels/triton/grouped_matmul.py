# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (Triton is an extra, which need not be installed where types are checked.)
"""The grouped matrix product in Triton: rows of each group times the group's own matrix (the experts of a layer).

A program computes an output tile: a tile of rows (see ``tile_list``) times ``block_n`` columns of its group's matrix.
The grid is that of the most tiles that any sizes need; programs past those that there are end at once. Programs of
neighbouring columns share their rows, those of neighbouring tiles mostly their matrix, which caches hold.

With few rows memory is the bound: every matrix whose group has rows is read once, and no other.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Float32, Int32

from mla_attn.pallas_kernels.tile_list import HEADER, RECORD, most_tiles
from mla_attn.pallas_kernels.triton.call import triton_call
from mla_attn.pallas_kernels.triton.grouped_configs import GroupedConfig

ALIGNED = 1  # tiles begin at any row, that is, with the first one of their group's


@triton.jit
def grouped_matmul_kernel(
    rows_ptr, weights_ptr, tiles_ptr, out_ptr,
    TILE_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    HEADER: tl.constexpr, RECORD: tl.constexpr, PARTS: tl.constexpr,
    GROUPS: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    if tile < tl.load(tiles_ptr):
        record = tiles_ptr + HEADER + tile * RECORD
        group, begin, end = tl.load(record), tl.load(record + 2), tl.load(record + 3)
        row, column = begin + tl.arange(0, TILE_ROWS), part * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        own, inside = row < end, column < WIDTH
        row = row.to(tl.int64)
        x_ptr = rows_ptr + row[:, None] * DEPTH + depth[None, :]
        w_ptr = weights_ptr + group.to(tl.int64) * DEPTH * WIDTH + depth[:, None] * WIDTH + column[None, :]
        acc = tl.zeros([TILE_ROWS, BLOCK_N], tl.float32)
        steps = tl.where(group < GROUPS, DEPTH, 0)  # rows after the last group are in none
        for k in tl.range(0, steps, BLOCK_K, num_stages=STAGES):
            if DEPTH % BLOCK_K == 0:
                x = tl.load(x_ptr, mask=own[:, None], other=0.0)
                w = tl.load(w_ptr, mask=inside[None, :], other=0.0)
            else:
                left = depth < DEPTH - k
                x = tl.load(x_ptr, mask=own[:, None] & left[None, :], other=0.0)
                w = tl.load(w_ptr, mask=left[:, None] & inside[None, :], other=0.0)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
            x_ptr += BLOCK_K
            w_ptr += BLOCK_K * WIDTH
        tl.store(out_ptr + row[:, None] * WIDTH + column[None, :], acc, mask=own[:, None] & inside[None, :])


def constants_of(config: GroupedConfig, shape: tuple[int, ...]) -> dict:
    """The kernel's constants for weights of this shape, [E, K, N]."""
    groups, depth, width = shape
    return {
        "TILE_ROWS": config.tile_rows,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.stages,
        "HEADER": HEADER,
        "RECORD": len(RECORD),
        "PARTS": -(-width // config.block_n),
        "GROUPS": groups,
        "DEPTH": depth,
        "WIDTH": width,
        "PRECISION": "ieee",  # float32 is not rounded to TF32; 16 bits are exact in any
    }


def grouped_matmul(
    rows: Float[Array, "M K"],
    weights: Float[Array, "E K N"],
    tiles: Int32[Array, "numbers"],
    *,
    config: GroupedConfig,
) -> Float32[Array, "M N"]:
    """Computes ``rows[i] @ weights[e]`` for each row i of group e; zeros for rows of no group.

    Args:
        rows: bfloat16, float16 or float32 rows sorted by group; M is at least 1.
        weights: a matrix for each group, in the dtype of ``rows``.
        tiles: the list that ``tile_list`` made for M rows, ``config.tile_rows`` and ``ALIGNED``.
        config: sizes.
    """
    num_rows, constants = rows.shape[0], constants_of(config, weights.shape)
    most = most_tiles(num_rows, weights.shape[0], config.tile_rows, ALIGNED)
    (out,) = triton_call(
        grouped_matmul_kernel,
        (rows, weights, tiles),
        (jax.ShapeDtypeStruct((num_rows, weights.shape[2]), jnp.float32),),
        name="grouped_matmul",
        grid=(most * constants["PARTS"],),
        warps=config.warps,
        stages=config.stages,
        target=config.target,
        constants=constants,
    )
    return out
