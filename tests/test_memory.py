"""How much memory a device has free, of what it says of itself."""

from types import SimpleNamespace

import jax
import pytest

from mla_attn import memory

GIB = 1 << 30
# What a GPU's allocator says where it took three quarters of 80 GiB at the start, and where it takes memory as it goes.
PREALLOCATED = {
    "bytes_limit": 60 * GIB,
    "bytes_in_use": 14 * GIB,
    "peak_bytes_in_use": 20 * GIB,
    "pool_bytes": 60 * GIB,
}
AS_IT_GOES = PREALLOCATED | {"pool_bytes": 16 * GIB}


@pytest.fixture
def gpu(monkeypatch):
    """Sets what the default device, a GPU, says."""
    said = {}
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: said["statistics"])
    monkeypatch.setattr(jax, "devices", lambda: [device])
    return lambda statistics: said.update(statistics=statistics)


@pytest.mark.parametrize(
    ("statistics", "free"),
    [
        (PREALLOCATED, 46 * GIB),
        (AS_IT_GOES, 46 * GIB),
        ({"bytes_limit": 60 * GIB}, 60 * GIB),
        ({"bytes_in_use": 14 * GIB}, None),
        ({}, None),
        (None, None),
    ],
    ids=["preallocated", "as it goes", "nothing in use", "no limit", "nothing", "none"],
)
def test_free_bytes_of_a_gpu(gpu, statistics, free):
    """The allocator's limit less what arrays hold, whether it has taken the memory yet or not."""
    gpu(statistics)
    assert memory.free_bytes() == free


def test_what_does_not_fit_on_a_gpu(gpu):
    gpu(PREALLOCATED)
    memory.check_fits("16 pages", 46 * GIB)
    with pytest.raises(MemoryError, match=r"16 pages need 46 GiB, 46 GiB are free"):
        memory.check_fits("16 pages", 46 * GIB + 1)
    gpu(PREALLOCATED | {"bytes_in_use": 61 * GIB})
    with pytest.raises(MemoryError, match=r"need 0\.1 GiB, 0 GiB are free"):
        memory.check_fits("16 pages", GIB // 10)
    gpu(None)
    memory.check_fits("16 pages", 1 << 60)  # nobody tells
