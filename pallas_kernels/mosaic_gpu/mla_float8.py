# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false
# (JAX's annotations of its own plgpu.ACC and transforms.)
"""The MLA kernel for float8 caches: absorbed attention whose products read bytes. For compute capability 9.0.

A thread block takes its items of the work list one after the other: up to 32 rows of a request and some tiles of 64
keys. Products are transposed, S^T = K Q^T and O^T = V^T P^T: keys and values are then the left operand, which wgmma
takes from registers too. So a tile's bytes are read from shared memory twice, once as keys and once as values, and
nothing is written back. Four warpgroups:

    0 and 1   S = Q K^T of every other tile, its softmax P over the keys seen so far, and their sum
    2         O = O exp(m - m') + P V; the item's queries before, its result after
    3         loads (TMA), into a buffer of up to four tiles, ahead into the next item

The running maximum m goes to and fro between warpgroups 0 and 1, so P is that of one sequence of tiles.

The stored numbers are exact in float16, as is a row of queries times a power of two (but for what is less than 2^-37
of its largest number), and P is rounded to float16, times 2^14, which loses less than bfloat16 does. The pool's scale
enters scores and results in float32. Rows in blocks have a scale for each key and 128 channels: products of a block are
scaled before they are added up, and P is stored once for each block, times the keys' scales, in bfloat16, as are then
the values.

Roofline: a key takes R + E bytes (656 in blocks of 512 + 64), read once for all rows: 68 us at 4.46 TB/s for 128
requests of 4096 keys.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32, UInt8

from mla_attn.pallas_kernels.mosaic_gpu import mla_bytes
from mla_attn.pallas_kernels.mosaic_gpu.columns import COLUMN
from mla_attn.pallas_kernels.mosaic_gpu.mla_block import START, Block, Call, attend, opaque_zero
from mla_attn.pallas_kernels.mosaic_gpu.primitives import (
    SHARED_BYTES,
    TILED,
    fence_proxy,
    shared_bytes,
    store_vector,
    sync_warpgroup,
    zeros,
)
from mla_attn.pallas_kernels.work_list import TILE, Plan

MOST_ROWS = 32  # of a row tile: what the accumulators of one warpgroup hold
BLOCK = 128  # channels of a part of a tile: two groups of rows of O^T, and what shares a scale in rows in blocks
LOADS, SCORES, VALUES = 40, 136, 200  # registers of a thread, by role
WIDE = 16  # most rows with which the values of two blocks fit into registers
P_EXPONENT = 14  # P is stored times 2 to it, so that small ones are not lost in float16


@functools.partial(jax.jit, static_argnames=("call", "plan"))  # all layers share one lowering
def mla_float8(
    q_latent: BFloat16[Array, "rows R"],
    q_rope: BFloat16[Array, "rows E"] | None,
    pages: UInt8[Array, "pages P C"],
    page_table: Int32[Array, "B W"],
    layer: Int32[Array, "1"],
    work: Int32[Array, "size"],
    tree: Int32[Array, "words tree_rows"] | None,
    scales: Float32[Array, "L"],
    q_scales: Float32[Array, "scale_rows"] | None,
    *,
    call: Call,
    plan: Plan,
) -> tuple[
    BFloat16[Array, "rows R"],
    Float32[Array, "rows"],
    Float32[Array, "partials tile_rows R"],
    Float32[Array, "partials tile_rows"],
]:
    """Attends over rows of the format ``call.cache``; other arguments and results are those of ``mla_decode``.

    Args:
        scales: the pool's scales, of each layer or one for all; rows in blocks do not use them.
        q_scales: what the scores of each row are multiplied by too; ``plan.tile_rows`` of anything follow the last.

    Raises:
        ValueError: ``plan.tile_rows`` is not a multiple of 8 up to 32.
    """
    if plan.tile_rows > MOST_ROWS or plan.tile_rows % 8:
        raise ValueError(f"plan.tile_rows={plan.tile_rows} must be a multiple of 8 up to {MOST_ROWS}")
    rope = 0 if q_rope is None else q_rope.shape[1]
    sizes = {"rank": q_latent.shape[1], "rope": rope, "page": pages.shape[1]}
    body = Float8Body(call, plan, has_q_scales=q_scales is not None, **sizes)
    arrays = (q_latent, q_rope, pages, page_table, layer, work, tree, scales, q_scales)
    return attend(body, arrays, kernel_name="mla_float8", warpgroups=4)


class Float8Body(Block):
    """A loading warpgroup, two for scores, one for values. Parts of a tile: blocks of 128 latents, and their tail."""

    rows_axis = 1

    def __init__(self, call: Call, plan: Plan, *, has_q_scales: bool = False, **sizes):
        super().__init__(call, plan, **sizes)
        self.has_q_scales = has_q_scales
        self.dtype, _, row_format = call.cache.partition(":")
        self.in_blocks = row_format == "blocks"
        self.p_dtype = jnp.bfloat16 if self.in_blocks else jnp.float16
        self.blocks = tuple(f"block{n}" for n in range(self.rank // BLOCK))
        self.tail = len(self.blocks) * 4 + 2 * self.rope if self.in_blocks else self.rope  # bytes
        self.parts = (*self.blocks, "tail") if self.tail else self.blocks
        self.stages = 4
        if shared_bytes(self.scratch()) > SHARED_BYTES:
            self.stages = 2  # an even number: then a stage always belongs to the same warpgroup of scores

    def scratch(self) -> dict:
        rows, copies = self.plan.tile_rows, 1 if self.gathers else TILE // self.copied
        queries = self.queries()
        for name in ("queries", "queries_rope"):  # twice: as they come, and as float16, in place
            array = queries[name]
            queries[name] = plgpu.RefUnion(array, plgpu.SMEM(array.shape, jnp.float16, transforms=TILED))
        parts = {
            part: plgpu.SMEM((self.stages, TILE, self._bytes(part)), jnp.uint8, transforms=self._transforms(part))
            for part in self.parts
        }
        stages = plgpu.Barrier(num_barriers=self.stages)
        return {
            **queries,
            **parts,
            "p": plgpu.SMEM((self.stages, self._p_number(-1) + 1, rows, TILE), self.p_dtype, transforms=TILED),
            "factors": plgpu.SMEM((self.stages, rows), jnp.float32),  # exp(m - m') of each tile
            "query_factors": plgpu.SMEM((rows,), jnp.float32),
            "maxima": plgpu.SMEM((2, rows), jnp.float32),  # of the warpgroups of scores
            "stats": plgpu.SMEM((4, rows), jnp.float32),  # their last maxima, then their sums
            "reduced": plgpu.SMEM((2, 32 * rows), jnp.float32),
            "natural_lse": plgpu.SMEM((rows,), jnp.float32),
            "full_q": plgpu.Barrier(num_arrivals=3 if self.rope else 2),
            "empty_q": plgpu.Barrier(),
            "queries_ready": plgpu.Barrier(),
            "full": {part: plgpu.Barrier(num_barriers=self.stages, num_arrivals=copies) for part in self.parts},
            "empty": dict.fromkeys(self.parts, stages),
            "p_ready": stages,
            "max_ready": plgpu.Barrier(num_barriers=2),
            "sums_ready": plgpu.Barrier(num_arrivals=2),
            "sums_read": plgpu.Barrier(),
        }

    def __call__(self, *refs, **smem):
        smem["queries"], self.queries_half = smem["queries"]
        smem["queries_rope"], self.rope_half = smem["queries_rope"]
        self.start(*refs, **smem)
        self.scales, self.q_scales = self.more
        warpgroup = lax.axis_index("warpgroup")
        roles = (
            (3, LOADS, self._load),
            (0, SCORES, functools.partial(self._scores, 0)),
            (1, SCORES, functools.partial(self._scores, 1)),
            (2, VALUES, self._values),
        )
        for number, registers, role in roles:

            @pl.when(warpgroup == number)
            def _(role=role, registers=registers):
                plgpu.set_max_registers(registers, action="decrease" if registers < 128 else "increase")
                # Carried: the item's fields, and how many tiles the buffer held before it.
                lax.fori_loop(0, self.rounds, role, (self.read_item(0), jnp.int32(0)))

    # Loads

    def _load(self, turn, carry):
        """Loads one item. Its first tiles come before its queries: those wait until the last result is stored."""
        fields, before = carry
        self.take_item(fields)
        following, tiles = self.read_item(turn + 1), self.item["tiles"]
        first = lax.min(tiles, self.stages)

        def load(j):
            order = tuple((0, part) for part in self.parts)
            self.load([(lax.rem(before + j, self.stages), j)], order, reused=before + j >= self.stages)

        pl.when(turn == 0)(self.load_queries)
        pl.loop(0, first)(load)

        @pl.when(turn > 0)
        def _():
            plgpu.barrier_wait(self.smem["empty_q"])
            self.load_queries()

        pl.loop(first, tiles)(load)
        return following, before + tiles

    def _bytes(self, part: str) -> int:
        return self.tail if part == "tail" else BLOCK

    def _transforms(self, part: str) -> tuple:
        return () if part == "tail" and self.in_blocks else mla_bytes.byte_rows(self._bytes(part))

    def _channels(self, part: str):
        if part != "tail":
            return pl.ds(self.blocks.index(part) * BLOCK, BLOCK)
        return pl.ds(self.rank if self.in_blocks else self.call.rope_offset, self.tail)

    def gather(self, rows, part: str, to) -> None:
        mla_bytes.gather_bytes(rows, self.pages.at[:, :, self._channels(part)], to, transforms=self._transforms(part))

    # Scores

    def _scores(self, number: int, turn, carry):
        """Scores and softmax of every other tile of one item: P and the factors of each, then maximum and sum."""
        fields, before = carry
        self.take_item(fields)
        smem, rows, tiles = self.smem, self.plan.tile_rows, self.item["tiles"]
        shape, scratch = (TILE, rows), smem["reduced"].at[number]
        plgpu.barrier_wait(smem["queries_ready"])
        factor = self._score_factor()
        first = lax.rem(before + number, 2)  # tiles of all items take turns
        start = plgpu.layout_cast(jnp.full((rows,), START, jnp.float32), COLUMN)

        def step(n, carry):
            m, sums = carry
            j = first + 2 * n
            at = lax.rem(before + j, self.stages)
            scores = self.masked(self._scores_of(at, shape, factor), j)
            highest = mla_bytes.reduce_rows(scores, "max", scratch)
            pl.when(before + j > 0)(lambda: plgpu.barrier_wait(smem["max_ready"].at[1 - number]))
            last = plgpu.load(smem["maxima"].at[1 - number], layout=COLUMN)
            last = lax.cond(j == 0, lambda _: start, lambda last: last, last)
            higher = jnp.maximum(last, highest)
            smem["maxima"].at[number][...] = higher
            plgpu.barrier_arrive(smem["max_ready"].at[number])
            p = jnp.exp2(scores - self.spread(higher, shape))
            self._store_p(p, at)
            smem["factors"].at[at][...] = jnp.exp2(last - higher)
            fence_proxy()
            plgpu.barrier_arrive(smem["p_ready"].at[at])
            return higher, sums * self.spread(jnp.exp2(m - higher), shape) + p

        m, sums = lax.fori_loop(0, lax.div(tiles - first + 1, 2), step, (start, zeros(shape)))
        following = self.read_item(turn + 1)  # loads while this item ends
        sums = mla_bytes.reduce_rows(sums, "add", scratch)
        pl.when(turn > 0)(lambda: plgpu.barrier_wait(smem["sums_read"]))
        smem["stats"].at[number][...] = m
        smem["stats"].at[2 + number][...] = sums
        plgpu.barrier_arrive(smem["sums_ready"])
        return following, before + tiles

    def _score_factor(self):
        """What all scores are multiplied by, beside the factors of the queries: log2(e) times all scales."""
        factor = jnp.float32(self.log2_scale)
        if not self.in_blocks:
            factor *= self._scale_of_layer()
        if self.has_q_scales:
            q_scales = self.q_scales.at[pl.ds(self.first_row, self.plan.tile_rows)]
            factor *= plgpu.load(q_scales, layout=COLUMN, optimized=False)
        return factor

    def _scale_of_layer(self):
        return self.scales[lax.clamp(0, self.layer[0], self.scales.shape[0] - 1)]

    def _scores_of(self, at, shape, factor):
        """Scores of the tile in stage ``at``, in log2; scaled before they are masked, for scales may be of any size."""

        def scoped(products):
            return pl.run_scoped(products, plgpu.ACC(shape, jnp.float32))

        query_factors = plgpu.load(self.smem["query_factors"], layout=COLUMN)
        if not self.in_blocks:
            return scoped(lambda ref: self._products(ref, at)) * self.spread(query_factors * factor, shape)
        plgpu.barrier_wait(self.smem["full"]["tail"].at[at])
        scores = zeros(shape)
        for n in range(len(self.blocks)):
            products = scoped(lambda ref, n=n: self._block_products(ref, at, n)[...])
            scores += products * self._key_scales(at, n, shape)
        scores *= self.spread(query_factors, shape)
        if self.rope:
            scores += scoped(lambda ref: self._rope_products(ref, at))
        return scores * (self.spread(factor, shape) if self.has_q_scales else factor)

    def _products(self, scores, at):
        for n in range(len(self.blocks)):
            self._block_products(scores, at, n)
            plgpu.wgmma_wait(1)  # two operands at a time, for they take registers
        if self.rope:
            smem, zero = self.smem, opaque_zero()
            plgpu.barrier_wait(smem["full"]["tail"].at[at])
            keys = mla_bytes.keys_operand(smem["tail"].at[at], self.dtype)
            plgpu.wgmma(scores, keys, self.rope_half.at[zero].transpose((1, 0)))
            plgpu.barrier_arrive(smem["empty"]["tail"].at[at])
        return scores[...]

    def _block_products(self, scores, at, n: int):
        """Adds the products of a block of channels."""
        in_half, zero = len(self.blocks) // 2, opaque_zero()
        plgpu.barrier_wait(self.smem["full"][self.blocks[n]].at[at])
        keys = mla_bytes.keys_operand(self.smem[self.blocks[n]].at[at], self.dtype)
        queries = self.queries_half.at[n // in_half + zero, :, pl.ds(n % in_half * BLOCK, BLOCK)]
        plgpu.wgmma(scores, keys, queries.transpose((1, 0)))
        return scores

    def _rope_products(self, scores, at):
        keys = mla_bytes.rope_operand(self.smem["tail"].at[at], 4 * len(self.blocks))
        plgpu.wgmma(scores, keys, self.smem["queries_rope"].at[opaque_zero()].transpose((1, 0)))
        return scores[...]

    def _key_scales(self, at, n: int, shape):
        scales = mla_bytes.key_scales(self.smem["tail"].at[at], 4 * n)
        return lax.broadcast_in_dim(scales, shape, [0])

    def _p_number(self, n: int) -> int:
        """Which P the values of block ``n`` (-1 for the last) are multiplied by."""
        return n % len(self.blocks) if self.in_blocks else 0

    def _store_p(self, p, at) -> None:
        if not self.in_blocks:
            self.smem["p"].at[at, 0].transpose((1, 0))[...] = (p * 2.0**P_EXPONENT).astype(self.p_dtype)
            return
        for n in range(len(self.blocks)):
            scaled = jnp.where(p == 0, 0.0, p * self._key_scales(at, n, p.shape))  # of what is not seen it may be NaN
            self.smem["p"].at[at, n].transpose((1, 0))[...] = scaled.astype(self.p_dtype)
        plgpu.barrier_arrive(self.smem["empty"]["tail"].at[at])

    # Values

    def _values(self, turn, carry):
        """The queries of one item, and its output."""
        fields, before = carry
        self.take_item(fields)
        smem = self.smem
        plgpu.barrier_wait(smem["full_q"])
        self._prepare_queries()

        def step(j, parts):
            at = lax.rem(before + j, self.stages)
            plgpu.barrier_wait(smem["p_ready"].at[at])
            factors = plgpu.load(smem["factors"].at[at], layout=COLUMN)
            self._drop_unused(at, j)
            rescaled = [plgpu.ACC.init(o * self.spread(factors, o.shape)) for o in parts]
            return pl.run_state(lambda parts: self._add_values(parts, at))(rescaled)

        parts = [zeros((BLOCK, self.plan.tile_rows)) for _ in self.blocks]
        parts = lax.fori_loop(0, self.item["tiles"], step, parts)
        following = self.read_item(turn + 1)  # loads while this item ends
        plgpu.barrier_wait(smem["sums_ready"])
        m0, m1, l0, l1 = (plgpu.load(smem["stats"].at[n], layout=COLUMN) for n in range(4))
        plgpu.barrier_arrive(smem["sums_read"])
        # Which of the two has which tiles depends on the items before; the bits must not.
        m, first = jnp.maximum(m0, m1), m0 >= m1
        sums = jnp.where(first, l0, l1) + jnp.where(first, l1, l0) * jnp.exp2(-jnp.abs(m0 - m1))
        seen = sums != 0  # not by m, which NaN scores leave at START: such a row is not empty
        scale = 1.0 if self.in_blocks else self._scale_of_layer() * 2.0**-P_EXPONENT
        inverse = jnp.where(seen, scale / sums, 0.0)
        self._store_lse(jnp.where(seen, m + jnp.log2(sums), -jnp.inf))
        self._store([o * self.spread(inverse, o.shape) for o in parts])
        plgpu.barrier_arrive(smem["empty_q"])
        return following, before + self.item["tiles"]

    def _prepare_queries(self) -> None:
        smem = self.smem
        rope = smem["queries_rope"].at[0] if self.rope and not self.in_blocks else None
        arrays = smem["queries"].at[0], smem["queries"].at[1], rope, smem["query_factors"]
        pl.loop(0, self.plan.tile_rows // 4)(lambda step: mla_bytes.prepare_queries(*arrays, step))
        fence_proxy()
        plgpu.barrier_arrive(smem["queries_ready"])

    def _drop_unused(self, at, j) -> None:
        """Zeroes what tile ``j`` holds past the last key: its probability is 0, but 0 * NaN is NaN."""
        valid = self.item["keys"] - (self.item["tile"] + j) * TILE

        @pl.when(valid < TILE)
        def _():
            for block in self.blocks:
                mla_bytes.zero_byte_rows(self.smem[block].at[at], valid)
            fence_proxy()
            sync_warpgroup(6)

    def _add_values(self, parts, at) -> None:
        """Adds the products of P with the values, and releases those."""
        smem, zero = self.smem, opaque_zero()
        for n, (o, block) in enumerate(zip(parts, self.blocks, strict=True)):
            values = mla_bytes.values_operand(smem[block].at[at], self.dtype, self.p_dtype)
            plgpu.wgmma(o, values, smem["p"].at[at, self._p_number(n) + zero].transpose((1, 0)))
            plgpu.wgmma_wait(1 if self.plan.tile_rows <= WIDE else 0)
        plgpu.wgmma_wait(0)
        for block in self.blocks:
            plgpu.barrier_arrive(smem["empty"][block].at[at])

    def _store_lse(self, lse) -> None:
        index = self.item["partial"]

        @pl.when(index >= 0)
        def _():
            store_vector(self.partial_lse.at[lax.max(index, 0)], lse, COLUMN)

        @pl.when(index < 0)
        def _():
            self.smem["natural_lse"][...] = lse * math.log(2)
            plgpu.commit_smem()
            self.store(self.smem["natural_lse"], self.lse)

    def _store(self, parts) -> None:
        """Stores a result through the query buffer, which the products have released; a partial result directly."""
        index, in_half = self.item["partial"], len(self.blocks) // 2

        @pl.when(index >= 0)
        def _():
            for n, o in enumerate(parts):
                mla_bytes.store_columns(self.partial.at[lax.max(index, 0), :, pl.ds(n * BLOCK, BLOCK)], o)

        @pl.when(index < 0)
        def _():
            for n, o in enumerate(parts):
                mla_bytes.stage_columns(self.smem["queries"].at[n // in_half], o, n % in_half * BLOCK)
            plgpu.commit_smem()
            for half in range(2):
                self.store(self.smem["queries"].at[half], self.out, pl.ds(half * self.half, self.half))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
