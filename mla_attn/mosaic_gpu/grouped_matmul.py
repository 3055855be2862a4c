"""The adapter to the grouped matmul kernel: ``supports``, and the choice of output tiles."""

import jax.numpy as jnp

from mla_attn.dispatch import Device, current_device
from mla_attn.mosaic_gpu import hopper

_CHANNELS = 64  # a copy has 64 columns of K or N, so K and N must be multiples of it


def supports(call, device: Device) -> str | None:
    """The reason why the kernel does not support a call (``ops.grouped_matmul.GroupedCall``), or None."""
    if (reason := hopper.refuses(device)) is not None:
        return reason
    if call.dtype != jnp.bfloat16:
        return f"{call.dtype} rows and weights: must be bfloat16"
    if call.depth % _CHANNELS or call.width % _CHANNELS:
        return f"weights of {call.depth} x {call.width}: both must be multiples of {_CHANNELS}"
    return None


def grouped_matmul(rows, weights, sizes):
    """Computes the list of tiles and runs the kernel; float32 [M, N]."""
    from mla_attn.pallas_kernels.mosaic_gpu import grouped_matmul as kernel
    from mla_attn.pallas_kernels.tile_list import tile_list

    (num_rows, _), (groups, depth, width) = rows.shape, weights.shape
    if 0 in (num_rows, groups, depth, width):
        return jnp.zeros((num_rows, width), jnp.float32)
    cores = current_device().cores
    tile_rows, block_n = output_tile(num_rows, groups, width, cores)
    config = kernel.Config(tile_rows=tile_rows, block_n=block_n)
    tiles = tile_list(sizes, num_rows=num_rows, tile_rows=tile_rows)
    return kernel.grouped_matmul(rows, weights, tiles, config=config, blocks=cores)


def output_tile(num_rows: int, groups: int, width: int, cores: int) -> tuple[int, int]:
    """Chooses ``tile_rows`` and ``block_n``, as if rows were spread evenly over groups.

    Many rows take large tiles, which read less per product. Few rows take the tiles with the shortest total time.
    """

    def waves(block_n):
        return -(-busy * -(-width // block_n) // cores)

    busy = min(groups, num_rows)
    mean = num_rows / busy
    tile_rows = 128 if mean > 96 else 64  # independent of width, because a layer's products share one list of tiles
    if mean > 24:
        block_n = 256
    elif busy * -(-width // 128) >= 4 * cores:
        block_n = 128
    else:
        block_n = min(128, 64, key=lambda n: waves(n) * n)
    return tile_rows, max(n for n in (64, 128, 256) if n <= min(block_n, width))
