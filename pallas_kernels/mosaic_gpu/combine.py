"""Joins the partial results of split groups, in place."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from mla_attn.pallas_kernels.work_list import SPLIT, Plan

_BATCH, _TAILS = 16, (2, 4, 8, 16)  # pieces whose loads are in flight at a time; of the last batch no more than needed
_INVARIANT_BATCH = 4
_NO_KEY = -1e30  # log2-sum-exp below which nothing counts


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def combine(
    work: Int32[Array, "size"],
    partial: Float32[Array, "partials group_rows R"],
    partial_lse: Float32[Array, "partials group_rows"],
    out: Float[Array, "rows R"],
    lse: Float32[Array, "rows"],
    *,
    plan: Plan,
    interpret: Any = False,
) -> tuple[Float[Array, "rows R"], Float32[Array, "rows"]]:
    """``(out, lse)`` with the rows of split groups filled in: ``sum_i 2**(lse_i - lse) out_i``, pieces in key order.

    Args:
        work: of ``schedule.work_list`` for ``plan``.
        partial: normalised results of the pieces; anything finite where a piece's rows see no key.
        partial_lse: their log2-sum-exp; -inf there.
        out, lse: results, ``lse`` with the natural logarithm.
        interpret: ``plgpu.InterpretGPUParams()`` runs it without a GPU.
    """
    rank, group_rows = out.shape[1], partial.shape[1]
    blocks = (8 if plan.invariant else 4) * plan.lanes  # as many as a multiprocessor has registers for
    parts = 2 if plan.num_rows < blocks and rank % 256 == 0 else 1  # of the columns: few rows keep few blocks busy
    columns = rank // parts
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=columns // 128)

    def body(work, partial, partial_lse, out, lse):
        def read(unit):
            """The split that a unit, a part of a row, belongs to; rows are 0 where there is none."""
            split = lax.min(lax.div(unit, group_rows * parts), plan.num_splits - 1)
            return tuple(work[plan.splits_at + split * len(SPLIT) + n] for n in range(len(SPLIT)))

        def join(split, row, part):
            place = pl.ds(part * columns, columns)

            def load(first, count, *, whole):
                """Log2-sum-exps and results of pieces; those after the split's last are it once more, at -inf."""
                if whole:
                    window = pl.ds(split["partial"] + first, count)
                    at, values, lses = range(count), partial.at[window], partial_lse.at[window]
                    lses = [lses[n, row] for n in at]
                else:
                    at = [split["partial"] + lax.min(first + n, split["pieces"] - 1) for n in range(count)]
                    values = partial
                    lses = [
                        jnp.where(first + n < split["pieces"], partial_lse[a, row], -jnp.inf) for n, a in enumerate(at)
                    ]
                return lses, [plgpu.load(values.at[a, row, place], layout=layout, optimized=False) for a in at]

            def add(carry, first, count, *, whole=False):
                acc, total, top = carry
                lses, values = load(first, count, whole=whole)
                higher = functools.reduce(lax.max, lses, top)
                scale = jnp.exp2(top - higher)
                acc, total = acc * scale, total * scale
                for x, value in zip(lses, values, strict=True):
                    weight = jnp.exp2(x - higher)
                    acc, total = acc + value * weight, total + weight
                return acc, total, higher

            def add_all(carry):
                if plan.invariant:  # how many pieces follow must not change how the first are added
                    steps = lax.div(split["pieces"] + (_INVARIANT_BATCH - 1), _INVARIANT_BATCH)
                    return lax.fori_loop(0, steps, lambda i, c: add(c, i * _INVARIANT_BATCH, _INVARIANT_BATCH), carry)
                steps = lax.div(split["pieces"], _BATCH)
                carry = lax.fori_loop(0, steps, lambda i, c: add(c, i * _BATCH, _BATCH, whole=True), carry)
                first, below = steps * _BATCH, 0
                for tail in _TAILS:
                    left = split["pieces"] - first
                    once = ((left > below) & (left <= tail)).astype(jnp.int32)
                    carry = lax.fori_loop(0, once, lambda _, c, tail=tail: add(c, first, tail), carry)
                    below = tail
                return carry

            zeros = plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), layout)
            acc, total, top = add_all((zeros, jnp.float32(0), jnp.float32(_NO_KEY)))
            seen = total > 0
            result = acc * jnp.where(seen, 1.0 / total, 0.0)
            out.at[split["row"] + row, place][...] = result.astype(out.dtype)

            @pl.when(part == 0)
            def _():
                lse[split["row"] + row] = jnp.where(seen, (top + jnp.log2(total)) * math.log(2), -jnp.inf)

        def turn(i, record):
            """A unit, while the record of the next is on its way."""
            unit = lax.axis_index("block") + i * blocks
            following = read(unit + blocks)
            split = dict(zip(SPLIT, record, strict=True))
            part, row = lax.rem(unit, parts), lax.rem(lax.div(unit, parts), group_rows)
            there = (row < split["rows"]) & (unit < plan.num_splits * group_rows * parts)
            pl.when(there)(lambda: join(split, row, part))
            return following

        # The first turn is taken in any case: its record is read beside the count, and not after it.
        first = lax.axis_index("block")
        units = lax.max(work[1] * (group_rows * parts) - first, 0)
        turns = lax.max(lax.div(units + (blocks - 1), blocks), 1)
        lax.fori_loop(0, turns, turn, read(first))

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        body,
        out_type=(),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),  # nothing is shared
        kernel_name="mla_combine",
        interpret=interpret,
    )(work, partial, partial_lse, out_ref, lse_ref)
    # Where the results are stacked, XLA (jaxlib 0.11.2) would let this kernel write them straight into their slice of
    # the stack, and lose what was already there in place.
    return lax.optimization_barrier((jax.freeze(out_ref), jax.freeze(lse_ref)))
