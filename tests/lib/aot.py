"""Compiling for GPUs without one: programs that do it, each in a process of its own, and what they need.

XLA's CUDA compiler is fetched by ``make cuda-aot``; ``MLA_ATTN_CUDA_AOT`` names another folder that holds it. Only in
those processes may it be found, for with it there JAX would look for a GPU.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import pytest

from source_tree import ROOT

FOLDER = Path(os.environ.get("MLA_ATTN_CUDA_AOT", ROOT / ".venv" / "cuda-aot"))
needs_compiler = pytest.mark.skipif(
    not (FOLDER / f"jax_cuda13_pjrt-{jax.__version__}.dist-info").is_dir(),
    reason=f"needs XLA's CUDA compiler, of JAX's version, in {FOLDER}: run `make cuda-aot`",
)
needs_c_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, cc")


def run(program: str, *arguments: str, **environment: str):
    """What a program of this folder prints, as JSON."""
    paths = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, Path(__file__).parent / program, *arguments],
        env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@functools.cache
def standin_driver() -> Path:
    """A libcuda.so.1 to preload: as much of CUDA's driver as compiling a kernel of Mosaic GPU asks for."""
    folder = Path(tempfile.mkdtemp(prefix="mla_attn_driver_"))
    (folder / "driver.c").write_text(_DRIVER)
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, folder / "driver.c"]
    subprocess.run(command, check=True)
    return library


_DRIVER = r"""
#include <stdlib.h>
enum { SUCCESS = 0, COMPUTE_CAPABILITY_MAJOR = 75, COMPUTE_CAPABILITY_MINOR = 76 };
int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { *text = "no GPU, only a stand-in"; return SUCCESS; }
int cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
  return SUCCESS;
}
int cuModuleLoadData(void **module, const void *image) { *module = &cuInit; return SUCCESS; }
int cuModuleUnload(void *module) { return SUCCESS; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = &cuInit; return SUCCESS; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }
/* Compiled host code refers to these; it calls them when a kernel is launched. */
void mosaic_gpu_init_tma_desc(void) { abort(); }
void mosaic_gpu_launch_kernel(void) { abort(); }
"""
