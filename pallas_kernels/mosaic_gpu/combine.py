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

from mla_attn.pallas_kernels.schedule import SPLIT, Plan

_BLOCKS_PER_CORE = 8
_FEW, _MANY = 8, 16  # pieces whose loads are in flight at a time
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
    blocks = _BLOCKS_PER_CORE * plan.lanes
    parts = 2 if plan.num_rows < blocks and rank % 256 == 0 else 1  # of the columns: few rows keep few blocks busy
    columns = rank // parts
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=columns // 128)

    def body(work, partial, partial_lse, out, lse):
        def join(split, row, part):
            place = pl.ds(part * columns, columns)

            def add(unroll, step, carry):
                acc, total, top = carry
                pieces = [step * unroll + n for n in range(unroll)]
                at = [split["partial"] + lax.min(i, split["pieces"] - 1) for i in pieces]
                lses = [
                    jnp.where(i < split["pieces"], partial_lse[a, row], -jnp.inf)
                    for i, a in zip(pieces, at, strict=True)
                ]
                values = [plgpu.load(partial.at[a, row, place], layout=layout, optimized=False) for a in at]
                higher = functools.reduce(lax.max, lses, top)
                scale = jnp.exp2(top - higher)
                acc, total = acc * scale, total * scale
                for x, v in zip(lses, values, strict=True):
                    weight = jnp.exp2(x - higher)
                    acc, total = acc + v * weight, total + weight
                return acc, total, higher

            def run(unroll):
                zeros = plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), layout)
                steps = lax.div(split["pieces"] + (unroll - 1), unroll)
                start = (zeros, jnp.float32(0), jnp.float32(_NO_KEY))
                acc, total, top = lax.fori_loop(0, steps, functools.partial(add, unroll), start)
                seen = total > 0
                result = acc * jnp.where(seen, 1.0 / total, 0.0)
                out.at[split["row"] + row, place][...] = result.astype(out.dtype)

                @pl.when(part == 0)
                def _():
                    lse[split["row"] + row] = jnp.where(seen, (top + jnp.log2(total)) * math.log(2), -jnp.inf)

            if plan.invariant:  # how many pieces follow must not change how the first are added
                run(4)
            else:
                pl.when(split["pieces"] <= _FEW)(lambda: run(_FEW))
                pl.when(split["pieces"] > _FEW)(lambda: run(_MANY))

        @pl.loop(lax.axis_index("block"), work[1] * (group_rows * parts), step=blocks)
        def _(unit):
            part, row = lax.rem(unit, parts), lax.rem(lax.div(unit, parts), group_rows)
            record = plan.splits_at + lax.div(unit, group_rows * parts) * len(SPLIT)
            split = {name: work[record + n] for n, name in enumerate(SPLIT)}
            pl.when(row < split["rows"])(lambda: join(split, row, part))

    out_ref, lse_ref = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        body,
        out_type=(),
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mla_combine",
        interpret=interpret,
    )(work, partial, partial_lse, out_ref, lse_ref)
    # Where the results are stacked, XLA (jaxlib 0.11.2) would let this kernel write them straight into their slice of
    # the stack, and lose what was already there in place.
    return lax.optimization_barrier((jax.freeze(out_ref), jax.freeze(lse_ref)))
