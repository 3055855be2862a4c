# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false
# (JAX's annotations of its own transforms.)
"""Scores of the GQA kernels: masks, caps and sinks, with rows as rows or as columns of the products."""

import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_attn.pallas_kernels.mosaic_gpu.gqa_block import BLOCK_ROWS, Block
from mla_attn.pallas_kernels.mosaic_gpu.primitives import ACC, scatter_vector, take
from mla_attn.pallas_kernels.work_list import TILE

START = -1e30  # the running maximum (log2) of a row that has seen no key
_MOST_SINK = 1e30  # an infinite sink (log2): everything else weighs nothing beside it
_LOG2E = math.log2(math.e)


class Scores(Block):
    """A thread block and what its scores are."""

    rows_axis: ClassVar[int]  # of the scores: 0, or 1 for transposed products

    @property
    def row_layout(self):
        """Layout of one number for each row."""
        return ACC.reduce(1 - self.rows_axis)

    def spread(self, rows, shape):
        """Broadcasts a number for each row over its keys or channels."""
        return lax.broadcast_in_dim(rows, shape, [self.rows_axis])

    def begin(self, warpgroup):
        """Maximum (log2) and sum before the first key: those of the sink, in the unit's first item."""
        row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (self.block_rows,), 0), self.row_layout)
        # Rows of nobody have P = 0: products of zeros take less power.
        m = jnp.where(row < self.item["rows"], START, _MOST_SINK)
        if not self.has_sinks:
            return m, plgpu.layout_cast(jnp.zeros((self.block_rows,), jnp.float32), self.row_layout)
        heads = self.plan.heads
        at = (self.set_head + warpgroup) * heads
        if heads > 1:
            at += lax.rem(row, heads)
        else:  # the remainder would be folded, and with it the layout
            at = plgpu.layout_cast(lax.broadcast(at, row.shape), self.row_layout)
        sink = take(self.sinks, at, jnp.float32, self.row_layout)
        sink = jnp.minimum(sink * _LOG2E, _MOST_SINK) + jnp.where(self.item["begins"] > 0, 0.0, -jnp.inf)
        m = jnp.maximum(m, sink)
        return m, jnp.exp2(sink - m)

    def capped(self, scores, key_scale=1.0):
        """The scores of wgmma, capped, and what makes them binary logarithms; ``key_scale`` is that of the keys."""
        cap, scale = self.call.soft_cap, self.call.scale
        if cap is None:
            return scores, scale * _LOG2E * key_scale
        # tanh x = 1 - 2 / (1 + e^2x); the hardware's own tanh is too coarse.
        return cap - (2 * cap) / (1 + jnp.exp2(scores * (scale / cap * 2 * _LOG2E * key_scale))), _LOG2E

    def masked(self, scores, j):
        """Scores of tile ``j`` of the item, with -inf for keys that a row does not see."""
        call, item, window, shape = self.call, self.item, self.plan.window, scores.shape
        key0 = (item["tile"] + j) * TILE

        def mask(scores):
            key = lax.broadcasted_iota(jnp.int32, shape, 1 - self.rows_axis) + key0
            seen = key < item["keys"]
            at = key * call.kv_stride
            token = item["nth"]
            if call.max_q_len > 1:
                token = lax.div(lax.broadcasted_iota(jnp.int32, shape, self.rows_axis), self.plan.heads) + token
            position = item["position"] + token
            if call.causal:
                seen &= at <= position
            if call.tree_keys:
                seen &= self._in_tree(at)
            if window is not None and not self.plan.tree:
                seen &= at > position - window
            return jnp.where(seen, scores, -jnp.inf)

        some_hidden = key0 + TILE > self.hidden
        if window is not None and not self.plan.tree:
            some_hidden |= key0 < self.shown
        return lax.cond(some_hidden, mask, lambda scores: scores, scores)

    def _in_tree(self, at):
        """Which keys the tree mask lets each row see; positions ``at`` count from the table's first key."""
        call, plan = self.call, self.plan
        row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (self.block_rows,), 0), self.row_layout)
        token = lax.min(self.item["token"] + lax.div(row, plan.heads), plan.num_tokens - 1)
        c = at - (self.item["position"] - (call.tree_keys - call.max_q_len))
        number = lax.shift_right_arithmetic(c, 5)  # of 32 columns; there are no keys after the last column
        word: Any = None
        for n in range(self.tree.shape[0]):
            words = self.spread(take(self.tree.at[n], token, jnp.int32, self.row_layout), at.shape)
            word = words if word is None else jnp.where(number == n, words, word)
        before = c < 0
        if plan.tree and plan.window is not None:
            before &= at > self.spread(take(self.positions, token, jnp.int32, self.row_layout), at.shape) - plan.window
        return before | ((c >= 0) & (lax.shift_right_logical(word, c & 31) & 1 == 1))

    def finish(self, warpgroup, o, m, sums, value_scale=1.0) -> None:
        """Writes the result or the partial result; values are to be multiplied by ``value_scale``."""
        item, plan = self.item, self.plan
        seen = sums != 0  # not by m, which NaN scores leave at START: such a row is not empty
        o = o * self.spread(jnp.where(seen, value_scale / sums, 0.0), o.shape)
        lse = jnp.where(seen, m + jnp.log2(sums), -jnp.inf)
        head, index = self.set_head + warpgroup, item["partial"]

        @pl.when(index < 0)
        def _():
            first = item["token"] * self.num_heads + head * plan.heads
            by = {"group": plan.heads, "stride": self.num_heads}
            self.scatter(self.out, o, first, item["rows"], **by)
            scatter_vector(self.lse, lse * math.log(2), first, item["rows"], layout=self.row_layout, **by)

        @pl.when(index >= 0)
        def _():
            lane_head = self.lane * self.heads + warpgroup
            first = (index * plan.set_heads + lane_head) * plan.tile_rows
            by = {"group": BLOCK_ROWS, "stride": 0}
            self.scatter(self.partial, o, first, item["rows"], **by)
            scatter_vector(self.partial_lse, lse, first, item["rows"], layout=self.row_layout, **by)

    def scatter(self, to, o, first, count, **places) -> None:
        """Stores the output's rows, as ``scatter_rows`` takes them."""
        raise NotImplementedError
