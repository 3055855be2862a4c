# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false
# (JAX's annotations of its own plgpu.ACC and transforms.)
"""Absorbed MLA over a paged bf16 cache where memory is the bound: at most 32 rows a request. Compute capability 9.0.

Keys are the M of every product, so that rows need not fill 64: they are its N, any multiple of 8. A thread block takes
its items of the work list one after the other: the rows of a request and some tiles of 64 keys, one tile at a time.
Four warpgroups:

    0         S = K Q^T (keys x rows), its softmax P over the keys seen so far, and their maximum and sum
    1 and 2   O^T = O^T exp(m - m') + V^T P (channels x rows), of one half of the value channels each
    3         loads (TMA), into a ring of two tiles, ahead into the next item

P crosses in shared memory, in the place of its tile's rope part, which is dead by then; the factors exp(m - m') beside
it.

Shared memory for 512 + 64 channels and 32 rows: queries 36 KB, two tiles 144 KB, 4 KB to take maxima across warps.

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

from mla_attn.pallas_kernels.mosaic_gpu.block import PARTS, START, Block, Call, opaque_zero
from mla_attn.pallas_kernels.mosaic_gpu.primitives import ACC, fence_proxy, store_transposed, sync_warpgroup
from mla_attn.pallas_kernels.schedule import TILE, Plan

ROW = ACC.reduce(0)  # a number for each row, where rows are columns
SLOTS = 2  # of the ring


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
    Float32[Array, "partials group_rows R"],
    Float32[Array, "partials group_rows"],
]:
    """As ``mla_decode``, for ``plan.group_rows`` of any multiple of 8 up to ``STREAM_ROWS``."""
    rope = 0 if q_rope is None else q_rope.shape[1]
    body = _Body(call, plan, rank=q_latent.shape[1], rope=rope, page=pages.shape[1])
    X, bf16, f32 = jax.ShapeDtypeStruct, jnp.bfloat16, jnp.float32
    rows, rank = q_latent.shape
    kernel = plgpu.kernel(
        body,
        out_type=(
            X((rows, rank), bf16),
            X((rows,), f32),
            X((plan.num_partials, plan.group_rows, rank), f32),
            X((plan.num_partials, plan.group_rows), f32),
        ),
        grid=(plan.lanes,),
        grid_names=("lane",),
        num_threads=4,
        thread_name="warpgroup",
        scratch_types=body.scratch(),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=4096,
            unsafe_no_auto_barriers=True,  # they are where the table above needs them
        ),
        kernel_name="mla_stream",
    )
    unused = jnp.zeros((1, 1), jnp.int32)
    return kernel(
        q_latent, unused if q_rope is None else q_rope, pages, page_table, layer, work, unused if tree is None else tree
    )


class _Body(Block):
    rows_axis, side_readers = 1, 2

    def scratch(self) -> dict:
        rows = self.plan.group_rows
        return {
            **self.queries(),
            **self.ring(),
            "factors": plgpu.SMEM((SLOTS, rows), jnp.float32),  # of each tile: what came before counts so much less
            "inverse_sums": plgpu.SMEM((rows,), jnp.float32),
            "natural_lse": plgpu.SMEM((rows,), jnp.float32),
            "p_ready": plgpu.Barrier(num_barriers=SLOTS),
            "sums_ready": plgpu.Barrier(),
            "sums_read": plgpu.Barrier(num_arrivals=2),
        }

    def __call__(self, *refs, **smem):
        self.start(*refs, **smem)
        warpgroup = lax.axis_index("warpgroup")
        roles = (
            (3, 48, self._load),
            (0, 104, self._scores),
            (1, 176, functools.partial(self._values, "left")),
            (2, 176, functools.partial(self._values, "right")),
        )
        for number, registers, role in roles:

            @pl.when(warpgroup == number)
            def _(role=role, registers=registers):
                plgpu.set_max_registers(registers, action="decrease" if registers < 128 else "increase")
                # Carried: the item's fields, and how many tiles went through the ring before it.
                lax.fori_loop(0, self.rounds, role, (self.read_item(0), jnp.int32(0)))

    def _load(self, turn, carry):
        """One item. Its queries take the place of the last one's result."""
        fields, before = carry
        self.take_item(fields)
        following, tiles = self.read_item(turn + 1), self.item["tiles"]

        def load(j):
            order = tuple((0, part) for part in PARTS)
            self.load([(lax.rem(before + j, SLOTS), j)], order, reused=before + j >= SLOTS)

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
        fields, before = carry
        self.take_item(fields)
        smem, shape = self.smem, (TILE, self.plan.group_rows)
        plgpu.barrier_wait(smem["full_q"])

        def step(j, carry):
            m, sums = carry
            at = lax.rem(before + j, SLOTS)
            scores = self.masked(pl.run_scoped(lambda ref: self._products(ref, at), plgpu.ACC(shape, jnp.float32)), j)
            higher = jnp.maximum(m, scores.max(axis=0) * self.log2_scale)
            p, factors = jnp.exp2(scores * self.log2_scale - self.spread(higher, shape)), jnp.exp2(m - higher)
            sync_warpgroup(7)  # every warp is done with this tile's scores: P takes the place of its rope part
            smem["side"].at[at, pl.ds(0, shape[1]), pl.ds(0, TILE)].transpose((1, 0))[...] = p.astype(jnp.bfloat16)
            smem["factors"].at[at][...] = factors  # those of two tiles ago were read before this tile came
            fence_proxy()
            plgpu.barrier_arrive(smem["p_ready"].at[at])
            return higher, sums * self.spread(factors, shape) + p

        m = plgpu.layout_cast(jnp.full(shape[1:], START, jnp.float32), ROW)
        m, sums = lax.fori_loop(0, self.item["tiles"], step, (m, _zeros(shape)))
        following = self.read_item(turn + 1)  # on its way while this item ends
        self._finish(turn, m, sums.sum(axis=0))
        return following, before + self.item["tiles"]

    def _products(self, scores, at):
        smem, zero = self.smem, opaque_zero()
        for n, part in enumerate(PARTS):
            plgpu.barrier_wait(smem["full"][part].at[at])
            if part != "side" or self.rope:
                q = smem["queries_rope"].at[zero] if part == "side" else smem["queries"].at[n + zero]
                plgpu.wgmma(scores, smem[part].at[at], q.transpose((1, 0)))
        return scores[...]

    def _finish(self, turn, m, sums) -> None:
        smem, slot = self.smem, self.item["partial"]
        seen = m > START / 2

        @pl.when(turn > 0)
        def _():
            plgpu.barrier_wait(smem["sums_read"])

        smem["inverse_sums"][...] = jnp.where(seen, 1.0 / sums, 0.0)
        plgpu.barrier_arrive(smem["sums_ready"])
        lse = jnp.where(seen, m + jnp.log2(sums), -jnp.inf)

        @pl.when(slot >= 0)
        def _():
            self.partial_lse.at[lax.max(slot, 0)][...] = lse

        @pl.when(slot < 0)
        def _():
            smem["natural_lse"][...] = lse * math.log(2)
            plgpu.commit_smem()
            self.store(smem["natural_lse"], self.lse)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # Values

    def _values(self, part: str, turn, carry):
        fields, before = carry
        self.take_item(fields)
        smem, rows = self.smem, self.plan.group_rows

        def step(j, o):
            at = lax.rem(before + j, SLOTS)
            plgpu.barrier_wait(smem["p_ready"].at[at])
            factors = plgpu.load(smem["factors"].at[at], layout=ROW)
            self.drop_unused(part, at, j)

            def product(o):
                p = smem["side"].at[at, pl.ds(0, rows), pl.ds(0, TILE)]
                plgpu.wgmma(o, smem[part].at[at].transpose((1, 0)), p.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(smem["empty"][part].at[at])
                plgpu.barrier_arrive(smem["empty"]["side"].at[at])

            return pl.run_state(product)(plgpu.ACC.init(o * self.spread(factors, o.shape)))

        o = lax.fori_loop(0, self.item["tiles"], step, _zeros((self.half, rows)))
        following = self.read_item(turn + 1)  # on its way while this item ends
        plgpu.barrier_wait(smem["sums_ready"])
        o = o * self.spread(plgpu.load(smem["inverse_sums"], layout=ROW), o.shape)
        plgpu.barrier_arrive(smem["sums_read"])
        self._store(PARTS.index(part), o)
        plgpu.barrier_arrive(smem["empty_q"])
        return following, before + self.item["tiles"]

    def _store(self, number: int, o) -> None:
        """The result through the queries' place, which all products are done with; a partial one at once."""
        slot, columns = self.item["partial"], pl.ds(number * self.half, self.half)

        @pl.when(slot >= 0)
        def _():
            store_transposed(self.partial.at[lax.max(slot, 0), :, columns], o)

        @pl.when(slot < 0)
        def _():
            staged = self.smem["queries"].at[number]
            staged.transpose((1, 0))[...] = o.astype(jnp.bfloat16)
            plgpu.commit_smem()
            self.store(staged, self.out, columns)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _zeros(shape):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), ACC)
