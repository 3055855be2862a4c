"""Joins the partial results of split groups, in place."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from mla_attn.pallas_kernels.schedule import SPLIT, Plan

_ROWS = 4  # of a thread block


def combine(
    work: Int32[Array, "size"],
    partial: Float32[Array, "partials group_rows R"],
    partial_lse: Float32[Array, "partials group_rows"],
    out: Float[Array, "rows R"],
    lse: Float32[Array, "rows"],
    *,
    plan: Plan,
) -> tuple[Float[Array, "rows R"], Float32[Array, "rows"]]:
    """``(out, lse)`` with the rows of split groups filled in: ``sum_i 2**(lse_i - lse) out_i``, pieces in key order.

    Args:
        work: of ``schedule.work_list`` for ``plan``.
        partial: normalised results of the pieces; anything where a piece's rows see no key.
        partial_lse: their log2-sum-exp; -inf there.
        out, lse: results, ``lse`` with the natural logarithm.
    """
    rank, group_rows = out.shape[1], partial.shape[1]
    layout = plgpu.Layout.WG_STRIDED((rank,), vec_size=rank // 128)

    def body(work, partial, partial_lse, out, lse):
        record = plan.splits_at + lax.axis_index("split") * len(SPLIT)
        split = {name: work[record + n] for n, name in enumerate(SPLIT)}

        def row(at):
            pieces = split["pieces"]
            top = lax.fori_loop(0, pieces, lambda i, m: lax.max(m, partial_lse[split["partial"] + i, at]), -1e30)

            def add(i, carry):
                acc, total = carry
                weight = jnp.exp2(partial_lse[split["partial"] + i, at] - top)
                values = plgpu.load(partial.at[split["partial"] + i, at], layout=layout, optimized=False)
                return acc + values * weight, total + weight

            zeros = plgpu.layout_cast(jnp.zeros((rank,), jnp.float32), layout)
            acc, total = lax.fori_loop(0, pieces, add, (zeros, jnp.float32(0)))
            seen = total > 0
            out.at[split["row"] + at][...] = (acc * jnp.where(seen, 1.0 / total, 0.0)).astype(out.dtype)
            lse[split["row"] + at] = jnp.where(seen, (top + jnp.log2(total)) * math.log(2), -jnp.inf)

        @pl.when(split["pieces"] > 0)
        def _():
            for n in range(_ROWS):
                at = lax.axis_index("rows") * _ROWS + n
                pl.when(at < split["rows"])(lambda at=at: row(at))

    out, lse = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        body,
        out_type=(),
        grid=(plan.num_splits, group_rows // _ROWS),
        grid_names=("split", "rows"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="mla_combine",
    )(work, partial, partial_lse, out, lse)
    return jax.freeze(out), jax.freeze(lse)
