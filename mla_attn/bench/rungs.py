"""``mla-attn bench rungs``: passes of whole models in programs that are larger than they need.

An engine compiles its passes for a ladder of batch sizes and pads each batch to the next rung. A rung is worth its
programs if a batch of its size takes noticeably longer in the program of the next one.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_attn.bench import output
from mla_attn.bench.configs import CONFIGS
from mla_attn.bench.machine import machine
from mla_attn.bench.model import time_steps
from mla_attn.bench.output import say
from mla_attn.buckets import warm_up
from mla_attn.models import check_model_fits, random_model
from mla_attn.passes import SAMPLING, Passes, Shapes, zeros

_PASSES = 5


def measure(
    name: str, batches: Sequence[int], rows: Sequence[int], *, kv_len: int, page_size: int, implementation: str | None
) -> dict[str, list[dict]]:
    """Times each number of requests in the decode program of its own size and of every larger one, and each number of
    prompt rows likewise. Each row has ``live`` requests or rows, those of the ``program``, and microseconds ``us``."""
    batches, rows = sorted(set(batches)), sorted(set(rows))
    width = -(-max(kv_len, rows[-1]) // page_size)
    num_pages = batches[-1] * width
    check_model_fits(
        nnx.eval_shape(lambda: random_model(CONFIGS[name], dtype=jnp.bfloat16)),
        num_pages=2 * num_pages,  # filling them takes twice the memory
        page_size=page_size,
    )
    say(f"{name}: making random weights")
    model = random_model(CONFIGS[name], dtype=jnp.bfloat16)
    shapes = Shapes(tuple(batches), tuple(rows), width, page_size, width * page_size, prompt_batches=(1,))
    passes = Passes(model, shapes, implementation=implementation)
    pools = model.create_pools(num_pages=num_pages, page_size=page_size)
    pools = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape, x.dtype), pools)
    say(f"{name}: compiling")
    warm_up([passes.decode, passes.prefill], passes.state, pools, progress=False)
    pages = np.random.default_rng(0).permutation(num_pages).astype(np.int32).reshape(-1, width)
    decode, prefill = [], []
    for program in batches:
        say(f"{name}: decode program of {program} requests")
        for live in (each for each in batches if each <= program):
            table = jax.device_put(pages[:program])
            us, pools, *_ = time_steps(passes, pools, table, cached=kv_len - 1, profile=False, live=live)
            decode.append({"program": program, "live": live, "us": us})
    for program in rows:
        say(f"{name}: prompt program of {program} rows")
        for live in (each for each in rows if each <= program):
            us, pools = _prompts(passes, pools, pages[:1], live, program)
            prefill.append({"program": program, "live": live, "us": us})
    return {"decode": decode, "prefill": prefill}


def _prompts(passes: Passes, pools, table, live: int, program: int) -> tuple[float, object]:
    """Times passes over a prompt of ``live`` tokens; returns median wall microseconds and the pools."""
    tokens = np.zeros(program, np.int32)
    tokens[:live] = np.random.default_rng(1).integers(1000, size=live)
    given = {"page_table": table, "seq_lens": np.array([live], np.int32), "q_lens": np.array([live], np.int32)}
    given = jax.device_put(given | {"prompt_tokens": tokens} | zeros(SAMPLING, {"B": 1}, None))
    wall = []
    for _ in range(_PASSES + 1):  # the first is not counted
        begin = time.perf_counter()
        for _ in range(_PASSES):
            _, pools = passes.prefill(passes.state, pools, given)
        jax.block_until_ready(pools)
        wall.append((time.perf_counter() - begin) / _PASSES)
    return 1e6 * statistics.median(wall[1:]), pools


def main(options: argparse.Namespace) -> int:
    """Prints tables, or JSON. Exit status 0."""
    sizes = {"kv_len": options.kv_len, "page_size": options.page_size}
    found = measure(options.model, options.batch, options.rows, **sizes, implementation=options.implementation)
    report = {"machine": machine(), "model": options.model, **sizes, **found}
    output.save(report, options.json)
    if options.json == "-":
        print(json.dumps(report))
        return 0
    print(f"{options.model}, random bf16 weights, kv_len {options.kv_len}, on {report['machine']['device']}; us, and % "
          "more than in the program of that size")  # fmt: skip
    print(table("requests of a decode step", found["decode"]))
    print(table("rows of a prompt", found["prefill"]))
    return 0


def table(title: str, found: list[dict]) -> str:
    """A Markdown table: a line for each live number, a column for each program."""
    programs = sorted({row["program"] for row in found})
    times = {(row["live"], row["program"]): row["us"] for row in found}
    lines = [f"| {title} | " + " | ".join(f"in {program}" for program in programs) + " |"]
    lines.append("| ---: |" + " ---: |" * len(programs))
    for live in sorted({row["live"] for row in found}):
        cells = [
            f"{times[live, program]:.0f} ({100 * (times[live, program] / times[live, live] - 1):+.1f} %)"
            if (live, program) in times
            else ""
            for program in programs
        ]
        lines.append(f"| {live} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
