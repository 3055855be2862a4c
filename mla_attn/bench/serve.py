"""Serving: the command that replays synthetic traces on the engine, and its report."""

import argparse
import collections
import dataclasses
import functools
import json
import math
import pathlib
import secrets
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_attn.bench import report
from mla_attn.bench.engines import BenchEngine, SimulatedEngine
from mla_attn.bench.model import CONFIGS
from mla_attn.bench.replay import Record, Replay, rehearse, replay, watch
from mla_attn.bench.run import machine
from mla_attn.bench.trace import COMMON_PREFIXES, Load, Request, make_trace
from mla_attn.dispatch import NAMES
from mla_attn.engine.requests import SamplingParams
from mla_attn.models import CausalLM, DeepseekConfig, DeepseekForCausalLM, load_checkpoint
from mla_attn.speculative import DraftTree

_PERCENTILES = (50, 90, 99)
_USUAL = 4  # times the mean: more are 0.1 % of the lengths at a spread of 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``--serve``."""
    group = parser.add_argument_group(
        "serving", "with --page-size, --dtype, --implementation, --seed, --json and --plot from above"
    )
    add = group.add_argument
    names = ", ".join(CONFIGS)
    add("--serve", metavar="CHECKPOINT", help=f"replay requests on the engine: a folder, or random weights of {names}")
    add("--requests", type=int, metavar="N", help="how many (default 64; of several batch sizes, 4 times each, from 8)")
    add("--rate", type=float, default=math.inf, metavar="R", help="arrivals per second, Poisson (default: all at once)")
    add("--prompt-tokens", type=int, default=256, metavar="MEAN", help="of a prompt, prefix apart (default 256)")
    add("--new-tokens", type=int, default=64, metavar="MEAN", help="generated per request (default 64)")
    add("--spread", type=float, default=0.5, metavar="X", help="deviation of the lengths' logarithms (default 0.5)")
    add("--shared-prefix", type=int, default=0, metavar="TOKENS", help=f"length of {COMMON_PREFIXES} common prefixes")
    add("--shared-share", type=float, default=0.5, metavar="0..1", help="requests that begin with one (default 0.5)")
    add(
        "--max-batch",
        default="8",
        metavar="B,B",
        help="most requests running at a time (default 8); of several, one after the other, the engine compiles passes "
        "for these sizes alone",
    )
    add("--num-pages", type=int, metavar="N", help="pages of the cache (default: --max-batch requests of --max-len)")
    add("--max-len", type=int, metavar="N", help=f"most tokens of a request (default: {_USUAL} times the mean)")
    add("--step-prompt-tokens", type=int, default=512, metavar="N", help="most computed per step (default 512)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (the default) is greedy")
    drafting = group.add_mutually_exclusive_group()
    drafting.add_argument(
        "--speculate", default="0", metavar="K,K", help="draft K tokens per step (default 0); several, as 0,3, in turn"
    )
    add("--acceptance", metavar="X,X", help="pretend that each draft is right with this probability, 0 to 1")
    drafting.add_argument("--tree", metavar="W1xW2x...", help="draft a tree: children per node at each depth")


# The report


