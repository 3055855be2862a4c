"""The wheel holds the packages under one name, and the tests look at this checkout with its annotations checked."""

import subprocess
import sys
import zipfile

import jax.numpy as jnp
import jaxtyping
import pytest

import mla_attn
from mla_attn.cache import LatentPool, write_latent
from mla_attn.specs import MLASpec
from source_tree import FOLDERS, ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([ROOT / ".ci" / "build-wheel", sys.executable, folder], check=True)
    [path] = folder.glob("*.whl")
    return path


def test_wheel_holds_every_source_file_under_mla_attn(wheel):
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {
        f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}"
        for package, folder in FOLDERS.items()
        for path in folder.rglob("*.py")
    }
    assert shipped == sources | {"mla_attn/py.typed"}


def test_wheel_names_license_and_command(wheel):
    archive = zipfile.ZipFile(wheel)
    read = {name.split(".dist-info/")[-1]: name for name in archive.namelist()}
    assert "Apache License" in archive.read(read["licenses/LICENSE"]).decode()
    assert "mla-attn = mla_attn.cli:main" in archive.read(read["entry_points.txt"]).decode()


def test_packages_import_from_the_wheel_alone_and_ops_need_no_optional_package(wheel):
    # Isolated from this checkout, and the wheel comes before an editable install's finder.
    code = f"""
import sys
sys.path.insert(0, {str(wheel)!r})
import importlib.util
import mla_attn.cache.latent, mla_attn.ops, mla_attn.pallas_kernels
for module in (mla_attn, mla_attn.cache.latent, mla_attn.ops, mla_attn.pallas_kernels):
    assert module.__file__.startswith({str(wheel)!r}), module.__file__
assert importlib.util.find_spec("cache") is None and importlib.util.find_spec("pallas_kernels") is None
optional = {{"flax", "jax_triton", "triton", "tokenizers", "beartype"}} & set(sys.modules)
assert not optional, f"imported by the ops: {{optional}}"
"""
    subprocess.run([sys.executable, "-I", "-c", code], check=True, cwd=wheel.parent)


def _find_python(folder, **programs):
    """Runs .ci/find-python where PATH holds nothing but ``programs``, given as shell commands."""
    for name, command in programs.items():
        path = folder / name.replace("_", ".")
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o755)
    env = {"PATH": str(folder), "HOME": str(folder)}
    return subprocess.run([ROOT / ".ci" / "find-python"], env=env, capture_output=True, text=True)


def test_find_python_passes_over_programs_that_do_not_run(tmp_path):
    found = _find_python(
        tmp_path, python3_12="exit 127", python3_13="echo 3.11; exit 1", python3=f'{sys.executable} "$@"'
    )
    assert (found.returncode, found.stdout) == (0, f"{sys.executable}\n")


def test_find_python_says_what_to_install(tmp_path):
    found = _find_python(tmp_path, python3="exit 1")
    assert found.returncode == 1
    assert "No Python 3.12 or newer" in found.stderr and "python3.12-venv" in found.stderr


def test_tests_import_this_checkout():
    assert mla_attn.__path__ == [str(ROOT / "mla_attn")]
    assert mla_attn.cache.__path__ == [str(ROOT / "cache")]


def test_annotated_shapes_are_checked_in_tests():
    pytest.importorskip("beartype")
    pool = LatentPool.create(
        num_layers=1,
        num_pages=2,
        page_size=4,
        spec=MLASpec(num_heads=1, kv_lora_rank=8, qk_rope_head_dim=2, scale=1.0),
        dtype=jnp.float32,
    )
    with pytest.raises(jaxtyping.TypeCheckError, match="slots"):
        write_latent(pool, jnp.zeros((3, 8)), jnp.zeros((3, 2)), jnp.zeros(3))
