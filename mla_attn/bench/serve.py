"""Serving: a synthetic trace of requests replayed on the engine, and what the requests saw of it."""

import argparse
import collections
import dataclasses
import functools
import json
import math
import pathlib
import secrets
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from mla_attn.bench import report
from mla_attn.bench.model import CONFIGS
from mla_attn.bench.run import machine
from mla_attn.bench.trace import COMMON_PREFIXES, Load, Request, make_trace
from mla_attn.dispatch import NAMES
from mla_attn.engine import Engine
from mla_attn.models import DeepseekConfig, DeepseekForCausalLM, load_checkpoint
from mla_attn.requests import EngineStatistics, Output, SamplingParams
from mla_attn.slots import SlotPasses
from mla_attn.speculative import DraftTree

_PERCENTILES = (50, 90, 99)
_USUAL = 4  # times the mean: more are 0.1 % of the lengths at a spread of 0.5
_LONGEST_NAP = 0.01  # seconds; sleep() is exact to about a tenth of a millisecond, so short naps lose nothing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``--serve``."""
    group = parser.add_argument_group(
        "serving", "with --page-size, --dtype, --implementation, --seed, --json and --plot from above"
    )
    add = group.add_argument
    names = ", ".join(CONFIGS)
    add("--serve", metavar="CHECKPOINT", help=f"replay requests on the engine: a folder, or random weights of {names}")
    add("--requests", type=int, default=64, metavar="N", help="how many (default 64)")
    add("--rate", type=float, default=math.inf, metavar="R", help="arrivals per second, Poisson (default: all at once)")
    add("--prompt-tokens", type=int, default=256, metavar="MEAN", help="of a prompt, prefix apart (default 256)")
    add("--new-tokens", type=int, default=64, metavar="MEAN", help="generated per request (default 64)")
    add("--spread", type=float, default=0.5, metavar="X", help="deviation of the lengths' logarithms (default 0.5)")
    add("--shared-prefix", type=int, default=0, metavar="TOKENS", help=f"length of {COMMON_PREFIXES} common prefixes")
    add("--shared-share", type=float, default=0.5, metavar="0..1", help="requests that begin with one (default 0.5)")
    add("--max-batch", type=int, default=8, metavar="B", help="most requests running at a time (default 8)")
    add("--num-pages", type=int, metavar="N", help="pages of the cache (default: --max-batch requests of --max-len)")
    add("--max-len", type=int, metavar="N", help=f"most tokens of a request (default: {_USUAL} times the mean)")
    add("--step-prompt-tokens", type=int, default=512, metavar="N", help="most computed per step (default 512)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (the default) is greedy")
    drafting = group.add_mutually_exclusive_group()
    drafting.add_argument("--speculate", type=int, default=0, metavar="K", help="draft K tokens per step (default 0)")
    add("--acceptance", type=float, metavar="0..1", help="pretend that each draft is right with this probability")
    drafting.add_argument("--tree", metavar="W1xW2x...", help="draft a tree: children per node at each depth")


# Drafts that are right as often as asked for


def simulated_engine(rate: float) -> type[Engine]:
    """An engine whose verify passes do their work, then accept each draft with probability ``rate``.

    Random weights draft no better than chance; so the speed at an acceptance that trained ones would reach can be
    measured. The tokens mean nothing. Of the children of a node the first is the one that may be right.
    """

    class SimulatedPasses(SlotPasses):
        def _pick(self, logits, positions, x):
            targets = super()._pick(logits, positions, x)
            if logits.ndim == 2:  # no drafts in this pass
                return targets
            parents, drafts = self._tree.parents.tolist(), x["drafts"]
            child = np.array([parents.index(node) - 1 if node in parents else -1 for node in range(len(parents))])
            luck = jax.vmap(jax.vmap(_uniform, in_axes=(None, 0)))(x["seed"], positions)
            # The first token that is no draft stands for one that was not foreseen.
            ids = jnp.arange(len(parents), dtype=jnp.int32)
            drafted = (drafts[:, None] == ids[None, :, None]).any(axis=-1)
            unforeseen = jnp.argmin(drafted, axis=-1).astype(jnp.int32)[:, None]
            judged = jnp.where(luck < rate, drafts[:, child], unforeseen)
            return jnp.where(jnp.asarray(child >= 0)[None], judged, targets)

    class SimulatedEngine(Engine):
        passes_class = SimulatedPasses

    return SimulatedEngine


