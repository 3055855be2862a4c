# pyright: reportPrivateImportUsage=false, reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false
# (JAX exports its MLIR bindings for itself alone, and does not type what inline_mgpu makes of a function.)
"""Operations that Pallas does not offer, written in MLIR: a fence, a named barrier, copies and stores row by row, a
product that warps may skip. And a count of shared memory."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, memref, nvvm, scf, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

ACC, ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # layout that wgmma and TMA take
SHARED_BYTES = 227 * 1024  # what a thread block may have with compute capability 9.0
_ALIGNMENT = 1024  # bytes, of every array in shared memory
_EACH_THREAD = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def shared_bytes(scratch, reduction_bytes: int = 0) -> int:
    """Bytes of shared memory that a thread block takes.

    Args:
        scratch: a tree of arrays and barriers, as Pallas takes them.
        reduction_bytes: what Pallas reduces across warps in.
    """

    def size(ref) -> int:
        if isinstance(ref, plgpu.Barrier):
            return 8 * math.prod(ref.num_barriers)
        if isinstance(ref, plgpu.RefUnion):
            return max(size(one) for one in ref.refs)
        array = math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize
        return -(-array // _ALIGNMENT) * _ALIGNMENT

    return reduction_bytes + sum(size(ref) for ref in jax.tree.leaves(scratch))


def fence_proxy() -> None:
    """Orders this thread's stores to shared memory before later reads by wgmma and TMA."""

    @plgpu.inline_mgpu()
    def fence(_):
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    fence()


def sync_warpgroup(number: int) -> None:
    """Waits until all 128 threads of the warpgroup are here.

    Args:
        number: hardware barrier, which no other warpgroup uses.
    """

    @plgpu.inline_mgpu()
    def sync(_):
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], f"bar.sync {number}, 128;", "", has_side_effects=True)

    sync()


def rows_of_keys(table, key, page0, *, page_size: int, num_pages: int, page_stride: int, pool_pages: int) -> jax.Array:
    """The pool's rows that 64 consecutive keys of a request lie in: int32 [128], as ``gather_rows`` takes it.

    Args:
        table: int32 [W], page ids of the request; keys past its end and ids out of range are clamped.
        key: index of the first key.
        page_size: tokens per page.
        page0, page_stride: page ``id`` is page ``page0 + id * page_stride`` of the pool, clamped to what there is.
        num_pages, pool_pages: number of page ids, and of pages of the pool.
    """
    columns, splat = table.shape[0], plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), splat, splat),
        return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_EACH_THREAD),
    )
    def find(_, table, key, page0):
        warp, lane = _warp_and_lane()
        row = arith.addi(arith.muli(warp, _i32(16)), arith.remui(lane, _i32(16)))
        key = arith.addi(key.registers.item(), row)
        column = arith.minsi(arith.divui(key, _i32(page_size)), _i32(columns - 1))
        page = memref.load(table, [arith.index_castui(ir.IndexType.get(), column)])
        page = arith.maxsi(arith.minsi(page, _i32(num_pages - 1)), _i32(0))
        page = arith.addi(page0.registers.item(), arith.muli(page, _i32(page_stride)))
        page = arith.maxsi(arith.minsi(page, _i32(pool_pages - 1)), _i32(0))
        found = arith.addi(arith.muli(page, _i32(page_size)), arith.remui(key, _i32(page_size)))
        found = vector.broadcast(ir.VectorType.get((1,), found.type), found)
        return mgpu.FragmentedArray(
            _registers=np.array([found], dtype=object), _layout=_EACH_THREAD.to_mgpu(), _is_signed=True
        )

    return find(table, key, page0)


