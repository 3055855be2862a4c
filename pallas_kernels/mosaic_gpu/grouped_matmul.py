# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false, reportCallIssue=false, reportArgumentType=false
# (JAX exports its MLIR bindings for itself alone, and does not type what inline_mgpu makes of a function.)
"""The grouped matmul kernel: rows of each group times the group's own matrix (the experts of a layer).

For compute capability 9.0.

An output tile is a tile of rows (see ``tile_list``) times ``block_n`` columns of its group's matrix; a thread block
takes every ``blocks``-th. The last warpgroup loads (TMA) into a buffer of ``stages`` stages, each ``BLOCK_K`` wide in
K, and runs ahead into the next output tile; each of the others multiplies 64 rows and keeps the sums in registers.
Neighbouring output tiles share their rows, and neighbouring tiles of rows mostly their matrix: what one thread block
reads others find in the L2.

With few rows memory is the bound: every matrix that has rows is read once. A tile's rows are copied up to the next
power of 2; the rows beyond its own give products that are not written.

Roofline, 64 groups, 2048 x 1408: 369 MB, 83 us at 4.46 TB/s; from some 12000 rows on products take longer.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from mla_attn.pallas_kernels.mosaic_gpu.primitives import TILED, store_rows
from mla_attn.pallas_kernels.tile_list import ALIGNED, HEADER, RECORD, most_tiles

BLOCK_K = 64  # columns of K per stage: 128 bytes of bfloat16, the span of the swizzle
WARPGROUP_ROWS = 64  # rows per warpgroup: M of wgmma is 64
SHARED_BYTES = 225 * 1024  # of a thread block's 227 KiB; the rest is for barriers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tile sizes of a launch; results do not depend on them.

    Attributes:
        tile_rows: rows of a tile, 64 or 128: one warpgroup for every 64.
        block_n: columns of an output tile: 64, 128 or 256.
        stages: stages of the shared-memory buffer; 0 for as many as fit, up to 12.

    Raises:
        ValueError: another number, or a buffer that does not fit.
    """

    tile_rows: int = 64
    block_n: int = 128
    stages: int = 0

    def __post_init__(self):
        if self.tile_rows not in (64, 128):
            raise ValueError(f"tile_rows={self.tile_rows} must be 64 or 128")
        if self.block_n not in (64, 128, 256):
            raise ValueError(f"block_n={self.block_n} must be 64, 128 or 256")
        fit = SHARED_BYTES // (2 * BLOCK_K * (self.tile_rows + self.block_n))
        if self.stages == 0:
            object.__setattr__(self, "stages", min(fit, 12))
        if not 2 <= self.stages <= min(fit, 32):
            raise ValueError(f"stages={self.stages} must be 2 to {min(fit, 32)}")


@functools.partial(jax.jit, static_argnames=("config", "blocks", "interpret"))  # all layers share one lowering
def grouped_matmul(
    rows: BFloat16[Array, "M K"],
    weights: BFloat16[Array, "E K N"],
    tiles: Int32[Array, "numbers"],
    *,
    config: Config,
    blocks: int,
    interpret: Any = False,
) -> Float32[Array, "M N"]:
    """Computes ``rows[i] @ weights[e]`` for each row i of group e; zeros for rows of no group.

    Args:
        rows: rows sorted by group; M is at least 1, K a multiple of ``BLOCK_K``.
        weights: a matrix for each group; N is a multiple of 64, at least ``config.block_n``.
        tiles: the list that ``tile_list`` made for M rows and ``config.tile_rows``.
        config: tile sizes.
        blocks: thread blocks, one for each multiprocessor.
        interpret: ``plgpu.InterpretGPUParams()`` runs it without a GPU.
    """
    num_rows = rows.shape[0]
    body = _Body(config, blocks, num_rows, weights.shape)
    padded = jnp.pad(rows, ((0, _copied_rows(num_rows, config.tile_rows) - num_rows), (0, 0)))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, weights.shape[2]), jnp.float32),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=body.consumers + 1,
        thread_name="warpgroup",
        scratch_types=body.scratch(),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),  # those of the buffer suffice
        kernel_name="grouped_matmul",
        interpret=interpret,
    )(padded, weights, tiles)


