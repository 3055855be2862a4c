"""Sizes of the kernels by architecture: block shapes, warps, stages and resident programs, chosen by static facts."""

import dataclasses
from typing import Any

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Sizes for calls up to some size; the first rule of an architecture that a call fits is its own.

    Attributes:
        rows: most rows of a row tile, with padding.
        channels: most channels that a step reads of a token: of its key, and of its value if that is not in the key.
        shared_values, wide, float8: as in ``PagedFacts``; None for either.
        sizes: fields of ``PagedConfig``.
    """

    rows: int
    channels: int
    shared_values: bool | None = None
    wide: bool = False
    float8: bool | None = None
    sizes: dict[str, Any]

    def fits(self, facts: PagedFacts) -> bool:
        """Whether a call is of this rule's kind and small enough."""
        return (
            padded_rows(facts.rows) <= self.rows
            and channels(facts) <= self.channels
            and self.shared_values in (None, facts.shared_values)
            and self.wide == facts.wide
            and self.float8 in (None, facts.float8)
        )


def _sizes(keys: int, warps: int, stages: int, resident: int = 1) -> dict[str, int]:
    return {"keys": keys, "warps": warps, "stages": stages, "resident": resident}


# Products of float32 are made of single multiplications, whose operands are in registers.
_WIDE = (Rule(rows=16, channels=576, wide=True, sizes=_sizes(16, 4, 1)),)
_HOPPER = (
    Rule(rows=32, channels=576, shared_values=True, sizes=_sizes(32, 4, 3, 2)),
    Rule(rows=64, channels=320, shared_values=True, sizes=_sizes(64, 8, 3)),
    Rule(rows=64, channels=576, shared_values=True, sizes=_sizes(64, 8, 2)),
    Rule(rows=32, channels=128, sizes=_sizes(64, 4, 3, 4)),
    Rule(rows=32, channels=256, sizes=_sizes(64, 4, 4, 2)),
    Rule(rows=64, channels=256, sizes=_sizes(64, 4, 3, 2)),
    Rule(rows=64, channels=512, sizes=_sizes(64, 8, 2)),
)
_AMPERE = (
    Rule(rows=64, channels=256, sizes=_sizes(64, 4, 3, 2)),
    Rule(rows=16, channels=576, sizes=_sizes(32, 4, 3)),
    Rule(rows=32, channels=576, shared_values=True, float8=True, sizes=_sizes(16, 8, 3)),
    Rule(rows=32, channels=576, shared_values=True, sizes=_sizes(32, 8, 3)),
    Rule(rows=64, channels=512, sizes=_sizes(32, 4, 3)),
)
_ADA = (
    Rule(rows=64, channels=256, sizes=_sizes(64, 4, 3)),
    Rule(rows=16, channels=576, sizes=_sizes(32, 4, 3)),
    Rule(rows=32, channels=576, shared_values=True, sizes=_sizes(16, 8, 3)),
    Rule(rows=64, channels=512, sizes=_sizes(16, 4, 3)),
)
_CDNA = (
    Rule(rows=64, channels=256, sizes=_sizes(32, 4, 2, 2)),
    Rule(rows=64, channels=576, sizes=_sizes(16, 4, 2)),
)
RULES: dict[str, tuple[Rule, ...]] = {
    "sm_80": _AMPERE + _WIDE,
    "sm_86": _ADA + _WIDE,
    "sm_89": _ADA + _WIDE,
    "sm_90": _HOPPER + _WIDE,
    "gfx90a": _CDNA + _WIDE,
    "gfx942": _CDNA + _WIDE,
    "gfx950": _CDNA + _WIDE,
}


def padded_rows(rows: int) -> int:
    """The rows of a row tile with those of padding: a power of 2, at least 16."""
    return max(16, 1 << (rows - 1).bit_length())


def channels(facts: PagedFacts) -> int:
    """The channels that a step reads of a token."""
    return facts.dim + (0 if facts.shared_values else facts.values)


def most_rows(target: str, *, heads: int, dim: int, wide: bool) -> int:
    """The most rows of a row tile: what a product takes, as far as registers hold the results."""
    if wide:
        return 16
    if target == "sm_90" or dim <= 256:
        return 64
    return 32 if heads > 16 else 16


def paged_config(facts: PagedFacts) -> PagedConfig:
    """The config for a call."""
    rule = next(rule for rule in RULES[facts.target] if rule.fits(facts))
    return PagedConfig(target=facts.target, rows=padded_rows(facts.rows), **rule.sizes)
