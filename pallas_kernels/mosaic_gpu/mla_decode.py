# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false
# (JAX's annotations of its own plgpu.ACC and transforms.)
"""The compute-bound MLA kernel: absorbed attention over a paged bfloat16 cache. For compute capability 9.0.

It runs decode, verify, draft-extend and trees. A thread block takes its items of the work list one after the other: 64
rows (query tokens times heads) and some tiles of 64 keys. Three warpgroups: the last one loads (TMA), and runs ahead
into the next item; the other two own one half of the value channels each. Tiles come in pairs: warpgroup 0 computes the
scores S and the softmax of tile 0, warpgroup 1 those of tile 1. Each needs the other's probabilities P too, which cross
through the rope buffer of their tile, whose keys have been used by then:

    warpgroup 0                                      warpgroup 1
    m0 = max(m, S0)              --- m0 --->
    P0 = exp(S0 - m0)            --- P0 --->         O = O exp(m - m0) + P0 V0   (shared memory)
    O = O exp(m - m0) + P0 V0    (registers)         m1 = max(m0, S1)
                                 <-- m1 ----         P1 = exp(S1 - m1)
    O = O exp(m0 - m1) + P1 V1   <-- P1 ----         O = O exp(m0 - m1) + P1 V1  (registers)
    S0 = Q K0 of the next pair                       S1 = Q K1 of the next pair

So warpgroup 1 runs about a third of a pair behind, and the softmax of each overlaps products of the other.
Each buffer is released as soon as its last product is issued, so that the loader refills it during the products of the
other tile. The query buffer is released before an item's last pair of tiles; the output is staged through the rope
buffers, 64 channels at a time, while the next item's queries load.

The running maximum stays as it is while it grows by less than ``rescale_threshold`` (in log2), so that most rescaling
is skipped: the sums cancel it exactly, and P stays below 2**rescale_threshold.

Shared memory: queries, two tiles, statistics; counted in ../README.md.

Roofline: a key takes 2 * (2 R + E) FLOP a row and 2 * (R + E) bytes. At 790 TFLOP/s and 4.46 TB/s, 128 requests of 4096
keys with 128 rows each take 185 us of products and 135 us of reads.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from mla_attn.pallas_kernels.mosaic_gpu.mla_block import START, Block, Call, attend, opaque_zero
from mla_attn.pallas_kernels.mosaic_gpu.primitives import ROW, fence_proxy, scale_rows, sync_warpgroup, zeros
from mla_attn.pallas_kernels.work_list import TILE, TILE_ROWS, Plan

BLOCK_ROWS = TILE_ROWS  # rows of a thread block: M of wgmma is 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel runs; results are the same up to rounding.

    Attributes:
        rescale_threshold: log2 by which the maximum may grow before sums are rescaled; 0 rescales at every growth.
    """

    rescale_threshold: float = 8.0

    def __post_init__(self):
        if not 0 <= self.rescale_threshold <= 16:
            raise ValueError(f"rescale_threshold={self.rescale_threshold} must be 0 to 16: log2 of the largest P")


@functools.partial(jax.jit, static_argnames=("call", "plan", "config"))  # all layers share one lowering
def mla_decode(
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
    config: Config = Config(),
) -> tuple[
    BFloat16[Array, "rows R"],
    Float32[Array, "rows"],
    Float32[Array, "partials tile_rows R"],
    Float32[Array, "partials tile_rows"],
]:
    """Attends, and returns ``(out, lse)`` and the partial results that ``combine`` joins.

    ``lse`` is a natural logarithm, that of partial results a binary one. Rows of partial results are not written in
    ``out`` and ``lse``.

    Args:
        q_latent: latent part of the queries, packed rows (token, head).
        q_rope: rope part of the queries; None where E is 0.
        pages: the pool, all layers, pages of any size; in a row the latent part, and from ``call.rope_offset`` on the
            rope part.
        page_table: ids within a layer; whatever they are, nothing outside ``pages`` is read.
        layer: layer of the pool.
        work: the list that ``work_list`` made for ``plan``.
        tree: bit c % 32 of ``tree[c // 32, row]`` says whether the row sees key c of ``call.tree_keys``, as in a tree
            mask; ``plan.tile_rows`` rows of anything follow the last. None without a tree.
        call: how scores are formed, and where pages lie.
        plan: static sizes of ``work``.
        config: how the kernel runs.

    Raises:
        ValueError: ``plan.tile_rows`` is not 64.
    """
    if plan.tile_rows != BLOCK_ROWS:
        raise ValueError(f"plan.tile_rows={plan.tile_rows} must be {BLOCK_ROWS}")
    rope = 0 if q_rope is None else q_rope.shape[1]
    body = _Body(call, plan, config, rank=q_latent.shape[1], rope=rope, page=pages.shape[1])
    arrays = (q_latent, q_rope, pages, page_table, layer, work, tree)
    return attend(body, arrays, kernel_name="mla_decode", warpgroups=3)


