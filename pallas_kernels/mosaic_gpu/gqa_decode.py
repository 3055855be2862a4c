# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false
# (JAX's annotations of its own plgpu.ACC and transforms.)
"""The GQA kernel: attention of the query heads of each KV head over paged keys and values. For compute capability 9.0.

It runs decode, verify, draft-extend, trees and prompt parts. Thread blocks come in teams that take an equal share of
all key tiles each (``even_list.py``); those of a team take neighbouring KV heads of the same keys at the same time, so
that what lies side by side in memory is read together. In a thread block one warpgroup loads (TMA) into a ring of
stages, a tile of 64 keys and values each, and runs ahead into the next item; each of the others computes a KV head:

    S = Q K^T,  m' = max(m, S),  P = exp(S - m'),  O = O exp(m - m') + P V

Rows (query tokens times query heads of the KV head) are M of wgmma, which is 64, however few they are: then most of
the product is waste, but it takes less time than reading the tile. In return P stays in registers, V is read as it
lies, and no warp waits for another.

Shared memory: queries, and as many stages as fit; counted in ../README.md.

Roofline: a key of a KV head takes 2 * (D + V) bytes: 461 us at 4.66 TB/s for 128 requests of 4096 keys, 8 KV heads of
128 channels.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from mla_attn.pallas_kernels.even_list import EvenPlan
from mla_attn.pallas_kernels.mosaic_gpu.gqa_block import BLOCK_ROWS, Block, Call
from mla_attn.pallas_kernels.mosaic_gpu.primitives import (
    ROW,
    scale_rows,
    scatter_rows,
    scatter_vector,
    take,
    zero_rows,
    zeros,
)
from mla_attn.pallas_kernels.work_list import TILE

START = -1e30  # the running maximum (log2) of a row that has seen no key
_MOST_SINK = 1e30  # an infinite sink (log2): everything else weighs nothing beside it
_LOG2E = math.log2(math.e)


@functools.partial(jax.jit, static_argnames=("call", "plan", "out_dtype"))  # all layers share one lowering
def gqa_decode(
    q: Float[Array, "rows D"],
    k: Float[Array, "pages ..."],
    v: Float[Array, "pages ..."] | None,
    page_table: Int32[Array, "B W"],
    layer: Int32[Array, "1"],
    work: Int32[Array, "size"],
    tree: Int32[Array, "words tokens"] | None,
    sinks: Float32[Array, "heads"] | None,
    *,
    call: Call,
    plan: EvenPlan,
    out_dtype: jnp.dtype,
) -> tuple[
    Float[Array, "rows V"],
    Float32[Array, "rows"],
    Float32[Array, "partials set_rows V"],
    Float32[Array, "partials set_rows"],
]:
    """Attends, and returns ``(out, lse)`` and the partial results that ``combine`` joins.

    ``lse`` is a natural logarithm, that of partial results a binary one. Rows of partial results are not written in
    ``out`` and ``lse``.

    Args:
        q: queries, packed rows (token, head), in the pool's dtype, of two bytes.
        k, v: the pool's arrays, all layers, pages of any size; ``v`` is None in the interleaved layout.
        page_table: ids within a layer; whatever they are, nothing outside the pool is read.
        layer: layer of the pool.
        work: the list that ``even_list`` made for ``plan``.
        tree: bit c % 32 of ``tree[c // 32, token]`` says whether the token's rows see key c of ``call.tree_keys``.
            None without a tree, and with a window.
        sinks: raw logits of each head; None without.
        call: how scores are formed, and where pages lie.
        plan: static sizes of ``work``.
        out_dtype: float32, bfloat16 or float16.
    """
    page = k.shape[2 if call.layout == "hnd" else 1]
    widths = [array.shape[-1] for array in (k, v) if array is not None]
    body = _Body(call, plan, dtype=q.dtype, page=page, widths=widths, has_sinks=sinks is not None)
    if body.gathers:
        k, v = body.as_rows(k), None if v is None else body.as_rows(v)
    X, f32, rows = jax.ShapeDtypeStruct, jnp.float32, plan.num_partials * plan.set_heads * plan.tile_rows
    kernel = plgpu.kernel(
        body,
        out_type=(
            X((q.shape[0], call.v_head_dim), out_dtype),
            X((q.shape[0],), f32),
            X((rows, call.v_head_dim), f32),
            X((rows,), f32),
        ),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=plan.block_heads + 1,
        thread_name="warpgroup",
        scratch_types=body.scratch(body.stages),
        # No automatic barriers: each role waits for what it takes from the others.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        kernel_name="gqa_decode",
    )
    unused = jnp.zeros((1, 1), jnp.int32)
    optional = (
        unused if tree is None else tree,
        unused.ravel().astype(f32) if sinks is None else sinks,
    )
    out, lse, partial, partial_lse = kernel(q, k, k if v is None else v, page_table, layer, work, *optional)
    return out, lse, partial.reshape(plan.num_partials, -1, call.v_head_dim), partial_lse.reshape(plan.num_partials, -1)


class _Body(Block):
    """A loading warpgroup, and one for each KV head that a thread block takes at a time."""

    def __call__(self, *refs, **smem):
        self.start(*refs, **smem)
        warpgroup = lax.axis_index("warpgroup")
        for loads in (True, False):

            @pl.when((warpgroup == self.heads) if loads else (warpgroup < self.heads))
            def _(loads=loads):
                if self.heads > 1:  # with less, each thread may have all registers that there are
                    plgpu.set_max_registers(56 if loads else 224, action="decrease" if loads else "increase")
                if loads:
                    self.zero_queries()
                role = self.load_item if loads else functools.partial(self._attend, warpgroup)
                # Carried: the item's fields, and how many tiles the ring held before it.
                lax.fori_loop(0, self.rounds, role, (self.read_item(0), jnp.int32(0)))

    def _attend(self, warpgroup, turn, carry):
        """Computes one item of the warpgroup's KV head; returns the fields of the next."""
        fields, before = carry
        self.take_item(fields)
        smem, slot = self.smem, lax.rem(turn, self.slots)
        plgpu.barrier_wait(smem["full_q"].at[slot])
        queries = smem["queries"].at[slot * self.heads + warpgroup]

        def step(j, carry):
            o, m, sums = carry
            at = lax.rem(before + j, self.stages) * self.heads + warpgroup
            plgpu.barrier_wait(smem["full"]["keys"].at[at])

            def scores_of(scores):
                plgpu.wgmma(scores, queries, smem["keys"].at[at].transpose((1, 0)))
                return scores[...]

            scores = pl.run_scoped(scores_of, plgpu.ACC((BLOCK_ROWS, TILE), jnp.float32))
            plgpu.barrier_arrive(smem["empty"]["keys"].at[at])
            scores, scale = self._capped(scores)
            scores = self._masked(scores, j)
            higher = jnp.maximum(m, scores.max(axis=1) * scale)
            p, factors = jnp.exp2(scores * scale - _spread(higher, scores.shape)), jnp.exp2(m - higher)
            sums = sums * factors + p.sum(axis=1)
            o = scale_rows(o, factors)
            plgpu.barrier_wait(smem["full"]["values"].at[at])
            self._drop_unused(at, j)

            def products(o_ref):
                plgpu.wgmma(o_ref, p.astype(self.dtype), smem["values"].at[at])
                plgpu.wgmma_wait(0)

            o = pl.run_state(products)(plgpu.ACC.init(o))
            plgpu.barrier_arrive(smem["empty"]["values"].at[at])
            return o, higher, sums

        o = zeros((BLOCK_ROWS, self.call.v_head_dim))
        o, m, sums = lax.fori_loop(0, self.item["tiles"], step, (o, *self._begin(warpgroup)))
        plgpu.barrier_arrive(smem["empty_q"].at[slot])
        following = self.read_item(turn + 1)  # loads while this item ends
        self._finish(warpgroup, o, m, sums)
        return following, before + self.item["tiles"]

    def _begin(self, warpgroup):
        """Maximum (log2) and sum before the first key: those of the sink, in the unit's first item."""
        row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (BLOCK_ROWS,), 0), ROW)
        # Rows of nobody have P = 0: products of zeros take less power.
        m = jnp.where(row < self.item["rows"], START, _MOST_SINK)
        if not self.has_sinks:
            return m, plgpu.layout_cast(jnp.zeros((BLOCK_ROWS,), jnp.float32), ROW)
        heads = self.plan.heads
        sink = take(self.sinks, (self.set_head + warpgroup) * heads + lax.rem(row, heads), jnp.float32)
        sink = jnp.minimum(sink * _LOG2E, _MOST_SINK) + jnp.where(self.item["begins"] > 0, 0.0, -jnp.inf)
        m = jnp.maximum(m, sink)
        return m, jnp.exp2(sink - m)

    def _capped(self, scores):
        """The scores of wgmma, capped, and what makes them binary logarithms."""
        cap = self.call.soft_cap
        if cap is None:
            return scores, self.call.scale * _LOG2E
        # tanh x = 1 - 2 / (1 + e^2x); the hardware's own tanh is too coarse.
        return cap - (2 * cap) / (1 + jnp.exp2(scores * (self.call.scale / cap * 2 * _LOG2E))), _LOG2E

    def _masked(self, scores, j):
        """Scores of tile ``j`` of the item, with -inf for keys that a row does not see."""
        call, item, window, shape = self.call, self.item, self.plan.window, scores.shape
        key0 = (item["tile"] + j) * TILE

        def mask(scores):
            key = lax.broadcasted_iota(jnp.int32, shape, 1) + key0
            seen = key < item["keys"]
            at = key * call.kv_stride
            token = item["nth"]
            if call.max_q_len > 1:
                token = lax.div(lax.broadcasted_iota(jnp.int32, shape, 0), self.plan.heads) + token
            position = item["position"] + token
            if call.causal:
                seen &= at <= position
            if call.tree_keys:
                seen &= self._in_tree(at)
            if window is not None:
                seen &= at > position - window
            return jnp.where(seen, scores, -jnp.inf)

        some_hidden = key0 + TILE > self.hidden
        if window is not None:
            some_hidden |= key0 < self.shown
        return lax.cond(some_hidden, mask, lambda scores: scores, scores)

    def _in_tree(self, at):
        """Which keys the tree mask lets each row see; positions ``at`` count from the table's first key."""
        call, plan = self.call, self.plan
        row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (BLOCK_ROWS,), 0), ROW)
        token = lax.min(self.item["token"] + lax.div(row, plan.heads), plan.num_tokens - 1)
        c = at - (self.item["position"] - (call.tree_keys - call.max_q_len))
        seen = c < 0
        for n in range(self.tree.shape[0]):
            words = take(self.tree.at[n], token, jnp.int32)
            bit = lax.shift_right_logical(_spread(words, at.shape), c & 31) & 1
            seen |= (lax.shift_right_arithmetic(c, 5) == n) & (bit == 1)
        return seen

    def _drop_unused(self, at, j) -> None:
        """Zeroes the values of tile ``j`` that no row sees: their probability is 0, but 0 * NaN is NaN."""
        key0 = (self.item["tile"] + j) * TILE
        valid, before = self.item["keys"] - key0, self.first_key - key0

        @pl.when((valid < TILE) | (before > 0))
        def _():
            zero_rows(self.smem["values"].at[at], valid, None if self.plan.window is None else before)
            plgpu.commit_smem()

    def _finish(self, warpgroup, o, m, sums) -> None:
        """Writes the result or the partial result."""
        item, plan = self.item, self.plan
        seen = sums != 0  # not by m, which NaN scores leave at START: such a row is not empty
        o = o * _spread(jnp.where(seen, 1.0 / sums, 0.0), o.shape)
        lse = jnp.where(seen, m + jnp.log2(sums), -jnp.inf)
        head, index = self.set_head + warpgroup, item["partial"]

        @pl.when(index < 0)
        def _():
            first = item["token"] * self.num_heads + head * plan.heads
            by = {"group": plan.heads, "stride": self.num_heads}
            scatter_rows(self.out, o, first, item["rows"], **by)
            scatter_vector(self.lse, lse * math.log(2), first, item["rows"], **by)

        @pl.when(index >= 0)
        def _():
            lane_head = self.lane * self.heads + warpgroup
            first = (index * plan.set_heads + lane_head) * plan.tile_rows
            by = {"group": BLOCK_ROWS, "stride": 0}
            scatter_rows(self.partial, o, first, item["rows"], **by)
            scatter_vector(self.partial_lse, lse, first, item["rows"], **by)


def _spread(rows, shape):
    """Broadcasts a number for each row over its keys or channels."""
    return lax.broadcast_in_dim(rows, shape, [0])
