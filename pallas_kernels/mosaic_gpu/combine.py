"""The kernel that joins the partial results of KV splits, in place (Flash-Decoding; arXiv:2205.14135, section 3.1)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from mla_attn.pallas_kernels.even_list import EvenPlan
from mla_attn.pallas_kernels.mosaic_gpu.primitives import load_repeated, store_repeated
from mla_attn.pallas_kernels.work_list import COMBINED, Plan

# KV splits whose loads are in flight at a time; the last batch is the smallest of _TAILS that holds what is left.
_BATCH, _TAILS = 16, (2, 4, 8, 16)
_INVARIANT_BATCH = 4
_NO_KEY = -1e30  # log2-sum-exp below which nothing counts
_THREADS = 128


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def combine(
    work: Int32[Array, "size"],
    partial: Float32[Array, "partials unit_rows R"],
    partial_lse: Float32[Array, "partials unit_rows"],
    out: Float[Array, "rows R"],
    lse: Float32[Array, "rows"],
    *,
    plan: Plan | EvenPlan,
    interpret: Any = False,
) -> tuple[Float[Array, "rows R"], Float32[Array, "rows"]]:
    """Fills in the rows of ``(out, lse)`` that are combined: ``sum_i 2**(lse_i - lse) out_i``, KV splits in key order.

    Args:
        work: the list that ``work_list`` or ``even_list`` made for ``plan``.
        partial: normalised outputs of the KV splits, with ``plan.set_heads`` KV heads one after the other; anything
            finite where a row sees no key of its split.
        partial_lse: log2-sum-exps of the KV splits; -inf where a row sees no key of its split.
        out, lse: results of all rows, ``lse`` with the natural logarithm; rows that are not combined stay as they are.
        plan: static sizes of the list.
        interpret: ``plgpu.InterpretGPUParams()`` runs it without a GPU.
    """
    body = _Body(plan, rank=out.shape[1], num_rows=out.shape[0], unit_rows=partial.shape[1])
    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        body,
        out_type=(),
        grid=(body.blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),  # threads share nothing
        kernel_name="mla_combine",
        interpret=interpret,
    )(work, partial, partial_lse, out_ref, lse_ref)
    # Where the results are stacked, XLA (jaxlib 0.11.2) would let this kernel write them straight into their slice of
    # the stack, and lose what was already there in place.
    return lax.optimization_barrier((jax.freeze(out_ref), jax.freeze(lse_ref)))


class _Body:
    """Body of the kernel. A thread block takes every ``blocks``-th *unit*: a row, or half of a row's channels."""

    def __init__(self, plan: Plan | EvenPlan, *, rank: int, num_rows: int, unit_rows: int):
        self.plan, self.unit_rows = plan, unit_rows
        self.head_rows = unit_rows // plan.set_heads
        self.blocks = (8 if plan.invariant else 4) * plan.blocks  # 4 or 8 a multiprocessor: what its registers hold
        self.parts = 2 if num_rows < self.blocks and rank % 256 == 0 else 1  # few rows keep few blocks busy
        self.columns = rank // self.parts
        width = max(self.columns, _THREADS)  # with fewer columns several threads have the same one
        self.layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // _THREADS)

    def __call__(self, work, partial, partial_lse, out, lse):
        self.work, self.partial, self.partial_lse, self.out, self.lse = work, partial, partial_lse, out, lse
        # A load takes hundreds of cycles, and the record's would wait for the count's: the first turn is always taken.
        first = lax.axis_index("block")
        units = lax.max(work[1] * (self.unit_rows * self.parts) - first, 0)
        turns = lax.max(lax.div(units + (self.blocks - 1), self.blocks), 1)
        lax.fori_loop(0, turns, self._turn, self._read(first))

    def _read(self, unit) -> tuple:
        """The record (``COMBINED``) of the row tile that a unit belongs to; it has 0 rows where there is none."""
        index = lax.min(lax.div(unit, self.unit_rows * self.parts), self.plan.num_combined - 1)
        return tuple(self.work[self.plan.combined_at + index * len(COMBINED) + n] for n in range(len(COMBINED)))

    def _turn(self, i, record):
        """Joins one unit while the record of the next loads; returns that record."""
        unit = lax.axis_index("block") + i * self.blocks
        following = self._read(unit + self.blocks)
        tile = dict(zip(COMBINED, record, strict=True))
        part, row = lax.rem(unit, self.parts), lax.rem(lax.div(unit, self.parts), self.unit_rows)
        there = (lax.rem(row, self.head_rows) < tile["rows"]) & (
            unit < self.plan.num_combined * self.unit_rows * self.parts
        )
        pl.when(there)(lambda: self._join(tile, row, part))
        return following

    def _join(self, tile, row, part) -> None:
        """Computes and writes the channels of one unit."""
        columns = pl.ds(part * self.columns, self.columns)
        zeros = plgpu.layout_cast(jnp.zeros(self.layout.args[0], jnp.float32), self.layout)
        acc, l, m = self._add_all(tile, row, columns, (zeros, jnp.float32(0), jnp.float32(_NO_KEY)))
        seen = l != 0  # NaN is not empty
        result, to = acc * jnp.where(seen, 1.0 / l, 0.0), tile["row"] + self._row_of_result(row)
        if self.columns < _THREADS:
            store_repeated(self.out.at[to, columns], result.astype(self.out.dtype))
        else:
            self.out.at[to, columns][...] = result.astype(self.out.dtype)

        @pl.when(part == 0)
        def _():
            self.lse[to] = jnp.where(seen, (m + jnp.log2(l)) * math.log(2), -jnp.inf)

    def _row_of_result(self, row):
        """Where a row of a unit, which is of one KV head after the other, lies in the result: token by token."""
        group, kv_heads = self.plan.heads, self.plan.kv_heads
        if kv_heads == 1:
            return row
        head, row = lax.div(row, self.head_rows), lax.rem(row, self.head_rows)
        return (lax.div(row, group) * kv_heads + head) * group + lax.rem(row, group)

    def _add_all(self, tile, row, columns, carry):
        add = functools.partial(self._add, tile, row, columns)
        if self.plan.invariant:  # how many KV splits follow must not change how the first are added
            steps = lax.div(tile["splits"] + (_INVARIANT_BATCH - 1), _INVARIANT_BATCH)
            return lax.fori_loop(0, steps, lambda i, c: add(c, i * _INVARIANT_BATCH, _INVARIANT_BATCH), carry)
        steps = lax.div(tile["splits"], _BATCH)
        carry = lax.fori_loop(0, steps, lambda i, c: add(c, i * _BATCH, _BATCH, whole=True), carry)
        first, below = steps * _BATCH, 0
        for tail in _TAILS:
            left = tile["splits"] - first
            once = ((left > below) & (left <= tail)).astype(jnp.int32)
            carry = lax.fori_loop(0, once, lambda _, c, tail=tail: add(c, first, tail), carry)
            below = tail
        return carry

    def _add(self, tile, row, columns, carry, first, count, *, whole=False):
        """Adds ``count`` KV splits to the running output, sum and maximum (log2)."""
        acc, l, m = carry
        lses, values = self._load(tile, row, columns, first, count, whole=whole)
        higher = functools.reduce(lax.max, lses, m)
        alpha = jnp.exp2(m - higher)
        acc, l = acc * alpha, l * alpha
        for lse, value in zip(lses, values, strict=True):
            weight = jnp.exp2(lse - higher)
            acc, l = acc + value * weight, l + weight
        return acc, l, higher

    def _load(self, tile, row, columns, first, count, *, whole):
        """Loads log2-sum-exps and outputs of ``count`` KV splits.

        Unless ``whole``, indices past the last one repeat it with weight 0 (a log-sum-exp of -inf).
        """
        if whole:
            window = pl.ds(tile["partial"] + first, count)
            at, values, lses = range(count), self.partial.at[window], self.partial_lse.at[window]
            lses = [lses[n, row] for n in at]
        else:
            at = [tile["partial"] + lax.min(first + n, tile["splits"] - 1) for n in range(count)]
            values = self.partial
            lses = [jnp.where(first + n < tile["splits"], self.partial_lse[a, row], -jnp.inf) for n, a in enumerate(at)]
        if self.columns < _THREADS:
            return lses, [load_repeated(values.at[a, row, columns], _THREADS) for a in at]
        return lses, [plgpu.load(values.at[a, row, columns], optimized=False) for a in at]
