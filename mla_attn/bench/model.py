"""``mla-attn bench model``: times decode steps of whole models with random weights and a real model's sizes."""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_attn.bench import output, timing
from mla_attn.bench.configs import CONFIGS
from mla_attn.bench.machine import machine
from mla_attn.bench.output import say
from mla_attn.buckets import warm_up
from mla_attn.models import check_model_fits, random_model
from mla_attn.passes import SAMPLING, Passes, Shapes, zeros

_STEPS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelStep:
    """Figures of a decode step with one token per request, greedy sampling included, in microseconds.

    Attributes:
        batch: requests.
        kv_len: tokens of each request.
        step_us: wall time of a step in a sequence of dependent steps.
        host_us: host time to dispatch a step.
        kernel_us: total time of the step's kernels; None if the profile does not show kernels.
        kernels: kernel launches per step.
        short_us: ``step_us`` with one cached token per request, which is the step without attention over a context.
    """

    batch: int
    kv_len: int
    step_us: float
    host_us: float
    kernel_us: float | None
    kernels: float | None
    short_us: float

    @property
    def attention_share(self) -> float:
        """Share of the step's time that is due to the cached tokens, compared with a step at one cached token."""
        return 1 - self.short_us / self.step_us


def measure(
    name: str,
    batches: Sequence[int],
    *,
    kv_len: int,
    page_size: int,
    implementation: str | None,
) -> list[ModelStep]:
    """Times decode steps of the model ``name`` in bfloat16, with ``kv_len`` tokens in every request."""
    width = -(-kv_len // page_size)
    check_model_fits(
        nnx.eval_shape(lambda: random_model(CONFIGS[name], dtype=jnp.bfloat16)),
        num_pages=2 * max(batches) * width,  # filling them takes twice the memory
        page_size=page_size,
    )
    say(f"{name}: making random weights")
    model = random_model(CONFIGS[name], dtype=jnp.bfloat16)
    shapes = Shapes(tuple(batches), (8,), width, page_size, width * page_size)
    passes = Passes(model, shapes, implementation=implementation)
    # One pool for all batches, because programs are compiled for its size.
    num_pages = max(batches) * width
    pools = model.create_pools(num_pages=num_pages, page_size=page_size)
    pools = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape, x.dtype), pools)
    say(f"{name}: compiling")
    warm_up([passes.decode], passes.state, pools, progress=False)
    steps = []
    for batch in batches:
        say(f"{name}: batch {batch}")
        pages = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
        table = jax.device_put(pages[: batch * width].reshape(batch, width))
        short, pools, *_ = time_steps(passes, pools, table, cached=0, profile=False)
        step, pools, host, kernels = time_steps(passes, pools, table, cached=kv_len - 1, profile=True)
        steps.append(
            ModelStep(
                batch=batch,
                kv_len=kv_len,
                step_us=step,
                host_us=host,
                kernel_us=None if kernels is None else sum(us for _, us in kernels.values()),
                kernels=None if kernels is None else sum(n for n, _ in kernels.values()),
                short_us=short,
            )
        )
    return steps


def time_steps(passes: Passes, pools, table, *, cached: int, profile: bool, live: int | None = None):
    """Times dependent steps; returns median wall microseconds, pools, median dispatch microseconds, kernels by name.

    All requests of the table are active, or the first ``live``.
    """
    batch = table.shape[0]
    active = (np.arange(batch) < (batch if live is None else live)).astype(np.int32)
    fixed = {"lens": np.full(batch, cached, np.int32) * active, "active": active}
    fixed = jax.device_put(fixed | zeros(SAMPLING, {"B": batch}, None)) | {"page_table": table}
    state = {"pools": pools, "tokens": jax.device_put(np.zeros(batch, np.int32))}

    def run() -> float:
        """Runs ``_STEPS`` steps, each with the previous one's tokens; returns the host seconds to dispatch them."""
        begin = time.perf_counter()
        for _ in range(_STEPS):
            out, state["pools"] = passes.decode(passes.state, state["pools"], fixed | {"tokens": state["tokens"]})
            state["tokens"] = out["tokens"]
        host = time.perf_counter() - begin
        jax.block_until_ready(state["tokens"])
        return host

    run()
    wall, host = [], []
    for _ in range(5):
        begin = time.perf_counter()
        host.append(run() / _STEPS)
        wall.append((time.perf_counter() - begin) / _STEPS)
    kernels = None
    if profile and jax.default_backend() == "gpu":
        try:
            seconds = timing.kernel_seconds(run, _STEPS)
            kernels = {kernel: (launches, 1e6 * s) for kernel, (launches, s) in seconds.items()}
        except RuntimeError as error:  # if the profiler fails, only a column is missing
            say(f"kernel time unknown: {error}")
    return 1e6 * statistics.median(wall), state["pools"], 1e6 * statistics.median(host), kernels


def main(options: argparse.Namespace) -> int:
    """Prints a table, or JSON. Exit status 0."""
    steps = measure(
        options.model,
        options.batch,
        kv_len=options.kv_len,
        page_size=options.page_size,
        implementation=options.implementation,
    )
    report = {"machine": machine(), "model": options.model, "steps": [dataclasses.asdict(s) for s in steps]}
    output.save(report, options.json)
    if options.json == "-":
        print(json.dumps(report))
        return 0
    device = report["machine"]["device"]
    print(f"{options.model}, random bf16 weights, one query token, page {options.page_size}, on {device}")
    print(
        "| batch | kv_len | step us | attention share | kernel us | kernels | host us |\n|---|---|---|---|---|---|---|"
    )
    for s in steps:
        kernel, count = ("-", "-") if s.kernel_us is None else (f"{s.kernel_us:.0f}", f"{s.kernels:.0f}")
        share = f"{100 * s.attention_share:.0f} %"
        print(f"| {s.batch} | {s.kv_len} | {s.step_us:.0f} | {share} | {kernel} | {count} | {s.host_us:.0f} |")
    return 0
