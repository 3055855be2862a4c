"""Sizes of the prefill kernel by architecture, chosen by static facts; needs no Triton."""

import dataclasses

from mla_attn.pallas_kernels.triton.limits import LIMITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """Sizes of a prefill kernel.

    Attributes:
        target: architecture, a key of ``LIMITS``.
        rows: query tokens of a tile, a power of 2.
        keys: keys of a step of the loop, a power of 2.
        warps: warps of a program.
        stages: stages of the loop over keys.
    """

    target: str
    rows: int
    keys: int
    warps: int
    stages: int

    def __post_init__(self):
        if self.target not in LIMITS:
            raise ValueError(f"target={self.target!r} must be one of {', '.join(LIMITS)}")
        powers = (16, 32, 64, 128)
        for name, values in (("rows", powers), ("keys", powers), ("warps", (4, 8)), ("stages", (1, 2, 3, 4))):
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)} must be one of {', '.join(map(str, values))}")


# Rows, keys, warps and stages by the channels of a key and a value together; the first that suffices.
_HOPPER = ((256, (128, 128, 8, 2)), (320, (128, 64, 8, 3)), (512, (64, 64, 4, 2)))
_AMPERE = ((256, (128, 64, 8, 3)), (320, (64, 64, 4, 3)), (512, (64, 32, 4, 3)))
_ADA = ((256, (128, 32, 8, 3)), (320, (64, 32, 4, 3)), (512, (64, 16, 4, 3)))
_CDNA = ((256, (128, 32, 4, 1)), (512, (64, 16, 4, 1)))
SIZES = {
    "sm_80": _AMPERE,
    "sm_86": _ADA,
    "sm_89": _ADA,
    "sm_90": _HOPPER,
    "gfx90a": _CDNA,
    "gfx942": _CDNA,
    "gfx950": _CDNA,
}
_WIDE = (16, 16, 4, 1)  # products of float32, which are made of single multiplications


def prefill_config(target: str, *, max_q_len: int, channels: int, wide: bool) -> PrefillConfig:
    """The config for a call.

    Args:
        target: architecture.
        max_q_len: most query tokens of a request.
        channels: channels of a key and of a value together, at most 512.
        wide: whether products are in float32, and not in 16 bits.
    """
    rows, keys, warps, stages = _WIDE if wide else next(sizes for most, sizes in SIZES[target] if channels <= most)
    fewest = max(16, 1 << (max_q_len - 1).bit_length())
    if fewest < rows:  # tiles of short requests; few rows do not suffice for many warps
        rows, warps = fewest, 4
    return PrefillConfig(target=target, rows=rows, keys=keys, warps=warps, stages=stages)
