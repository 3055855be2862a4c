# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false
# (JAX's annotations of its own plgpu.ACC and transforms.)
"""The memory-bound MLA kernel: absorbed attention of few rows over a paged bfloat16 cache. For compute capability 9.0.

A thread block takes its items of the work list one after the other: the rows of a request and some tiles of 64 keys,
one tile at a time, so that the pipeline fills and drains quickly. Four warpgroups:

    0         S = Q K^T, its softmax P over the keys seen so far, and their maximum and sum
    1 and 2   O = O exp(m - m') + P V, of one half of the value channels each
    3         loads (TMA), into a two-stage buffer of tiles, ahead into the next item

P crosses in shared memory, in the rope buffer of its tile, whose keys have been used by then; so do the factors
exp(m - m'). M of wgmma is 64: up to 32 rows the products are transposed (operands swapped), S^T = K Q^T, O^T = V^T P^T.
Rows are then N, which may be any multiple of 8.

Shared memory: queries, two tiles, statistics, and for transposed products 4 KiB to reduce across warps; counted in
../README.md.

Roofline: a key takes 2 * (R + E) bytes, read once for all rows: 135 us at 4.46 TB/s for 128 requests of 4096 keys.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from mla_attn.pallas_kernels.mosaic_gpu.mla_block import PARTS, START, Block, Call, attend, opaque_zero
from mla_attn.pallas_kernels.mosaic_gpu.primitives import (
    ACC,
    fence_proxy,
    scale_rows,
    store_transposed,
    store_vector,
    sync_warpgroup,
    zeros,
)
from mla_attn.pallas_kernels.work_list import TILE, Plan

STAGES = 2  # stages of the key buffer
LOADS, SCORES, VALUES = 48, 104, 176  # registers of a thread, by role


@functools.partial(jax.jit, static_argnames=("call", "plan"))  # all layers share one lowering
def mla_stream(
    q_latent: BFloat16[Array, "rows R"],
    q_rope: BFloat16[Array, "rows E"] | None,
    pages: BFloat16[Array, "pages P C"],
    page_table: Int32[Array, "B W"],
    layer: Int32[Array, "1"],
    work: Int32[Array, "size"],
    tree: Int32[Array, "words tree_rows"] | None,
    *,
    call: Call,
    plan: Plan,
) -> tuple[
    BFloat16[Array, "rows R"],
    Float32[Array, "rows"],
    Float32[Array, "partials tile_rows R"],
    Float32[Array, "partials tile_rows"],
]:
    """Attends; arguments and results are those of ``mla_decode``.

    Raises:
        ValueError: ``plan.tile_rows`` is neither 64 nor a multiple of 8 up to 32.
    """
    if plan.tile_rows != 64 and (plan.tile_rows > 32 or plan.tile_rows % 8):
        raise ValueError(f"plan.tile_rows={plan.tile_rows} must be 64, or a multiple of 8 up to 32")
    rope = 0 if q_rope is None else q_rope.shape[1]
    body = _Body(call, plan, rank=q_latent.shape[1], rope=rope, page=pages.shape[1])
    arrays = (q_latent, q_rope, pages, page_table, layer, work, tree)
    return attend(body, arrays, kernel_name="mla_stream", warpgroups=4)


class _Body(Block):
    """A loading warpgroup, one for scores, two for values."""

    rope_readers = 2

    def __init__(self, call: Call, plan: Plan, **sizes):
        super().__init__(call, plan, **sizes)
        self.rows_axis = 0 if plan.tile_rows == 64 else 1
        self.row_layout = ACC.reduce(1 - self.rows_axis)  # layout of one number for each row
        self.reduction_bytes = 4096 if self.rows_axis else 0
        # The compiler grants an accumulator no more than 128 registers: with rows as M, a half takes two.
        count = 1 if self.rows_axis else 2
        width = self.half // count
        self.columns = [(n * width, width) for n in range(count)]

    def shape(self, others: int) -> tuple[int, int]:
        """Shape of rows times ``others`` (keys or channels), as the products have it."""
        rows = self.plan.tile_rows
        return (others, rows) if self.rows_axis else (rows, others)

    def transposed(self, ref):
        """An array whose rows come first, as the products have it."""
        return ref.transpose((1, 0)) if self.rows_axis else ref

    def scratch(self) -> dict:
        rows = self.plan.tile_rows
        return {
            **self.queries(),
            **self.buffer(),
            "factors": plgpu.SMEM((STAGES, rows), jnp.float32),  # exp(m - m') of each tile
            "inverse_sums": plgpu.SMEM((rows,), jnp.float32),
            "natural_lse": plgpu.SMEM((rows,), jnp.float32),
            "p_ready": plgpu.Barrier(num_barriers=STAGES),
            "sums_ready": plgpu.Barrier(),
            "sums_read": plgpu.Barrier(num_arrivals=2),
        }

    def __call__(self, *refs, **smem):
        self.start(*refs, **smem)
        warpgroup = lax.axis_index("warpgroup")
        roles = (
            (3, LOADS, self._load),
            (0, SCORES, self._scores),
            (1, VALUES, functools.partial(self._values, "left")),
            (2, VALUES, functools.partial(self._values, "right")),
        )
        for number, registers, role in roles:

            @pl.when(warpgroup == number)
            def _(role=role, registers=registers):
                plgpu.set_max_registers(registers, action="decrease" if registers < 128 else "increase")
                # Carried: the item's fields, and how many tiles the buffer held before it.
                lax.fori_loop(0, self.rounds, role, (self.read_item(0), jnp.int32(0)))

    def _load(self, turn, carry):
        """Loads one item. Its first tile comes before its queries: those wait until the last result is stored."""
        fields, before = carry
        self.take_item(fields)
        following, tiles = self.read_item(turn + 1), self.item["tiles"]

        def load(j):
            order = tuple((0, part) for part in PARTS)
            self.load([(lax.rem(before + j, STAGES), j)], order, reused=before + j >= STAGES)

        pl.when(turn == 0)(self.load_queries)
        pl.when(tiles > 0)(lambda: load(0))

        @pl.when(turn > 0)
        def _():
            plgpu.barrier_wait(self.smem["empty_q"])
            self.load_queries()

        pl.loop(1, tiles)(load)
        return following, before + tiles

    # Scores

    def _scores(self, turn, carry):
        """Scores and softmax of one item: P and the factors of each tile, then the sums and log-sum-exps."""
        fields, before = carry
        self.take_item(fields)
        smem, shape = self.smem, self.shape(TILE)
        keys_axis, rows = 1 - self.rows_axis, self.plan.tile_rows
        plgpu.barrier_wait(smem["full_q"])

        def step(j, carry):
            m, sums = carry
            at = lax.rem(before + j, STAGES)
            scores = self.masked(pl.run_scoped(lambda ref: self._products(ref, at), plgpu.ACC(shape, jnp.float32)), j)
            higher = jnp.maximum(m, scores.max(axis=keys_axis) * self.log2_scale)
            p, factors = jnp.exp2(scores * self.log2_scale - self.spread(higher, shape)), jnp.exp2(m - higher)
            sync_warpgroup(7)  # every warp is done with this tile's scores: P overwrites its rope part
            self.transposed(smem["rope"].at[at, pl.ds(0, rows), pl.ds(0, TILE)])[...] = p.astype(jnp.bfloat16)
            smem["factors"].at[at][...] = factors  # this tile was loaded after those of two tiles ago were read
            fence_proxy()
            plgpu.barrier_arrive(smem["p_ready"].at[at])
            return higher, sums * self.spread(factors, shape) + p

        m = plgpu.layout_cast(jnp.full((rows,), START, jnp.float32), self.row_layout)
        m, sums = lax.fori_loop(0, self.item["tiles"], step, (m, zeros(shape)))
        following = self.read_item(turn + 1)  # loads while this item ends
        self._finish(turn, m, sums.sum(axis=keys_axis))
        return following, before + self.item["tiles"]

    def _products(self, scores, at):
        """The scores of the tile in stage ``at``, each part as it arrives."""
        smem, zero = self.smem, opaque_zero()
        for n, part in enumerate(PARTS):
            plgpu.barrier_wait(smem["full"][part].at[at])
            if part != "rope" or self.rope:
                q = smem["queries_rope"].at[zero] if part == "rope" else smem["queries"].at[n + zero]
                self._multiply(scores, q, smem[part].at[at].transpose((1, 0)))
        return scores[...]

    def _multiply(self, acc, left, right) -> None:
        """Adds ``left @ right``, or its transpose."""
        if self.rows_axis:
            left, right = right.transpose((1, 0)), left.transpose((1, 0))
        plgpu.wgmma(acc, left, right)

    def _finish(self, turn, m, sums) -> None:
        """Hands 1 / sum to the value warpgroups, and writes the log-sum-exps."""
        smem, index = self.smem, self.item["partial"]
        seen = sums != 0  # not by m, which NaN scores leave at START: such a row is not empty

        @pl.when(turn > 0)
        def _():
            plgpu.barrier_wait(smem["sums_read"])

        smem["inverse_sums"][...] = jnp.where(seen, 1.0 / sums, 0.0)
        plgpu.barrier_arrive(smem["sums_ready"])
        lse = jnp.where(seen, m + jnp.log2(sums), -jnp.inf)

        @pl.when(index >= 0)
        def _():
            store_vector(self.partial_lse.at[lax.max(index, 0)], lse, self.row_layout)

        @pl.when(index < 0)
        def _():
            smem["natural_lse"][...] = lse * math.log(2)
            plgpu.commit_smem()
            self.store(smem["natural_lse"], self.lse)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # Values

    def _values(self, part: str, turn, carry):
        """One half of the output of one item."""
        fields, before = carry
        self.take_item(fields)
        smem, rows = self.smem, self.plan.tile_rows

        def step(j, parts):
            at = lax.rem(before + j, STAGES)
            plgpu.barrier_wait(smem["p_ready"].at[at])
            factors = plgpu.load(smem["factors"].at[at], layout=self.row_layout)
            self.drop_unused(part, at, j)

            def products(parts):
                p = smem["rope"].at[at, pl.ds(0, rows), pl.ds(0, TILE)]
                for o, columns in zip(parts, self.columns, strict=True):
                    self._multiply(o, p, smem[part].at[at, :, pl.ds(*columns)])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(smem["empty"][part].at[at])
                plgpu.barrier_arrive(smem["empty"]["rope"].at[at])

            return pl.run_state(products)([plgpu.ACC.init(self._rescaled(o, factors)) for o in parts])

        parts = [zeros(self.shape(width)) for _, width in self.columns]
        parts = lax.fori_loop(0, self.item["tiles"], step, parts)
        following = self.read_item(turn + 1)  # loads while this item ends
        plgpu.barrier_wait(smem["sums_ready"])
        scale = plgpu.load(smem["inverse_sums"], layout=self.row_layout)
        plgpu.barrier_arrive(smem["sums_read"])
        self._store(PARTS.index(part), [o * self.spread(scale, o.shape) for o in parts])
        plgpu.barrier_arrive(smem["empty_q"])
        return following, before + self.item["tiles"]

    def _rescaled(self, o, factors):
        # With rows as M a warp has 16 of them, whose maxima seldom grow: it skips the product then.
        return o * self.spread(factors, o.shape) if self.rows_axis else scale_rows(o, factors)

    def _store(self, number: int, parts) -> None:
        """Stores a result through the query buffer, which the products have released; a partial result directly."""
        index, first = self.item["partial"], number * self.half

        @pl.when(index >= 0)
        def _():
            for o, (start, width) in zip(parts, self.columns, strict=True):
                to = self.partial.at[lax.max(index, 0), :, pl.ds(first + start, width)]
                if self.rows_axis:
                    store_transposed(to, o)
                else:
                    to[...] = o

        @pl.when(index < 0)
        def _():
            staged = self.smem["queries"].at[number]
            for o, columns in zip(parts, self.columns, strict=True):
                self.transposed(staged.at[:, pl.ds(*columns)])[...] = o.astype(jnp.bfloat16)
            plgpu.commit_smem()
            self.store(staged, self.out, pl.ds(first, self.half))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
