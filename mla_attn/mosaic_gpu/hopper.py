"""The device and the version of jax that every Hopper kernel needs."""

import jax

from mla_attn.dispatch import Device

COMPUTE_CAPABILITY = "9.0"
_JAX = (0, 11, 2)  # oldest release on which the kernels have run; Pallas Mosaic GPU changes with every release


def refuses(device: Device) -> str | None:
    """The reason why kernels do not run on a device, or None."""
    if device.platform != "gpu" or device.compute_capability != COMPUTE_CAPABILITY:
        capability = device.compute_capability
        where = device.arch or device.platform if capability is None else f"compute capability {capability}"
        return f"{where}: must be an NVIDIA GPU of compute capability {COMPUTE_CAPABILITY}"
    if jax.__version_info__ < _JAX:
        return f"jax {jax.__version__}: must be at least {'.'.join(map(str, _JAX))}"
    return None