# Order of the copies of a pair, (tile, part): that in which the scores of each tile use them. Other orders: NOTES.md.
_ORDER = ((0, "left"), (0, "right"), (0, "rope"), (1, "right"), (1, "left"), (1, "rope"))


class _Body(Block):
    """A loading warpgroup and two consumers."""

    rows_axis = 0

    def __init__(self, call: Call, plan: Plan, config: Config, **sizes):
        super().__init__(call, plan, **sizes)
        self.config = config

    def scratch(self) -> dict:
        two = plgpu.Barrier(num_barriers=2)
        return {
            **self.queries(),
            **self.buffer(),
            "stats": plgpu.SMEM((4, BLOCK_ROWS), jnp.float32),  # maxima, then sums, of both warpgroups
            "max_ready": two,
            "p_ready": two,
            "sums_ready": plgpu.Barrier(num_arrivals=2),
        }

    def __call__(self, *refs, **smem):
        self.start(*refs, **smem)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            lax.fori_loop(0, self.rounds, self._load, self.read_item(0))

        for number, consumer in enumerate((_Left(self), _Right(self))):

            @pl.when(warpgroup == number)
            def _(consumer=consumer):
                plgpu.set_max_registers(232, action="increase")
                lax.fori_loop(0, self.rounds, consumer.run, self.read_item(0))

    def take_item(self, fields: tuple) -> None:
        super().take_item(fields)
        self.pairs = lax.max(lax.div(self.item["tiles"] + 1, 2), 1)

    def _load(self, turn, fields):
        """Loads one item; returns the fields of the next. Queries wait for the last scores of the item before."""
        self.take_item(fields)
        pl.when(turn > 0)(lambda: plgpu.barrier_wait(self.smem["empty_q"]))
        self.load_queries()

        @pl.loop(0, self.pairs)
        def _(t):
            self.load([(0, 2 * t), (1, 2 * t + 1)], _ORDER, reused=(turn > 0) | (t > 0))

        return self.read_item(turn + 1)  # loads while the last pair does


