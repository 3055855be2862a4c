"""Names of programs: digests of everything that a program depends on, equal in all processes if and only if it is.

A name is a digest of values, part by part. ``repr`` and ``hash`` cannot be used, because they differ between processes
and may omit parts. A value that cannot be described completely has no name, and its program is not kept.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

import mla_attn
import mla_attn.cache
import mla_attn.pallas_kernels
from mla_attn.dispatch import current_device

# Packages whose code is not described, because ``surroundings`` has a version or a digest of it.
_PACKAGES = frozenset({"mla_attn", "jax", "jaxlib", "flax", "numpy", "ml_dtypes"} | sys.stdlib_module_names)
_VARIABLES = ("XLA_", "LIBTPU_", "MLA_ATTN_", "MOSAIC_GPU_", "JAX_PALLAS_")
# JAX sets the last three itself when a process lowers its first Mosaic kernel: the programs named before it would have
# other names than those named after it.
_SILENT_VARIABLES = (
    "MLA_ATTN_CACHE_DIR",
    "MOSAIC_GPU_CUDA_ROOT",
    "MOSAIC_GPU_RUNTIME_LIB_PATH",
    "MOSAIC_GPU_NVSHMEM_",
)
# Settings of JAX that concern files and logging, and do not change programs.
_SILENT_SETTINGS = {"cache", "log", "logging", "traceback", "dump", "dumps", "transfer", "distributed", "platforms"}


class Unknown(Exception):
    """A value is of a kind that has no name; the message names the kind."""


def identity(*values: Any) -> str:
    """The name of the values, 64 hexadecimal digits.

    Raises:
        Unknown: a part of them cannot be described completely, such as a class that a user wrote.
    """
    digest = hashlib.sha256()
    _describe(values, lambda text: digest.update(text.encode() + b"\0"))
    return digest.hexdigest()


def surroundings() -> tuple[Any, ...]:
    """The facts on which every program depends: versions, this package's source, the device, settings of JAX and the
    environment."""
    device = jax.devices()[0]
    there = (device.platform, device.device_kind, device.client.platform_version, jax.device_count())
    return (
        ("python", platform.python_version(), platform.machine()),
        _versions(),
        ("source", _SOURCE),
        ("device", there, current_device()),
        [
            # Read the attribute, not the value, because it reflects settings of this thread too.
            (name, getattr(jax.config, name, value))
            for name, value in sorted(jax.config.values.items())
            if not _SILENT_SETTINGS.intersection(name.split("_"))
        ],
        [
            (name, text)
            for name, text in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not name.startswith(_SILENT_VARIABLES)
        ],
    )


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    return tuple((name, importlib.metadata.version(name)) for name in ("jax", "jaxlib", "flax", "numpy", "ml_dtypes"))


def source_is_as_imported() -> bool:
    """Whether the package's files are unchanged since this process imported them, so that the digest is of its code."""
    return _source_digest() == _SOURCE


def _source_digest() -> str:
    """A digest of the names and contents of this package's modules."""
    digest = hashlib.sha256()
    # The last two are in other folders of a source tree.
    for package in (mla_attn, mla_attn.cache, mla_attn.pallas_kernels):
        for folder in map(pathlib.Path, package.__path__):
            for path in sorted(folder.rglob("*.py")):
                name = f"{package.__name__} {path.relative_to(folder)}"
                digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


_SOURCE = _source_digest()


def _describe(value: Any, write: Callable[[str], None]) -> None:
    """Writes a description of ``value``. Each part is preceded by its kind and length, so that it is unambiguous."""
    kind = type(value)
    if value is None or kind in (bool, int, str, bytes, float, complex):
        write(f"{kind.__name__} {len(str(value))} {value!r}")
    elif isinstance(value, enum.Enum):
        write(f"enum {_name_of(kind)} {value.name}")
    elif isinstance(value, np.dtype):
        write(f"dtype {value.name}")
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        write(f"array {array.dtype.name} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}")
    elif isinstance(value, jax.ShapeDtypeStruct):
        _parts("shape", (value.shape, value.dtype, value.sharding, value.weak_type), write)
    elif isinstance(value, jax.tree_util.PyTreeDef):
        _parts("tree", (value.node_data(), value.num_leaves, *value.children()), write)
    elif isinstance(value, type):
        # Python gives None's class a name that no module has.
        write("class of None" if value is type(None) else f"class {_name_of(value)}")
    elif isinstance(value, functools.partial):
        _parts("partial", (value.func, value.args, value.keywords), write)
    elif isinstance(value, tuple | list):
        _parts(_name_of(kind), value, write)
    elif isinstance(value, Mapping):
        _parts(_name_of(kind), [item for pair in value.items() for item in pair], write)
    elif isinstance(value, nnx.GraphDef):
        write(f"graph {_of_graph(value)}")
    elif dataclasses.is_dataclass(value):
        _parts(_name_of(kind), _fields(value), write)
    elif callable(value) and hasattr(value, "__qualname__"):
        write(f"function {_name_of(value)}")
    else:
        raise Unknown(f"a {kind.__module__}.{kind.__qualname__}")


def _fields(value: Any) -> list[Any]:
    return [part for field in dataclasses.fields(value) for part in (field.name, getattr(value, field.name))]


@functools.lru_cache(maxsize=8)
def _of_graph(graphdef: Any) -> str:
    """The name of a model without its arrays; cached, because every pass needs it: 0.1 s for 27 layers."""
    return identity(_fields(graphdef))


def _parts(kind: str, parts: Any, write: Callable[[str], None]) -> None:
    parts = tuple(parts)
    write(f"{kind} of {len(parts)}")
    for part in parts:
        _describe(part, write)


def _name_of(thing: Any) -> str:
    """The qualified name of a class or function, if that name still refers to this object."""
    module, name = thing.__module__ or "", thing.__qualname__
    if module.partition(".")[0] not in _PACKAGES:
        raise Unknown(f"{module}.{name}, which is of no package whose version is known here")
    try:
        found = functools.reduce(getattr, name.split("."), sys.modules[module])
    except (AttributeError, KeyError):
        found = None
    if found is not thing:
        raise Unknown(f"{module}.{name}, which is not what its module has under this name")
    return f"{module}.{name}"
