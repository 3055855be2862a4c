# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false
# (JAX's annotations of its own plgpu.ACC and transforms.)
"""The kernel of prompts: attention of packed queries over packed keys and values. For compute capability 9.0.

Thread blocks are persistent. Each takes one unit after the other, a row tile of 128 query tokens of one head, from a
counter that all share, longest first; units that run at the same time are of a few heads, whose keys then stay in L2.
In a thread block one warpgroup loads (TMA) into a ring of stages, a tile of 128 keys and values each, and runs ahead
into the next unit. Two others compute 64 rows each over the same tiles (the structure is FlashAttention-3's,
arXiv:2407.08608):

    S = Q K^T,  m' = max(m, S),  P = exp(S - m'),  O = O exp(m - m') + P V

The product S of a tile is issued before P V of the tile before, so that one runs while the softmax of the other is
computed, and the warpgroups take turns to issue, so that the softmax of one runs beside the products of the other.

Shared memory: queries, and as many stages as fit; counted in ../README.md.

Roofline: a row and a key take 2 * (D + V) FLOP: 2.75 TFLOP, 3.5 ms at 790 TFLOP/s, for a causal prompt of 8192 tokens,
128 heads of 192 and 128 channels.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from mla_attn.pallas_kernels.mosaic_gpu.primitives import (
    ROW,
    SHARED_BYTES,
    TILED,
    arrive_alone,
    copy_rows,
    issue_product,
    scale_rows,
    scatter_rows,
    scatter_vector,
    shared_bytes,
    start_barriers,
    sync_pair,
    take_number,
    wait_for_phase,
    wait_for_product,
    zero_rows,
    zeros,
)
from mla_attn.pallas_kernels.prompt_list import HEADER, ITEM, KEYS, ROWS, PromptPlan

CHANNELS = 64  # channels of a part of queries, keys and values in shared memory: 128 bytes, the span of the swizzle
COMPUTING = 2  # warpgroups that compute
BLOCK_ROWS = ROWS // COMPUTING  # rows of one: M of wgmma
PARTS = ("keys", "values")
MOST_STAGES = 4
START = -1e30  # the running maximum (log2) of a row that has seen no key
_MOST_SINK = 1e30  # an infinite sink (log2): everything else weighs nothing beside it
_LOG2E = math.log2(math.e)
_UNIT = (*ITEM[:-1], "head")  # what the loader tells the others of a unit; no tiles at all: -1, there is none left
_TURN, _NUMBER = 8, 12  # hardware barriers: whose turn it is to issue (two of them), and the loader's own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Static facts of a call.

    Attributes:
        scale: softmax scale.
        heads, kv_heads: query heads and key heads.
        qk_dim, v_dim: channels D of a key and V of a value.
        near_heads: heads whose units run at the same time, a divisor of ``heads``.
        soft_cap: cap of scores; None for none.
    """

    scale: float
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    near_heads: int
    soft_cap: float | None = None


@functools.partial(jax.jit, static_argnames=("call", "plan", "out_dtype", "blocks"))  # all layers share one lowering
def ragged_prefill(
    q: Float[Array, "T H D"],
    k: Float[Array, "Tk K D"],
    v: Float[Array, "Tk K V"],
    work: Int32[Array, "size"],
    sinks: Float32[Array, "H"] | None,
    *,
    call: Call,
    plan: PromptPlan,
    out_dtype: jnp.dtype,
    blocks: int,
) -> tuple[Float[Array, "T H V"], Float32[Array, "T H"]]:
    """Attends, and returns ``out`` and ``lse``, a natural logarithm.

    Args:
        q, k, v: packed rows, of one dtype of two bytes.
        work: the list that ``prompt_list`` made for ``plan``.
        sinks: raw logits of each head; None without. With them ``lse`` has no meaning.
        call: how scores are formed, and the order of heads.
        plan: static sizes of ``work``.
        out_dtype: float32, bfloat16 or float16.
        blocks: thread blocks, all of which the device runs at once.
    """
    body = _Body(call, plan, dtype=q.dtype, has_sinks=sinks is not None)
    X, rows = jax.ShapeDtypeStruct, q.shape[0] * call.heads
    kernel = plgpu.kernel(
        body,
        out_type=(X((rows, call.v_dim), out_dtype), X((rows,), jnp.float32)),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=COMPUTING + 1,
        thread_name="warpgroup",
        scratch_types=body.scratch(body.stages),
        # No automatic barriers: each role waits for what it takes from the others.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        kernel_name="ragged_prefill",
    )
    counter = jax.new_ref(jnp.zeros(1, jnp.int32))
    sinks = jnp.zeros(1, jnp.float32) if sinks is None else sinks
    out, lse = kernel(q, k, v, work, sinks, counter)
    return out.reshape(*q.shape[:2], -1), lse.reshape(q.shape[:2])


