"""What a program may take of each architecture that the kernels are compiled for."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of an architecture.

    Attributes:
        shared: most bytes of shared memory of a program.
        registers: most registers of a thread.
        lanes: threads of a warp.
        warps: most warps of a program.
        async_copies: whether loads into shared memory need no registers, so that several stages are worth their bytes.
    """

    shared: int
    registers: int
    lanes: int
    warps: int
    async_copies: bool


_AMD = {"registers": 512, "lanes": 64, "warps": 16}  # accumulation registers included
_NVIDIA = {"registers": 255, "lanes": 32, "warps": 32, "async_copies": True}

# NVIDIA: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". AMD: CDNA 2, 3 and 4 ISA
# guides, local data share of a workgroup.
LIMITS: dict[str, Limits] = {
    "sm_80": Limits(shared=163 << 10, **_NVIDIA),
    "sm_86": Limits(shared=99 << 10, **_NVIDIA),
    "sm_89": Limits(shared=99 << 10, **_NVIDIA),
    "sm_90": Limits(shared=227 << 10, **_NVIDIA),
    "gfx90a": Limits(shared=64 << 10, async_copies=False, **_AMD),
    "gfx942": Limits(shared=64 << 10, async_copies=False, **_AMD),
    "gfx950": Limits(shared=160 << 10, async_copies=True, **_AMD),
}
