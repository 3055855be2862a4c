# pyright: reportPrivateImportUsage=false, reportAbstractUsage=false
# (JAX's annotations of its own transforms.)
"""What a thread block of the GQA kernels has and loads: shared memory, items, and key tiles; and its launch."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from mla_attn.pallas_kernels.even_list import HEADER, ITEM, EvenPlan
from mla_attn.pallas_kernels.mosaic_gpu.float8 import byte_tiles, place_queries, tile_width
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
_OPTIONAL = ("tree", "window_starts", "positions", "sinks", "k_scale", "v_scale")


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
        head_parts: consecutive heads (of the plan's KV heads) that read the same KV head of the pool.
        sharing: thread blocks that share a multiprocessor's shared memory.
        float8: name of the dtype of keys and values of one byte; None for those in the dtype of queries.
        scale_dims: dimensions of the scales of keys and of values: 0, 1 for [L] or 2 for [L, K].
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
    head_parts: int = 1
    sharing: int = 1
    float8: str | None = None
    scale_dims: tuple[int, int] = (0, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrays:
    """Arrays of a call.

    Attributes:
        q: queries, packed rows (token, head), bfloat16 or float16.
        k, v: the pool's arrays, all layers, pages of any size, in the dtype of ``q`` or uint8; ``v`` is None in the
            interleaved layout.
        page_table: ids within a layer; whatever they are, nothing outside the pool is read.
        layer: layer of the pool.
        work: the list that ``even_list`` made for the plan.
        tree: bit c % 32 of ``tree[c // 32, token]`` says whether the token's rows see key c of ``Call.tree_keys``; None
            without a tree.
        window_starts: for trees with a window, first position in the window of any row of each request; None for
            others. Positions count from the table's first key.
        positions: for trees with a window, the positions that the windows of each token's rows end at; None for others.
        sinks: raw logits of each head; None without.
        k_scale, v_scale: scales of ``Call.scale_dims`` dimensions, made flat; read if keys and values are of one byte.
    """

    q: Float[Array, "rows D"]
    k: Shaped[Array, "k_pages ..."]
    v: Shaped[Array, "v_pages ..."] | None
    page_table: Int32[Array, "B W"]
    layer: Int32[Array, "1"]
    work: Int32[Array, "size"]
    tree: Int32[Array, "words tokens"] | None = None
    window_starts: Int32[Array, "requests"] | None = None
    positions: Int32[Array, "tokens"] | None = None
    sinks: Float32[Array, "heads"] | None = None
    k_scale: Float32[Array, "k_scales"] | None = None
    v_scale: Float32[Array, "v_scales"] | None = None


class Block:
    """A thread block of a GQA kernel: its shared memory, its items, and the loads of its key tiles.

    Pallas calls an instance with the global- and shared-memory refs; they are kept as attributes while the kernel is
    traced.
    """

    @classmethod
    def of(cls, arrays: Arrays, call: Call, plan: EvenPlan):
        """The thread block of a call with these arrays."""
        page = arrays.k.shape[2 if call.layout == "hnd" else 1]
        widths = [array.shape[-1] for array in (arrays.k, arrays.v) if array is not None]
        return cls(call, plan, dtype=arrays.q.dtype, page=page, widths=widths, has_sinks=arrays.sinks is not None)

    def __init__(self, call: Call, plan: EvenPlan, *, dtype, page: int, widths: list[int], has_sinks: bool):
        self.call, self.plan, self.dtype, self.page, self.has_sinks = call, plan, dtype, page, has_sinks
        self.copied = math.gcd(page, TILE)  # keys of one TMA copy: they lie in one page, and in one tile
        # TMA swizzles 8 rows at a time, and counts channels by tiles; others are copied row by row.
        channels = (call.head_dim, call.v_head_dim)
        tiles = {tile_width(n) if call.float8 else 64 for n in channels}
        self.gathers = self.copied % 8 != 0 or any(width % tile for width in widths for tile in tiles)
        self.loaded_rows = -(-plan.tile_rows // 8) * 8
        self.block_rows = self.product_rows()
        self.heads = plan.block_heads
        self.num_heads = plan.kv_heads * plan.heads
        self.slots = 2
        self.stages = self._fitting_stages()
        if self._fitting_stages(slots=1) > self.stages:
            self.slots, self.stages = 1, self._fitting_stages(slots=1)

    def product_rows(self) -> int:
        """Rows of a product."""
        return BLOCK_ROWS

    def _fitting_stages(self, slots: int | None = None) -> int:
        """The most stages that fit beside buffers for the queries of ``slots`` items."""
        system = 1024  # bytes of each thread block that the system keeps
        free = (SHARED_BYTES + system) // self.call.sharing - system - shared_bytes(self.scratch(0, slots))
        each = shared_bytes(self.scratch(1, slots)) - shared_bytes(self.scratch(0, slots))
        return min(free // each, MOST_STAGES)

    def scratch(self, stages: int, slots: int | None = None) -> dict:
        """Shared memory and barriers of a thread block, by the name under which ``smem`` holds them."""
        slots, buffers = self.slots if slots is None else slots, stages * self.heads
        copies = 1 if self.gathers else TILE // self.copied

        def tiles(channels):
            dtype, layout = (jnp.uint8, byte_tiles(channels)) if self.call.float8 else (self.dtype, TILED)
            return plgpu.SMEM((buffers, TILE, channels), dtype, transforms=layout)

        def barriers(count, arrivals=1):
            return plgpu.Barrier(num_barriers=max(count, 1), num_arrivals=arrivals)

        return {
            "queries": plgpu.SMEM(
                (slots * self.heads, self.block_rows, self.call.head_dim), self.dtype, transforms=TILED
            ),
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

    def start(self, q, k, v, page_table, layer, work, *refs, **smem) -> None:
        """Keeps the references, and finds the items of the block's team."""
        self.q, self.k, self.v, self.page_table, self.layer, self.work = q, k, v, page_table, layer, work
        self.tree, self.window_starts, self.positions, self.sinks, *self.scales = refs[: len(_OPTIONAL)]
        self.smem, outs = smem, refs[len(_OPTIONAL) :]
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
        if self.plan.tree:  # windows end where the arrays say: which tiles all rows see is not known
            self.first_key = _keys_before(self.window_starts[item["request"]], call.kv_stride)
            self.hidden = jnp.int32(0)
        elif window is not None:
            last = position + (self.plan.tile_tokens - 1)
            self.first_key = _keys_before(position + 1 - window, call.kv_stride)
            self.shown = _keys_before(last + 1 - window, call.kv_stride)
        self.set_head = item["set"] * self.plan.set_heads + self.lane * self.heads  # first KV head of the block

    def pool_head(self, n):
        """The pool's KV head that the block's head ``n`` reads."""
        head = self.set_head + n
        return head if self.call.head_parts == 1 else lax.div(head, self.call.head_parts)

    # Loads

    def zero_queries(self) -> None:
        """Zeroes the rows of nobody, for good."""
        if self.loaded_rows < self.block_rows:
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
            copy = place_queries if self.call.float8 else gather_queries
            copy(
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
                    rows, array = self._gathered(part, tile, self.pool_head(n))
                    gather_rows(rows, array, to, transforms=byte_tiles(to.shape[1]) if self.call.float8 else TILED)
                    self._arrived(pending, in_flight=1)
                    pending = full
                else:
                    self._copy(sources, part, self.pool_head(n), to, full)
        self._arrived(pending, in_flight=0)

    def drop_unused(self, at, j) -> None:
        """Zeroes the values of tile ``j`` that no row sees: their probability is 0, but 0 * NaN is NaN."""
        key0 = (self.item["tile"] + j) * TILE
        valid, before = self.item["keys"] - key0, self.first_key - key0

        @pl.when((valid < TILE) | (before > 0))
        def _():
            zero_rows(self.smem["values"].at[at], valid, None if self.plan.window is None else before)
            plgpu.commit_smem()

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
        call, (array, channels) = self.call, self._array(part)
        kv_heads = self.plan.kv_heads // call.head_parts
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


def attend(body: Block, arrays: Arrays, *, out_dtype, kernel_name: str, registers: tuple[int, int] | None):
    """Launches a kernel, a thread block for each of ``plan.blocks``; returns what ``gqa_decode`` returns.

    Args:
        body: called with references to the arrays and to the results.
        arrays: those of the call.
        out_dtype: dtype of ``out``.
        kernel_name: shown in profiles.
        registers: of a loading thread, and of others; None for what the compiler gives them.
    """
    q, k, v, call, plan = arrays.q, arrays.k, arrays.v, body.call, body.plan
    if body.gathers:
        k, v = body.as_rows(k), None if v is None else body.as_rows(v)
    X, f32, rows = jax.ShapeDtypeStruct, jnp.float32, plan.num_partials * plan.set_heads * plan.tile_rows
    kernel = plgpu.kernel(
        functools.partial(_by_role, body, registers),
        out_type=(
            X((q.shape[0], call.v_head_dim), out_dtype),
            X((q.shape[0],), f32),
            X((rows, call.v_head_dim), f32),
            X((rows,), f32),
        ),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=plan.block_heads + 1,
        thread_name="warpgroup",
        scratch_types=body.scratch(body.stages),
        # No automatic barriers: each role waits for what it takes from the others.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        kernel_name=kernel_name,
    )
    no_words, no_numbers = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, f32)
    unused = (no_words, no_words[0], no_words[0], *[no_numbers] * 3)
    optional = [getattr(arrays, name) for name in _OPTIONAL]
    optional = (u if a is None else a for a, u in zip(optional, unused, strict=True))
    operands = (q, k, k if v is None else v, arrays.page_table, arrays.layer, arrays.work, *optional)
    out, lse, partial, partial_lse = kernel(*operands)
    return out, lse, partial.reshape(plan.num_partials, -1, call.v_head_dim), partial_lse.reshape(plan.num_partials, -1)


def _by_role(body, registers, *refs, **smem) -> None:
    """A loading warpgroup, and one for each KV head that a thread block takes at a time."""
    body.start(*refs, **smem)
    warpgroup = lax.axis_index("warpgroup")
    for loads in (True, False):

        @pl.when((warpgroup == body.heads) if loads else (warpgroup < body.heads))
        def _(loads=loads):
            if registers is not None:
                plgpu.set_max_registers(registers[not loads], action="decrease" if loads else "increase")
            if loads:
                body.zero_queries()
            role = body.load_item if loads else functools.partial(body.attend_item, warpgroup)
            # Carried: the item's fields, and how many tiles the ring held before it.
            lax.fori_loop(0, body.rounds, role, (body.read_item(0), jnp.int32(0)))