def gather_rows(rows: jax.Array, pages, to, *, transforms: tuple) -> None:
    """Starts copying 64 rows, 16 bytes a thread at a time; ``wait_for_gathers`` waits for them.

    Args:
        rows: what ``rows_of_keys`` returned; each warp copies 16 of them.
        pages: [pages, P, N] in global memory, a slice of the pool's channels, of one or two bytes each; N is 64, 128
            or 256.
        to: [64, N] in shared memory.
        transforms: layout of ``to``: tiles of 8 rows by 128 bytes, or 64 if a row has no more, swizzled.
    """
    size = jnp.dtype(to.dtype).itemsize
    row_chunks = to.shape[1] * size // 16  # 16 bytes each, one for a thread
    tile_chunks = min(row_chunks, 8)
    at_once = 32 // row_chunks  # rows that a warp copies at a time

    @plgpu.inline_mgpu(arg_types=(_EACH_THREAD, plgpu.RefType(), plgpu.RefType(transforms)))
    def gather(_, rows, pages, to):
        i64, byte = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)
        source = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(pages))
        target = mgpu.utils.memref_ptr(to)
        own = vector.extract(rows.registers.item(), dynamic_position=[], static_position=[0])
        warp, lane = _warp_and_lane()
        chunk, first = arith.remui(lane, _i32(row_chunks)), arith.divui(lane, _i32(row_chunks))
        source = mgpu.utils.getelementptr(source, [arith.muli(chunk, _i32(16))], byte)
        row_bytes = arith.constant(i64, ir.IntegerAttr.get(i64, size * pages.type.get_strides_and_offset()[0][1]))
        for n in range(0, 16, at_once):
            row = arith.addi(first, _i32(n))  # number among the warp's 16
            place = nvvm.shfl_sync(_i32(-1), own, row, _i32(31), nvvm.ShflKind.idx)
            in_tile = arith.remui(row, _i32(8))
            tile = arith.addi(arith.muli(warp, _i32(2)), arith.divui(row, _i32(8)))
            tile = arith.addi(arith.muli(tile, _i32(row_chunks // tile_chunks)), arith.divui(chunk, _i32(tile_chunks)))
            line = arith.divui(in_tile, _i32(8 // tile_chunks))  # of 128 bytes
            swizzled = arith.xori(arith.remui(chunk, _i32(tile_chunks)), line)
            inside = arith.addi(arith.muli(in_tile, _i32(16 * tile_chunks)), arith.muli(swizzled, _i32(16)))
            nvvm.cp_async_shared_global(
                mgpu.utils.getelementptr(target, [arith.addi(arith.muli(tile, _i32(128 * tile_chunks)), inside)], byte),
                mgpu.utils.getelementptr(source, [arith.muli(arith.extui(i64, place), row_bytes)], byte),
                16,
                nvvm.LoadCacheModifierKind.CG,
            )
        nvvm.cp_async_commit_group()

    gather(rows, pages, to)


def wait_for_gathers(in_flight: int) -> None:
    """Waits until this thread's part of all but the last ``in_flight`` gathers has been copied."""

    @plgpu.inline_mgpu()
    def wait(_):
        nvvm.cp_async_wait_group(in_flight)

    wait()


def start_barriers(barriers) -> None:
    """Makes barriers of one arrival each in shared memory, for ``copy_rows``; all threads of the block are here.

    Pallas does not let a piece of MLIR have a barrier of its own.

    Args:
        barriers: int32 [2 n], of n barriers.
    """
    count = barriers.shape[0] // 2

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def start(_, barriers):
        first = mgpu.utils.single_thread_predicate(scope=mgpu.utils.ThreadSubset.BLOCK)
        for n in range(count):
            nvvm.mbarrier_init(_barrier(barriers, _i32(n)).get_ptr(), _i32(1), predicate=first)
        void = ir.Type.parse("!llvm.void")
        both = "fence.mbarrier_init.release.cluster; bar.sync 0;"
        llvm.inline_asm(void, [], both, "~{memory}", has_side_effects=True)

    start(barriers)


def wait_for_phase(barriers, at, phase) -> None:
    """Waits until a barrier of ``start_barriers`` has completed its ``phase``-th phase, counted from 0."""
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar, scalar))
    def wait(_, barriers, at, phase):
        parity = arith.trunci(ir.IntegerType.get_signless(1), phase.registers.item())
        _barrier(barriers, at.registers.item()).wait_parity(parity)

    wait(barriers, at, phase)


def arrive_alone(barriers, at) -> None:
    """One thread of the warpgroup arrives at a barrier of ``start_barriers``, after its own stores."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def arrive(_, barriers, at):
        first = mgpu.utils.single_thread_predicate(scope=mgpu.utils.ThreadSubset.WARPGROUP)
        nvvm.mbarrier_arrive_expect_tx(_barrier(barriers, at.registers.item()).get_ptr(), _i32(0), predicate=first)

    arrive(barriers, at)


def _barrier(barriers, at):
    address = mgpu.utils.memref_ptr(barriers)
    return mgpu.utils.BarrierRef(address, at, None, 1)


def copy_rows(source, to, barriers, at, row, head) -> None:
    """Starts copying one head's rows with TMA, from any row on; one thread arrives at the barrier.

    Pallas' own copy of a tiled array begins at multiples of 8 rows. Rows outside the array become zeros.

    Args:
        source: [N, H, D] in global memory, of two bytes each; D is a multiple of 64.
        to: [D / 64, M, 64] in shared memory, in ``TILED``: 64 channels after the other.
        barriers, at: a barrier of ``start_barriers``.
        row, head: int32, first row, and head.
    """
    parts, rows, _ = to.shape
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(TILED), plgpu.RefType(), scalar, scalar, scalar))
    def copy(context, source, to, barriers, at, row, head):
        index = ir.IndexType.get()
        row, head = (arith.index_cast(index, x.registers.item()) for x in (row, head))
        context.async_copy(
            src_ref=source,
            dst_ref=mgpu.utils.memref_fold(to, 1, 3),
            gmem_slice=(mgpu.ds(row, rows), head, mgpu.ds(0, parts * 64)),
            gmem_transform=(mgpu.TileTransform((64,)), mgpu.TransposeTransform((1, 0, 2))),
            barrier=_barrier(barriers, at.registers.item()),
            swizzle=128,
        )

    copy(source, to, barriers, at, row, head)


def issue_product(sums: jax.Array, left: jax.Array, right) -> jax.Array:
    """Starts ``sums + left @ right`` as one group of wgmma; ``wait_for_product`` waits for the result.

    Pallas has no view of the parts of ``right`` as one array, and a product of each part alone is slower.

    Args:
        sums: float32 [64, N] in the layout of wgmma's accumulators.
        left: [64, K] of two bytes each, in the same layout.
        right: [N / 64, K, 64] in shared memory, in ``TILED``.
    """
    result = plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=ACC)

    @plgpu.inline_mgpu(arg_types=(ACC, ACC, plgpu.RefType(TILED)), return_type=result)
    def issue(_, sums, left, right):
        right = mgpu.utils.memref_slice(right, (slice(None), slice(None), 0))
        right = mgpu.utils.memref_transpose(right, (1, 0, 2, 3))
        accumulator = mgpu.wgmma(mgpu.WGMMAAccumulator.from_registers(sums), left, right, swizzle=128)
        nvvm.wgmma_commit_group_sync_aligned()
        return accumulator.value.to_layout(ACC.to_mgpu())

    return issue(sums, left, right)


def wait_for_product(product: jax.Array) -> jax.Array:
    """Waits for all products that were issued; returns what ``issue_product`` started."""
    result = plgpu.ShapeDtypeStruct(product.shape, jnp.float32, layout=ACC)

    @plgpu.inline_mgpu(arg_types=(ACC,), return_type=result)
    def wait(_, product):
        nvvm.wgmma_wait_group_sync_aligned(0)
        return mgpu.optimization_barrier(product)  # nothing that reads it is moved before the wait

    return wait(product)


def take_number(counter, number, barrier: int) -> jax.Array:
    """Adds 1 to a counter that all thread blocks share, and returns what it held before.

    Args:
        counter: int32 [1] in global memory.
        number: int32 [1] in shared memory, by which a thread tells the others of its warpgroup.
        barrier: hardware barrier, which no other warpgroup uses.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=scalar_of(jnp.int32))
    def take(_, counter, number):
        i32, first = ir.IntegerType.get_signless(32), arith.constant(ir.IndexType.get(), 0)
        sync = f"bar.sync {barrier}, 128;"
        void = ir.Type.parse("!llvm.void")
        thread = arith.remui(mgpu.utils.thread_idx(), _i32(128))
        llvm.inline_asm(void, [], sync, "", has_side_effects=True)  # all have read the number before
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, thread, _i32(0))):
            place = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(counter))
            add = "atom.relaxed.gpu.global.add.s32 $0, [$1], 1;"
            memref.store(llvm.inline_asm(i32, [place], add, "=r,l", has_side_effects=True), number, [first])
        llvm.inline_asm(void, [], sync, "", has_side_effects=True)
        return mgpu.FragmentedArray.splat(memref.load(number, [first]), (), is_signed=True)

    return take(counter, number)


