"""``mla-attn bench host``: times the engine's host work, with passes that do nothing in place of the model's."""

import argparse
import dataclasses
import gc
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from mla_attn.bench import output
from mla_attn.bench.machine import machine
from mla_attn.buckets import Buckets
from mla_attn.engine import Engine, SamplingParams
from mla_attn.models import random_model
from mla_attn.passes import Passes

PAGE_SIZE, PROMPT_TOKENS = 64, 512
WAITING = (0, 10, 100, 1000)
RUNNING, BESIDE = (1, 64), 32
_DECODED = 100  # timed steps if requests only decode
_WAITER = 16384  # tokens of a waiting request
# A tiny model, none of which is computed.
_TINY = {
    "model_type": "deepseek_v3",
    "vocab_size": 256,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "n_routed_experts": None,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


class _Nothing(Buckets):
    """Buckets that select a shape and pad as usual, and return the same zeros at every call."""

    def _lower(self, index, state, pool):
        outputs, _ = jax.eval_shape(self._step.jitted, state, pool, self._rungs[index])
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), outputs)

    def _compile(self, index, lowered):
        self._programs[index] = lambda state, pool, inputs: (lowered, pool)
        return self._programs[index]


class _NoPasses(Passes):
    buckets_class = _Nothing


class HostEngine(Engine):
    """An engine without device work: all tokens are 0, and a step takes only host time."""

    passes_class = _NoPasses


@dataclasses.dataclass(frozen=True)
class Row:
    """Figures of steps of one kind.

    Attributes:
        prompt: tokens of the prompt that is computed in these steps; 0 if requests only decode.
        running: requests that decode.
        waiting: requests that wait for pages.
        steps: number of timed steps.
        mean, worst: CPU time of this thread per step, in milliseconds.
    """

    prompt: int
    running: int
    waiting: int
    steps: int
    mean: float
    worst: float


def measure(prompts: Sequence[int]) -> Iterator[Row]:
    """Measures row by row: prompts alone, then while other requests decode, then decoding while others wait for
    pages.

    An equal request with other tokens runs first, so that the engine is warm. When a prompt is timed alone, the cache
    is full of that request's pages, which are evicted.
    """
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    for running in (0, BESIDE):
        for prompt in prompts:
            engine = _engine(running + 1, prompt + PAGE_SIZE)
            _decode(engine, running, new=prompt + PAGE_SIZE - 1, first=[token ^ 1 for token in _tokens(prompt)])
            engine.add_request(_tokens(prompt), params)
            yield Row(prompt, running, 0, *_time(engine, -(-prompt // PROMPT_TOKENS)))
    waiter = _tokens(_WAITER)
    for running in RUNNING:
        for count in WAITING:
            # Too few pages to admit a waiting request while any other runs.
            few = _WAITER // PAGE_SIZE + 1
            engine = _engine(running + 1, _WAITER + PAGE_SIZE, num_pages=few, max_waiting=max(count, running))
            _decode(engine, running, new=2 * _DECODED, first=[1])
            for _ in range(count):
                engine.add_request(waiter, params)
            yield Row(0, running, count, *_time(engine, _DECODED))


def _engine(max_batch: int, max_len: int, *, num_pages: int | None = None, max_waiting: int = 64) -> HostEngine:
    engine = HostEngine(
        random_model(_TINY | {"max_position_embeddings": max_len}, dtype=jnp.bfloat16),
        max_batch=max_batch,
        num_pages=num_pages or max_batch * -(-max_len // PAGE_SIZE),
        page_size=PAGE_SIZE,
        max_len=max_len,
        prompt_tokens=PROMPT_TOKENS,
        max_waiting=max_waiting,
        cache_dir="",
    )
    engine.warm_up(progress=False)
    return engine


def _decode(engine: HostEngine, running: int, *, new: int, first: list[int]) -> None:
    """Steps until ``running`` requests decode, and one with the prompt ``first`` has ended."""
    for _ in range(running):
        engine.add_request([0], SamplingParams(max_new_tokens=new, ignore_eos=True))
    while engine.statistics.waiting:
        engine.step()
    gc.collect()  # collect other engines' garbage now, not in timed steps
    ended = []
    engine.add_request(first, SamplingParams(max_new_tokens=1, ignore_eos=True), on_output=ended.append)
    while not ended:
        engine.step()


def _time(engine: HostEngine, steps: int) -> tuple[int, float, float]:
    """Runs the engine; returns the number of steps, and their mean and largest time in milliseconds."""
    taken = []
    for _ in range(steps):
        begin = time.thread_time()
        engine.step()
        taken.append(1e3 * (time.thread_time() - begin))
    return steps, statistics.mean(taken), max(taken)


def _tokens(count: int) -> list[int]:
    return np.random.default_rng(count).integers(_TINY["vocab_size"], size=count).tolist()


def main(options: argparse.Namespace) -> int:
    """Prints a table, or JSON. Exit status 0."""
    rows, head = [], machine()
    tell = output.say if options.json == "-" else print
    tell(f"{head['device']}, {head['date']}: host ms per step with empty passes, prompts {PROMPT_TOKENS} "
         "tokens per step\n\n  prompt decoding  waiting    steps     mean    worst")  # fmt: skip
    for row in tqdm(measure(options.prompt_tokens), desc="measuring", disable=not sys.stderr.isatty(), leave=False):
        rows.append(row)
        tell(f"{row.prompt:8} {row.running:8} {row.waiting:8} {row.steps:8} {row.mean:8.3f} {row.worst:8.3f}")
    report = {"machine": head, "steps": [dataclasses.asdict(row) for row in rows]}
    output.save(report, options.json)
    if options.json == "-":
        print(json.dumps(report))
    if options.plot:
        plot(rows, f"{head['device']}, {head['date'][:10]}", options.plot)
    return 0


def plot(rows: Sequence[Row], title: str, path: str | pathlib.Path) -> None:
    """Draws host ms per step against the length of a prompt, alone and while other requests decode."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 5), layout="constrained")).add_subplot(xscale="log")
    for running in sorted({row.running for row in rows if row.prompt}):
        points = [(row.prompt, row.mean) for row in rows if row.prompt and row.running == running]
        axes.plot(*zip(*points, strict=True), "o-", label=f"while {running} decode" if running else "alone")
    axes.set(xlabel="tokens of the prompt", ylabel="host ms per step", ylim=(0, None))
    axes.legend()
    axes.grid(visible=True, alpha=0.2)
    axes.set_title(title)
    figure.savefig(path, dpi=150)
