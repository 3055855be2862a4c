"""Sizes of the kernels by architecture: block shapes, warps, stages and resident programs, chosen by static facts."""

import dataclasses

from mla_attn.pallas_kernels.triton.limits import LIMITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedConfig:
    """Sizes of a paged attention kernel.

    Attributes:
        target: architecture, a key of ``LIMITS``.
        rows: rows of a row tile, a power of 2.
        keys: keys of a step of the loop, a power of 2, at most 64.
        transposed: whether products have keys as their first dimension, which needs 64 of them.
        warps: warps of a program.
        stages: stages of the loop over keys.
        resident: programs that a multiprocessor runs at once.
    """

    target: str
    rows: int
    keys: int = 64
    transposed: bool = False
    warps: int
    stages: int
    resident: int = 1

    def __post_init__(self):
        if self.target not in LIMITS:
            raise ValueError(f"target={self.target!r} must be one of {', '.join(LIMITS)}")
        for name, values in (("rows", (16, 32, 64)), ("keys", (16, 32, 64)), ("warps", (1, 2, 4, 8))):
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)} must be one of {', '.join(map(str, values))}")
        if self.transposed and self.keys != 64:
            raise ValueError(f"keys={self.keys} with transposed products: must be 64")
        for name, most in (("stages", 8), ("resident", 4)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 to {most}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedFacts:
    """The static facts that a config is chosen by.

    Attributes:
        target: architecture.
        rows: rows of a row tile, padding not counted.
        dim: channels of a key, of both its parts.
        values: channels of a value.
        shared_values: whether values are the first channels of the keys.
        wide: whether products are in float32, and not in 16 bits.
        float8: whether rows are stored as float8.
    """

    target: str
    rows: int
    dim: int
    values: int
    shared_values: bool
    wide: bool
    float8: bool


def padded_rows(rows: int) -> int:
    """The rows of a row tile with those of padding: a power of 2, at least 16."""
    return max(16, 1 << (rows - 1).bit_length())


def most_rows(target: str, *, heads: int, dim: int, wide: bool) -> int:
    """The most rows of a row tile: what a product takes, as far as registers hold the results."""
    if wide or LIMITS[target].shared < 64 << 10:
        return 16
    if target == "sm_90" or dim <= 256:
        return 64
    return 32 if heads > 16 else 16


def paged_config(facts: PagedFacts) -> PagedConfig:
    """The config for a call."""
    rows, wide_keys = padded_rows(facts.rows), facts.dim > 256
    if facts.wide:
        return PagedConfig(target=facts.target, rows=rows, keys=16, warps=4, stages=1)
    if LIMITS[facts.target].lanes == 64:
        return PagedConfig(target=facts.target, rows=rows, keys=32 if wide_keys else 64, warps=4, stages=2, resident=1)
    if facts.target == "sm_90":
        if facts.shared_values:
            if rows == 64:
                return PagedConfig(target=facts.target, rows=rows, warps=8, stages=3)
            return PagedConfig(target=facts.target, rows=rows, transposed=not facts.float8, warps=4, stages=3)
        return PagedConfig(target=facts.target, rows=rows, warps=4, stages=4, resident=2)
    return PagedConfig(target=facts.target, rows=rows, keys=32 if wide_keys else 64, warps=4, stages=3, resident=1)