def _uniform(seed, position):
    return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position))


# The replay


@dataclasses.dataclass
class Record:
    """What a request saw; times in seconds after the replay's begin.

    Attributes:
        arrival: as the trace has it: what the engine keeps waiting before it is added, waits too.
        prompt_tokens: of its prompt.
        asked: tokens to generate.
        new_tokens: tokens that came.
        outputs: that brought them.
        first: when the first came.
        last: when the last came.
        finish_reason: of its last ``Output``.
    """

    arrival: float
    prompt_tokens: int
    asked: int
    new_tokens: int = 0
    outputs: int = 0
    first: float | None = None
    last: float | None = None
    finish_reason: str | None = None

    @property
    def served(self) -> bool:
        return self.new_tokens == self.asked

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first is None else self.first - self.arrival

    @property
    def time_per_token(self) -> float | None:
        """Mean between its tokens, None where there are fewer than two."""
        if self.first is None or self.last is None or self.new_tokens < 2:
            return None
        return (self.last - self.first) / (self.new_tokens - 1)

    @property
    def latency(self) -> float | None:
        return None if self.last is None else self.last - self.arrival

    def add(self, output: Output, now: float) -> None:
        if output.tokens:
            self.first = now if self.first is None else self.first
            self.last = now
            self.new_tokens += len(output.tokens)
            self.outputs += 1
        self.finish_reason = output.finish_reason


@dataclasses.dataclass(frozen=True)
class Replay:
    """A trace served.

    Attributes:
        records: of each request, by arrival.
        duration: seconds from the first arrival to the last token.
        timeline: after every step: seconds, running and waiting requests.
        most_pages: pages that requests held at most after a step.
        prompt_rows: prompt rows computed, those of preempted requests again.
        reused_rows: prompt rows found in the prefix cache instead, counted alike.
        preemptions: times a running request had to give its pages back.
        steps: of the engine.
        step_seconds: inside them.
        wait_seconds: of which waiting for the device.
        statistics: the engine's, at the end; earlier replays count in it.
    """

    records: list[Record]
    duration: float
    timeline: list[tuple[float, int, int]]
    most_pages: int
    prompt_rows: int
    reused_rows: int
    preemptions: int
    steps: int
    step_seconds: float
    wait_seconds: float
    statistics: EngineStatistics


def replay(engine: Engine, trace: Sequence[Request], params: SamplingParams, *, progress: bool = True) -> Replay:
    """Serve a trace on an idle engine that is warm. Requests are added once their time has come, between steps.

    Args:
        engine: made for requests as long as the trace's, and for as many waiting ones.
        trace: requests by arrival.
        params: of all requests but for ``max_new_tokens``; the n-th request draws from this seed plus n.
        progress: whether to show a bar of finished requests.
    """
    ahead, records, timeline, most_pages = collections.deque(enumerate(trace)), [], [], 0
    before, begin = engine.statistics, time.perf_counter()

    def note(record: Record, output: Output) -> None:
        record.add(output, time.perf_counter() - begin)

    with tqdm(total=len(trace), desc="serving", unit="request", disable=not progress, leave=False) as bar:
        while ahead or engine.busy:
            while ahead and ahead[0][1].arrival <= time.perf_counter() - begin:
                number, request = ahead.popleft()
                record = Record(request.arrival, len(request.prompt), request.new_tokens)
                seed = (params.seed + number) % 2**32
                own = dataclasses.replace(params, max_new_tokens=request.new_tokens, seed=seed)
                engine.add_request(request.prompt, own, on_output=functools.partial(note, record))
                records.append(record)
            if not engine.busy:  # so the next arrival lies ahead
                time.sleep(max(0.0, min(ahead[0][1].arrival - (time.perf_counter() - begin), _LONGEST_NAP)))
                continue
            outputs = engine.step()
            now, statistics = time.perf_counter() - begin, engine.statistics
            timeline.append((now, statistics.running, statistics.waiting))
            most_pages = max(most_pages, statistics.pages_used)
            bar.update(sum(output.finish_reason is not None for output in outputs))
    duration = max((record.last for record in records if record.last is not None), default=0.0)
    after = engine.statistics
    return Replay(
        records,
        duration,
        timeline,
        most_pages,
        prompt_rows=after.prompt_tokens - before.prompt_tokens,
        reused_rows=after.reused_tokens - before.reused_tokens,
        preemptions=after.preemptions - before.preemptions,
        steps=after.steps - before.steps,
        step_seconds=after.step_seconds - before.step_seconds,
        wait_seconds=after.wait_seconds - before.wait_seconds,
        statistics=after,
    )