class _Consumer:
    """What both consumer warpgroups do alike.

    A row's sum is kept in two parts: each warpgroup adds up the probabilities of its own tiles, and ``_finish`` joins
    them. With one query token and no tree, only the last pair holds keys that are not visible, and only it is masked.

    A half of a tile is read as keys by the tile's warpgroup, then as values by the half's warpgroup. Only the latter
    zeroes its unused rows and releases it: it has waited for P, which the tile's warpgroup made of the keys.
    """

    number: int  # number of the warpgroup, and of its tile in a pair
    order: tuple[str, ...]  # order in which the parts of its tile arrive

    def __init__(self, body: _Body):
        self.body, self.call, self.config = body, body.call, body.config

    def step(self, t, carry, *, last: bool):
        """Softmax and value products of pair ``t``, and the scores of the next pair unless this is the last."""
        raise NotImplementedError

    def run(self, turn, fields):
        """Computes one item; returns the fields of the next."""
        body, self.smem = self.body, self.body.smem
        body.take_item(fields)
        plgpu.barrier_wait(self.smem["full_q"])
        m = plgpu.layout_cast(jnp.full((BLOCK_ROWS,), START, jnp.float32), ROW)
        sums = plgpu.layout_cast(jnp.zeros((BLOCK_ROWS,), jnp.float32), ROW)

        def first_scores(scores):
            self.add_all_scores(scores)
            return scores[...]

        scores = pl.run_scoped(first_scores, plgpu.ACC((BLOCK_ROWS, TILE), jnp.float32))
        carry = zeros((BLOCK_ROWS, body.half)), scores, m, sums
        carry = lax.fori_loop(0, body.pairs - 1, lambda t, c: self.step(t, c, last=False), carry)
        plgpu.barrier_arrive(self.smem["empty_q"])
        o, m, sums = self.step(body.pairs - 1, carry, last=True)
        following = body.read_item(turn + 1)  # loads while this item ends
        self._finish(o, m, sums)
        self.release("rope", 1 - self.number)  # only now: the output was staged in it
        return following

    def run_products(self, products, carry, *, last: bool):
        """Runs ``products(o, scores, m, sums)`` on references; ``scores`` is None in an item's last pair."""
        o, scores, m, sums = carry
        if last:
            return pl.run_state(lambda r: products(r[0], None, *r[1:]))((plgpu.ACC.init(o), m, sums))
        return pl.run_state(lambda r: products(*r))((plgpu.ACC.init(o), plgpu.ACC.init(scores), m, sums))

    # Scores

    def add_all_scores(self, scores) -> None:
        """Adds the products of all parts of this warpgroup's tile."""
        zero = opaque_zero()
        for part in self.order:
            self.add_scores(scores, part, zero)

    def restart_scores(self, scores) -> None:
        """Starts anew with the scores of this warpgroup's tile in the next pair."""
        scores[...] = zeros((BLOCK_ROWS, TILE))
        self.add_all_scores(scores)

    def add_scores(self, scores, part: str, zero) -> None:
        """Waits for ``part`` of this warpgroup's tile and adds its products."""
        body, smem = self.body, self.smem
        plgpu.barrier_wait(smem["full"][part].at[self.number])
        if part == "rope":
            if not body.rope:
                return
            q = smem["queries_rope"].at[zero]
        else:
            q = smem["queries"].at[("left", "right").index(part) + zero]
        plgpu.wgmma(scores, q, smem[part].at[self.number + zero].transpose((1, 0)))

    # Softmax

    def raised(self, m, scores):
        """The running maximum (log2) after ``scores``: unchanged unless it grows by more than ``rescale_threshold``."""
        top = scores.max(axis=1) * self.body.log2_scale
        return (
            jnp.where(top > m + self.config.rescale_threshold, top, m)
            if self.config.rescale_threshold
            else jnp.maximum(m, top)
        )

    def probabilities(self, scores, m):
        """exp(score - maximum), float32."""
        return jnp.exp2(scores * self.body.log2_scale - self.body.spread(m, scores.shape))

    def rescaled(self, o, factors):
        """``o`` with each row times its factor."""
        return scale_rows(o, factors) if self.config.rescale_threshold else o * self.body.spread(factors, o.shape)

    def release(self, part: str, at: int) -> None:
        """Lets the loader overwrite a part of stage ``at``."""
        plgpu.barrier_arrive(self.smem["empty"][part].at[at])

    def publish_p(self, p) -> None:
        """Hands this tile's probabilities to the other warpgroup, in the rope buffer of the tile."""
        sync_warpgroup(6 + self.number)  # every warp is done with the scores: P overwrites the tile's rope part
        self.smem["rope"].at[self.number][...] = p
        fence_proxy()
        plgpu.barrier_arrive(self.smem["p_ready"].at[self.number])

    def other_p(self, zero):
        """The other tile's probabilities, in shared memory, once they are there."""
        plgpu.barrier_wait(self.smem["p_ready"].at[1 - self.number])
        return self.smem["rope"].at[1 - self.number + zero, :, pl.ds(0, TILE)]

    def publish_max(self, m) -> None:
        """Hands the running maximum to the other warpgroup."""
        self.smem["stats"].at[self.number][...] = m
        plgpu.barrier_arrive(self.smem["max_ready"].at[self.number])

    def other_max(self):
        """The other warpgroup's running maximum, once it is there."""
        plgpu.barrier_wait(self.smem["max_ready"].at[1 - self.number])
        return plgpu.load(self.smem["stats"].at[1 - self.number])

    def _finish(self, o, m, sums) -> None:
        """Joins the sums of both warpgroups, and writes the result or the partial result."""
        body, stats = self.body, self.smem["stats"]
        stats.at[2 + self.number][...] = sums
        plgpu.barrier_arrive(self.smem["sums_ready"])
        plgpu.barrier_wait(self.smem["sums_ready"])
        total = plgpu.load(stats.at[2]) + plgpu.load(stats.at[3])
        seen = total != 0  # not by m, which NaN scores leave at START: such a row is not empty
        o = o * self.body.spread(jnp.where(seen, 1.0 / total, 0.0), o.shape)
        lse = jnp.where(seen, m + jnp.log2(total), -jnp.inf)
        index = body.item["partial"]

        @pl.when(index < 0)
        def _():
            self._store(o, lse * math.log(2))

        @pl.when(index >= 0)
        def _():
            body.partial.at[lax.max(index, 0), :, pl.ds(self.number * body.half, body.half)][...] = o
            if self.number == 0:
                body.partial_lse.at[lax.max(index, 0)][...] = lse

    def _store(self, o, lse) -> None:
        """Stores the item's rows, 64 channels at a time, through the rope buffer that this warpgroup read last."""
        body, staged, stats = self.body, self.smem["rope"].at[1 - self.number], self.smem["stats"].at[0]
        for column in range(0, body.half, TILE):
            staged[...] = o[:, column : column + TILE].astype(jnp.bfloat16)
            first = self.number == 0 and column == 0
            if first:
                stats[...] = lse
            plgpu.commit_smem()
            body.store(staged, body.out, pl.ds(self.number * body.half + column, TILE))
            if first:
                body.store(stats, body.lse)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class _Left(_Consumer):
    """Warpgroup 0: scores of the first tile of a pair, the left half of the values."""

    number, order = 0, ("left", "right", "rope")

    def step(self, t, carry, *, last: bool):
        o, scores, m, sums = carry
        zero, smem = opaque_zero(), self.smem
        if last or self.call.max_q_len > 1 or self.call.tree_keys:
            scores = self.body.masked(scores, 2 * t)
        m0 = self.raised(m, scores)
        self.publish_max(m0)
        p = self.probabilities(scores, m0)
        p16, alpha = p.astype(jnp.bfloat16), jnp.exp2(m - m0)
        self.publish_p(p16)
        o = self.rescaled(o, alpha)
        if last:
            self.body.drop_unused("left", 0, 2 * t)

        def products(o_ref, scores_ref, m_ref, sums_ref):
            plgpu.wgmma(o_ref, p16, smem["left"].at[0 + zero])
            sums = sums_ref[...] * alpha + p.sum(axis=1)
            o = plgpu.wgmma_accumulator_load(o_ref, wait_n=0)
            self.release("left", 0)
            m1 = self.other_max()
            beta = jnp.exp2(m0 - m1)
            o_ref[...] = self.rescaled(o, beta)
            m_ref[...], sums_ref[...] = m1, sums * beta
            p1 = self.other_p(zero)
            if last:
                self.body.drop_unused("left", 1, 2 * t + 1)
            plgpu.wgmma(o_ref, p1, smem["left"].at[1 + zero])
            plgpu.wgmma_wait(0)
            self.release("left", 1)
            if not last:
                self.release("rope", 1)
                self.restart_scores(scores_ref)

        return self.run_products(products, (o, scores, m, sums), last=last)


