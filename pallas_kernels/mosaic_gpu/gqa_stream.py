# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false
# (JAX's annotations of its own plgpu.ACC and transforms.)
"""The GQA kernel for few rows, and for keys and values of one byte. For compute capability 9.0.

It is ``gqa_decode`` with transposed products (operands swapped):

    S^T = K Q^T,  m' = max(m, S),  P = exp(S - m'),  O^T = O^T exp(m - m') + V^T P^T

Rows are N of wgmma, which may be any multiple of 8, whereas as M they are 64: with 8 rows the softmax takes an eighth
of the instructions. In return its maxima cross warps in shared memory, and P does. P stands there twice, rounded, and
what that lost: as columns beside each other both take one product, and the error is that of the result's rounding.

Keys and values are M, and so may come from registers. Those of one byte become bfloat16 there (``float8.py``), once for
all rows, and nothing but bytes is written to shared memory.

Roofline: a key of a KV head takes D + V bytes in float8: 231 us at 4.66 TB/s for 128 requests of 4096 keys, 8 KV heads
of 128 channels. To make bfloat16 of it takes a multiprocessor's integer units half of that time.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from mla_attn.pallas_kernels.even_list import EvenPlan
from mla_attn.pallas_kernels.mosaic_gpu.columns import (
    own_columns,
    reduce_columns,
    scale_columns,
    scatter_columns,
    sum_parts,
)
from mla_attn.pallas_kernels.mosaic_gpu.float8 import channel_of, keys_operand, values_operand
from mla_attn.pallas_kernels.mosaic_gpu.gqa_block import Arrays, Call, attend
from mla_attn.pallas_kernels.mosaic_gpu.gqa_scores import Scores
from mla_attn.pallas_kernels.mosaic_gpu.primitives import TILED, zeros
from mla_attn.pallas_kernels.work_list import TILE

_PART_REGISTERS = 64  # most of a thread for O if P is stored in two parts


@functools.partial(jax.jit, static_argnames=("call", "plan", "out_dtype"))  # all layers share one lowering
def gqa_stream(
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
    """Attends; arguments and results are those of ``gqa_decode``. Keys and values may be of one byte too."""
    body = _Body.of(arrays, call, plan)
    # As many as there are; to gather takes more than to start copies.
    registers = {1: None, 2: (56, 224), 4: (56, 104) if body.gathers else (32, 112)}[plan.block_heads]
    return attend(body, arrays, out_dtype=out_dtype, kernel_name="gqa_stream", registers=registers)


class _Body(Scores):
    """A loading warpgroup, and one for each KV head that a thread block takes at a time."""

    rows_axis = 1

    def product_rows(self) -> int:
        return self.loaded_rows

    @property
    def parts(self) -> int:
        """Parts of P. (With ``plan.invariant`` always one: their number must not depend on that of rows.)"""
        few = 2 * self.block_rows * self.call.v_head_dim <= 128 * _PART_REGISTERS and not self.plan.invariant
        return 2 if few and self.dtype == jnp.bfloat16 else 1

    @property
    def prepares_values(self) -> bool:
        """Whether values are read while scores are computed: where registers are left, and warps too few to do both."""
        few = self.block_rows <= 32 and max(self.call.head_dim, self.call.v_head_dim) <= 128
        return few and self.heads < 4 and self.call.sharing == 1

    def scratch(self, stages: int, slots: int | None = None) -> dict:
        shape = (self.heads, self.parts * self.block_rows, TILE)
        return {
            **super().scratch(stages, slots),
            "p": plgpu.SMEM(shape, self.dtype, transforms=TILED),
            "reduced": plgpu.SMEM((self.heads, 4, self.block_rows), jnp.float32),
        }

    def attend_item(self, warpgroup, turn, carry):
        """Computes one item of the warpgroup's KV head; returns the fields of the next."""
        fields, before = carry
        self.take_item(fields)
        smem, slot = self.smem, lax.rem(turn, self.slots)
        key_scale, value_scale = (self._scale(n, warpgroup) for n in range(2))
        plgpu.barrier_wait(smem["full_q"].at[slot])
        queries = smem["queries"].at[slot * self.heads + warpgroup]

        def step(j, carry):
            o, m, sums = carry
            at = lax.rem(before + j, self.stages) * self.heads + warpgroup
            scores, values = self._scores(queries, at)
            scores, scale = self.capped(scores, key_scale)
            scores = self.masked(scores, j)
            highest = reduce_columns(own_columns(scores, "maximum"), smem["reduced"].at[warpgroup], "maximum")
            higher = jnp.maximum(m, highest * scale)
            p, factors = jnp.exp2(scores * scale - self.spread(higher, scores.shape)), jnp.exp2(m - higher)
            sums = sums * factors + own_columns(p, "sum")
            self._share(p, warpgroup)
            values = self._values(at) if values is None else values
            if not self.call.float8:  # other codes than numbers become numbers
                self.drop_unused(at, j)
            o = self._add_values(scale_columns(o, factors), values, at, warpgroup)
            return o, higher, sums

        start, sink = self.begin(warpgroup)
        o = zeros((self.call.v_head_dim, self.parts * self.block_rows))
        o, m, sums = lax.fori_loop(0, self.item["tiles"], step, (o, start, jnp.zeros_like(start)))
        plgpu.barrier_arrive(smem["empty_q"].at[slot])
        following = self.read_item(turn + 1)  # loads while this item ends
        plgpu.commit_smem()  # every warp has read the maxima
        total = reduce_columns(sums, smem["reduced"].at[warpgroup], "sum")
        if self.has_sinks:
            total += sink * jnp.exp2(start - m)
        self.finish(warpgroup, sum_parts(o, self.block_rows), m, total, value_scale)
        plgpu.commit_smem()
        return following, before + self.item["tiles"]

    def _scores(self, queries, at):
        """The scores of the tile in stage ``at``, and its values as a left operand."""
        smem, float8 = self.smem, self.call.float8
        keys = smem["keys"].at[at]
        plgpu.barrier_wait(smem["full"]["keys"].at[at])
        if float8:
            keys = keys_operand(keys, float8)
            plgpu.barrier_arrive(smem["empty"]["keys"].at[at])

        def products(scores):
            plgpu.wgmma(scores, keys, queries.transpose((1, 0)))
            if float8 and self.prepares_values:
                values = self._values(at)
                return scores[...], values
            return scores[...]

        found = pl.run_scoped(products, plgpu.ACC((TILE, self.block_rows), jnp.float32))
        if not float8:
            plgpu.barrier_arrive(smem["empty"]["keys"].at[at])
        return found if isinstance(found, tuple) else (found, None)

    def _values(self, at):
        """The values of a stage as a left operand: in shared memory, or of bytes in registers."""
        values = self.smem["values"].at[at]
        plgpu.barrier_wait(self.smem["full"]["values"].at[at])
        if not self.call.float8:
            return values.transpose((1, 0))
        operand = values_operand(values, self.call.float8)
        plgpu.barrier_arrive(self.smem["empty"]["values"].at[at])
        return operand

    def _share(self, p, warpgroup) -> None:
        """Stores P for all warps, rounded, and what that lost."""
        rows, to = self.block_rows, self.smem["p"].at[warpgroup]
        rounded = p.astype(self.dtype)
        to.at[pl.ds(0, rows)].transpose((1, 0))[...] = rounded
        if self.parts > 1:
            to.at[pl.ds(rows, rows)].transpose((1, 0))[...] = (p - rounded.astype(jnp.float32)).astype(self.dtype)
        plgpu.commit_smem()

    def _add_values(self, o, values, at, warpgroup):
        def products(o_ref):
            plgpu.wgmma(o_ref, values, self.smem["p"].at[warpgroup].transpose((1, 0)))
            plgpu.wgmma_wait(0)

        o = pl.run_state(products)(plgpu.ACC.init(o))
        if not self.call.float8:
            plgpu.barrier_arrive(self.smem["empty"]["values"].at[at])
        return o

    def _scale(self, part: int, warpgroup):
        """The scale of keys (0) or values (1) of the warpgroup's KV head."""
        if not self.call.float8:
            return 1.0
        dims, heads = self.call.scale_dims[part], self.plan.kv_heads // self.call.head_parts
        at = self.layer[0] if dims else 0
        return self.scales[part][at * heads + self.pool_head(warpgroup) if dims == 2 else at]

    def scatter(self, to, o, first, count, **places) -> None:
        scatter_columns(to, o, first, count, channel_of=channel_of if self.call.float8 else None, **places)
