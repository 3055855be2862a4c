# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false
# (JAX's annotations of its own transforms.)
"""What a thread block of the GQA kernel has and loads: shared memory, items, and key tiles."""

import dataclasses
import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_attn.pallas_kernels.even_list import HEADER, ITEM, EvenPlan
from mla_attn.pallas_kernels.mosaic_gpu.primitives import (
    SHARED_BYTES,
    TILED,
    fence_proxy,
    gather_queries,
    gather_rows,
    rows_of_keys,
    shared_bytes,
    wait_for_gathers,
    zero_rows,
)
from mla_attn.pallas_kernels.work_list import TILE

BLOCK_ROWS = 64  # M of wgmma
MOST_STAGES = 8
PARTS = ("keys", "values")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Static facts of a call.

    Attributes:
        scale: softmax scale.
        head_dim, v_head_dim: channels D of a key and V of a value.
        layout: as in ``KVPool``.
        max_q_len: most query tokens of a request.
        num_pages, page_stride, layer_stride: as in ``KVPool``.
        causal: rows see keys up to their own position.
        soft_cap: cap of scores; None for none.
        kv_stride: positions from one key index to the next.
        tree_keys: columns M of the tree mask; 0 without one.
    """

    scale: float
    head_dim: int
    v_head_dim: int
    layout: str
    max_q_len: int
    num_pages: int
    causal: bool = True
    soft_cap: float | None = None
    kv_stride: int = 1
    page_stride: int = 1
    layer_stride: int = 0
    tree_keys: int = 0


class Block:
    """A thread block of the GQA kernel: its shared memory, its items, and the loads of its key tiles.

    Pallas calls an instance with the global- and shared-memory refs; they are kept as attributes while the kernel is
    traced.
    """

    def __init__(self, call: Call, plan: EvenPlan, *, dtype, page: int, widths: list[int], has_sinks: bool):
        self.call, self.plan, self.dtype, self.page, self.has_sinks = call, plan, dtype, page, has_sinks
        self.copied = math.gcd(page, TILE)  # keys of one TMA copy: they lie in one page, and in one tile
        # TMA swizzles 8 rows at a time, and counts channels by 64; others are copied row by row.
        self.gathers = self.copied % 8 != 0 or any(width % 64 for width in widths)
        self.loaded_rows = -(-plan.tile_rows // 8) * 8
        self.heads = plan.block_heads
        self.num_heads = plan.kv_heads * plan.heads
        self.slots = 2
        self.stages = self._fitting_stages()
        if self._fitting_stages(slots=1) > self.stages:
            self.slots, self.stages = 1, self._fitting_stages(slots=1)

    def _fitting_stages(self, slots: int | None = None) -> int:
        """The most stages that fit beside buffers for the queries of ``slots`` items."""
        free = SHARED_BYTES - shared_bytes(self.scratch(0, slots))
        each = shared_bytes(self.scratch(1, slots)) - shared_bytes(self.scratch(0, slots))
        return min(free // each, MOST_STAGES)

    def scratch(self, stages: int, slots: int | None = None) -> dict:
        """Shared memory and barriers of a thread block, by the name under which ``smem`` holds them."""
        slots, buffers = self.slots if slots is None else slots, stages * self.heads
        copies = 1 if self.gathers else TILE // self.copied

        def tiles(channels):
            return plgpu.SMEM((buffers, TILE, channels), self.dtype, transforms=TILED)

        def barriers(count, arrivals=1):
            return plgpu.Barrier(num_barriers=max(count, 1), num_arrivals=arrivals)

        return {
            "queries": plgpu.SMEM((slots * self.heads, BLOCK_ROWS, self.call.head_dim), self.dtype, transforms=TILED),
            "keys": tiles(self.call.head_dim),
            "values": tiles(self.call.v_head_dim),
            "full_q": barriers(slots),
            "empty_q": barriers(slots, self.heads),
            "full": {part: barriers(buffers, copies) for part in PARTS},
            "empty": {part: barriers(buffers) for part in PARTS},
        }

    def as_rows(self, array):
        """A pool's array as [pages, rows, elements], for gathers."""
        if self.call.layout == "hnd":
            return array.reshape(-1, *array.shape[2:])
        return array.reshape(*array.shape[:2], -1)

    def start(self, q, k, v, page_table, layer, work, tree, sinks, *outs, **smem) -> None:
        """Keeps the references, and finds the items of the block's team."""
        self.q, self.k, self.v, self.page_table, self.layer, self.work = q, k, v, page_table, layer, work
        self.tree, self.sinks, self.smem = tree, sinks, smem
        self.out, self.lse, self.partial, self.partial_lse = outs
        block, lanes = lax.axis_index("block"), self.plan.lanes
        team, self.lane = lax.div(block, lanes), lax.rem(block, lanes)
        self.first_item = work[HEADER + team]
        self.rounds = work[HEADER + team + 1] - self.first_item

    # Items

    def read_item(self, turn) -> tuple:
        """The record (``ITEM``) of the team's item of a turn; another team's where there is none."""
        index = lax.min(self.first_item + turn, self.plan.num_items - 1)
        return tuple(self.work[self.plan.items_at + index * len(ITEM) + n] for n in range(len(ITEM)))

    def take_item(self, fields: tuple) -> None:
        """Keeps an item's fields.

        Also the keys of the request from ``first_key`` on that any row of the item may see, and which of them all rows
        see: those from ``shown`` on and before ``hidden``.
        """
        call, window, item = self.call, self.plan.window, dict(zip(ITEM, fields, strict=True))
        self.item, self.hidden = item, item["keys"]
        self.first_key = self.shown = jnp.int32(0)
        position = item["position"] + item["nth"]  # of the first row
        if call.causal:
            self.hidden = lax.min(self.hidden, _keys_before(position + 1, call.kv_stride))
        if call.tree_keys:  # the tree mask may hide any key that it has a column for
            first = item["position"] - (call.tree_keys - call.max_q_len)
            self.hidden = lax.min(self.hidden, _keys_before(first, call.kv_stride))
        if window is not None:
            last = position + (self.plan.tile_tokens - 1)
            self.first_key = _keys_before(position + 1 - window, call.kv_stride)
            self.shown = _keys_before(last + 1 - window, call.kv_stride)
        self.set_head = item["set"] * self.plan.set_heads + self.lane * self.heads  # first KV head of the block

    # Loads

    def zero_queries(self) -> None:
        """Zeroes the rows of nobody, for good."""
        if self.loaded_rows < BLOCK_ROWS:
            for n in range(self.slots * self.heads):
                zero_rows(self.smem["queries"].at[n], jnp.int32(self.loaded_rows))

    def load_item(self, turn, carry):
        """Loads one item: its first tile, then its queries, which may have to wait, then the others."""
        fields, before = carry
        self.take_item(fields)
        following, tiles = self.read_item(turn + 1), self.item["tiles"]

        def load(j):
            self._load_tile(lax.rem(before + j, self.stages), j, reused=before + j >= self.stages)

        pl.when(tiles > 0)(lambda: load(0))
        slot = lax.rem(turn, self.slots)
        pl.when(turn >= self.slots)(lambda: plgpu.barrier_wait(self.smem["empty_q"].at[slot]))
        for n in range(self.heads):
            gather_queries(
                self.q,
                self.smem["queries"].at[slot * self.heads + n],
                self.item["token"],
                (self.set_head + n) * self.plan.heads,
                count=self.loaded_rows,
                group=self.plan.heads,
                num_heads=self.num_heads,
            )
        self._arrived(self.smem["full_q"].at[slot], in_flight=0)
        pl.loop(1, tiles)(load)
        return following, before + tiles

    def _load_tile(self, stage, j, *, reused) -> None:
        """Copies the item's tile ``j``, keys and values of each KV head, as soon as its stage has been released."""
        tile = self.item["tile"] + j
        sources = None if self.gathers else self._copies(tile)
        pending = None
        for part in PARTS:
            for n in range(self.heads):
                at = stage * self.heads + n
                to, full = self.smem[part].at[at], self.smem["full"][part].at[at]
                pl.when(reused)(functools.partial(plgpu.barrier_wait, self.smem["empty"][part].at[at]))
                if sources is None:
                    rows, array = self._gathered(part, tile, self.set_head + n)
                    gather_rows(rows, array, to, transforms=TILED)
                    self._arrived(pending, in_flight=1)
                    pending = full
                else:
                    self._copy(sources, part, self.set_head + n, to, full)
        self._arrived(pending, in_flight=0)

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

    def _copy(self, copies, part: str, head, to, full) -> None:
        """Starts the TMA copies of the keys or the values of one head of a tile."""
        array, channels = self._array(part)
        for n, (page, row) in enumerate(copies):
            rows = slice(None) if self.page == TILE else pl.ds(row, self.copied)
            target = to if self.copied == TILE else to.at[pl.ds(n * self.copied, self.copied)]
            at = {"nhd": (page, rows, head), "hnd": (page, head, rows)}.get(
                self.call.layout, (page, rows, head, PARTS.index(part))
            )
            plgpu.copy_gmem_to_smem(array.at[(*at, pl.ds(0, channels))], target, full)

    def _gathered(self, part: str, tile, head):
        """Where the keys of a tile lie, and the array, as ``gather_rows`` takes them."""
        call, (array, channels), kv_heads = self.call, self._array(part), self.plan.kv_heads
        pages, factor, first = array.shape[0], 1, 0
        if call.layout == "hnd":
            factor, first, begin = kv_heads, head, 0
        elif call.layout == "nhd":
            begin = head * (array.shape[2] // kv_heads)
        else:
            begin = (2 * head + PARTS.index(part)) * (array.shape[2] // (2 * kv_heads))
        rows = rows_of_keys(
            self.page_table.at[self.item["request"]],
            tile * TILE,
            self.layer[0] * (call.layer_stride * factor) + first,
            page_size=self.page,
            num_pages=call.num_pages,
            page_stride=call.page_stride * factor,
            pool_pages=pages,
        )
        return rows, array.at[:, :, pl.ds(begin, channels)]

    def _array(self, part: str):
        """The pool's array that holds the keys or the values, and their channels."""
        return (self.k, self.call.head_dim) if part == "keys" else (self.v, self.call.v_head_dim)

    def _arrived(self, full, *, in_flight: int) -> None:
        """Arrives at the barrier of a gather once all but the last ``in_flight`` gathers are done."""
        if full is not None:
            wait_for_gathers(in_flight)
            fence_proxy()
            plgpu.barrier_arrive(full)


def _keys_before(position, stride: int):
    """Number of keys before ``position``, which counts from the first key's; 0 or less for none."""
    return lax.div(position + (stride - 1), stride)
