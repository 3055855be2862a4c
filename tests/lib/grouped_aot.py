"""Compiles grouped matrix products for an H200 on a machine without a GPU and prints what became of them, as JSON.

Run by ``pallas_kernels/test_grouped_matmul.py`` as a program of its own, with the stand-in of ``aot.py`` for CUDA's
driver. Its argument is a JSON object: a name and M, E, K, N of each.
"""

import json
import sys

import mosaic_aot  # first: it settles where to import the library from

# isort: split
import jax
import jax.numpy as jnp
from jax.experimental import topologies

import kernel_calls
from mla_attn.ops.grouped_matmul import grouped_matmul


def main(calls: dict[str, list[int]]) -> dict[str, dict]:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=mosaic_aot.TARGET.read_text(), topology="1x1x1"
    )
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    return {name: _compiled(sizes, device) for name, sizes in calls.items()}


def _compiled(sizes: list[int], device) -> dict:
    num_rows, groups, depth, width = sizes

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    rows, sizes = array(jnp.bfloat16, num_rows, depth), array(jnp.int32, groups)
    kernels = array(jnp.bfloat16, groups, depth, width)

    def two(rows, first, second, sizes):
        return grouped_matmul(rows, first, sizes), grouped_matmul(rows, second, sizes)

    with mosaic_aot.printed() as log:
        one = kernel_calls.lower(lambda *a: grouped_matmul(*a), rows, kernels, sizes).compile(mosaic_aot.OPTIONS)
    with mosaic_aot.printed():
        both = kernel_calls.lower(two, rows, kernels, kernels, sizes).compile(mosaic_aot.OPTIONS)
    return {
        "kernels": mosaic_aot.kernels(log),
        "instructions": mosaic_aot.instructions(one.as_text()),
        "instructions of two": mosaic_aot.instructions(both.as_text()),
    }


if __name__ == "__main__":
    json.dump(main(json.loads(sys.argv[1])), sys.stdout)
