# pyright: reportPrivateImportUsage=false, reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false
# (JAX exports its MLIR bindings for itself alone, and does not type what inline_mgpu makes of a function.)
"""Operations, written in MLIR, on transposed products: accumulators whose columns are rows of scores."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, nvvm, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_attn.pallas_kernels.mosaic_gpu.primitives import ACC, _i32, _scattered, _warp_and_lane, elements

COLUMN = ACC.reduce(0)  # layout of one number for each column
_COMBINE = {"maximum": arith.maxnumf, "sum": arith.addf}


def own_columns(values: jax.Array, by: Literal["maximum", "sum"]) -> jax.Array:
    """Reduces over the rows that a thread holds: float32 [N] in ``COLUMN``, of which each thread has its own.

    Args:
        values: float32 [64, N] in the layout of wgmma's accumulators.
        by: what is made of the numbers of a column; a maximum leaves NaN out.
    """
    columns, combine = values.shape[1], _COMBINE[by]

    @plgpu.inline_mgpu(arg_types=(ACC,), return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=COLUMN))
    def reduce(_, values):
        registers = values.registers.reshape(columns // 8, 2)
        return _numbers([combine(first, second) for first, second in registers])

    return reduce(values)


def reduce_columns(values: jax.Array, scratch, by: Literal["maximum", "sum"]) -> jax.Array:
    """Reduces what ``own_columns`` returned over all threads: float32 [N] in ``COLUMN``, now the same in all.

    The caller has all warps wait for each other before ``scratch`` is written again.

    Args:
        values: float32 [N] in ``COLUMN``, of each thread its own.
        scratch: float32 [4, N] in shared memory.
        by: as for ``own_columns``.
    """
    (columns,), combine = values.shape, _COMBINE[by]

    @plgpu.inline_mgpu(
        arg_types=(COLUMN, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct((columns,), jnp.float32, layout=COLUMN)
    )
    def reduce(_, values, scratch):
        f32, pair = ir.F32Type.get(), ir.VectorType.get((2,), ir.F32Type.get())
        warp, lane = _warp_and_lane()
        base = mgpu.utils.memref_ptr(scratch)
        own = arith.muli(arith.remui(lane, _i32(4)), _i32(2))
        for n, register in enumerate(values.registers.ravel()):
            numbers = elements(register)
            for distance in (4, 8, 16):
                numbers = [combine(x, _from_lane(x, distance)) for x in numbers]
            at = arith.addi(arith.addi(arith.muli(warp, _i32(columns)), own), _i32(8 * n))
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, lane, _i32(4))):
                llvm.store(vector.from_elements(pair, numbers), mgpu.utils.getelementptr(base, [at], f32))
        mgpu.utils.warpgroup_barrier()
        found = []
        for n in range(columns // 8):
            places = [arith.addi(own, _i32(other * columns + 8 * n)) for other in range(4)]
            found.append(
                functools.reduce(combine, (llvm.load(pair, mgpu.utils.getelementptr(base, [p], f32)) for p in places))
            )
        return _numbers(found)

    return reduce(values, scratch)


def scale_columns(values: jax.Array, factors: jax.Array) -> jax.Array:
    """``values * factors``, of each column its own.

    Args:
        values: float32 [M, n N] in the layout of wgmma's accumulators.
        factors: float32 [N] in ``COLUMN``; they are repeated.
    """
    rows, columns = values.shape

    @plgpu.inline_mgpu(
        arg_types=(ACC, COLUMN), return_type=plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=ACC)
    )
    def scale(_, values, factors):
        registers, factors = values.registers.reshape(rows // 64, columns // 8, 2), factors.registers.ravel()
        scaled = np.empty_like(registers)
        for at in np.ndindex(registers.shape):
            scaled[at] = arith.mulf(registers[at], factors[at[1] % len(factors)])
        return mgpu.FragmentedArray(
            _registers=scaled.reshape(values.registers.shape), _layout=values.layout, _is_signed=None
        )

    return scale(values, factors)


def sum_parts(values: jax.Array, columns: int) -> jax.Array:
    """``values[:, :columns] + values[:, columns:]``, or ``values`` if that is all there is."""
    rows, both = values.shape
    if both == columns:
        return values

    @plgpu.inline_mgpu(arg_types=(ACC,), return_type=plgpu.ShapeDtypeStruct((rows, columns), jnp.float32, layout=ACC))
    def add(_, values):
        registers, half = values.registers.reshape(rows // 64, both // 8, 2), columns // 8
        added = np.empty((rows // 64, half, 2), dtype=object)
        for at in np.ndindex(added.shape):
            added[at] = arith.addf(registers[at], registers[at[0], at[1] + half, at[2]])
        shape = values.layout.registers_shape((rows, columns))
        return mgpu.FragmentedArray(_registers=added.reshape(shape), _layout=values.layout, _is_signed=None)

    return add(values)


def scatter_columns(
    ref, values: jax.Array, first, count, *, group: int, stride: int, channel_of: Callable | None = None
) -> None:
    """Stores ``ref[first + r // group * stride + r % group] = values[:, r]`` in global memory, for r below ``count``.

    Args:
        ref: float32, bfloat16 or float16 [N, C]; N C elements may be more than an int32 counts.
        values: float32 [C, R] in the layout of wgmma's accumulators.
        first, count: int32.
        group, stride: consecutive numbers, and from a group to the next.
        channel_of: which channel a row of ``values`` is, as ``float8.channel_of``; None for its own number.
    """
    (channels, rows), dtype, scalar = values.shape, jnp.dtype(ref.dtype), plgpu.Layout.WG_SPLAT
    channel_of = (lambda n, half, _: (64 * n + 8 * half, 16, 1)) if channel_of is None else channel_of

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACC, scalar, scalar))
    def store(_, ref, values, first, count):
        i64, element = ir.IntegerType.get_signless(64), ir.MemRefType(ref.type).element_type
        first, count = first.registers.item(), count.registers.item()
        warp, lane = _warp_and_lane()
        group_of, own = arith.divui(lane, _i32(4)), arith.muli(arith.remui(lane, _i32(4)), _i32(2))
        pitch = arith.constant(i64, ir.IntegerAttr.get(i64, channels))
        base = llvm.addrspacecast(llvm.PointerType.get(1), mgpu.utils.memref_ptr(ref))
        registers = values.registers.reshape(channels // 64, rows // 8, 2)
        _, of_warp, of_group = channel_of(0, 0, channels)
        channel = arith.addi(arith.muli(warp, _i32(of_warp)), arith.muli(group_of, _i32(of_group)))
        for n in range(rows // 8):
            for odd in range(2):
                row = arith.addi(own, _i32(8 * n + odd))
                with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, row, count)):
                    place = arith.muli(arith.extui(i64, _scattered(row, first, group, stride)), pitch)
                    place = arith.addi(place, arith.extui(i64, channel))
                    place = mgpu.utils.getelementptr(base, [place], element)
                    for tile, half in np.ndindex(channels // 64, 2):
                        number = elements(registers[tile, n, half])[odd]
                        if dtype != jnp.float32:
                            number = arith.truncf(element, number)
                        start, *_ = channel_of(tile, half, channels)
                        llvm.store(number, mgpu.utils.getelementptr(place, [start], element))

    store(ref, values, first, count)


def _numbers(registers: list):
    layout, made = COLUMN.to_mgpu(), np.empty(len(registers), dtype=object)
    made[:] = registers
    shape = layout.registers_shape((8 * len(registers),))
    return mgpu.FragmentedArray(_registers=made.reshape(shape), _layout=layout, _is_signed=None)


def _from_lane(number, distance: int):
    """The number of the lane whose number differs in one bit."""
    i32 = ir.IntegerType.get_signless(32)
    bits = nvvm.shfl_sync(_i32(-1), llvm.bitcast(i32, number), _i32(distance), _i32(31), nvvm.ShflKind.bfly)
    return llvm.bitcast(number.type, bits)
