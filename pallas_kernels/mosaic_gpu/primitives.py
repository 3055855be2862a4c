# pyright: reportPrivateImportUsage=false, reportCallIssue=false, reportArgumentType=false
# (JAX exports its MLIR bindings for itself alone, and does not type what inline_mgpu makes of a function.)
"""What Pallas does not name: a fence, a named barrier, a multiplication that warps may skip."""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, nvvm, scf, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

ACC, ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


def fence_proxy() -> None:
    """Orders this thread's stores to shared memory before later reads by wgmma and TMA."""

    @plgpu.inline_mgpu()
    def fence(_):
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    fence()


def sync_warpgroup(number: int) -> None:
    """All 128 threads of a warpgroup meet at hardware barrier ``number``, which no other warpgroup uses."""

    @plgpu.inline_mgpu()
    def sync(_):
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], f"bar.sync {number}, 128;", "", has_side_effects=True)

    sync()


def scale_rows(values: jax.Array, factors: jax.Array) -> jax.Array:
    """``values * factors[:, None]``, skipped by every warp whose factors are all 1: most of the time, if so arranged.

    Args:
        values: float32 [M, N] in the layout of wgmma's accumulators.
        factors: float32 [M], a row each.
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
    """i1, the same in all threads of a warp: whether any of their registers differs from ``value``."""
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
