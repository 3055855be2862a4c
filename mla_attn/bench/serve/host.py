"""``mla-attn bench host``: times the engine's host work, with passes that do nothing in place of the model's."""

import argparse
import dataclasses
import gc
import json
import pathlib
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
_WINDOW = 1024  # of the second layer of the model with windows
_TIMES = 3  # each row is measured; the least of a step counts, because other programs interrupt some
# Tiny models, none of which is computed.
_COMMON = {"vocab_size": 256, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
_MLA = _COMMON | {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 1,
    "n_routed_experts": None,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_WINDOWED = _COMMON | {
    "model_type": "gemma2",
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of steps of one kind.

    Attributes:
        prompt: tokens of the prompt that is computed in these steps; 0 if requests only decode.
        found: whether all of that prompt but the last tokens is found in the cache.
        running: requests that decode.
        waiting: requests that wait for pages.
        window: the window of half of the layers; 0 if there is none.
        steps: number of timed steps.
        mean, worst: CPU time of this thread per step, in milliseconds.
    """

    prompt: int = 0
    found: bool = False
    running: int = 0
    waiting: int = 0
    window: int = 0
    steps: int = 0
    mean: float = 0.0
    worst: float = 0.0


def measure(prompts: Sequence[int]) -> Iterator[Row]:
    """Measures row by row: prompts alone, then while other requests decode, then decoding while others wait for
    pages.

    An equal request with other tokens runs first, so that the engine is warm. When a prompt is timed alone, the cache
    is full of that request's pages, which are evicted, or it is the same prompt, which is found. Another engine steps
    just before the timed steps, because the first step after a rest takes up to 0.5 ms more: the processor's caches do
    not hold the engine's code then. Each row is measured several times, and the least time of each step counts.
    """
    other = _engine(1, _WAITER)
    alone = [Row(prompt=prompt, found=found) for found in (False, True) for prompt in prompts]
    beside = [Row(prompt=prompt, running=BESIDE) for prompt in prompts]
    decoding = [Row(running=running, waiting=count) for running in RUNNING for count in WAITING]
    windows = [Row(running=running, window=_WINDOW) for running in RUNNING]
    for row in (*alone, *beside, *decoding, *windows):
        taken = np.min([_time(*_ready(row), other) for _ in range(_TIMES)], axis=0)
        yield dataclasses.replace(row, steps=len(taken), mean=float(taken.mean()), worst=float(taken.max()))


def _ready(row: Row) -> tuple[HostEngine, int]:
    """An engine of a row, and the number of steps to time."""
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    if row.prompt:
        engine, tokens = _engine(row.running + 1, row.prompt + PAGE_SIZE), _tokens(row.prompt)
        before = [tokens, tokens] if row.found else [[token ^ 1 for token in tokens]]
        _decode(engine, row.running, row.prompt + PAGE_SIZE - 1, before)
        engine.add_request(tokens, params)
        return engine, 1 if row.found else -(-row.prompt // PROMPT_TOKENS)
    # Too few pages to admit a waiting request while any other runs.
    few, room = _WAITER // PAGE_SIZE + 1, max(row.waiting, row.running)
    engine = _engine(row.running + 1, _WAITER + PAGE_SIZE, num_pages=few, max_waiting=room, window=row.window)
    _decode(engine, row.running, 2 * _DECODED, [[1]])
    for _ in range(row.waiting):
        engine.add_request(_tokens(_WAITER), params)
    return engine, _DECODED


def _engine(
    max_batch: int, max_len: int, *, num_pages: int | None = None, max_waiting: int = 64, window: int = 0
) -> HostEngine:
    config = (_WINDOWED | {"sliding_window": window} if window else _MLA) | {"max_position_embeddings": max_len}
    engine = HostEngine(
        random_model(config, dtype=jnp.bfloat16),
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


def _decode(engine: HostEngine, running: int, new: int, before: list[list[int]]) -> None:
    """Steps until ``running`` requests decode, ``new`` tokens each, and others with the prompts ``before`` have
    ended."""
    for _ in range(running):
        engine.add_request([0], SamplingParams(max_new_tokens=new, ignore_eos=True))
    while engine.statistics.waiting:
        engine.step()
    for prompt in before:
        ended = []
        engine.add_request(prompt, SamplingParams(max_new_tokens=1, ignore_eos=True), on_output=ended.append)
        while not ended:
            engine.step()


def _time(engine: HostEngine, steps: int, other: HostEngine) -> list[float]:
    """Runs the engine after ``other``; returns the time of each step, in milliseconds."""
    gc.collect()  # of what is made for each row, now and not in timed steps
    for token in (0, 1):  # the second evicts the first one's pages
        other.add_request([token] * (_WAITER - _DECODED), SamplingParams(max_new_tokens=_DECODED, ignore_eos=True))
        while other.busy:
            other.step()
    taken = []
    for _ in range(steps):
        begin = time.thread_time()
        engine.step()
        taken.append(1e3 * (time.thread_time() - begin))
    return taken


def _tokens(count: int) -> list[int]:
    return np.random.default_rng(count).integers(_COMMON["vocab_size"], size=count).tolist()


def main(options: argparse.Namespace) -> int:
    """Prints a table, or JSON. Exit status 0."""
    rows, head = [], machine()
    tell = output.say if options.json == "-" else print
    tell(f"{head['device']}, {head['date']}: host ms per step with empty passes, prompts {PROMPT_TOKENS} "
         "tokens per step\n\n  prompt   found decoding  waiting   window    steps     mean    worst")  # fmt: skip
    for row in tqdm(measure(options.prompt_tokens), desc="measuring", disable=not sys.stderr.isatty(), leave=False):
        rows.append(row)
        found = "yes" if row.found else ""
        tell(f"{row.prompt:8} {found:>7} {row.running:8} {row.waiting:8} {row.window:8} {row.steps:8} "
             f"{row.mean:8.3f} {row.worst:8.3f}")  # fmt: skip
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
    computed = [row for row in rows if row.prompt and not row.found]
    for running in sorted({row.running for row in computed}):
        points = [(row.prompt, row.mean) for row in computed if row.running == running]
        axes.plot(*zip(*points, strict=True), "o-", label=f"while {running} decode" if running else "alone")
    axes.set(xlabel="tokens of the prompt", ylabel="host ms per step", ylim=(0, None))
    axes.legend()
    axes.grid(visible=True, alpha=0.2)
    axes.set_title(title)
    figure.savefig(path, dpi=150)