class _Right(_Consumer):
    """Warpgroup 1: scores of the second tile of a pair, the right half of the values."""

    number, order = 1, ("right", "left", "rope")

    def step(self, t, carry, *, last: bool):
        o, scores, m, sums = carry
        zero, smem = opaque_zero(), self.smem
        if last or self.call.max_q_len > 1 or self.call.tree_keys:
            scores = self.body.masked(scores, 2 * t + 1)
        m0 = self.other_max()
        o = self.rescaled(o, jnp.exp2(m - m0))
        if last:
            self.body.drop_unused("right", 0, 2 * t)

        def products(o_ref, scores_ref, m_ref, sums_ref):
            plgpu.wgmma(o_ref, self.other_p(zero), smem["right"].at[0 + zero])
            m1 = self.raised(m0, scores)
            self.publish_max(m1)
            p = self.probabilities(scores, m1)
            p16 = p.astype(jnp.bfloat16)
            self.publish_p(p16)
            m_ref[...], sums_ref[...] = m1, sums_ref[...] * jnp.exp2(m - m1) + p.sum(axis=1)
            o = plgpu.wgmma_accumulator_load(o_ref, wait_n=0)
            self.release("right", 0)
            if not last:
                self.release("rope", 0)
            o_ref[...] = self.rescaled(o, jnp.exp2(m0 - m1))
            if last:
                self.body.drop_unused("right", 1, 2 * t + 1)
            plgpu.wgmma(o_ref, p16, smem["right"].at[1 + zero])
            plgpu.wgmma_wait(0)
            self.release("right", 1)
            if not last:
                self.restart_scores(scores_ref)

        return self.run_products(products, (o, scores, m, sums), last=last)
