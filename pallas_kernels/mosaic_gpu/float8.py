# pyright: reportPrivateImportUsage=false, reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false
# (JAX exports its MLIR bindings for itself alone, and does not type what inline_mgpu makes of a function.)
"""Keys and values stored as bytes, which become operands of products in registers.

Compute capability 9.0 has no conversion from float8 to bfloat16. But the bits of a byte, moved to their places in a
bfloat16, are its value times a power of two: 2^-120 for e4m3, 2^-112 for e5m2, which one product takes back, exactly.
So it is for all finite codes, subnormals included. Codes of NaN and infinity become finite numbers.

A byte is read where its operand belongs: thread t % 4 of a row of A has channels 2t, 2t + 1, 2t + 8 and 2t + 9 of each
16. Which channel is called which is free, as long as both operands agree. Keys are read 16 bytes at a time, so their
channels are renamed, and queries are stored in this order (``place_queries``). Of values 4 bytes at a time are read, of
four channels: rows of O^T are renamed, which ``channel_of`` tells ``scatter_columns``.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_attn.pallas_kernels.mosaic_gpu.primitives import ACC, TILED, _i32, _warp_and_lane, elements

_PLACES = {"float8_e4m3fn": (4, 120), "float8_e5m2": (3, 112)}  # bits to the right, from a half's upper byte; exponent


def byte_tiles(channels: int) -> tuple:
    """Layout in shared memory, which TMA writes: tiles of 8 rows by 128 bytes, or 64 if a row has no more."""
    width = tile_width(channels)
    return (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width))


def tile_width(channels: int) -> int:
    """Channels of a tile of bytes."""
    return min(channels, 128)


def placed(word, dtype: str):
    """The bfloat16 pair of two float8 numbers, the upper bytes of a word's halves; the lower bytes may be anything."""
    shift, exponent = _PLACES[dtype]
    sign = arith.andi(word, _i32(0x80008000 - 2**32))
    rest = arith.shrui(arith.andi(word, _i32(0x7F007F00)), _i32(shift))
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    factor = arith.constant(ir.BF16Type.get(), ir.FloatAttr.get(ir.BF16Type.get(), 2.0**exponent))
    return arith.mulf(llvm.bitcast(pair, arith.ori(sign, rest)), vector.broadcast(pair, factor))


