"""Triton kernels as machine code of any architecture, without a GPU, and what they take of it."""

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path

from source_tree import ROOT

_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "uint8": "u8"}


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a program takes: bytes of shared memory, registers of a thread, and how many were spilled.

    Spills of NVIDIA's are bytes of the stack, which kernels have for nothing else.
    """

    shared: int
    registers: int
    spills: int
    assembly: str


def compiled(kernel, target: str, dtypes, *, constants, warps: int, stages: int) -> Taken:
    """Compiles a kernel whose pointers, aligned to 16 bytes as arrays of JAX are, are to these dtypes, in order."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = dict(zip(names, (f"*{_TYPES[str(dtype)]}" for dtype in dtypes), strict=False))
    source = ASTSource(
        fn=kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(signature))},
    )
    nvidia = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32) if nvidia else GPUTarget("hip", target, 64)
    with triton.knobs.cache.scope():  # kept beside XLA's programs, until `make clean`
        triton.knobs.cache.dir = str(ROOT / ".pytest_cache" / "triton")
        program = triton.compile(source, target=gpu, options={"num_warps": warps, "num_stages": stages})
    if not nvidia:
        text = program.asm["amdgcn"]
        count, *spills = (int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in _COUNTS)
        return Taken(program.metadata.shared, count, sum(spills), text)
    return Taken(program.metadata.shared, *_usage(program.asm["cubin"]), program.asm["ptx"])


_COUNTS = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of the stack of the one kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])
