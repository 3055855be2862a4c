"""Adapter to the grouped matmul kernel: what it supports, and the choice of its sizes."""

import jax.numpy as jnp

from mla_attn.dispatch import Device, current_device
from mla_attn.names import DTYPES
from mla_attn.pallas_kernels.tile_list import tile_list
from mla_attn.pallas_kernels.triton import grouped_configs
from mla_attn.triton import gpus


def supports(call, device: Device) -> str | None:
    """The reason why the kernel does not support a call (``ops.grouped_matmul.GroupedCall``), or None."""
    if (reason := gpus.refuses(device)) is not None:
        return reason
    if call.dtype.name not in DTYPES:
        return f"{call.dtype} rows and weights: must be {', '.join(DTYPES)}"
    return None


def grouped_matmul(rows, weights, sizes):
    """Computes the list of tiles and runs the kernel; float32 [M, N]."""
    from mla_attn.pallas_kernels.triton import grouped_matmul as kernel

    (num_rows, _), (groups, depth, width) = rows.shape, weights.shape
    if 0 in (num_rows, groups, depth, width):
        return jnp.zeros((num_rows, width), jnp.float32)
    device, itemsize = current_device(), rows.dtype.itemsize
    target = gpus.target(device)
    assert target is not None  # refused before
    tile_rows = grouped_configs.tile_rows(num_rows, groups, itemsize=itemsize)
    config = grouped_configs.grouped_config(
        target,
        rows=tile_rows,
        tiles=min(groups, num_rows) + num_rows // tile_rows,
        width=width,
        itemsize=itemsize,
        cores=device.cores,
    )
    tiles = tile_list(sizes, num_rows=num_rows, tile_rows=tile_rows, aligned=kernel.ALIGNED)
    return kernel.grouped_matmul(rows, weights, tiles, config=config)
