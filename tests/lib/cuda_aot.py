"""Compiles the library's programs for an H200 on a machine without a GPU and prints what memory they take, as JSON.

Run by ``test_cuda_aot.py`` as a program of its own, for only there may XLA's CUDA plugin be found: JAX would look for a
GPU. Its argument is ``bfloat16`` or ``float32``, for the programs of ``footprint.py`` with a pool of that type, or
``passes``, for those of a whole model.
"""

# ruff: noqa: E402 -- where to import the library from is settled first
import dataclasses
import json
import sys
from pathlib import Path

import source_tree

sys.meta_path.insert(0, source_tree.PathFinder)  # annotations are checked by the tests that run on the CPU

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

from checkpoints import V3
from footprint import CUDA_PASSES, PROGRAMS, Footprint, footprint, lower, lower_pass, place, sizes_of
from mla_attn.models import load_checkpoint
from mla_attn.models.layers import Linear

TARGET = Path(__file__).parent / "h200.txtpb"

CUDA_MISTAKES = ("copied_layer", "stacked_layers")  # the rest is the same everywhere

# For speed. Neither changes what is kept in memory: one chooses among instructions, the other among matrix products,
# by timing them if there is a GPU.
OPTIONS = {"xla_llvm_disable_expensive_passes": True, "xla_gpu_autotune_level": 0}


def main(group: str) -> dict[str, list[Footprint] | str]:
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology="1x1x1")
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    if group == "passes":
        model = load_checkpoint(V3, dtype=jnp.bfloat16)
        return {name: _attempt(_of_pass, name, model, device) for name in CUDA_PASSES}
    if group == "float32":
        return {name: _attempt(_of_program, name, group, device) for name in ("decode", "extend")}
    found = {name: _attempt(_of_program, name, group, device) for name in (*PROGRAMS, *CUDA_MISTAKES)}
    return found | {"one_row": _attempt(_of_one_row, jnp.dtype(group), device)}


def _of_program(name, dtype, device) -> list[Footprint]:
    return [footprint(lower(name, s, device), s.layer_bytes, **OPTIONS) for s in sizes_of(name, dtype)]


def _of_one_row(dtype, device) -> list[Footprint]:
    """A row through a layer of the model; "layer" is its kernel."""
    linear = nnx.eval_shape(lambda: Linear(2048, 2048, dtype=dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(linear)
    shapes = place((state, jax.ShapeDtypeStruct((1, 2048), dtype)), device)
    lowered = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)).lower(*shapes)
    return [footprint(lowered, 2048 * 2048 * dtype.itemsize, **OPTIONS)]


def _of_pass(name, model, device) -> list[Footprint]:
    lowered, layer_bytes = lower_pass(name, model, device)
    return [footprint(lowered, layer_bytes, model.cache_groups[0].num_layers, **OPTIONS)]


def _attempt(function, *arguments):
    """One program that does not compile must not hide the others."""
    try:
        return [dataclasses.asdict(found) for found in function(*arguments)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    json.dump(main(sys.argv[1]), sys.stdout)
