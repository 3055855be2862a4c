"""Sizes of the grouped matmul kernel by architecture, chosen by static facts; needs no Triton."""

import dataclasses

from mla_attn.pallas_kernels.triton.limits import LIMITS

_WGMMA_ROWS = 64  # rows of a tile from which Hopper multiplies out of shared memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedConfig:
    """Sizes of a grouped matmul kernel.

    Attributes:
        target: architecture, a key of ``LIMITS``.
        itemsize: bytes of an element of rows and weights.
        tile_rows: rows of a tile, a power of 2 from 16 to 128.
        block_n: columns of an output tile, a power of 2 from 16 to 256.
        block_k: columns of a step over K, a power of 2 from 16 to 128.
        warps: warps of a program.
        stages: stages of the loop over K.

    Raises:
        ValueError: another number, or stages that do not fit shared memory.
    """

    target: str
    itemsize: int
    tile_rows: int
    block_n: int
    block_k: int
    warps: int
    stages: int

    def __post_init__(self):
        if self.target not in LIMITS:
            raise ValueError(f"target={self.target!r} must be one of {', '.join(LIMITS)}")
        for name, values in (
            ("itemsize", (2, 4)),
            ("tile_rows", (16, 32, 64, 128)),
            ("block_n", (16, 32, 64, 128, 256)),
            ("block_k", (16, 32, 64, 128)),
            ("warps", (1, 2, 4, 8)),
            ("stages", tuple(range(1, 9))),
        ):
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)} must be one of {', '.join(map(str, values))}")
        if self.shared > (most := LIMITS[self.target].shared):
            raise ValueError(f"stages={self.stages} take {self.shared} bytes of shared memory, must be at most {most}")

    @property
    def shared(self) -> int:
        """Most bytes of shared memory that the stages of rows and weights take.

        Products out of registers have copied their stage by the time the next load begins, and need one stage less.
        """
        in_shared = self.target == "sm_90" and self.itemsize == 2 and self.tile_rows >= _WGMMA_ROWS
        buffers = self.stages if in_shared else max(self.stages - 1, 1)
        return buffers * self.block_k * (self.tile_rows + self.block_n) * self.itemsize


def tile_rows(num_rows: int, groups: int, *, itemsize: int) -> int:
    """Rows of a tile, as if rows were spread evenly over groups.

    It depends on neither depth nor width, because a layer's products share one list of tiles.
    """
    mean = num_rows / min(groups, num_rows)
    most = 64 if itemsize == 4 else 128
    return next((n for n in (16, 32, 64) if mean <= 0.75 * n and n < most), most)


def grouped_config(target: str, *, rows: int, tiles: int, width: int, itemsize: int, cores: int) -> GroupedConfig:
    """The config of a product.

    Args:
        target: architecture, a key of ``LIMITS``.
        rows: rows of a tile.
        tiles: tiles of rows to expect.
        width: columns N.
        itemsize: bytes of an element.
        cores: multiprocessors of the device; output tiles are narrower if there were too few for them.
    """
    sizes = {"target": target, "itemsize": itemsize, "tile_rows": rows}
    widest = _widest(target, rows, itemsize)
    enough = (n for n in (256, 128, 64) if n <= widest and tiles * -(-width // n) >= 2 * cores)
    block_n = max(16, min(next(enough, 64), 1 << (width - 1).bit_length()))
    if itemsize == 4:  # no matrix unit takes float32: operands and sums are in registers
        return GroupedConfig(**sizes, block_n=block_n, block_k=32, warps=8 if rows == 64 else 4, stages=2)
    warps = 8 if rows == 128 and block_n >= 128 else 4
    if not LIMITS[target].async_copies:  # each stage in flight takes registers
        return GroupedConfig(**sizes, block_n=block_n, block_k=64, warps=warps, stages=2)
    most = 4 if rows >= _WGMMA_ROWS else 6
    fitting = (n for n in range(most, 1, -1) if _fits(target, stages=n, size=64 * (rows + block_n) * itemsize))
    return GroupedConfig(**sizes, block_n=block_n, block_k=64, warps=warps, stages=next(fitting, 2))


def _widest(target: str, rows: int, itemsize: int) -> int:
    """The most columns whose sums, ``rows`` of them, stay in registers."""
    if itemsize == 4:
        return 64
    return 256 if rows == 128 and target in ("sm_80", "sm_90") else 128


def _fits(target: str, *, stages: int, size: int) -> bool:
    return stages * size <= LIMITS[target].shared
