# pyright: reportAbstractUsage=false
# (JAX's annotations of its own transforms.)
"""A thread block of either MLA kernel: the items of its lane, the tiles of their keys, and which keys a row sees."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_attn.pallas_kernels.mosaic_gpu.primitives import (
    ACC,
    TILED,
    fence_proxy,
    gather_rows,
    rows_of_slots,
    wait_for_gathers,
)
from mla_attn.pallas_kernels.work_list import HEADER, ITEM, TILE, Plan

STORE_ROWS = 8  # rows are written by so many, and come in multiples of it
START, MASKED = -1e30, -1e33  # the running maximum (log2) of a row that has seen no key; a masked score
PARTS = ("left", "right", "side")  # of a tile: either half of the value channels, and the rope part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Static facts of a call; ``num_pages`` and the strides as in a pool."""

    heads: int
    scale: float
    max_q_len: int
    num_pages: int
    causal: bool = True
    kv_stride: int = 1
    page_stride: int = 1
    layer_stride: int = 0
    tree_keys: int = 0  # M of a tree mask; 0 without one


class Block:
    """Called with a kernel's references, it holds them while the body is traced.

    Tiles lie in a ring of two places in shared memory, each in three parts with barriers of their own.
    """

    rows_axis: int  # of scores: 0 where they are rows times keys, 1 where they are keys times rows
    side_readers: int = 1  # warpgroups that let go of a side

    def __init__(self, call: Call, plan: Plan, *, rank: int, rope: int, page: int):
        self.call, self.plan = call, plan
        self.rank, self.rope, self.page = rank, rope, page
        self.half = rank // 2
        self.piece = math.gcd(page, TILE)  # keys of one copy: they lie in one page, and in one tile
        self.gathers = self.piece % 8 != 0  # less than the swizzle's 8 rows: the warpgroup copies row by row
        self.log2_scale = call.scale * math.log2(math.e)

    def scratch(self) -> dict:
        raise NotImplementedError

    def __call__(self, *refs, **smem) -> None:
        raise NotImplementedError

    # Shared memory

    def ring(self) -> dict:
        """Tiles, and barriers of their parts."""
        copies = 1 if self.gathers else TILE // self.piece

        def tiles(channels):
            return plgpu.SMEM((2, TILE, channels), jnp.bfloat16, transforms=TILED)

        def barriers(arrivals):
            return plgpu.Barrier(num_barriers=2, num_arrivals=arrivals)

        return {
            "left": tiles(self.half),
            "right": tiles(self.half),
            "side": tiles(max(self.rope, TILE)),  # the rope part, then probabilities, then results of mla_decode
            "full": {part: barriers(copies if part != "side" or self.rope else 1) for part in PARTS},
            "empty": {part: barriers(self.side_readers if part == "side" else 1) for part in PARTS},
        }

    def queries(self) -> dict:
        rows = self.plan.group_rows
        return {
            "queries": plgpu.SMEM((2, rows, self.half), jnp.bfloat16, transforms=TILED),  # channels of left and right
            "queries_rope": plgpu.SMEM((1, rows, max(self.rope, 64)), jnp.bfloat16, transforms=TILED),
            "full_q": plgpu.Barrier(num_arrivals=3 if self.rope else 2),
            "empty_q": plgpu.Barrier(num_arrivals=2),
        }

    # Items

    def start(self, q_latent, q_rope, pages, page_table, layer, work, tree, out, lse, partial, partial_lse, **smem):
        self.gmem_q = (q_latent, q_rope)
        self.pages, self.page_table, self.layer, self.tree_words = pages, page_table, layer, tree
        self.out, self.lse, self.partial, self.partial_lse = out, lse, partial, partial_lse
        self.work, self.smem = work, smem
        self.lane, lanes = lax.axis_index("lane"), self.plan.lanes
        # Items of this lane: one of each full round, and one of the last if it reaches this lane from its end.
        full, rest = lax.div(work[0], lanes), lax.rem(work[0], lanes)
        self.rounds = full + (self._place(full) < rest).astype(jnp.int32)

    def _place(self, turn):
        """This lane's place in a round: they go to and fro."""
        return jnp.where(lax.rem(turn, 2) == 0, self.lane, self.plan.lanes - 1 - self.lane)

    def read_item(self, turn) -> tuple:
        """This lane's item of a round; one of another lane if there is none."""
        index = lax.min(turn * self.plan.lanes + self._place(turn), self.plan.num_items - 1)
        return tuple(self.work[HEADER + index * len(ITEM) + n] for n in range(len(ITEM)))

    def take_item(self, fields: tuple) -> None:
        """``hidden``: the first slot that some of its rows do not see."""
        call, item = self.call, dict(zip(ITEM, fields, strict=True))
        self.item, self.hidden = item, item["keys"]
        self.first_row = pl.multiple_of(item["row"], STORE_ROWS)
        self.token = lax.div(item["first"], call.heads)  # of the first row
        if call.causal:
            stands = item["stands"] + self.token
            self.hidden = lax.min(self.hidden, _slots_up_to(stands, call.kv_stride))
        if call.tree_keys:  # the tree may hide any key it speaks of
            before = item["stands"] - (call.tree_keys - call.max_q_len) - 1
            self.hidden = lax.min(self.hidden, _slots_up_to(before, call.kv_stride))

    # Loads

    def load_queries(self) -> None:
        rows, full = pl.ds(self.first_row, self.plan.group_rows), self.smem["full_q"]  # past the last: zeros, unused
        for n in range(2):
            columns = pl.ds(n * self.half, self.half)
            plgpu.copy_gmem_to_smem(self.gmem_q[0].at[rows, columns], self.smem["queries"].at[n], full)
        if self.rope:
            plgpu.copy_gmem_to_smem(self.gmem_q[1].at[rows], self.smem["queries_rope"].at[0], full)

    def load(self, tiles, order, *, reused) -> None:
        """Copies parts of tiles into the ring, each as soon as its place is free, if that was in use.

        Args:
            tiles: (place in the ring, tile of the item) of each.
            order: (which of ``tiles``, part) of each copy. An order in which the parts are used, and let go of.
        """
        find = self._rows if self.gathers else self._pieces
        sources: list = [find(self._clamped(j)) for _, j in tiles]
        pending = None
        for n, part in order:
            at = tiles[n][0]
            to, full = self.smem[part].at[at], self.smem["full"][part].at[at]
            pl.when(reused)(functools.partial(plgpu.barrier_wait, self.smem["empty"][part].at[at]))
            if part == "side" and not self.rope:
                plgpu.barrier_arrive(full)
            elif self.gathers:
                gather_rows(sources[n], self.pages.at[:, :, self._channels(part)], to, transforms=TILED)
                self._arrived(pending, in_flight=1)
                pending = full
            else:
                self._copy(sources[n], part, to, full)
        self._arrived(pending, in_flight=0)

    def _clamped(self, j):
        """Tile ``j`` of the item, counted in the table; past the item's end its last, whose scores will be masked."""
        return self.item["tile"] + lax.max(lax.min(j, self.item["tiles"] - 1), 0)

    def _rows(self, tile):
        """What ``gather_rows`` takes."""
        return rows_of_slots(
            self.page_table.at[self.item["request"]],
            tile * TILE,
            self.layer[0] * self.call.layer_stride,
            page_size=self.page,
            num_pages=self.call.num_pages,
            page_stride=self.call.page_stride,
            pool_pages=self.pages.shape[0],
        )

    def _pieces(self, tile) -> list:
        """(physical page, first slot in it) of each piece."""
        call, pieces = self.call, []
        for n in range(TILE // self.piece):
            if self.page == TILE:
                column, slot = tile, 0
            else:
                slot = tile * TILE + n * self.piece
                column, slot = lax.div(slot, self.page), pl.multiple_of(lax.rem(slot, self.page), self.piece)
            column = lax.min(column, self.page_table.shape[1] - 1)
            page = lax.clamp(0, self.page_table[self.item["request"], column], call.num_pages - 1)
            pieces.append((page * call.page_stride + self.layer[0] * call.layer_stride, slot))
        return pieces

    def _channels(self, part: str):
        return pl.ds(*{"left": (0, self.half), "right": (self.half, self.half), "side": (self.rank, self.rope)}[part])

    def _copy(self, pieces, part: str, to, full) -> None:
        for n, (page, slot) in enumerate(pieces):
            keys = slice(None) if self.page == TILE else pl.ds(slot, self.piece)
            piece = to if self.piece == TILE else to.at[pl.ds(n * self.piece, self.piece)]
            plgpu.copy_gmem_to_smem(self.pages.at[page, keys, self._channels(part)], piece, full)

    def _arrived(self, full, *, in_flight: int) -> None:
        """Tells of a gather, once all but the last ``in_flight`` are done."""
        if full is not None:
            wait_for_gathers(in_flight)
            fence_proxy()
            plgpu.barrier_arrive(full)

    # What the consumers share

    def masked(self, scores, j):
        """Scores of tile ``j`` of the item, those of keys that a row does not see replaced."""
        call, item, shape, rows = self.call, self.item, scores.shape, self.rows_axis
        slot0 = (item["tile"] + j) * TILE

        def mask(scores):
            slot = plgpu.broadcasted_iota(jnp.int32, shape, 1 - rows, layout=ACC) + slot0
            seen = (slot < item["keys"]) & (j < item["tiles"])
            at = slot * call.kv_stride
            if call.causal:
                token = self.token
                if call.max_q_len > 1:
                    row = plgpu.broadcasted_iota(jnp.int32, shape, rows, layout=ACC)
                    token = lax.div(row + item["first"], call.heads)
                seen &= at <= item["stands"] + token
            if call.tree_keys:
                seen &= self._in_tree(at)
            return jnp.where(seen, scores, MASKED)

        return lax.cond((slot0 + TILE > self.hidden) | (j >= item["tiles"]), mask, lambda scores: scores, scores)

    def _in_tree(self, at):
        """Whether the tree lets each row see the key at each position (counted from slot 0's key)."""
        call = self.call
        rows, layout = pl.ds(self.first_row, self.plan.group_rows), ACC.reduce(1 - self.rows_axis)
        c = at - (self.item["stands"] - (call.tree_keys - call.max_q_len))
        seen = c < 0
        for n in range(self.tree_words.shape[0]):
            words = plgpu.load(self.tree_words.at[n, rows], layout=layout, optimized=False)
            bit = lax.shift_right_logical(self.spread(words, at.shape), c & 31) & 1
            seen |= (lax.shift_right_arithmetic(c, 5) == n) & (bit == 1)
        return seen

    def spread(self, rows, shape):
        """A number for each row, for all of its keys or channels."""
        return lax.broadcast_in_dim(rows, shape, [self.rows_axis])

    def drop_unused(self, part: str, at, j) -> None:
        """Zeros for what the slots of tile ``j`` hold past the last key: 0 * NaN is NaN."""
        valid = self.item["keys"] - (self.item["tile"] + j) * TILE

        @pl.when(valid < TILE)
        def _():
            row = plgpu.broadcasted_iota(jnp.int32, (TILE, 64), 0, layout=ACC)
            for column in range(0, self.half, 64):
                values = self.smem[part].at[at, :, pl.ds(column, 64)]
                held = plgpu.load(values, layout=ACC, optimized=False).astype(jnp.float32)
                values[...] = jnp.where(row < valid, held, 0.0).astype(jnp.bfloat16)
            plgpu.commit_smem()

    def store(self, staged, to, *columns) -> None:
        """The item's rows, from shared to global memory, when what was written there is to be seen by copies."""
        rows = self.plan.group_rows

        def copy(first, count):
            at = pl.ds(pl.multiple_of(self.first_row + first, STORE_ROWS), count)
            plgpu.copy_smem_to_gmem(staged if count == rows else staged.at[pl.ds(first, count)], to.at[at, *columns])

        if self.call.heads % rows == 0:
            copy(0, rows)
        else:
            for first in range(0, rows, STORE_ROWS):
                pl.when(first < self.item["rows"])(functools.partial(copy, first, STORE_ROWS))


def attend(body: Block, arrays, *, kernel_name: str, warpgroups: int, reduction_bytes: int = 0):
    """Runs a kernel on every lane; ``(out, lse)`` and partial results, as ``mla_decode`` returns them.

    Args:
        body: called with references to ``arrays`` and to what it returns.
        arrays: queries, their rope part, pages, page table, layer, work, tree; None for what is not there.
        warpgroups: of a thread block.
        reduction_bytes: of shared memory, for Pallas to reduce across warps.
    """
    plan, rows = body.plan, arrays[0].shape[0]
    X, bf16, f32 = jax.ShapeDtypeStruct, jnp.bfloat16, jnp.float32
    kernel = plgpu.kernel(
        body,
        out_type=(
            X((rows, body.rank), bf16),
            X((rows,), f32),
            X((plan.num_partials, plan.group_rows, body.rank), f32),
            X((plan.num_partials, plan.group_rows), f32),
        ),
        grid=(plan.lanes,),
        grid_names=("lane",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=body.scratch(),
        # Each role waits for what it takes from the others.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=reduction_bytes, unsafe_no_auto_barriers=True
        ),
        kernel_name=kernel_name,
    )
    unused = jnp.zeros((1, 1), jnp.int32)
    return kernel(*(unused if a is None else a for a in arrays))


def opaque_zero():
    """Descriptors of operands indexed by it are made where they are used, not hoisted out of the loop and spilled."""
    return lax.optimization_barrier(jnp.int32(0))


def _slots_up_to(position, stride: int):
    """Table slots whose keys stand at or before ``position``, counted from slot 0's key; 0 or less: none."""
    return lax.div(position + stride, stride)
