"""Compiles calls of the Hopper kernels on a machine without a GPU and prints what became of them, as JSON.

Run by ``pallas_kernels/test_kernels.py`` as a program of its own, with the stand-in of ``aot.py`` for CUDA's driver.
Its arguments are names of ``CALLS``, ``GQA_CALLS`` and ``PROMPT_CALLS``, ``layers`` for a decode step of several layers
over a large pool, and ``stacked`` for layers scanned over whose results are stacked; or ``kept`` alone, for a pass that
is written down and read back.
"""

# ruff: noqa: E402 -- where to import the library from is settled first
import collections
import contextlib
import ctypes
import dataclasses
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import source_tree

sys.meta_path.insert(0, source_tree.PathFinder)  # annotations are checked by the tests that run on the CPU
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

import jax
import jax.export
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

import kernel_calls
from footprint import LARGE, LAYERS, Footprint, large_copies, lower, place
from mla_attn.bench.configs import CONFIGS
from mla_attn.dispatch import compiling_for
from mla_attn.models import random_model
from mla_attn.passes import Passes, Shapes
from mla_attn.programs.step import _caller
from mla_attn.support import H200

TARGET = Path(__file__).parent / "h200.txtpb"
OPTIONS = {"xla_gpu_autotune_level": 0}  # it would time matrix products, of which there are none


def main(names: list[str]) -> dict[str, dict]:
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology="1x1x1")
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    if names == ["kept"]:
        with printed():
            return _kept(device)
    return {name: _compiled(name, device) for name in names}


def _kept(device) -> dict[str, dict]:
    """A decode pass of a model of two layers, as it is and as a folder of programs gives it back."""
    model = nnx.eval_shape(lambda: random_model({**CONFIGS["v2-lite"], "num_hidden_layers": 2}, dtype=jnp.bfloat16))
    passes = Passes(model, Shapes((4,), (64,), LARGE.table_width, LARGE.page_size, max_len=1024))
    pools = jax.eval_shape(lambda: model.create_pools(num_pages=LARGE.num_pages, page_size=LARGE.page_size))
    step, shapes = passes.decode._step, place((passes.state, pools, passes.decode._rungs[0]), None)
    layers = sum(pool.data.size * pool.dtype.itemsize for pool in pools.values())
    found = {}
    with compiling_for(H200):
        program = step._export(shapes, ("cuda",))
        program = jax.export.deserialize(bytearray(program.serialize()))
        for name, jitted in (("made", step.jitted), ("kept", step._jit(_caller(program)))):
            compiled = jitted.trace(*place(shapes, device)).lower(lowering_platforms=("cuda",)).compile(OPTIONS)
            memory, hlo = compiled.memory_analysis(), compiled.as_text()
            unaliased = layers - memory.alias_size_in_bytes
            copies = large_copies(hlo, layers // 2)
            footprint = Footprint(layers // 2, unaliased, memory.temp_size_in_bytes, copies)
            kernels = hlo.count('custom_call_target="mosaic_gpu_v2"')
            found[name] = {"kernels": kernels, "footprint": dataclasses.asdict(footprint)}
    return found


def _compiled(name: str, device) -> dict:
    with printed() as log:
        compiled = _lowered(name, device).compile(OPTIONS)
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    layer = LARGE.layer_bytes
    found = Footprint(
        layer, LAYERS * layer - memory.alias_size_in_bytes, memory.temp_size_in_bytes, large_copies(hlo, layer)
    )
    return {
        "kernels": kernels(log),
        "instructions": instructions(hlo),
        "fused_kernels": fused_kernels(hlo),
        "footprint": dataclasses.asdict(found),
    }


def _lowered(name: str, device) -> jax.stages.Lowered:
    if name == "layers":
        with compiling_for(H200):
            return lower("mosaic_gpu_layers", LARGE, device)
    if name == "stacked":
        scan, arguments = kernel_calls.scanned()
        return kernel_calls.lower(scan, *place(arguments, device))
    if name in kernel_calls.PROMPT_CALLS:
        attend, arguments = kernel_calls.make_prompts(**kernel_calls.PROMPT_CALLS[name])
        return kernel_calls.lower(attend, *place(arguments, device))
    if name in kernel_calls.GQA_CALLS:
        plan, attend, (pool, metadata, *rest) = kernel_calls.make_gqa(**kernel_calls.GQA_CALLS[name])
    else:
        plan, attend, (pool, metadata, *rest) = kernel_calls.make(**kernel_calls.CALLS[name])
    with compiling_for(H200):
        arguments = pool, jax.eval_shape(plan, pool, metadata), *rest
    return kernel_calls.lower(attend, *place(arguments, device))


@contextlib.contextmanager
def printed():
    """Collects in a list what this process prints meanwhile, XLA included."""
    log, flush = [], ctypes.CDLL(None).fflush
    with tempfile.TemporaryFile("w+") as file:
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield log
        finally:
            flush(None)
            os.dup2(stdout, 1)
            os.close(stdout)
        file.seek(0)
        log += file.read().splitlines()


def kernels(log: list[str]) -> list[dict]:
    """What ptxas says of each kernel; one that was compiled before is not there."""
    found = []
    for line in log:
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            found.append({"name": match[1]})
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            if "stack frame" in line:  # and not the warning, which comes before
                found[-1] |= {"spill_stores": int(match[1]), "spill_loads": int(match[2])}
        elif match := re.search(r"Used (\d+) registers", line):
            found[-1]["registers"] = int(match[1])
    # These come before the names they belong to.
    serialised = [line for line in log if "C7510" in line or "serializ" in line]
    return [kernel | {"serialised": [s for s in serialised if kernel["name"] in s]} for kernel in found]


def instructions(hlo: str) -> dict[str, int]:
    """How often each operation is in a program, by name; for custom calls the target."""
    found = collections.Counter()
    for line in hlo.splitlines():
        if match := re.match(r"\s*(?:ROOT )?%\S+ = .*? ([a-z][\w-]*)\(", line):
            target = re.search(r'custom_call_target="([^"]*)"', line)
            found[target[1] if target else match[1]] += 1
    return found


def fused_kernels(hlo: str) -> int:
    """Kernels within fusions: XLA then has them write into a slice of a larger array."""
    computations = re.split(r"\n}\n", hlo)
    return sum(c.count('"mosaic_gpu_v2"') for c in computations if re.search(r"^%[\w.-]*fus", c, re.MULTILINE))


if __name__ == "__main__":
    json.dump(main(sys.argv[1:]), sys.stdout)
