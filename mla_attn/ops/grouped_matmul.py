"""Rows of each group times the group's own matrix: a kernel on Hopper GPUs, XLA's ``ragged_dot`` everywhere else."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from mla_attn.dispatch import current_device, named_by_environment
from mla_attn.mosaic_gpu.mla import COMPUTE_CAPABILITY


def grouped_matmul(
    rows: Float[Array, "M K"], kernels: Float[Array, "E K N"], sizes: Int32[Array, "E"]
) -> Float32[Array, "M N"]:
    """Product of each run of ``sizes[e]`` rows with ``kernels[e]``, in float32; zeros for rows after the last run.

    The kernel serves bfloat16 on GPUs of compute capability 9.0, K and N multiples of 64, unless the environment
    variable ``MLA_ATTN_IMPLEMENTATION`` names another implementation than ``mosaic_gpu``. It has no derivative. The
    choice is for the default device, as everywhere: lower for another one under ``dispatch.compiling_for``.

    Args:
        rows: run after run.
        kernels: in the type of ``rows``; float32 is multiplied at the highest precision.
        sizes: not negative, together at most M.

    Raises:
        ValueError: the environment variable names no implementation.
    """
    if _kernel_serves(rows, kernels):
        return _by_kernel(rows, kernels, sizes)
    # GPUs multiply float32 in TF32 unless told otherwise.
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.ragged_dot(rows, kernels, sizes, precision=precision, preferred_element_type=jnp.float32)


def _kernel_serves(rows, kernels) -> bool:
    device, (_, depth, width) = current_device(), kernels.shape
    return (
        named_by_environment() in (None, "mosaic_gpu")
        and (device.platform, device.compute_capability) == ("gpu", COMPUTE_CAPABILITY)
        and rows.dtype == kernels.dtype == jnp.bfloat16
        and depth % 64 == width % 64 == 0
        and 0 not in (*rows.shape, *kernels.shape)
    )


def _by_kernel(rows, kernels, sizes):
    from mla_attn.pallas_kernels.mosaic_gpu import grouped_matmul as kernel
    from mla_attn.pallas_kernels.tile_list import tile_list

    cores, num_rows, (groups, _, width) = current_device().cores, rows.shape[0], kernels.shape
    tile_rows, columns = _shape_of_units(num_rows, groups, width, cores)
    config = kernel.Config(tile_rows=tile_rows, columns=columns)
    tiles = tile_list(sizes, num_rows=num_rows, tile_rows=tile_rows)
    return kernel.grouped_matmul(rows, kernels, tiles, config=config, blocks=cores)


def _shape_of_units(num_rows: int, groups: int, width: int, cores: int) -> tuple[int, int]:
    """``tile_rows`` and ``columns`` that should do best, were rows spread evenly over groups.

    Many rows want large units, which read less for each product; few rows those with which the device is done first.
    """

    def rounds(columns):
        return -(-busy * -(-width // columns) // cores)

    busy = min(groups, num_rows)
    mean = num_rows / busy
    tile_rows = 128 if mean > 96 else 64  # the same for all widths: a layer's products share their list of tiles
    if mean > 24:
        columns = 256
    elif busy * -(-width // 128) >= 4 * cores:
        columns = 128
    else:
        columns = min(128, 64, key=lambda c: rounds(c) * c)
    return tile_rows, max(c for c in (64, 128, 256) if c <= min(columns, width))
