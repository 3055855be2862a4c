"""The GPUs that the Triton kernels are compiled for, and the software that launches them."""

import functools
import importlib.util

import jax

from mla_attn.dispatch import Device
from mla_attn.pallas_kernels.triton.limits import LIMITS

_JAX = (0, 12)  # from this release on jax-triton fails under jit


def target(device: Device) -> str | None:
    """The architecture of a GPU, such as sm_90 or gfx942; None for other devices."""
    if device.platform != "gpu":
        return None
    if device.arch is not None:
        return device.arch
    return device.compute_capability and f"sm_{device.compute_capability.replace('.', '')}"


def refuses(device: Device) -> str | None:
    """The reason why kernels do not run on a device with the software of this process, or None."""
    if (found := target(device)) not in LIMITS:
        return f"{found or device.platform}: must be a GPU of {', '.join(LIMITS)}"
    return missing()


@functools.cache
def missing() -> str | None:
    """What this process lacks to launch Triton kernels from JAX, or None."""
    if jax.__version_info__ >= _JAX:
        return f"jax {jax.__version__}: must be below {'.'.join(map(str, _JAX))}, with which jax-triton fails under jit"
    for module, package in (("triton", "triton"), ("jax_triton", "jax-triton")):
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed: must be, as with mla-attn[triton]"
    from jaxlib import gpu_triton

    if not hasattr(gpu_triton, "TritonKernel"):
        return "jaxlib without a GPU plugin: must have that of CUDA or ROCm"
    return None
