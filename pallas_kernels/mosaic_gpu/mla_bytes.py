# pyright: reportPrivateImportUsage=false, reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false
# (JAX exports its MLIR bindings for itself alone, and does not type what inline_mgpu makes of a function.)
"""Operations of ``mla_float8``, written in MLIR: bytes as operands of products, the queries that go with them, results.

Compute capability 9.0 converts two float8 numbers to float16 in one instruction, exactly and NaN included, but
not to bfloat16, for which ``float8.placed`` moves bits.

An operand's bytes are read where wgmma wants them: thread t % 4 of a row has columns 2t, 2t + 1, 2t + 8 and 2t + 9 of
every 16. Which channel is called which is free. Keys are read 16 bytes at a time, so their channels are renamed, and
those of queries with them (``prepare_queries``). Values are read 4 bytes at a time, of four channels: rows of O^T are
renamed, which ``store_columns`` and ``stage_columns`` undo.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, nvvm, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_attn.pallas_kernels.mosaic_gpu.columns import COLUMN
from mla_attn.pallas_kernels.mosaic_gpu.float8 import placed
from mla_attn.pallas_kernels.mosaic_gpu.primitives import ACC, ROW, TILED, _i32, _warp_and_lane

_CONVERSIONS = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}
_EACH_THREAD = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def byte_rows(size: int) -> tuple:
    """Layout in shared memory, which TMA writes, of rows of 64 or 128 bytes: their 16-byte chunks are permuted."""
    return (plgpu.SwizzleTransform(size),)


def keys_operand(keys, dtype: str) -> jax.Array:
    """Keys [64, D] as the left operand of a product, float16 in the layout of wgmma, channels renamed.

    Args:
        keys: uint8 [64, D] in shared memory, in ``byte_rows(D)``; D is 64 or 128.
        dtype: name of the float8 dtype.
    """
    size = keys.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(byte_rows(size)),),
        return_type=plgpu.ShapeDtypeStruct((64, size), jnp.float16, layout=ACC),
    )
    def load(_, keys):
        warp, group, thread = _place()
        row = arith.addi(arith.muli(warp, _i32(16)), group)
        base, kind = mgpu.utils.memref_ptr(keys), ir.VectorType.get((4,), _i32(0).type)
        pairs = np.empty((size // 8, 2), dtype=object)  # of 8 columns, of half of the rows
        for n in range(size // 64):
            chunk = arith.addi(arith.muli(thread, _i32(size // 64)), _i32(n))
            place = _swizzled(row, chunk, size)
            for half in range(2):
                words = _load(base, place, half * 8 * size, kind)
                for i in range(4):
                    word = vector.extract(words, dynamic_position=[], static_position=[i])
                    pairs[8 * n + 2 * i, half], pairs[8 * n + 2 * i + 1, half] = _halves(word, dtype)
        return _operand(pairs, (64, size))

    return load(keys)


def values_operand(values, dtype: str, to) -> jax.Array:
    """Values [64, 128], transposed: [128, 64] as the left operand of a product, in the layout of wgmma, rows renamed.

    Args:
        values: uint8 [64, 128] in shared memory, in ``byte_rows(128)``.
        dtype: name of the float8 dtype.
        to: float16 or bfloat16.
    """
    half_precision = jnp.dtype(to) == jnp.float16

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(byte_rows(128)),),
        return_type=plgpu.ShapeDtypeStruct((128, 64), to, layout=ACC),
    )
    def load(_, values):
        warp, group, thread = _place()
        base, i32, places = mgpu.utils.memref_ptr(values), ir.IntegerType.get_signless(32), []
        chunk = arith.addi(arith.muli(warp, _i32(2)), arith.shrui(group, _i32(2)))
        rest = arith.muli(arith.andi(group, _i32(3)), _i32(4))
        for odd in range(2):  # the two keys of a pair
            key = arith.addi(arith.muli(thread, _i32(2)), _i32(odd))
            places.append(arith.addi(_swizzled(key, chunk, 128), rest))
        pairs = np.empty((2, 8, 2), dtype=object)  # of 64 channels, 8 keys, half of the rows
        for n in range(8):
            first, second = (_load(base, place, n * 1024, i32) for place in places)
            for register in range(2):
                # Bytes of both keys beside each other, for two channels.
                if half_precision:
                    word = _bytes_of(first, second, 0x7362 if register else 0x5140)
                    pairs[register, n] = _halves(word, dtype)
                else:
                    selects = (0x6622, 0x7733) if register else (0x4400, 0x5511)
                    pairs[register, n] = [placed(_bytes_of(first, second, select), dtype) for select in selects]
        return _operand(pairs, (128, 64))

    return load(values)


def rope_operand(tail, start: int) -> jax.Array:
    """64 bfloat16 channels of 64 keys as the left operand of a product, in the layout of wgmma.

    Args:
        tail: uint8 [64, N] in shared memory, row after row; N is a multiple of 4.
        start: byte where the channels begin, a multiple of 4.
    """
    pitch = tail.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=ACC)
    )
    def load(_, tail):
        warp, group, thread = _place()
        row = arith.addi(arith.muli(warp, _i32(16)), group)
        place = arith.addi(arith.muli(row, _i32(pitch)), arith.muli(thread, _i32(4)))
        base, pair = mgpu.utils.memref_ptr(tail), ir.VectorType.get((2,), ir.BF16Type.get())
        pairs = np.empty((8, 2), dtype=object)
        for n, half in np.ndindex(8, 2):
            pairs[n, half] = _load(base, place, half * 8 * pitch + start + 16 * n, pair)
        return _operand(pairs, (64, 64))

    return load(tail)


def key_scales(tail, start: int) -> jax.Array:
    """A float32 number of each of 64 keys: [64] in ``ROW``; arguments are those of ``rope_operand``."""
    pitch = tail.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=ROW))
    def load(_, tail):
        warp, group, _ = _place()
        row = arith.addi(arith.muli(warp, _i32(16)), group)
        base, f32, layout = mgpu.utils.memref_ptr(tail), ir.VectorType.get((1,), ir.F32Type.get()), ROW.to_mgpu()
        registers = np.empty(layout.registers_shape((64,)), dtype=object)
        for half in range(2):  # a thread's row, and the 8th after it
            registers.flat[half] = _load(base, arith.muli(row, _i32(pitch)), half * 8 * pitch + start, f32)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(tail)


def zero_byte_rows(rows, first) -> None:
    """Stores ``rows[first:] = 0`` in shared memory; rows are uint8 [64, 128] in ``byte_rows(128)``."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(byte_rows(128)), plgpu.Layout.WG_SPLAT))
    def store(_, rows, first):
        thread = arith.remui(mgpu.utils.thread_idx(), _i32(128))
        own = arith.divui(thread, _i32(8))  # 16 bytes of every 16th row
        base = mgpu.utils.memref_ptr(rows)
        zeros = vector.broadcast(ir.VectorType.get((4,), _i32(0).type), _i32(0))
        for n in range(4):
            row = arith.addi(own, _i32(16 * n))
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.sge, row, first.registers.item())):
                llvm.store(zeros, _at(base, arith.muli(thread, _i32(16)), 2048 * n))

    store(rows, first)