def keys_operand(keys, dtype: str) -> jax.Array:
    """Keys [64, D] as the left operand of a product, bfloat16 in the layout of wgmma, channels renamed.

    Args:
        keys: uint8 [64, D] in shared memory, in ``byte_tiles(D)``.
        dtype: name of the float8 dtype.
    """
    channels = keys.shape[1]
    width = tile_width(channels)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(byte_tiles(channels)),),
        return_type=plgpu.ShapeDtypeStruct((64, channels), jnp.bfloat16, layout=ACC),
    )
    def load(_, keys):
        warp, group, thread = _place()
        chunk, swizzle = (group, 2) if width == 128 else (arith.shrui(group, _i32(1)), 1)
        chunk = arith.xori(chunk, arith.muli(thread, _i32(swizzle)))  # of 16 bytes; the first one of the thread
        row = arith.addi(arith.muli(warp, _i32(16 * channels)), arith.muli(group, _i32(width)))
        base = mgpu.utils.memref_ptr(keys)
        pairs = np.empty((channels // 8, 2), dtype=object)  # as store_rows has them: of 8 channels, half of the rows
        for n in range(channels // 64):
            at = chunk if n % 2 == 0 else arith.xori(chunk, _i32(1))
            at = arith.addi(row, arith.muli(at, _i32(16)))
            for half in range(2):
                start = half * 8 * channels + n // 2 * 8 * width
                words = _load(base, at, start, ir.VectorType.get((4,), _i32(0).type))
                for i, word in enumerate(elements(words)):
                    pairs[8 * n + 2 * i, half] = placed(arith.shli(word, _i32(8)), dtype)
                    pairs[8 * n + 2 * i + 1, half] = placed(word, dtype)
        return _operand(pairs[None], (64, channels))

    return load(keys)


def values_operand(values, dtype: str) -> jax.Array:
    """Values [64, V], transposed: [V, 64] as the left operand of a product, bfloat16, rows renamed.

    Args:
        values: uint8 [64, V] in shared memory, in ``byte_tiles(V)``.
        dtype: name of the float8 dtype.
    """
    channels = values.shape[1]
    width = tile_width(channels)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(byte_tiles(channels)),),
        return_type=plgpu.ShapeDtypeStruct((channels, 64), jnp.bfloat16, layout=ACC),
    )
    def load(_, values):
        warp, group, thread = _place()
        base, i32 = mgpu.utils.memref_ptr(values), ir.IntegerType.get_signless(32)
        i16, places = ir.IntegerType.get_signless(16), []
        for odd in range(2):  # the two keys of a pair
            key = arith.addi(arith.muli(thread, _i32(2)), _i32(odd))
            if width == 128:
                chunk = arith.addi(arith.muli(warp, _i32(2)), arith.shrui(group, _i32(2)))
                chunk, rest = arith.xori(chunk, key), arith.muli(arith.andi(group, _i32(3)), _i32(4))
            else:
                chunk, rest = arith.xori(warp, thread), arith.muli(group, _i32(2))
            place = arith.addi(arith.muli(key, _i32(width)), arith.muli(chunk, _i32(16)))
            places.append(arith.addi(place, rest))
        pairs = np.empty((channels // 64, 8, 2), dtype=object)  # of 64 channels, 8 keys, half of the rows
        for n in range(8):
            for tile in range(channels // width):
                start = (n * (channels // width) + tile) * 8 * width
                if width == 128:
                    both = [_load(base, place, start, i32) for place in places]
                else:
                    both = [arith.extui(i32, _load(base, place, start, i16)) for place in places]
                for i in range(width // 32):
                    pairs[2 * tile + i // 2, n, i % 2] = placed(_upper_bytes(*both, i), dtype)
        return _operand(pairs, (channels, 64))

    return load(values)


def channel_of(register: int, half: int, channels: int) -> tuple[int, int, int]:
    """Which channel a row of ``values_operand`` is: ``start + a * warp + b * (lane // 4)``, as (start, a, b).

    Args:
        register: which 64 rows.
        half: 0 for a thread's first row of each 16, 1 for the 8th after it.
        channels: channels V.
    """
    if channels == 64:
        return half, 16, 2
    return register // 2 * 128 + register % 2 * 2 + half, 32, 4


def place_queries(queries, to, token, head, *, count: int, group: int, num_heads: int) -> None:
    """Copies rows of a few query tokens, with their channels in the order of ``keys_operand``.

    Args are those of ``gather_queries``; the copies are done when it returns.
    """
    rows, channels = queries.shape
    chunks, width = channels // 8, tile_width(channels)
    at_once = 128 // chunks  # rows that the warpgroup copies at a time
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(TILED), scalar, scalar))
    def copy(_, queries, to, token, head):
        i64, byte = ir.IntegerType.get_signless(64), ir.IntegerType.get_signless(8)
        token, head = token.registers.item(), head.registers.item()
        thread = arith.remui(mgpu.utils.thread_idx(), _i32(128))
        chunk, own = arith.remui(thread, _i32(chunks)), arith.divui(thread, _i32(chunks))
        source = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(queries))
        source = mgpu.utils.getelementptr(source, [arith.muli(chunk, _i32(16))], byte)
        target = mgpu.utils.memref_ptr(to)
        row_bytes = arith.constant(i64, ir.IntegerAttr.get(i64, 2 * channels))
        # Channels of a thread of the product: a quarter of each 128, or of 64.
        in_tile = arith.remui(chunk, _i32(width // 8))
        lane, step = arith.divui(in_tile, _i32(width // 32)), arith.remui(in_tile, _i32(width // 32))
        step = arith.addi(
            arith.muli(arith.divui(chunk, _i32(width // 8)), _i32(width // 16)), arith.muli(step, _i32(2))
        )
        for n in range(0, count, at_once):
            row = arith.addi(own, _i32(n))
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, row, _i32(count))):
                from_token = arith.addi(token, arith.divui(row, _i32(group)))
                from_token = arith.minsi(from_token, _i32(rows // num_heads - 1))
                place = arith.addi(arith.muli(from_token, _i32(num_heads)), head)
                place = arith.addi(place, arith.remui(row, _i32(group)))
                place = mgpu.utils.getelementptr(source, [arith.muli(arith.extui(i64, place), row_bytes)], byte)
                words = elements(llvm.load(ir.VectorType.get((4,), _i32(0).type), place))
                of_8, in_8 = arith.divui(row, _i32(8)), arith.remui(row, _i32(8))
                for i in range(2):
                    low, high = words[2 * i : 2 * i + 2]
                    even = arith.ori(arith.andi(low, _i32(0xFFFF)), arith.shli(high, _i32(16)))
                    odd = arith.ori(arith.shrui(low, _i32(16)), arith.andi(high, _i32(0xFFFF0000 - 2**32)))
                    for second, word in enumerate((even, odd)):
                        to_chunk = arith.addi(arith.muli(arith.addi(step, _i32(i)), _i32(2)), _i32(second))
                        tile = arith.addi(arith.muli(of_8, _i32(channels // 64)), arith.divui(to_chunk, _i32(8)))
                        swizzled = arith.xori(arith.remui(to_chunk, _i32(8)), in_8)
                        offset = arith.addi(arith.muli(in_8, _i32(128)), arith.muli(swizzled, _i32(16)))
                        offset = arith.addi(offset, arith.muli(lane, _i32(4)))
                        offset = arith.addi(offset, arith.muli(tile, _i32(1024)))
                        llvm.store(word, mgpu.utils.getelementptr(target, [offset], byte))

    copy(queries, to, token, head)


def _place():
    """A thread's warp, and row and column of it in the layout of wgmma's operands: of 8 and of 4."""
    warp, lane = _warp_and_lane()
    return warp, arith.divui(lane, _i32(4)), arith.remui(lane, _i32(4))


def _load(base, place, start: int, kind):
    byte = ir.IntegerType.get_signless(8)
    return llvm.load(kind, mgpu.utils.getelementptr(mgpu.utils.getelementptr(base, [place], byte), [start], byte))


def _upper_bytes(first, second, n: int):
    """A word whose halves have byte ``n`` of both words as their upper bytes."""
    select = (4 + n) << 12 | (4 + n) << 8 | n << 4 | n
    return llvm.inline_asm(first.type, [first, second], f"prmt.b32 $0, $1, $2, {select};", "=r,r,r")


def _operand(pairs, shape: tuple[int, int]):
    layout = ACC.to_mgpu()
    registers = pairs.reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