def percentiles(values: Sequence[float | None]) -> dict[str, float] | None:
    """p50, p90 and p99 of those that are there; None if none is."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    found = np.percentile(there, _PERCENTILES).tolist()
    return {f"p{p}": value for p, value in zip(_PERCENTILES, found, strict=True)}


def summarize(found: Replay, device: dict[str, int | float] | None = None, *, drafts: bool) -> dict:
    """Figures of a replay, with drafts or without, and what ``watch`` saw; times in seconds, rates per second, None
    where there is nothing to tell."""
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
        "acceptance_length": _acceptance_length(records) if drafts else None,
        "prefix_share": found.reused_rows / looked_up if looked_up else 0.0,
        "preemptions": found.preemptions,
        "most_pages": found.most_pages,
        "steps": found.steps,
        "step_time": found.step_seconds / found.steps if found.steps else None,
        "host_time": (found.step_seconds - found.wait_seconds) / found.steps if found.steps else None,
        "device": device,
        "programs": statistics.programs,
        "warm_up_seconds": statistics.warm_up_seconds,
        "compiles_after_warm_up": statistics.compiles_after_warm_up,
    }


def _acceptance_length(records: Sequence[Record]) -> float | None:
    """Tokens per request and verify pass. (A request's first token comes from its prompt.)"""
    passes = sum(max(record.outputs - 1, 0) for record in records)
    return sum(max(record.new_tokens - 1, 0) for record in records) / passes if passes else None


def table(made: dict) -> str:
    """The report for people: what was run on what, then a figure a line."""
    asked, got = made["configuration"], made["summary"]
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
    if got["device"] is not None:
        lines["device"] = (
            f"busy {100 * got['device']['busy']:.1f} %, waits for the host {100 * got['device']['waited']:.1f} % of "
            f"{got['device']['steps']} steps of {1e3 * got['device']['step_time']:.2f} ms under the profiler"
        )
    head = [
        _machine(made),
        f"{asked['checkpoint']}, {asked['dtype']}, page {asked['page_size']}, at most {asked['max_batch']} requests of "
        f"{asked['max_len']} tokens at a time, {_drafts(asked)}, seed {asked['seed']}",
    ]
    return "\n".join([*head, "", *(f"{name:<15}{value}" for name, value in lines.items()), "", _latencies(got)])


def _machine(made: dict) -> str:
    host = made["machine"]
    return f"{host['device']}, jax {host['jax']}, jaxlib {host['jaxlib']}, {host['date']}"


def _drafts(asked: dict) -> str:
    drafts = "no drafts" if asked["tree"] is None else "drafts " + "x".join(map(str, asked["tree"]))
    if asked["simulated_acceptance"] is None:
        return drafts
    return f"{drafts} (each SIMULATED to be right with probability {asked['simulated_acceptance']:g})"


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


# Several replays: (title, width, figure of a result), a line a result.
_COLUMNS: tuple[tuple[str, int, Callable[[dict, dict], str]], ...] = (
    ("batch", 5, lambda asked, got: str(asked["max_batch"])),
    ("requests", 9, lambda asked, got: f"{got['served']}/{got['requests']}"),
    ("tokens/s", 9, lambda asked, got: f"{got['output_tokens_per_second']:.1f}"),
    ("accepted", 9, lambda asked, got: _figure(got["acceptance_length"])),
    ("step ms", 8, lambda asked, got: _figure(got["step_time"], 1e3)),
    ("host ms", 8, lambda asked, got: _figure(got["host_time"], 1e3)),
    ("busy %", 7, lambda asked, got: _figure((got["device"] or {}).get("busy"), 1e2)),
    ("waits %", 8, lambda asked, got: _figure((got["device"] or {}).get("waited"), 1e2)),
    ("ms/token", 9, lambda asked, got: _figure((got["time_per_output_token"] or {}).get("p50"), 1e3)),
)


def _figure(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{unit * value:.2f}"


def header(made: dict) -> str:
    """What stands above the rows of several replays."""
    asked, got = made["configuration"], made["summary"]
    return "\n".join(
        [
            _machine(made),
            f"{asked['checkpoint']}, {asked['dtype']}, page {asked['page_size']}, requests of at most "
            f"{asked['max_len']} tokens, {got['programs']} programs compiled in {got['warm_up_seconds']:.1f} s, seed "
            f"{asked['seed']}",
            "tokens/s: output; accepted: tokens a verify pass; busy, waits (for the host): of the device's time, in a "
            "profile; ms/token: p50",
            "",
            " ".join(title.rjust(width) for title, width, _ in _COLUMNS) + "  drafts",
        ]
    )


def row(made: dict) -> str:
    """One replay of several."""
    asked, got = made["configuration"], made["summary"]
    return " ".join(figure(asked, got).rjust(width) for _, width, figure in _COLUMNS) + f"  {_drafts(asked)}"


def plot_batches(results: Sequence[dict], title: str, path: str | pathlib.Path) -> None:
    """Output tokens per second against the most requests running, a line for each kind of drafts."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(9, 6), layout="constrained")).add_subplot(xscale="log")
    lines = collections.defaultdict(list)
    for made in results:
        point = made["configuration"]["max_batch"], made["summary"]["output_tokens_per_second"]
        lines[_drafts(made["configuration"])].append(point)
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), "o-", label=name)
    batches = sorted({batch for points in lines.values() for batch, _ in points})
    axes.set_xticks(batches, labels=map(str, batches))
    axes.minorticks_off()
    axes.set(xlabel="most requests running at a time", ylabel="output tokens per second", ylim=(0, None))
    axes.legend()
    axes.grid(visible=True, alpha=0.2)
    axes.set_title(title)
    figure.savefig(path, dpi=150)


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


@dataclasses.dataclass(frozen=True)
class Case:
    """A replay: most requests running at a time, what they ask for, and how often drafts are made to be right."""

    max_batch: int
    load: Load
    params: SamplingParams
    acceptance: float | None


def main(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """``mla-attn bench --serve``: prints a table, or JSON. Exit status: 1 if a request was not served, else 0.

    Several batch sizes or kinds of drafts are replayed one after the other on one engine, a row each once it is there;
    JSON then has ``results``, each as that of a single replay, and a file has those so far.
    """
    cases = _cases(options)
    _check_engine(options)
    report.check_files(options)
    say(f"{options.serve}: loading")
    model = _model(options.serve, options.dtype, drafts=any(case.params.speculation for case in cases))
    max_len, num_pages = _sizes(options, cases, model.max_position_embeddings)
    traces = [make_trace(case.load, vocab_size=model.vocab_size, max_len=max_len) for case in cases]
    engine = _engine(options, cases, model, max_len=max_len, num_pages=num_pages)
    say(f"{options.serve}: compiling and warming up")
    engine.warm_up(progress=sys.stderr.isatty())
    several, results, made = len(cases) > 1, [], {}
    tell = say if options.json == "-" else functools.partial(print, flush=True)
    for case, trace in zip(cases, traces, strict=True):
        say(f"{options.serve}: serving {case.load.requests} requests, at most {case.max_batch} at a time")
        found, device = _serve(engine, case, trace, say)
        results.append(_report(options, case, found, device, max_len=max_len, num_pages=num_pages))
        if several and len(results) == 1:
            tell(header(results[0]))
        if several:
            tell(row(results[-1]))
        made = {"results": results} if several else results[0]
        report.save(made, options.json)
        if options.plot:
            title = f"{options.serve} on {results[0]['machine']['device']}, {results[0]['machine']['date'][:10]}"
            plot_batches(results, title, options.plot) if several else plot(found, title, options.plot)
    if options.json == "-":
        print(json.dumps(made))
    elif not several:
        print(table(made))
    return int(any(made["summary"]["served"] < made["summary"]["requests"] for made in results))


def _serve(
    engine: BenchEngine, case: Case, trace: Sequence[Request], say: Callable[[str], None]
) -> tuple[Replay, dict[str, int | float] | None]:
    """The replay of a case, and what the device did in one more that is profiled, where it can be."""
    engine.limit = case.max_batch
    if case.acceptance is not None:
        assert isinstance(engine, SimulatedEngine)
        engine.simulate(case.acceptance)
    rehearse(engine, case.load, case.params)
    engine.forget()
    found, device = replay(engine, trace, case.params, progress=sys.stderr.isatty()), None
    if jax.default_backend() == "gpu":
        engine.forget()
        try:
            device = watch(engine, case.load, case.params)
        except RuntimeError as error:  # a failing profiler costs a figure, not the run
            say(f"what the device did is unknown: {error}")
    engine.forget()
    return found, device


def _engine(
    options: argparse.Namespace, cases: Sequence[Case], model: CausalLM, *, max_len: int, num_pages: int
) -> BenchEngine:
    """One that serves all cases."""
    batches = sorted({case.max_batch for case in cases})
    trees = dict.fromkeys(case.params.speculation for case in cases if case.params.speculation)
    simulated = any(case.acceptance is not None for case in cases)
    return (SimulatedEngine if simulated else BenchEngine)(
        model,
        max_batch=batches[-1],
        batches=batches if len(batches) > 1 else None,
        num_pages=num_pages,
        page_size=options.page_size,
        max_len=max_len,
        speculation=tuple(trees),
        prompt_tokens=options.step_prompt_tokens,
        max_waiting=max(max(case.load.requests, 2 * case.max_batch) for case in cases),
        implementation=options.implementation,
    )


def _cases(options: argparse.Namespace) -> list[Case]:
    """Of each batch size, of each kind of drafts: all of the same seed."""
    batches = _numbers("max_batch", options.max_batch, int)
    seed = secrets.randbits(31) if options.seed is None else options.seed
    asked = {field.name: getattr(options, field.name) for field in dataclasses.fields(Load)} | {"seed": seed}
    cases = []
    for batch in batches:
        if batch < 1:
            raise ValueError(f"max_batch={batch} must be at least 1")
        if options.requests is None:  # enough to fill the batch some times over
            asked["requests"] = 64 if len(batches) == 1 else max(8, 4 * batch)
        load = Load(**asked)
        for tree, acceptance in _drafting(options):
            # No stop tokens: lengths are those of the trace.
            params = SamplingParams(temperature=options.temperature, speculation=tree, seed=seed % 2**32)
            cases.append(Case(batch, load, params, acceptance))
    return cases


def _drafting(options: argparse.Namespace) -> list[tuple[DraftTree | None, float | None]]:
    """Draft trees, each with each of the probabilities that its drafts are right; None where they are not simulated."""
    lengths = _numbers("speculate", options.speculate, int)
    if min(lengths) < 0:
        raise ValueError(f"speculate={min(lengths)} must be at least 0")
    trees = [DraftTree.chain(length) if length else None for length in lengths]
    if options.tree is not None:
        trees = [DraftTree.parse(options.tree)]
    if options.acceptance is None:
        return [(tree, None) for tree in trees]
    rates = _numbers("acceptance", options.acceptance, float)
    for rate in rates:
        if not (0 <= rate <= 1 and any(trees)):
            raise ValueError(f"acceptance={rate} must be 0 to 1, with speculate or tree")
    return [(tree, rate) for tree in trees for rate in (rates if tree else (None,))]


def _numbers[T: (int, float)](name: str, text: str, kind: type[T]) -> tuple[T, ...]:
    """Of an option that may have several, with commas."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name}={text!r} must be of type {kind.__name__}, or several with commas between") from None


def _check_engine(options: argparse.Namespace) -> None:
    """What the engine would refuse only after minutes of loading."""
    for name in ("num_pages", "page_size", "max_len", "step_prompt_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if options.implementation not in (None, *NAMES):
        raise ValueError(f"implementation={options.implementation!r} must be one of {', '.join(NAMES)}")


def _sizes(options: argparse.Namespace, cases: Sequence[Case], positions: int) -> tuple[int, int]:
    """Most tokens of a request, and pages of the cache."""
    load, most = cases[0].load, max(case.max_batch for case in cases)  # loads differ in the number of requests alone
    fitting = positions if options.num_pages is None else min(positions, options.num_pages * options.page_size)
    usual = load.shared_prefix + _USUAL * (load.prompt_tokens + load.new_tokens)
    max_len = min(usual, fitting) if options.max_len is None else options.max_len
    if max_len > fitting:
        raise ValueError(f"max_len={max_len} must be at most {fitting}, what the model and num_pages have room for")
    pages = most * -(-max_len // options.page_size) if options.num_pages is None else options.num_pages
    return max_len, pages


def _model(checkpoint: str, dtype: str, *, drafts: bool) -> CausalLM:
    if checkpoint in CONFIGS:
        config = DeepseekConfig.from_hf(CONFIGS[checkpoint] | {"num_nextn_predict_layers": int(drafts)})
        return DeepseekForCausalLM(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    if not pathlib.Path(checkpoint).is_dir():
        raise ValueError(f"serve={checkpoint!r} must be a folder or one of {', '.join(CONFIGS)}")
    return load_checkpoint(checkpoint, dtype=jnp.dtype(dtype))


def _report(
    options: argparse.Namespace,
    case: Case,
    found: Replay,
    device: dict[str, int | float] | None,
    *,
    max_len: int,
    num_pages: int,
) -> dict:
    """All there is, as JSON holds it."""
    tree = case.params.speculation
    configuration = {
        "checkpoint": options.serve,
        **dataclasses.asdict(case.load),
        "rate": None if math.isinf(case.load.rate) else case.load.rate,  # JSON has no infinity
        "max_batch": case.max_batch,
        "num_pages": num_pages,
        "page_size": options.page_size,
        "max_len": max_len,
        "step_prompt_tokens": options.step_prompt_tokens,
        "dtype": options.dtype,
        "implementation": options.implementation,
        "temperature": case.params.temperature,
        "tree": tree and list(tree.widths),
        "simulated_acceptance": case.acceptance,
    }
    return {
        "machine": machine(),
        "configuration": configuration,
        "summary": summarize(found, device, drafts=tree is not None),
        "records": [dataclasses.asdict(record) for record in found.records],
        "timeline": found.timeline,
    }
