"""The grouped matrix product: rows of each group times the group's own matrix, as in the experts of a layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from mla_attn.checks import check_array, check_index, check_shape, check_type
from mla_attn.dispatch import Device, Implementation, Order, choose, compute
from mla_attn.mosaic_gpu import grouped_matmul as mosaic_gpu
from mla_attn.reference.grouped_matmul import grouped_matmul as reference_grouped
from mla_attn.triton import grouped_matmul as triton
from mla_attn.xla.grouped_matmul import grouped_matmul as xla_grouped


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedCall:
    """Static facts of a call, from which (with the device) the implementation is chosen; made by ``GroupedCall.of``.

    Attributes:
        dtype: dtype of rows and matrices.
        depth, width: K and N of a matrix.
    """

    dtype: np.dtype
    depth: int
    width: int

    @classmethod
    def of(cls, weights: Float[Array | jax.ShapeDtypeStruct, "E K N"]) -> "GroupedCall":
        """The facts of calls with ``weights``, which may be abstract."""
        return cls(dtype=np.dtype(weights.dtype), depth=weights.shape[1], width=weights.shape[2])


def _portable(call: GroupedCall, device: Device) -> str | None:
    return None


IMPLEMENTATIONS = (
    Implementation("mosaic_gpu", mosaic_gpu.supports, mosaic_gpu.grouped_matmul),
    Implementation("triton", triton.supports, triton.grouped_matmul),
    Implementation("xla", _portable, xla_grouped, derivative="own"),
    Implementation("reference", _portable, reference_grouped, derivative="own"),
)


def grouped_matmul(
    rows: Float[Array, "M K"],
    weights: Float[Array, "E K N"],
    sizes: Int32[Array, "G"],
    *,
    first_group: int | Int32[Array, ""] = 0,
    implementation: Order = None,
) -> Float32[Array, "M N"]:
    """Multiplies each group of consecutive rows by its matrix, in float32; other rows give zeros.

    Args:
        rows: rows of all groups, one group after the other.
        weights: one matrix per group, in the dtype of ``rows``; float32 is multiplied at the highest precision.
        sizes: rows of each group; not negative, in total at most M. There may be more groups than matrices, as on a
            device that has some of a layer's experts: the rows of the others give zeros.
        first_group: group of the first matrix, an integer or an array (which cannot be checked: it is clipped).
        implementation: "mosaic_gpu", "triton", "xla" or "reference", or names in the order to try them; None for the
            default choice.

    Raises:
        ValueError: a wrong shape or dtype, at trace time.
        NotImplementedError: no implementation (or none of those named) supports the call (the message has the reasons),
            a kernel is differentiated, or arrays are sharded over explicit mesh axes.
    """
    for name, array, axes in (("rows", rows, "[M, K]"), ("weights", weights, "[E, K, N]")):
        check_array(name, array)
        if array.ndim != axes.count(",") + 1:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, must be {axes}")
        check_type(name, array, jnp.floating)
    groups, depth, _ = weights.shape
    check_shape("rows", rows, (rows.shape[0], depth), "[M, K] with K of weights")
    check_array("sizes", sizes)
    if sizes.ndim != 1 or sizes.shape[0] < groups:
        raise ValueError(f"sizes has shape {tuple(sizes.shape)}, must be [G] with G at least the {groups} of weights")
    check_type("sizes", sizes, jnp.int32)
    first_group = check_index("first_group", first_group, 0, sizes.shape[0] - groups)
    if weights.dtype != rows.dtype:
        raise ValueError(f"weights has dtype {weights.dtype}, must be that of rows, {rows.dtype}")
    chosen = choose("grouped_matmul", GroupedCall.of(weights), IMPLEMENTATIONS, implementation)
    if sizes.shape[0] == groups:
        return compute("grouped_matmul", chosen, IMPLEMENTATIONS, (rows, weights, sizes))
    # Implementations multiply groups from row 0 on: the rows before the first matrix's go to the end and back.
    first_group = jnp.clip(jnp.asarray(first_group, jnp.int32), 0, sizes.shape[0] - groups)
    before = jnp.where(jnp.arange(sizes.shape[0]) < first_group, sizes, 0).sum(dtype=jnp.int32)
    sizes = jax.lax.dynamic_slice_in_dim(sizes, first_group, groups)
    out = compute("grouped_matmul", chosen, IMPLEMENTATIONS, (jnp.roll(rows, -before, axis=0), weights, sizes))
    return jnp.roll(out, before, axis=0)
