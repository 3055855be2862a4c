"""Imports ``mla_attn`` from this checkout, installed or not, with its shape annotations checked at every call."""

import importlib.machinery
import importlib.util
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = {"mla_attn": ROOT / "mla_attn"} | {name: ROOT / path for name, path in _SETUPTOOLS["package-dir"].items()}

_TRITON = "mla_attn.pallas_kernels.triton."


class PathFinder(importlib.machinery.PathFinder):
    """Finds this library alone, the folders that ``package-dir`` maps under it included.

    An editable install has a finder of its own for those, but jaxtyping's hook asks the first ``PathFinder`` only.
    """

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname in FOLDERS:
            return importlib.util.spec_from_file_location(fullname, FOLDERS[fullname] / "__init__.py")
        return super().find_spec(fullname, path, target) if fullname.startswith("mla_attn.") else None


class TritonFinder(PathFinder):
    """Finds the modules of Triton kernels, before jaxtyping's hook: Triton compiles functions, not wrappers of them."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return super().find_spec(fullname, path, target) if fullname.startswith(_TRITON) else None


def check(function):
    """Type-checks a function with beartype, as jaxtyping's hook calls it.

    Constructors are left alone: JAX rebuilds a pytree with whatever its leaves were mapped to (``tree.map``,
    ``eval_shape``, the axes of ``vmap``), so a dataclass may hold what its annotations do not say.
    """
    import beartype

    return function if function.__name__ == "__init__" else beartype.beartype(function)


def install() -> bool:
    """Make the checkout importable; True if its annotations are checked too (needs beartype)."""
    checked = importlib.util.find_spec("beartype") is not None
    sys.meta_path.insert(0, PathFinder)
    if checked:
        import jaxtyping

        jaxtyping.install_import_hook("mla_attn", "source_tree.check")
        sys.meta_path.insert(0, TritonFinder)
    return checked