def _copied_rows(num_rows: int, tile_rows: int) -> int:
    """Rows that the input is padded to, so that the copies of ``_load_rows`` stay inside it."""
    if num_rows >= tile_rows:
        return -(-num_rows // ALIGNED) * ALIGNED
    return max(1 << (num_rows - 1).bit_length(), ALIGNED)


class _Body:
    """Body of the kernel; Pallas calls an instance with the refs, which are kept as attributes while it is traced."""

    def __init__(self, config: Config, blocks: int, num_rows: int, shape: tuple[int, int, int]):
        self.config, self.blocks = config, blocks
        self.groups, depth, self.width = shape
        self.steps = depth // BLOCK_K
        self.parts = -(-self.width // config.block_n)  # output tiles of a tile of rows
        self.most = most_tiles(num_rows, self.groups, config.tile_rows)
        self.consumers = config.tile_rows // WARPGROUP_ROWS

    def scratch(self) -> dict:
        config, stages = self.config, self.config.stages
        return {
            "rows_buffer": plgpu.SMEM((stages, config.tile_rows, BLOCK_K), jnp.bfloat16, transforms=TILED),
            "weights_buffer": plgpu.SMEM((stages, BLOCK_K, config.block_n), jnp.bfloat16, transforms=TILED),
            "full": plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            "empty": plgpu.Barrier(num_barriers=stages, num_arrivals=self.consumers),
        }

    def __call__(self, rows, weights, tiles, out, *, rows_buffer, weights_buffer, full, empty):
        self.rows, self.weights, self.tiles, self.out = rows, weights, tiles, out
        self.rows_buffer, self.weights_buffer, self.full, self.empty = rows_buffer, weights_buffer, full, empty
        self.block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        turns = lax.div(lax.max(tiles[0] * self.parts - self.block, 0) + (self.blocks - 1), self.blocks)

        def run(role, registers):
            """Runs a role over all output tiles of this thread block; returns how many steps they took."""
            if self.consumers > 1:  # with 128 threads less, registers are not scarce
                plgpu.set_max_registers(registers, action="decrease" if registers < 128 else "increase")
            # Carried: the output tile's record, and how many steps went through the buffer before it.
            return lax.fori_loop(0, turns, role, (self._read(0), jnp.int32(0)))[1]

        @pl.when(warpgroup == self.consumers)
        def _():
            steps = run(self._load, 40)
            # No barrier may be left with an arrival that nobody waited for.
            first = lax.max(steps - self.config.stages, 0)
            lax.fori_loop(first, steps, lambda step, _: self._wait_for_release(step), None)

        for number in range(self.consumers):

            @pl.when(warpgroup == number)
            def _(number=number):
                run(functools.partial(self._multiply, number), 232)

    def _read(self, turn) -> tuple:
        """Record and first column of this block's output tile of a turn; those of another tile where there is none."""
        index = lax.min(self.block + turn * self.blocks, self.most * self.parts - 1)
        tile, part = lax.div(index, self.parts), lax.rem(index, self.parts)
        record = (self.tiles[HEADER + tile * len(RECORD) + n] for n in range(len(RECORD)))
        return *record, part * self.config.block_n

    def _steps(self, group):
        """Steps over K of a group's output tiles; 0 for rows that are in no group."""
        return jnp.where(group < self.groups, self.steps, 0)

    def _stage(self, step):
        return lax.rem(step, self.config.stages)

    # Loads

    def _load(self, turn, carry):
        (group, first, _, end, column), before = carry
        following = self._read(turn + 1)
        first, column = pl.multiple_of(first, ALIGNED), pl.multiple_of(column, 64)
        steps = self._steps(group)

        def step(k, _):
            at = self._stage(before + k)
            depth = pl.ds(pl.multiple_of(k * BLOCK_K, BLOCK_K), BLOCK_K)
            pl.when(before + k >= self.config.stages)(lambda: self._wait_for_release(before + k))
            weights = self.weights.at[group, depth, pl.ds(column, self.config.block_n)]
            plgpu.copy_gmem_to_smem(weights, self.weights_buffer.at[at], self.full.at[at])
            self._load_rows(first, end - first, depth, at)

        lax.fori_loop(0, steps, step, None)
        return following, before + steps

    def _load_rows(self, first, count, depth, at) -> None:
        """Copies the tile's ``count`` rows into stage ``at``.

        TMA boxes are static, but how many rows a tile has is known at run time only. So there is one copy for each
        power of 2 (8, 16, ... up to the tile), and the smallest that holds ``count`` rows is issued; the rows it copies
        beyond them are the next group's, whose products are not stored.
        """
        most, size = min(self.config.tile_rows, self.rows.shape[0]), ALIGNED
        while size <= most:

            @pl.when((count <= size if size < most else True) & (count > size // 2 if size > ALIGNED else True))
            def _(size=size):
                place = self.rows_buffer.at[at, pl.ds(0, size)]
                plgpu.copy_gmem_to_smem(self.rows.at[pl.ds(first, size), depth], place, self.full.at[at])

            size *= 2

    # Products

    def _multiply(self, number: int, turn, carry):
        (group, first, begin, end, column), before = carry
        following = self._read(turn + 1)
        steps, own = self._steps(group), pl.ds(number * WARPGROUP_ROWS, WARPGROUP_ROWS)
        first += number * WARPGROUP_ROWS

        def products(sums):
            def step(k, _):
                at = self._stage(before + k)
                plgpu.barrier_wait(self.full.at[at])
                plgpu.wgmma(sums, self.rows_buffer.at[at, own], self.weights_buffer.at[at])
                plgpu.wgmma_wait(1)  # the step before is done: its stage can be released
                pl.when(k > 0)(lambda: self._release(before + k - 1))

            lax.fori_loop(0, steps, step, None)
            values = sums[...]
            pl.when(steps > 0)(lambda: self._release(before + steps - 1))
            columns = pl.ds(column, self.config.block_n)
            width = self.width - column if self.width % self.config.block_n else None
            store_rows(self.out.at[pl.ds(first, WARPGROUP_ROWS), columns], values, begin - first, end - first, width)

        def skip():
            def step(k, _):
                plgpu.barrier_wait(self.full.at[self._stage(before + k)])
                self._release(before + k)

            lax.fori_loop(0, steps, step, None)

        def multiply():
            pl.run_scoped(products, plgpu.ACC((WARPGROUP_ROWS, self.config.block_n), jnp.float32))

        if number == 0:
            multiply()
        else:
            pl.when(first < end)(multiply)
            pl.when(first >= end)(skip)
        return following, before + steps

    def _wait_for_release(self, step) -> None:
        """Waits until every consumer has released what the stage of ``step`` held before."""
        plgpu.barrier_wait(self.empty.at[self._stage(step)])

    def _release(self, step) -> None:
        plgpu.barrier_arrive(self.empty.at[self._stage(step)])
