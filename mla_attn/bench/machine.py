"""The machine and the versions that a report names."""

import datetime
import os
import platform

import jax
import jaxlib.version


def machine() -> dict[str, str]:
    """Device, platform, versions and date (UTC) of a report."""
    device = jax.devices()[0]
    return {
        "device": f"{_cpu_name()}, {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind,
        "platform": device.client.platform_version,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