def scalar_of(dtype):
    """The type of a number that a piece of MLIR returns."""
    return plgpu.ShapeDtypeStruct((), dtype, layout=plgpu.Layout.WG_SPLAT)


def sync_pair(number: int, *, wait: bool) -> None:
    """Arrives at a hardware barrier of two warpgroups; with ``wait`` also waits until the other one arrives."""

    @plgpu.inline_mgpu()
    def sync(_):
        void, what = ir.Type.parse("!llvm.void"), "sync" if wait else "arrive"
        llvm.inline_asm(void, [], f"bar.{what} {number}, 256;", "", has_side_effects=True)

    sync()


def zero_rows(rows, first, before=None) -> None:
    """Stores ``rows[first:] = 0`` and ``rows[:before] = 0`` in shared memory.

    Args:
        rows: [M, N] of two bytes each, in ``TILED``; M is a multiple of 16, N of 64.
        first, before: int32; ``before`` may be None for none.
    """
    count, tiles = rows.shape[0], rows.shape[1] // 64  # tiles of 8 rows by 64 columns side by side, 1024 bytes each
    befores = () if before is None else (before,)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TILED),) + (plgpu.Layout.WG_SPLAT,) * (1 + len(befores)))
    def store(_, rows, first, *befores):
        thread, byte = arith.remui(mgpu.utils.thread_idx(), _i32(128)), ir.IntegerType.get_signless(8)
        own, chunk = arith.divui(thread, _i32(8)), arith.remui(thread, _i32(8))  # 16 bytes of every 16th row
        tile, in_tile = arith.divui(own, _i32(8)), arith.remui(own, _i32(8))
        inside = arith.addi(arith.muli(in_tile, _i32(128)), arith.muli(chunk, _i32(16)))
        offset = arith.addi(arith.muli(tile, _i32(tiles * 1024)), inside)
        base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(rows), [offset], byte)
        zeros = vector.broadcast(ir.VectorType.get((4,), _i32(0).type), _i32(0))
        for n in range(count // 16):
            row = arith.addi(own, _i32(16 * n))
            outside = arith.cmpi(arith.CmpIPredicate.sge, row, first.registers.item())
            for limit in befores:
                under = arith.cmpi(arith.CmpIPredicate.slt, row, limit.registers.item())
                outside = arith.ori(outside, under)
            with mgpu.utils.when(outside):
                for column in range(tiles):
                    llvm.store(zeros, mgpu.utils.getelementptr(base, [(2 * n * tiles + column) * 1024], byte))

    store(rows, first, *befores)


def store_vector(ref, values: jax.Array, layout) -> None:
    """Stores ``ref[...] = values`` in global memory, for any length. (Pallas' own store asks for whole cache lines.)

    Both are float32 [N], ``values`` in ``layout``; threads that hold the same number all write it.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def store(_, ref, values):
        values.foreach(lambda value, at: memref.store(value, ref, at))

    store(ref, values)


def store_transposed(ref, values: jax.Array) -> None:
    """Stores ``ref[...] = values.T`` in global memory.

    Args:
        ref: float32 [N, M].
        values: float32 [M, N] in the layout of wgmma's accumulators.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACC))
    def store(_, ref, values):
        values.foreach(lambda value, at: memref.store(value, ref, [at[1], at[0]]))

    store(ref, values)


def store_rows(ref, values, begin, end, width=None) -> None:
    """Stores ``ref[begin:end, :width] = values[begin:end, :width]`` in global memory.

    Args:
        ref: float32 [64, N], a slice that may reach past the array's end, where nothing is written.
        values: float32 [64, N] in the layout of wgmma's accumulators.
        begin, end: first row and end of the rows to store; any integers.
        width: columns to store, a multiple of 64; None for all.
    """
    columns, scalar = values.shape[1], plgpu.Layout.WG_SPLAT
    widths = () if width is None else (width,)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACC, scalar, scalar) + (scalar,) * len(widths))
    def store(_, ref, values, begin, end, *widths):
        i64 = ir.IntegerType.get_signless(64)
        warp, lane = _warp_and_lane()
        own_row = arith.addi(arith.muli(warp, _i32(16)), arith.divui(lane, _i32(4)))
        own_column = arith.extui(i64, arith.muli(arith.remui(lane, _i32(4)), _i32(2)))
        pitch = ref.type.get_strides_and_offset()[0][0]
        base = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(ref))
        # A thread has pairs of columns, of its own row and of the 8th after it.
        pairs = values.registers.reshape(columns // 8, 2)
        for half in range(2):
            row = arith.addi(own_row, _i32(8 * half))
            inside = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, row, begin.registers.item()),
                arith.cmpi(arith.CmpIPredicate.slt, row, end.registers.item()),
            )
            offset = arith.addi(
                arith.muli(arith.extui(i64, row), arith.constant(i64, ir.IntegerAttr.get(i64, pitch))), own_column
            )
            place = mgpu.utils.getelementptr(base, [offset], ir.F32Type.get())
            for chunk in range(0, columns, 64):
                there = inside
                for limit in widths:
                    within = arith.cmpi(arith.CmpIPredicate.sgt, limit.registers.item(), _i32(chunk))
                    there = arith.andi(inside, within)
                with ir.InsertionPoint(scf.IfOp(there).then_block):
                    for n in range(chunk // 8, chunk // 8 + 8):
                        llvm.store(pairs[n, half], mgpu.utils.getelementptr(place, [8 * n], ir.F32Type.get()))
                    scf.yield_([])

    store(ref, values, begin, end, *widths)


def gather_queries(queries, to, token, head, *, count: int, group: int, num_heads: int) -> None:
    """Starts copying rows of a few query tokens, 16 bytes a thread at a time; ``wait_for_gathers`` waits for them.

    Args:
        queries: [T * H, D] in global memory, of two bytes each; D is 64, 128 or 256.
        to: [64, D] in shared memory, in ``TILED``.
        token: token of the first row; tokens past the end are the last.
        head: first head.
        count: rows to copy, a multiple of 8; row r is of token ``token + r // group`` and head ``head + r % group``.
        group: heads of a token.
        num_heads: heads H.
    """
    rows, channels = queries.shape
    chunks = channels // 8  # 16 bytes each, one for a thread
    at_once = 128 // chunks  # rows that the warpgroup copies at a time
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(TILED), scalar, scalar))
    def gather(_, queries, to, token, head):
        i64, byte = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)
        token, head = token.registers.item(), head.registers.item()
        thread = arith.remui(mgpu.utils.thread_idx(), _i32(128))
        chunk, own = arith.remui(thread, _i32(chunks)), arith.divui(thread, _i32(chunks))
        source = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(queries))
        source = mgpu.utils.getelementptr(source, [arith.muli(chunk, _i32(16))], byte)
        target = mgpu.utils.memref_ptr(to)
        row_bytes = arith.constant(i64, ir.IntegerAttr.get(i64, 2 * channels))
        for n in range(0, count, at_once):
            row = arith.addi(own, _i32(n))
            from_token = arith.addi(token, arith.divui(row, _i32(group)))
            from_token = arith.minsi(from_token, _i32(rows // num_heads - 1))
            place = arith.addi(arith.muli(from_token, _i32(num_heads)), head)
            place = arith.addi(place, arith.remui(row, _i32(group)))
            in_tile = arith.remui(row, _i32(8))
            tile = arith.addi(arith.muli(arith.divui(row, _i32(8)), _i32(channels // 64)), arith.divui(chunk, _i32(8)))
            swizzled = arith.xori(arith.remui(chunk, _i32(8)), in_tile)
            inside = arith.addi(arith.muli(in_tile, _i32(128)), arith.muli(swizzled, _i32(16)))
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, row, _i32(count))):
                nvvm.cp_async_shared_global(
                    mgpu.utils.getelementptr(target, [arith.addi(arith.muli(tile, _i32(1024)), inside)], byte),
                    mgpu.utils.getelementptr(source, [arith.muli(arith.extui(i64, place), row_bytes)], byte),
                    16,
                    nvvm.LoadCacheModifierKind.CG,
                )
        nvvm.cp_async_commit_group()

    gather(queries, to, token, head)


def take(ref, at: jax.Array, dtype, layout=ROW) -> jax.Array:
    """``ref[at]``, a load from global memory for each number.

    Args:
        ref: [N], of ``dtype``.
        at: int32 [n] in ``layout``, all of ``[0, N)``.
        layout: one number for each row of wgmma's accumulators, or for each column.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout), return_type=plgpu.ShapeDtypeStruct(at.shape, dtype, layout=layout)
    )
    def load(_, ref, at):
        is_signed = True if jnp.issubdtype(dtype, jnp.integer) else None
        index, element = ir.IndexType.get(), ir.MemRefType(ref.type).element_type

        def one(number):
            return memref.load(ref, [arith.index_castui(index, number)])

        registers = np.empty_like(at.registers)
        for n, register in np.ndenumerate(at.registers):
            if isinstance(register.type, ir.VectorType):
                numbers = [one(number) for number in elements(register)]
                registers[n] = vector.from_elements(ir.VectorType.get((len(numbers),), element), numbers)
            else:
                registers[n] = one(register)
        return mgpu.FragmentedArray(_registers=registers, _layout=at.layout, _is_signed=is_signed)

    return load(ref, at)


def elements(register) -> list:
    """The numbers of a register that is a vector."""
    count = ir.VectorType(register.type).shape[0]
    return [vector.extract(register, dynamic_position=[], static_position=[n]) for n in range(count)]


def load_repeated(ref, count: int) -> jax.Array:
    """``ref`` in global memory, float32 [N], again and again up to ``count`` numbers, one a thread: 128."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((count,), jnp.float32, layout=_EACH_THREAD)
    )
    def load(_, ref):
        value = memref.load(ref, [_repeated_index(ref)])
        value = vector.broadcast(ir.VectorType.get((1,), value.type), value)
        return mgpu.FragmentedArray(
            _registers=np.array([value], dtype=object), _layout=_EACH_THREAD.to_mgpu(), _is_signed=None
        )

    return load(ref)


def store_repeated(ref, values: jax.Array) -> None:
    """Stores what ``load_repeated`` loaded: threads that hold the same number all write it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _EACH_THREAD))
    def store(_, ref, values):
        value = vector.extract(values.registers.item(), dynamic_position=[], static_position=[0])
        memref.store(value, ref, [_repeated_index(ref)])

    store(ref, values)


def _repeated_index(ref):
    thread = arith.remui(mgpu.utils.thread_idx(), _i32(ir.MemRefType(ref.type).shape[0]))
    return arith.index_castui(ir.IndexType.get(), thread)


def scatter_vector(ref, values: jax.Array, first, count, *, group: int, stride: int, layout=ROW) -> None:
    """Stores ``ref[first + r // group * stride + r % group] = values[r]`` in global memory, for r below ``count``.

    Args:
        ref: float32 [N].
        values: float32 [n] in ``layout``; threads that hold the same number all write it.
        first, count: int32.
        group, stride: consecutive numbers, and from a group to the next.
        layout: one number for each row of wgmma's accumulators, or for each column.
    """
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, scalar, scalar))
    def store(_, ref, values, first, count):
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        first, count = first.registers.item(), count.registers.item()

        def one(value, at):
            row = arith.index_castui(i32, at[0])
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, row, count)):
                memref.store(value, ref, [arith.index_castui(index, _scattered(row, first, group, stride))])

        values.foreach(one)

    store(ref, values, first, count)


def scatter_rows(ref, values: jax.Array, first, count, *, group: int, stride: int) -> None:
    """Stores ``ref[first + r // group * stride + r % group] = values[r]`` in global memory, for r below ``count``.

    Args:
        ref: float32, bfloat16 or float16 [N, C], or a slice of the columns; it may hold more elements than an int32
            counts.
        values: float32 [64, C] in the layout of wgmma's accumulators.
        first, count, group, stride: as ``scatter_vector`` takes them.
    """
    columns, dtype, scalar = values.shape[1], jnp.dtype(ref.dtype), plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACC, scalar, scalar))
    def store(_, ref, values, first, count):
        i64 = ir.IntegerType.get_signless(64)
        first, count = first.registers.item(), count.registers.item()
        element = ir.MemRefType(ref.type).element_type
        warp, lane = _warp_and_lane()
        own_row = arith.addi(arith.muli(warp, _i32(16)), arith.divui(lane, _i32(4)))
        own_column = arith.extui(i64, arith.muli(arith.remui(lane, _i32(4)), _i32(2)))
        pitch = arith.constant(i64, ir.IntegerAttr.get(i64, ref.type.get_strides_and_offset()[0][0]))
        base = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(ref))
        # A thread has pairs of columns, of its own row and of the 8th after it.
        pairs = values.registers.reshape(columns // 8, 2)
        for half in range(2):
            row = arith.addi(own_row, _i32(8 * half))
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, row, count)):
                place = arith.extui(i64, _scattered(row, first, group, stride))
                offset = arith.addi(arith.muli(place, pitch), own_column)
                place = mgpu.utils.getelementptr(base, [offset], element)
                for n in range(columns // 8):
                    pair = pairs[n, half]
                    if dtype != jnp.float32:
                        pair = arith.truncf(ir.VectorType.get((2,), element), pair)
                    llvm.store(pair, mgpu.utils.getelementptr(place, [8 * n], element))

    store(ref, values, first, count)


def _scattered(row, first, group: int, stride: int):
    token = arith.divui(row, _i32(group))
    return arith.addi(
        arith.addi(first, arith.muli(token, _i32(stride))), arith.subi(row, arith.muli(token, _i32(group)))
    )


def zeros(shape: tuple[int, ...]) -> jax.Array:
    """float32 zeros in the layout of wgmma's accumulators."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), ACC)


def scale_rows(values: jax.Array, factors: jax.Array) -> jax.Array:
    """``values * factors[:, None]``; a warp whose factors are all 1 skips the product.

    Args:
        values: float32 [M, N] in the layout of wgmma's accumulators.
        factors: float32 [M], one for each row.
    """

    @plgpu.inline_mgpu(arg_types=(ACC, ROW), return_type=plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=ACC))
    def scale(_, values, factors):
        if_op = scf.IfOp(_any_in_warp_differs(factors, 1.0), [r.type for r in values.registers.flat], has_else=True)
        with ir.InsertionPoint(if_op.then_block):
            scaled = values * factors.broadcast_in_dim(values.shape, (0,), ACC.to_mgpu())
            scf.yield_(list(scaled.registers.flat))
        with ir.InsertionPoint(if_op.else_block):
            scf.yield_(list(values.registers.flat))
        registers = np.array(list(if_op.results), dtype=object).reshape(values.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)

    return scale(values, factors)


def _any_in_warp_differs(array, value: float):
    """Whether any register of a warp's threads differs from ``value``: an i1, the same in all of them."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    expected, differs = arith.constant(f32, ir.FloatAttr.get(f32, value)), None
    for register in array.registers.flat:
        if isinstance(register.type, ir.VectorType):
            register = vector.extract(register, dynamic_position=[], static_position=[0])
        here = arith.cmpf(arith.CmpFPredicate.UNE, register, expected)
        differs = here if differs is None else arith.ori(differs, here)
    vote = (
        "{ .reg .pred here, any; setp.ne.u32 here, $1, 0; vote.sync.any.pred any, here, 0xffffffff;"
        " selp.u32 $0, 1, 0, any; }"
    )
    voted = llvm.inline_asm(i32, [arith.extui(i32, differs)], vote, "=r,r", has_side_effects=True)
    return arith.cmpi(arith.CmpIPredicate.ne, voted, arith.constant(i32, ir.IntegerAttr.get(i32, 0)))


def _i32(value: int):
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def _warp_and_lane():
    """Number of this thread's warp in its warpgroup, and of the thread in its warp."""
    thread = arith.remui(mgpu.utils.thread_idx(), _i32(128))
    return arith.divui(thread, _i32(32)), arith.remui(thread, _i32(32))