def prepare_queries(left, right, rope, factors, step) -> None:
    """Makes float16 of four rows of queries, in place: row times a power of two, channels as ``keys_operand`` has them.

    The power brings the row's largest number to 2^13, so that what float16 cannot hold is less than 2^-37 of it.

    Args:
        left, right: halves of the rows, bfloat16 [rows, D] in shared memory, in ``TILED``; D is 128 or 256.
        rope: the rest of the rows, bfloat16 [rows, 64]; None if it stays as it is.
        factors: float32 [rows] in shared memory, which gets the inverse of each row's power.
        step: number of the four rows.
    """
    parts, scalar = [part for part in (left, right, rope) if part is not None], plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(TILED) for _ in parts), plgpu.RefType(), scalar))
    def prepare(_, *arguments):
        *refs, factors, step = arguments
        warp, lane = _warp_and_lane()
        row = arith.addi(arith.muli(step.registers.item(), _i32(4)), warp)
        of_8, in_8 = arith.divui(row, _i32(8)), arith.remui(row, _i32(8))
        four, i32, f32 = ir.VectorType.get((4,), _i32(0).type), _i32(0).type, ir.F32Type.get()
        loaded, largest = [], _i32(0)
        for part, ref in zip(parts, refs, strict=True):
            channels = part.shape[1]
            tiles = _at(mgpu.utils.memref_ptr(ref), arith.muli(of_8, _i32(channels // 64 * 1024)), 0)

            def place(chunk, tiles=tiles):
                tile, inside = arith.divui(chunk, _i32(8)), _swizzled(in_8, arith.remui(chunk, _i32(8)), 128)
                return _at(tiles, arith.addi(arith.muli(tile, _i32(1024)), inside), 0)

            # Lanes that have no chunk of their own load another's, and do not store it.
            chunk = arith.remui(lane, _i32(channels // 8))
            words = llvm.load(four, place(chunk))
            words = [vector.extract(words, dynamic_position=[], static_position=[i]) for i in range(4)]
            loaded.append((channels, place, words))
            for word in words:
                for bits in (arith.andi(word, _i32(0x7FFF)), arith.andi(arith.shrui(word, _i32(16)), _i32(0x7FFF))):
                    largest = arith.maxui(largest, bits)
        largest = llvm.inline_asm(
            i32, [largest], "redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r", has_side_effects=True
        )
        exponent = arith.subi(_i32(127 + 127 + 13), arith.shrui(largest, _i32(7)))
        exponent = arith.minsi(arith.maxsi(exponent, _i32(1)), _i32(253))
        power = llvm.bitcast(f32, arith.shli(exponent, _i32(23)))
        inverse = llvm.bitcast(f32, arith.shli(arith.subi(_i32(254), exponent), _i32(23)))
        for channels, place, words in loaded:
            width = min(channels, 128)
            quarter = width // 32  # chunks of a thread of the product
            chunk = arith.remui(lane, _i32(channels // 8))
            block, in_block = arith.divui(chunk, _i32(width // 8)), arith.remui(chunk, _i32(width // 8))
            thread, own = arith.divui(in_block, _i32(quarter)), arith.remui(in_block, _i32(quarter))
            first = arith.addi(arith.muli(block, _i32(width // 8)), arith.muli(own, _i32(4)))
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, lane, _i32(channels // 8))):
                for i, word in enumerate(words):
                    to = arith.muli(thread, _i32(4))
                    llvm.store(_scaled(word, power), _at(place(arith.addi(first, _i32(i))), to, 0))
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, _i32(0))):
            llvm.store(inverse, _at(mgpu.utils.memref_ptr(factors), arith.muli(row, _i32(4)), 0))

    prepare(*parts, factors, step)


def gather_bytes(rows: jax.Array, pages, to, *, transforms: tuple) -> None:
    """Starts copying 64 rows, 16 bytes a thread at a time; ``wait_for_gathers`` waits for them.

    Args:
        rows: what ``rows_of_keys`` returned; each warp copies 16 of them.
        pages: uint8 [pages, P, N] in global memory, a slice of the pool's rows; N is a multiple of 16.
        to: uint8 [64, N] in shared memory.
        transforms: layout of ``to``: ``byte_rows(N)``, or () for row after row.
    """
    size = to.shape[1]
    chunks = size // 16

    @plgpu.inline_mgpu(arg_types=(_EACH_THREAD, plgpu.RefType(), plgpu.RefType(transforms)))
    def gather(_, rows, pages, to):
        i64 = ir.IntegerType.get_signless(64)
        source = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(pages))
        target = mgpu.utils.memref_ptr(to)
        own = vector.extract(rows.registers.item(), dynamic_position=[], static_position=[0])
        warp, lane = _warp_and_lane()
        row_bytes = arith.constant(i64, ir.IntegerAttr.get(i64, pages.type.get_strides_and_offset()[0][1]))
        for n in range(0, 16 * chunks, 32):
            number = arith.addi(lane, _i32(n))
            row, chunk = arith.divui(number, _i32(chunks)), arith.remui(number, _i32(chunks))
            from_row = nvvm.shfl_sync(_i32(-1), own, row, _i32(31), nvvm.ShflKind.idx)
            to_row = arith.addi(arith.muli(warp, _i32(16)), row)
            if transforms:
                offset = _swizzled(to_row, chunk, size)
            else:
                offset = arith.addi(arith.muli(to_row, _i32(size)), arith.muli(chunk, _i32(16)))
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, row, _i32(16))):
                place = arith.muli(arith.extui(i64, from_row), row_bytes)
                place = arith.addi(place, arith.extui(i64, arith.muli(chunk, _i32(16))))
                copied = _at(target, offset, 0), _at(source, place, 0)
                nvvm.cp_async_shared_global(*copied, 16, nvvm.LoadCacheModifierKind.CG)
        nvvm.cp_async_commit_group()

    gather(rows, pages, to)


def reduce_rows(values: jax.Array, operation: str, scratch) -> jax.Array:
    """The "max" or the sum ("add") of each column, float32 [N], of a warpgroup that shares ``scratch`` with nobody.

    Args:
        values: float32 [64, N] in the layout of wgmma's accumulators.
        operation: "max" or "add".
        scratch: float32 [32 * N] in shared memory.
    """
    result = plgpu.ShapeDtypeStruct(values.shape[1:], jnp.float32, layout=COLUMN)

    @plgpu.inline_mgpu(arg_types=(ACC, plgpu.RefType()), return_type=result)
    def reduce(_, values, scratch):
        return values.reduce(operation, 0, scratch)

    return reduce(values, scratch)


def store_columns(ref, values: jax.Array) -> None:
    """Stores ``ref[...] = values.T`` in global memory, rows of ``values`` renamed as those of ``values_operand``.

    Args:
        ref: float32 [N, 128].
        values: float32 [128, N] in the layout of wgmma's accumulators.
    """
    columns = values.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACC))
    def store(_, ref, values):
        i64, f32 = ir.IntegerType.get_signless(64), ir.F32Type.get()
        pitch = ref.type.get_strides_and_offset()[0][0]
        base = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(ref))
        warp, group, thread = _place()
        place = arith.addi(arith.muli(thread, _i32(2 * pitch)), _first_channel(warp, group))
        base = mgpu.utils.getelementptr(base, [arith.extui(i64, place)], f32)
        for column, numbers in _columns(values, columns):
            numbers = vector.from_elements(ir.VectorType.get((4,), f32), numbers)
            llvm.store(numbers, mgpu.utils.getelementptr(base, [column * pitch], f32))

    store(ref, values)


def stage_columns(ref, values: jax.Array, start: int) -> None:
    """Stores ``ref[:, start : start + 128] = values.T`` in shared memory, rounded; rows are renamed as above.

    Args:
        ref: bfloat16 [N, C] in ``TILED``.
        values: float32 [128, N] in the layout of wgmma's accumulators.
        start: a multiple of 128.
    """
    columns, channels = values.shape[1], ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TILED), ACC))
    def store(_, ref, values):
        four = ir.VectorType.get((4,), ir.F32Type.get())
        warp, group, thread = _place()
        channel = _first_channel(warp, group)
        tile, in_tile = arith.divui(channel, _i32(64)), arith.remui(channel, _i32(64))
        chunk, rest = arith.divui(in_tile, _i32(8)), arith.muli(arith.remui(in_tile, _i32(8)), _i32(2))
        base, places = mgpu.utils.memref_ptr(ref), []
        for odd in range(2):
            row = arith.addi(arith.muli(thread, _i32(2)), _i32(odd))
            place = arith.addi(_swizzled(row, chunk, 128), rest)
            places.append(_at(base, arith.addi(place, arith.muli(tile, _i32(1024))), 0))
        for column, numbers in _columns(values, columns):
            numbers = arith.truncf(ir.VectorType.get((4,), ir.BF16Type.get()), vector.from_elements(four, numbers))
            offset = (column // 8 * (channels // 64) + start // 64) * 1024
            llvm.store(numbers, _at(places[column % 8], _i32(offset), 0))

    store(ref, values)


def _halves(word, dtype: str) -> list:
    """The float16 pairs of a word's lower and of its upper two bytes."""
    i16, pair = ir.IntegerType.get_signless(16), ir.VectorType.get((2,), ir.F16Type.get())
    parts = [arith.trunci(i16, word), arith.trunci(i16, arith.shrui(word, _i32(16)))]
    convert = f"cvt.rn.f16x2.{_CONVERSIONS[dtype]} $0, $1;"
    return [llvm.bitcast(pair, llvm.inline_asm(word.type, [part], convert, "=r,h")) for part in parts]


def _scaled(word, power):
    """A word of two float16 numbers: those of two bfloat16 numbers, times a power."""
    f32 = ir.F32Type.get()
    numbers = arith.shli(word, _i32(16)), arith.andi(word, _i32(0xFFFF0000 - 2**32))
    numbers = [arith.mulf(llvm.bitcast(f32, number), power) for number in numbers]
    numbers = vector.from_elements(ir.VectorType.get((2,), f32), numbers)
    return llvm.bitcast(word.type, arith.truncf(ir.VectorType.get((2,), ir.F16Type.get()), numbers))


def _swizzled(row, chunk, size: int):
    """Byte of a 16-byte chunk of a row, of rows of 64 or 128 bytes in a swizzle of as many bytes."""
    in_tile = arith.remui(row, _i32(8)) if size == 128 else arith.divui(arith.remui(row, _i32(8)), _i32(2))
    return arith.addi(arith.muli(row, _i32(size)), arith.muli(arith.xori(chunk, in_tile), _i32(16)))


def _first_channel(warp, group):
    """The first of the four channels of a thread, of 128 rows renamed as those of ``values_operand``."""
    return arith.addi(arith.muli(warp, _i32(32)), arith.muli(group, _i32(4)))


def _columns(values, columns: int):
    """Column (of the thread with the first two of each 8) and numbers of four channels, one after the other."""
    pairs = values.registers.reshape(2, columns // 8, 2)
    for n in range(columns // 8):
        for odd in range(2):
            four = [pairs[register, n, half] for register in range(2) for half in range(2)]
            yield 8 * n + odd, [vector.extract(x, dynamic_position=[], static_position=[odd]) for x in four]


def _place():
    """A thread's warp, and row and column of it in the layout of wgmma's operands: of 8 and of 4."""
    warp, lane = _warp_and_lane()
    return warp, arith.divui(lane, _i32(4)), arith.remui(lane, _i32(4))


def _at(base, place, start: int):
    """A pointer ``place + start`` bytes further."""
    byte = ir.IntegerType.get_signless(8)
    moved = mgpu.utils.getelementptr(base, [place], byte)
    return mgpu.utils.getelementptr(moved, [start], byte) if start else moved


def _load(base, place, start: int, kind):
    return llvm.load(kind, _at(base, place, start))


def _bytes_of(first, second, select: int):
    """The word whose bytes ``select`` names, lowest first."""
    return llvm.inline_asm(first.type, [first, second], f"prmt.b32 $0, $1, $2, {select};", "=r,r,r")


def _operand(pairs, shape: tuple[int, int]):
    layout = ACC.to_mgpu()
    registers = pairs.reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