class _Body:
    """A loading warpgroup, and two that compute. Pallas calls an instance with the global- and shared-memory refs."""

    def __init__(self, call: Call, plan: PromptPlan, *, dtype, has_sinks: bool):
        self.call, self.plan, self.dtype, self.has_sinks = call, plan, dtype, has_sinks
        self.qk_parts, self.v_parts = call.qk_dim // CHANNELS, call.v_dim // CHANNELS
        free = SHARED_BYTES - shared_bytes(self.scratch(0))
        stages = min(free // (shared_bytes(self.scratch(1)) - shared_bytes(self.scratch(0))), MOST_STAGES)
        self.stages = stages // 2 * 2  # a ring of three, for which 128/128 has room, has not been run

    def scratch(self, stages: int) -> dict:
        """Shared memory and barriers of a thread block, by the name under which ``smem`` holds them."""

        def parts(count, rows):
            return plgpu.SMEM((*count, rows, CHANNELS), self.dtype, transforms=TILED)

        def barriers(count):
            return plgpu.Barrier(num_barriers=max(count, 1), num_arrivals=COMPUTING)

        return {
            "queries": parts((self.qk_parts,), ROWS),
            "keys": parts((stages, self.qk_parts), KEYS),
            "values": parts((stages, self.v_parts), KEYS),
            "words": plgpu.SMEM((2 * self._barriers(stages) + len(_UNIT) + 1,), jnp.int32),
            "empty_q": barriers(1),
            "empty": {part: barriers(stages) for part in PARTS},
        }

    def __call__(self, q, k, v, work, sinks, counter, out, lse, **smem):
        self.q, self.k, self.v, self.work, self.sinks, self.counter = q, k, v, work, sinks, counter
        self.out, self.lse, self.smem = out, lse, smem
        # One array, because each takes a kilobyte at least: barriers, the unit, and a number for the loader.
        count = 2 * self._barriers(self.stages)
        self.barriers, self.unit_at = smem["words"].at[pl.ds(0, count)], count
        self.number = smem["words"].at[pl.ds(count + len(_UNIT), 1)]
        start_barriers(self.barriers)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == COMPUTING)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            self._load()

        for number in range(COMPUTING):

            @pl.when(warpgroup == number)
            def _(number=number):
                plgpu.set_max_registers(232, action="increase")
                _Computing(self, number).run()

    @staticmethod
    def _barriers(stages: int) -> int:
        return 1 + len(PARTS) * stages

    # Barriers of what is loaded: first that of the queries, then those of each part's stages. Their phases
    # are counted by units and by tiles.

    def full(self, part: str, tile) -> tuple[Any, Any]:
        """The barrier of a part of the thread block's ``tile``-th tile of all."""
        return self.barriers, lax.rem(tile, self.stages) + (1 + PARTS.index(part) * self.stages)

    def wait(self, part: str, tile) -> None:
        """Waits until a part of the thread block's ``tile``-th tile of all is there."""
        wait_for_phase(*self.full(part, tile), lax.div(tile, self.stages))

    # Loads

    def _load(self) -> None:
        """Loads one unit after the other, until none is left."""
        count = self.work[0]
        total = count * self.call.heads

        def load(carry):
            number, before = carry
            unit = self._unit(number, count)
            following = self._load_unit(unit, before)
            return following, before + unit["tiles"]

        lax.while_loop(lambda carry: carry[0] < total, load, (self._take(), jnp.int32(0)))
        plgpu.barrier_wait(self.smem["empty_q"].at[0])
        self.smem["words"][self.unit_at + _UNIT.index("tiles")] = jnp.int32(-1)
        arrive_alone(self.barriers, jnp.int32(0))

    def _take(self):
        return take_number(self.counter, self.number, _NUMBER)

    def _unit(self, number, count) -> dict:
        """The fields of ``ITEM`` and the head of a unit."""
        near = self.call.near_heads
        group, rest = lax.div(number, count * near), lax.rem(number, count * near)
        item = HEADER + lax.div(rest, near) * len(ITEM)
        unit = {name: self.work[item + n] for n, name in enumerate(ITEM)}
        return unit | {"head": group * near + lax.rem(rest, near)}

    def _load_unit(self, unit, before):
        """Loads a unit: its first tile, then its queries, which have to wait, then the others.

        Returns the number of the next unit.
        """
        smem, kv_head = self.smem, lax.div(unit["head"], self.call.heads // self.call.kv_heads)

        def load(j):
            at, key = lax.rem(before + j, self.stages), unit["key_row"] + (unit["tile"] + j) * KEYS
            for part, array in zip(PARTS, (self.k, self.v), strict=True):
                empty = smem["empty"][part].at[at]
                pl.when(before + j >= self.stages)(functools.partial(plgpu.barrier_wait, empty))
                copy_rows(array, smem[part].at[at], *self.full(part, before + j), key, kv_head)

        pl.when(unit["tiles"] > 0)(lambda: load(0))
        following = self._take()  # long before it is needed, for it takes a trip to L2 and back
        plgpu.barrier_wait(smem["empty_q"].at[0])
        for n, name in enumerate(_UNIT):
            smem["words"][self.unit_at + n] = unit[name]
        copy_rows(self.q, smem["queries"], self.barriers, jnp.int32(0), unit["row"], unit["head"])
        pl.loop(1, unit["tiles"])(load)
        return following


class _Computing:
    """A warpgroup that computes ``BLOCK_ROWS`` rows of each unit."""

    def __init__(self, body: _Body, number: int):
        self.body, self.number, self.call, self.smem = body, number, body.call, body.smem
        self.own_turn, self.other_turn = _TURN + number, _TURN + 1 - number  # hardware barriers

    def run(self) -> None:
        """Computes one unit after the other, until the loader says that none is left."""
        self._release_queries()
        if self.number:
            sync_pair(self.other_turn, wait=False)  # the first turn is the other's

        def compute(carry):
            turn, tiles, before = carry
            self._compute(before)
            return turn + 1, self._next(turn + 1), before + tiles

        lax.while_loop(lambda carry: carry[1] >= 0, compute, (jnp.int32(0), self._next(jnp.int32(0)), jnp.int32(0)))
        if not self.number:
            sync_pair(self.own_turn, wait=True)  # the turn that nobody takes

    def _next(self, turn):
        """Waits for the unit of a turn; returns how many tiles it has."""
        wait_for_phase(self.body.barriers, jnp.int32(0), turn)
        return self._read("tiles")

    def _read(self, name):
        return self.smem["words"][self.body.unit_at + _UNIT.index(name)]

    def _release_queries(self) -> None:
        plgpu.barrier_arrive(self.smem["empty_q"].at[0])

    def _compute(self, before) -> None:
        unit = self.unit = {name: self._read(name) for name in _UNIT}
        first_row = self.number * BLOCK_ROWS
        self.position = unit["position"] + first_row  # of the warpgroup's first row
        self.rows = unit["rows"] - first_row
        # Keys that all rows see: those from ``shown`` on and before ``hidden``.
        self.hidden, self.shown = unit["keys"], jnp.int32(0)
        if self.body.plan.causal:
            self.hidden = lax.min(self.hidden, self.position + 1)
        if self.body.plan.window is not None:
            self.shown = self.position + BLOCK_ROWS - self.body.plan.window

        @pl.when(unit["tiles"] > 0)
        def _():
            self._finish(*self._attend(before))

        @pl.when(unit["tiles"] == 0)
        def _():
            self._release_queries()
            self._finish(zeros((BLOCK_ROWS, self.call.v_dim)), _none(0.0), _none(0.0))

    def _attend(self, before):
        """Output, not yet divided by the sums; maxima (log2) and sums."""
        smem, stages, tiles = self.smem, self.body.stages, self.unit["tiles"]
        at = lax.rem(before, stages)
        self.body.wait("keys", before)

        def first_scores(scores):
            self._issue_scores(scores, at)
            return scores[...]

        scores = pl.run_scoped(first_scores, plgpu.ACC((BLOCK_ROWS, KEYS), jnp.float32))
        plgpu.barrier_arrive(smem["empty"]["keys"].at[at])
        p, m, sums, _ = self._softmax(scores, jnp.int32(0), *self._begin())
        p = p.astype(self.body.dtype)
        if self.body.plan.window is not None:
            self.body.wait("values", before)
            self._drop_unused(at, jnp.int32(0))

        def step(j, carry):
            o, p, m, sums = carry
            keys, values = lax.rem(before + j, stages), lax.rem(before + j - 1, stages)
            self.body.wait("keys", before + j)

            def products(refs):
                o_ref, s_ref, p_ref, m_ref, sums_ref = refs
                sync_pair(self.own_turn, wait=True)
                self._issue_scores(s_ref, keys)
                self.body.wait("values", before + j - 1)
                o = issue_product(o_ref[...], p_ref[...], smem["values"].at[values])
                sync_pair(self.other_turn, wait=False)
                scores = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                plgpu.barrier_arrive(smem["empty"]["keys"].at[keys])
                p, m_ref[...], sums_ref[...], factors = self._softmax(scores, j, m_ref[...], sums_ref[...])
                o = wait_for_product(o)
                plgpu.barrier_arrive(smem["empty"]["values"].at[values])
                o_ref[...], p_ref[...] = scale_rows(o, factors), p.astype(self.body.dtype)

            scores = plgpu.ACC.init(zeros((BLOCK_ROWS, KEYS)))
            o, _, p, m, sums = pl.run_state(products)((o, scores, p, m, sums))
            return o, p, m, sums

        carry = (zeros((BLOCK_ROWS, self.call.v_dim)), p, m, sums)
        o, p, m, sums = lax.fori_loop(1, tiles, step, carry)
        self._release_queries()
        at = lax.rem(before + tiles - 1, stages)
        self.body.wait("values", before + tiles - 1)
        self._drop_unused(at, tiles - 1)
        o = wait_for_product(issue_product(o, p, smem["values"].at[at]))
        plgpu.barrier_arrive(smem["empty"]["values"].at[at])
        return o, m, sums

    def _issue_scores(self, scores, at) -> None:
        rows = pl.ds(self.number * BLOCK_ROWS, BLOCK_ROWS)
        for part in range(self.body.qk_parts):
            queries, keys = self.smem["queries"].at[part, rows], self.smem["keys"].at[at, part]
            plgpu.wgmma(scores, queries, keys.transpose((1, 0)))

    def _begin(self):
        """Maximum (log2) and sum before the first key: those of the sink."""
        if not self.body.has_sinks:
            return _none(START), _none(0.0)
        sink = lax.min(self.body.sinks[self.unit["head"]] * _LOG2E, jnp.float32(_MOST_SINK))
        m = lax.max(jnp.float32(START), sink)
        return _none(0.0) + m, _none(0.0) + jnp.exp2(sink - m)

    def _softmax(self, scores, j, m, sums):
        """Probabilities of the unit's tile ``j``, raised maxima and sums, and factors of what was summed before."""
        scores, scale = self._capped(scores)
        scores = self._masked(scores, j)
        higher = jnp.maximum(m, scores.max(axis=1) * scale)
        p, factors = jnp.exp2(scores * scale - _spread(higher, scores.shape)), jnp.exp2(m - higher)
        return p, higher, sums * factors + p.sum(axis=1), factors

    def _capped(self, scores):
        """The scores of wgmma, capped, and what makes them binary logarithms."""
        cap = self.call.soft_cap
        if cap is None:
            return scores, self.call.scale * _LOG2E
        # tanh x = 1 - 2 / (1 + e^2x); the hardware's own tanh is too coarse.
        return cap - (2 * cap) / (1 + jnp.exp2(scores * (self.call.scale / cap * 2 * _LOG2E))), _LOG2E

    def _masked(self, scores, j):
        """Scores of tile ``j`` of the unit, with -inf for keys that a row does not see."""
        window, shape = self.body.plan.window, scores.shape
        key0 = (self.unit["tile"] + j) * KEYS

        def mask(scores):
            key = lax.broadcasted_iota(jnp.int32, shape, 1) + key0
            seen = key < self.unit["keys"]
            position = lax.broadcasted_iota(jnp.int32, shape, 0) + self.position
            if self.body.plan.causal:
                seen &= key <= position
            if window is not None:
                seen &= key > position - window
            return jnp.where(seen, scores, -jnp.inf)

        some_hidden = key0 + KEYS > self.hidden
        if window is not None:
            some_hidden |= key0 < self.shown
        return lax.cond(some_hidden, mask, lambda scores: scores, scores)

    def _drop_unused(self, at, j) -> None:
        """Zeroes the values of tile ``j`` that no row sees: their probability is 0, but 0 * NaN is NaN.

        Both warpgroups do, each before it reads them, so that none waits for the other.
        """
        key0, window = (self.unit["tile"] + j) * KEYS, self.body.plan.window
        valid, before = self.unit["keys"] - key0, jnp.int32(0)
        if window is not None:
            before = self.unit["position"] + 1 - window - key0

        @pl.when((valid < KEYS) | (before > 0))
        def _():
            for part in range(self.body.v_parts):
                zero_rows(self.smem["values"].at[at, part], valid, None if window is None else before)
            plgpu.commit_smem()

    def _finish(self, o, m, sums) -> None:
        """Writes the result."""
        seen = sums != 0  # not by m, which NaN scores leave at START: such a row is not empty
        inverse = jnp.where(seen, 1.0 / sums, 0.0)
        lse = jnp.where(seen, (m + jnp.log2(sums)) * math.log(2), -jnp.inf)
        heads = self.call.heads
        first = (self.unit["row"] + self.number * BLOCK_ROWS) * heads + self.unit["head"]
        scatter_rows(self.body.out, o * _spread(inverse, o.shape), first, self.rows, group=1, stride=heads)
        scatter_vector(self.body.lse, lse, first, self.rows, group=1, stride=heads)


def _none(value: float):
    """The same number for each row."""
    return plgpu.layout_cast(jnp.full((BLOCK_ROWS,), value, jnp.float32), ROW)


def _spread(rows, shape):
    """Broadcasts a number for each row over its keys or channels."""
    return lax.broadcast_in_dim(rows, shape, [0])
