# pyright: reportAbstractUsage=false
# (JAX's annotations of its own transforms.)
"""What the two MLA kernels share: a thread block's items, the loads of their key tiles, and which keys a row sees."""

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
    rows_of_keys,
    wait_for_gathers,
    zero_rows,
)
from mla_attn.pallas_kernels.work_list import HEADER, ITEM, TILE, Plan

STORE_ROWS = 8  # rows of one store: every item has a multiple of it
START, MASKED = -1e30, -1e33  # the running maximum (log2) of a row that has seen no key; a masked score
PARTS = ("left", "right", "rope")  # parts of a key tile: either half of the value channels, and the rope channels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Static facts of a call of either kernel.

    Attributes:
        heads: packed rows of a query token: query heads, padded.
        scale: softmax scale.
        max_q_len: most query tokens of a request.
        num_pages, page_stride, layer_stride, rope_offset: as in ``LatentPool``.
        causal: rows see keys up to their own position.
        kv_stride: positions from one key index to the next.
        tree_keys: columns M of the tree mask; 0 without one.
        cache: name of the pool's row format.
    """

    heads: int
    scale: float
    max_q_len: int
    num_pages: int
    rope_offset: int
    causal: bool = True
    kv_stride: int = 1
    page_stride: int = 1
    layer_stride: int = 0
    tree_keys: int = 0
    cache: str = "bfloat16"


class Block:
    """Body shared by the MLA kernels.

    Pallas calls an instance with the global- and shared-memory refs; they are kept as attributes while the kernel is
    traced.

    Key tiles go through a two-stage buffer in shared memory, in three parts (left, right, rope), each with barriers of
    its own, so that a part can be used or refilled before the others.
    """

    rows_axis: int  # axis of the scores that holds rows: 0, or 1 where the products are transposed
    rope_readers: int = 1  # warpgroups that release a rope buffer
    reduction_bytes: int = 0  # shared memory in which Pallas reduces across warps

    def __init__(self, call: Call, plan: Plan, *, rank: int, rope: int, page: int):
        self.call, self.plan = call, plan
        self.rank, self.rope, self.page = rank, rope, page
        self.half = rank // 2
        self.copied = math.gcd(page, TILE)  # keys of one TMA copy: they lie in one page, and in one tile
        self.gathers = self.copied % 8 != 0  # TMA swizzles 8 rows at a time; smaller runs are copied row by row
        self.log2_scale = call.scale * math.log2(math.e)

    def scratch(self) -> dict:
        """Shared memory and barriers of a thread block, by the name under which ``smem`` holds them."""
        raise NotImplementedError

    def __call__(self, *refs, **smem) -> None:
        raise NotImplementedError

    # Shared memory

    def buffer(self) -> dict:
        """The two stages of key tiles, and the barriers of their parts."""
        copies = 1 if self.gathers else TILE // self.copied

        def tiles(channels):
            return plgpu.SMEM((2, TILE, channels), jnp.bfloat16, transforms=TILED)

        def barriers(arrivals):
            return plgpu.Barrier(num_barriers=2, num_arrivals=arrivals)

        return {
            "left": tiles(self.half),
            "right": tiles(self.half),
            "rope": tiles(max(self.rope, TILE)),  # rope part, reused for P, then for output of mla_decode
            "full": {part: barriers(copies if part != "rope" or self.rope else 1) for part in PARTS},
            "empty": {part: barriers(self.rope_readers if part == "rope" else 1) for part in PARTS},
        }

    def queries(self) -> dict:
        """The queries of an item, and their barriers."""
        rows = self.plan.tile_rows
        return {
            "queries": plgpu.SMEM((2, rows, self.half), jnp.bfloat16, transforms=TILED),  # left, right
            "queries_rope": plgpu.SMEM((1, rows, max(self.rope, 64)), jnp.bfloat16, transforms=TILED),
            "full_q": plgpu.Barrier(num_arrivals=3 if self.rope else 2),
            "empty_q": plgpu.Barrier(num_arrivals=2),
        }

    # Items

    def start(self, q_latent, q_rope, pages, page_table, layer, work, tree, *rest, **smem):
        """Keeps the references, and counts the items of this thread block."""
        *self.more, out, lse, partial, partial_lse = rest
        self.gmem_q = (q_latent, q_rope)
        self.pages, self.page_table, self.layer, self.tree_words = pages, page_table, layer, tree
        self.out, self.lse, self.partial, self.partial_lse = out, lse, partial, partial_lse
        self.work, self.smem = work, smem
        self.block, blocks = lax.axis_index("block"), self.plan.blocks
        # Items of this block: one of each full round, and one of the last if that reaches this block from its end.
        full, rest = lax.div(work[0], blocks), lax.rem(work[0], blocks)
        self.rounds = full + (self._number_in_round(full) < rest).astype(jnp.int32)

    def _number_in_round(self, turn):
        """Number of this block's item within a round: even rounds ascend over the blocks, odd rounds descend."""
        return jnp.where(lax.rem(turn, 2) == 0, self.block, self.plan.blocks - 1 - self.block)

    def read_item(self, turn) -> tuple:
        """The record (``ITEM``) of this block's item of a round; another block's where there is none."""
        index = lax.min(turn * self.plan.blocks + self._number_in_round(turn), self.plan.num_items - 1)
        return tuple(self.work[HEADER + index * len(ITEM) + n] for n in range(len(ITEM)))

    def take_item(self, fields: tuple) -> None:
        """Keeps an item's fields, and ``hidden``, the first key that some of its rows do not see."""
        call, item = self.call, dict(zip(ITEM, fields, strict=True))
        self.item, self.hidden = item, item["keys"]
        self.first_row = pl.multiple_of(item["row"], STORE_ROWS)
        self.token = lax.div(item["first"], call.heads)  # query token of the first row
        if call.causal:
            position = item["position"] + self.token
            self.hidden = lax.min(self.hidden, _keys_up_to(position, call.kv_stride))
        if call.tree_keys:  # the tree mask may hide any key that it has a column for
            before = item["position"] - (call.tree_keys - call.max_q_len) - 1
            self.hidden = lax.min(self.hidden, _keys_up_to(before, call.kv_stride))

    # Loads

    def load_queries(self) -> None:
        """Starts copying the item's queries; rows past the last one of the call are zeros."""
        rows, full = pl.ds(self.first_row, self.plan.tile_rows), self.smem["full_q"]
        for n in range(2):
            columns = pl.ds(n * self.half, self.half)
            plgpu.copy_gmem_to_smem(self.gmem_q[0].at[rows, columns], self.smem["queries"].at[n], full)
        if self.rope:
            plgpu.copy_gmem_to_smem(self.gmem_q[1].at[rows], self.smem["queries_rope"].at[0], full)

    def load(self, tiles, order, *, reused) -> None:
        """Copies parts of key tiles into the buffer, each as soon as its stage has been released.

        Args:
            tiles: (stage, number of the tile in the item) of each tile.
            order: (which of ``tiles``, part) of each copy, in the order in which the parts are used and released.
            reused: whether the stages were in use before, so that a release must be waited for.
        """
        find = self._rows if self.gathers else self._copies
        sources: list = [find(self._clamped(j)) for _, j in tiles]
        pending = None
        for n, part in order:
            at = tiles[n][0]
            to, full = self.smem[part].at[at], self.smem["full"][part].at[at]
            pl.when(reused)(functools.partial(plgpu.barrier_wait, self.smem["empty"][part].at[at]))
            if part == "rope" and not self.rope:
                plgpu.barrier_arrive(full)
            elif self.gathers:
                self.gather(sources[n], part, to)
                self._arrived(pending, in_flight=1)
                pending = full
            else:
                self._copy(sources[n], part, to, full)
        self._arrived(pending, in_flight=0)

    def gather(self, rows, part: str, to) -> None:
        """Starts copying one part of a tile row by row."""
        gather_rows(rows, self.pages.at[:, :, self._channels(part)], to, transforms=TILED)

    def _clamped(self, j):
        """Number in the request of the item's tile ``j``; past the item's end its last, whose scores will be masked."""
        return self.item["tile"] + lax.max(lax.min(j, self.item["tiles"] - 1), 0)

    def _rows(self, tile):
        """Where the keys of a tile lie, as ``gather_rows`` takes it."""
        return rows_of_keys(
            self.page_table.at[self.item["request"]],
            tile * TILE,
            self.layer[0] * self.call.layer_stride,
            page_size=self.page,
            num_pages=self.call.num_pages,
            page_stride=self.call.page_stride,
            pool_pages=self.pages.shape[0],
        )

    def _copies(self, tile) -> list:
        """(physical page, first row in it) of each TMA copy of a tile."""
        call, copies = self.call, []
        for n in range(TILE // self.copied):
            if self.page == TILE:
                column, row = tile, 0
            else:
                key = tile * TILE + n * self.copied
                column, row = lax.div(key, self.page), pl.multiple_of(lax.rem(key, self.page), self.copied)
            column = lax.min(column, self.page_table.shape[1] - 1)
            page = lax.clamp(0, self.page_table[self.item["request"], column], call.num_pages - 1)
            copies.append((page * call.page_stride + self.layer[0] * call.layer_stride, row))
        return copies

    def _channels(self, part: str):
        """The elements of a pool's row that a part holds."""
        rope = (self.call.rope_offset, self.rope)
        return pl.ds(*{"left": (0, self.half), "right": (self.half, self.half), "rope": rope}[part])

    def _copy(self, copies, part: str, to, full) -> None:
        """Starts the TMA copies of one part of a tile."""
        for n, (page, row) in enumerate(copies):
            rows = slice(None) if self.page == TILE else pl.ds(row, self.copied)
            target = to if self.copied == TILE else to.at[pl.ds(n * self.copied, self.copied)]
            plgpu.copy_gmem_to_smem(self.pages.at[page, rows, self._channels(part)], target, full)

    def _arrived(self, full, *, in_flight: int) -> None:
        """Arrives at the barrier of a gather once all but the last ``in_flight`` gathers are done."""
        if full is not None:
            wait_for_gathers(in_flight)
            fence_proxy()
            plgpu.barrier_arrive(full)

    # What the consumers share

    def masked(self, scores, j):
        """Scores of tile ``j`` of the item, with ``MASKED`` for keys that a row does not see."""
        call, item, shape, rows = self.call, self.item, scores.shape, self.rows_axis
        key0 = (item["tile"] + j) * TILE

        def mask(scores):
            key = lax.broadcasted_iota(jnp.int32, shape, 1 - rows) + key0
            seen = (key < item["keys"]) & (j < item["tiles"])
            at = key * call.kv_stride
            if call.causal:
                token = self.token
                if call.max_q_len > 1:
                    row = lax.broadcasted_iota(jnp.int32, shape, rows)
                    token = lax.div(row + item["first"], call.heads)
                seen &= at <= item["position"] + token
            if call.tree_keys:
                seen &= self._in_tree(at)
            return jnp.where(seen, scores, MASKED)

        return lax.cond((key0 + TILE > self.hidden) | (j >= item["tiles"]), mask, lambda scores: scores, scores)

    def _in_tree(self, at):
        """Which keys the tree mask lets each row see; positions ``at`` count from the table's first key."""
        call = self.call
        rows, layout = pl.ds(self.first_row, self.plan.tile_rows), ACC.reduce(1 - self.rows_axis)
        c = at - (self.item["position"] - (call.tree_keys - call.max_q_len))
        seen = c < 0
        for n in range(self.tree_words.shape[0]):
            words = plgpu.load(self.tree_words.at[n, rows], layout=layout, optimized=False)
            bit = lax.shift_right_logical(self.spread(words, at.shape), c & 31) & 1
            seen |= (lax.shift_right_arithmetic(c, 5) == n) & (bit == 1)
        return seen

    def spread(self, rows, shape):
        """Broadcasts a number for each row over its keys or channels."""
        return lax.broadcast_in_dim(rows, shape, [self.rows_axis])

    def drop_unused(self, part: str, stage, j) -> None:
        """Zeroes what tile ``j`` holds past the last key: its probability is 0, but 0 * NaN is NaN."""
        valid = self.item["keys"] - (self.item["tile"] + j) * TILE

        @pl.when(valid < TILE)
        def _():
            zero_rows(self.smem[part].at[stage], valid)
            plgpu.commit_smem()

    def store(self, staged, to, *columns) -> None:
        """Starts copying the item's rows from shared to global memory; the caller has committed what it wrote there."""
        rows = self.plan.tile_rows

        def copy(first, count):
            at = pl.ds(pl.multiple_of(self.first_row + first, STORE_ROWS), count)
            plgpu.copy_smem_to_gmem(staged if count == rows else staged.at[pl.ds(first, count)], to.at[at, *columns])

        if self.call.heads % rows == 0:
            copy(0, rows)
        else:
            steps = lax.min(lax.div(self.item["rows"] + (STORE_ROWS - 1), STORE_ROWS), rows // STORE_ROWS)
            pl.loop(0, steps)(lambda n: copy(pl.multiple_of(n * STORE_ROWS, STORE_ROWS), STORE_ROWS))


def attend(body: Block, arrays, *, kernel_name: str, warpgroups: int):
    """Launches a kernel, a thread block for each of ``plan.blocks``; returns what ``mla_decode`` returns.

    Args:
        body: called with references to ``arrays`` and to the results.
        arrays: queries, their rope part, pages, page table, layer, work, tree; None for what is not there.
        kernel_name: shown in profiles.
        warpgroups: warpgroups of a thread block.
    """
    plan, rows = body.plan, arrays[0].shape[0]
    X, bf16, f32 = jax.ShapeDtypeStruct, jnp.bfloat16, jnp.float32
    kernel = plgpu.kernel(
        body,
        out_type=(
            X((rows, body.rank), bf16),
            X((rows,), f32),
            X((plan.num_partials, plan.tile_rows, body.rank), f32),
            X((plan.num_partials, plan.tile_rows), f32),
        ),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=body.scratch(),
        # No automatic barriers: each role waits for what it takes from the others.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=body.reduction_bytes, unsafe_no_auto_barriers=True
        ),
        kernel_name=kernel_name,
    )
    unused = jnp.zeros((1, 1), jnp.int32)
    return kernel(*(unused if a is None else a for a in arrays))


def opaque_zero():
    """A zero that the compiler cannot fold.

    LLVM hoists loop-invariant descriptors of wgmma operands out of the loop, and they spill. Indexed by this zero,
    operands are not invariant, and their descriptors are made where they are used.
    """
    return lax.optimization_barrier(jnp.int32(0))


def _keys_up_to(position, stride: int):
    """Number of keys up to ``position``, which counts from the first key's; 0 or less for none."""
    return lax.div(position + stride, stride)