def rehearse(engine: Engine, load: Load, params: SamplingParams) -> None:
    """Serve some requests like the load's but of other tokens: a program's first run takes longer than later ones."""
    few = {"requests": 2 * engine.max_batch, "rate": math.inf, "new_tokens": min(load.new_tokens, 16)}
    load = dataclasses.replace(load, **few, seed=load.seed + 1)
    trace = make_trace(load, vocab_size=engine.model.config.vocab_size, max_len=engine.max_len)
    replay(engine, trace, params, progress=False)


# The report


def percentiles(values: Sequence[float | None]) -> dict[str, float] | None:
    """p50, p90 and p99 of those that are there; None if none is."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    found = np.percentile(there, _PERCENTILES).tolist()
    return {f"p{p}": value for p, value in zip(_PERCENTILES, found, strict=True)}


def summarize(found: Replay) -> dict:
    """Figures of a replay; times in seconds, rates per second, None where there is nothing to tell."""
    records, statistics = found.records, found.statistics
    prompt_tokens = sum(record.prompt_tokens for record in records)
    new_tokens = sum(record.new_tokens for record in records)
    looked_up = found.reused_rows + found.prompt_rows
    per_second = 1 / found.duration if found.duration else 0.0
    return {
        "requests": len(records),
        "served": sum(record.served for record in records),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "duration": found.duration,
        "output_tokens_per_second": new_tokens * per_second,
        "total_tokens_per_second": (prompt_tokens + new_tokens) * per_second,
        "time_to_first_token": percentiles([record.time_to_first_token for record in records]),
        "time_per_output_token": percentiles([record.time_per_token for record in records]),
        "latency": percentiles([record.latency for record in records]),
        "acceptance_length": _acceptance_length(records),
        "prefix_share": found.reused_rows / looked_up if looked_up else 0.0,
        "preemptions": found.preemptions,
        "most_pages": found.most_pages,
        "steps": found.steps,
        "step_time": found.step_seconds / found.steps if found.steps else None,
        "host_time": (found.step_seconds - found.wait_seconds) / found.steps if found.steps else None,
        "programs": statistics.programs,
        "warm_up_seconds": statistics.warm_up_seconds,
        "compiles_after_warm_up": statistics.compiles_after_warm_up,
    }


def _acceptance_length(records: Sequence[Record]) -> float | None:
    """Tokens per request and verify pass; 1 without drafts. (A request's first token comes from its prompt.)"""
    passes = sum(max(record.outputs - 1, 0) for record in records)
    return sum(max(record.new_tokens - 1, 0) for record in records) / passes if passes else None


def table(made: dict) -> str:
    """The report for people: what was run on what, then a figure a line."""
    host, asked, got = made["machine"], made["configuration"], made["summary"]
    rate = "all at once" if asked["rate"] is None else f"{asked['rate']:g} per second"
    accepted = "-" if got["acceptance_length"] is None else f"{got['acceptance_length']:.2f}"
    lines = {
        "requests": f"{got['requests']}, {got['served']} served in full, {rate}",
        "prompt tokens": f"{got['prompt_tokens']}, {100 * got['prefix_share']:.1f} % found in the prefix cache",
        "new tokens": f"{got['new_tokens']}, acceptance length {accepted}",
        "duration": f"{got['duration']:.2f} s, {got['steps']} engine steps{_step_times(got)}",
        "throughput": f"{got['output_tokens_per_second']:.1f} output tokens/s, "
        f"{got['total_tokens_per_second']:.1f} with prompts",
        "pages": f"{got['most_pages']} of {asked['num_pages']} held at most by requests; "
        f"{got['preemptions']} preemptions",
        "programs": f"{got['programs']}, compiled in {got['warm_up_seconds']:.1f} s; "
        f"{got['compiles_after_warm_up']} more after warm-up",
    }
    drafts = "no drafts" if asked["tree"] is None else "drafts " + "x".join(map(str, asked["tree"]))
    if asked["simulated_acceptance"] is not None:
        drafts += f" (each SIMULATED to be right with probability {asked['simulated_acceptance']:g})"
    head = [
        f"{host['device']}, jax {host['jax']}, jaxlib {host['jaxlib']}, {host['date']}",
        f"{asked['checkpoint']}, {asked['dtype']}, page {asked['page_size']}, at most {asked['max_batch']} requests of "
        f"{asked['max_len']} tokens at a time, {drafts}, seed {asked['seed']}",
    ]
    return "\n".join([*head, "", *(f"{name:<15}{value}" for name, value in lines.items()), "", _latencies(got)])


def _step_times(summary: dict) -> str:
    if summary["step_time"] is None:
        return ""
    return f" of {1e3 * summary['step_time']:.2f} ms, {1e3 * summary['host_time']:.2f} ms of it the host's"


def _latencies(summary: dict) -> str:
    rows = {
        "time to first token": "time_to_first_token",
        "time per output token": "time_per_output_token",
        "end-to-end latency": "latency",
    }
    lines = [f"{'ms':<24}" + "".join(f"{f'p{p}':>10}" for p in _PERCENTILES)]
    for title, name in rows.items():
        values = summary[name]
        cells = ["-" if values is None else f"{1e3 * values[f'p{p}']:.1f}" for p in _PERCENTILES]
        lines.append(f"{title:<24}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def plot(found: Replay, title: str, path: str | pathlib.Path) -> None:
    """How time to first token and time per output token are distributed, and who ran and waited when."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.5), layout="constrained")
    first, per_token, timeline = figure.subplots(1, 3)
    for axes, name, values in (
        (first, "time to first token", [record.time_to_first_token for record in found.records]),
        (per_token, "time per output token, mean of a request", [record.time_per_token for record in found.records]),
    ):
        there = [1e3 * value for value in values if value is not None]
        if there:  # requests of one token have no time between tokens
            axes.ecdf(there)
        axes.set(xlabel=f"{name}, ms", ylabel="share of requests", ylim=(0, 1))
    seconds, running, waiting = zip(*found.timeline, strict=True)
    timeline.step(seconds, running, where="post", label="running")
    timeline.step(seconds, waiting, where="post", label="waiting")
    timeline.set(xlabel="seconds", ylabel="requests", ylim=(0, None))
    timeline.legend()
    for axes in (first, per_token, timeline):
        axes.grid(visible=True, alpha=0.2)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


# The command


def main(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """``mla-attn bench --serve``: prints a table, or JSON. Exit status: 1 if a request was not served, else 0."""
    if options.plot:
        report.find_matplotlib()  # before the run rather than after it
    load, params = _load(options), _params(options)
    _check_engine(options)
    say(f"{options.serve}: loading")
    model = _model(options.serve, options.dtype, drafts=params.speculation is not None)
    max_len, num_pages = _sizes(options, load, model.config.max_position_embeddings)
    trace = make_trace(load, vocab_size=model.config.vocab_size, max_len=max_len)
    engine = (Engine if options.acceptance is None else simulated_engine(options.acceptance))(
        model,
        max_batch=options.max_batch,
        num_pages=num_pages,
        page_size=options.page_size,
        max_len=max_len,
        speculation=() if params.speculation is None else (params.speculation,),
        prompt_tokens=options.step_prompt_tokens,
        max_waiting=max(load.requests, 2 * options.max_batch),
        implementation=options.implementation,
    )
    say(f"{options.serve}: compiling and warming up")
    progress = sys.stderr.isatty()
    engine.warm_up(progress=progress)
    params = dataclasses.replace(params, seed=load.seed % 2**32)
    rehearse(engine, load, params)
    say(f"{options.serve}: serving {load.requests} requests")
    found = replay(engine, trace, params, progress=progress)
    made = _report(options, load, params, found, max_len=max_len, num_pages=num_pages)
    if options.json not in (None, "-"):
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(made, file, indent=1)
    print(json.dumps(made) if options.json == "-" else table(made))
    if options.plot:
        plot(found, f"{options.serve} on {made['machine']['device']}, {made['machine']['date'][:10]}", options.plot)
    return int(made["summary"]["served"] < load.requests)


def _load(options: argparse.Namespace) -> Load:
    asked = {field.name: getattr(options, field.name) for field in dataclasses.fields(Load)}
    return Load(**asked | {"seed": secrets.randbits(31) if options.seed is None else options.seed})


def _params(options: argparse.Namespace) -> SamplingParams:
    if options.speculate < 0:
        raise ValueError(f"speculate={options.speculate} must be at least 0")
    chain = DraftTree.chain(options.speculate) if options.speculate else None
    tree = chain if options.tree is None else DraftTree.parse(options.tree)
    if options.acceptance is not None and not (0 <= options.acceptance <= 1 and tree is not None):
        raise ValueError(f"acceptance={options.acceptance} must be 0 to 1, with speculate or tree")
    # No stop tokens: lengths are those of the trace.
    return SamplingParams(temperature=options.temperature, speculation=tree)


def _check_engine(options: argparse.Namespace) -> None:
    """What the engine would refuse only after minutes of loading."""
    for name in ("max_batch", "num_pages", "page_size", "max_len", "step_prompt_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if options.implementation not in (None, *NAMES):
        raise ValueError(f"implementation={options.implementation!r} must be one of {', '.join(NAMES)}")


def _sizes(options: argparse.Namespace, load: Load, positions: int) -> tuple[int, int]:
    """Most tokens of a request, and pages of the cache."""
    fitting = positions if options.num_pages is None else min(positions, options.num_pages * options.page_size)
    usual = load.shared_prefix + _USUAL * (load.prompt_tokens + load.new_tokens)
    max_len = min(usual, fitting) if options.max_len is None else options.max_len
    if max_len > fitting:
        raise ValueError(f"max_len={max_len} must be at most {fitting}, what the model and num_pages have room for")
    pages = options.max_batch * -(-max_len // options.page_size) if options.num_pages is None else options.num_pages
    return max_len, pages


def _model(checkpoint: str, dtype: str, *, drafts: bool) -> DeepseekForCausalLM:
    if checkpoint in CONFIGS:
        config = DeepseekConfig.from_hf(CONFIGS[checkpoint] | {"num_nextn_predict_layers": int(drafts)})
        return DeepseekForCausalLM(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    if not pathlib.Path(checkpoint).is_dir():
        raise ValueError(f"serve={checkpoint!r} must be a folder or one of {', '.join(CONFIGS)}")
    return load_checkpoint(checkpoint, dtype=jnp.dtype(dtype))


def _report(
    options: argparse.Namespace, load: Load, params: SamplingParams, found: Replay, *, max_len: int, num_pages: int
) -> dict:
    """All there is, as JSON holds it."""
    configuration = {
        "checkpoint": options.serve,
        **dataclasses.asdict(load),
        "rate": None if math.isinf(load.rate) else load.rate,  # JSON has no infinity
        "max_batch": options.max_batch,
        "num_pages": num_pages,
        "page_size": options.page_size,
        "max_len": max_len,
        "step_prompt_tokens": options.step_prompt_tokens,
        "dtype": options.dtype,
        "implementation": options.implementation,
        "temperature": params.temperature,
        "tree": params.speculation and list(params.speculation.widths),
        "simulated_acceptance": options.acceptance,
    }
    return {
        "machine": machine(),
        "configuration": configuration,
        "summary": summarize(found),
        "records": [dataclasses.asdict(record) for record in found.records],
        "timeline": found.timeline,
    }
