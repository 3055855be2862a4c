"""Checks that memory is free before it is allocated."""

import math
import pathlib
from typing import Any

import jax

from mla_attn.text import gibibytes

_CGROUP = pathlib.Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Free bytes of the default device (for a CPU of the host and its container); None if unknown."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return min((each for each in (_free_of_host(), _free_of_container()) if each is not None), default=None)
    statistics = device.memory_stats() or {}
    if "bytes_limit" not in statistics:
        return None
    return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)


def tree_bytes(tree: Any) -> int:
    """Bytes of a pytree of arrays or ``jax.ShapeDtypeStruct``."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def check_fits(what: str, needed: int) -> None:
    """Raises MemoryError, with both figures, if the default device has fewer than ``needed`` bytes free.

    Args:
        what: subject of the message, in the plural.
        needed: bytes that it needs.
    """
    free = free_bytes()
    if free is not None and needed > free:
        raise MemoryError(f"{what} need {gibibytes(needed)}, {gibibytes(max(free, 0))} are free")


def _free_of_host() -> int | None:
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _free_of_container() -> int | None:
    try:
        limit, used = ((_CGROUP / name).read_text() for name in ("memory.max", "memory.current"))
        return int(limit) - int(used)  # "max" is no limit
    except (OSError, ValueError):
        return None
