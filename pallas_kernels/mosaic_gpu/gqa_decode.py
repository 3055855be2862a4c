# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false
# (JAX's annotations of its own plgpu.ACC and transforms.)
"""The GQA kernel for many rows: attention of each KV head's query heads over paged keys and values. For compute
capability 9.0.

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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from mla_attn.pallas_kernels.even_list import EvenPlan
from mla_attn.pallas_kernels.mosaic_gpu.gqa_block import BLOCK_ROWS, Arrays, Call, attend
from mla_attn.pallas_kernels.mosaic_gpu.gqa_scores import Scores
from mla_attn.pallas_kernels.mosaic_gpu.primitives import scale_rows, scatter_rows, zeros
from mla_attn.pallas_kernels.work_list import TILE


@functools.partial(jax.jit, static_argnames=("call", "plan", "out_dtype"))  # all layers share one lowering
def gqa_decode(
    arrays: Arrays,
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
        arrays: those of the call.
        call: how scores are formed, and where pages lie.
        plan: static sizes of ``arrays.work``.
        out_dtype: float32, bfloat16 or float16.
    """
    registers = (56, 224) if plan.block_heads > 1 else None  # with less, each thread may have all that there are
    return attend(
        _Body.of(arrays, call, plan), arrays, out_dtype=out_dtype, kernel_name="gqa_decode", registers=registers
    )


class _Body(Scores):
    """A loading warpgroup, and one for each KV head that a thread block takes at a time."""

    rows_axis = 0

    def attend_item(self, warpgroup, turn, carry):
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
            scores, scale = self.capped(scores)
            scores = self.masked(scores, j)
            higher = jnp.maximum(m, scores.max(axis=1) * scale)
            p, factors = jnp.exp2(scores * scale - self.spread(higher, scores.shape)), jnp.exp2(m - higher)
            sums = sums * factors + p.sum(axis=1)
            o = scale_rows(o, factors)
            plgpu.barrier_wait(smem["full"]["values"].at[at])
            self.drop_unused(at, j)

            def products(o_ref):
                plgpu.wgmma(o_ref, p.astype(self.dtype), smem["values"].at[at])
                plgpu.wgmma_wait(0)

            o = pl.run_state(products)(plgpu.ACC.init(o))
            plgpu.barrier_arrive(smem["empty"]["values"].at[at])
            return o, higher, sums

        o = zeros((BLOCK_ROWS, self.call.v_head_dim))
        o, m, sums = lax.fori_loop(0, self.item["tiles"], step, (o, *self.begin(warpgroup)))
        plgpu.barrier_arrive(smem["empty_q"].at[slot])
        following = self.read_item(turn + 1)  # loads while this item ends
        self.finish(warpgroup, o, m, sums)
        return following, before + self.item["tiles"]

    def scatter(self, to, o, first, count, **places) -> None:
        scatter_rows(to, o, first, count, **places)
