"""One of two processes that serve a model: ``one_of_two.py ADDRESS RANK DIES``, run by engine/test_processes.py.

Each has two of the four devices, and makes the same calls. Prints the tokens of a request; with DIES, rank 1 then ends
without a word, and rank 0 goes on.
"""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import V3
from mla_attn.engine import Engine, SamplingParams
from mla_attn.parallel import Layout, Parallelism

NEW = 8


def main(address: str, rank: str, dies: str) -> None:
    jax.distributed.initialize(address, 2, int(rank), heartbeat_timeout_seconds=10)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    parallelism = Parallelism(mesh, Layout(heads="x", context="y", experts=("x", "y")))
    sizes = {"max_batch": 2, "batches": (2,), "num_pages": 24, "page_size": 16, "max_len": 96, "prompt_tokens": 64}
    engine = Engine.from_checkpoint(V3, dtype=jnp.float32, parallelism=parallelism, **sizes, cache_dir="")
    with np.load(V3 / "expected.npz") as file:
        prompt = file["prompt_0"].tolist()
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    (result,) = engine.generate([prompt], params, progress=False)
    print(json.dumps({"tokens": result.tokens, "compiles": engine.statistics.compiles_after_warm_up}), flush=True)
    if dies == "dies":
        if rank == "1":
            os._exit(0)
        engine.generate([prompt], params, progress=False)
        print("went on alone", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
