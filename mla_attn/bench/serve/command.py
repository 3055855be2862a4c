"""``mla-attn bench serve``: its options, the engine that they ask for, and its replays."""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import secrets
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mla_attn.bench import output
from mla_attn.bench.machine import machine
from mla_attn.bench.model import CONFIGS
from mla_attn.bench.output import say
from mla_attn.bench.serve import report
from mla_attn.bench.serve.engines import SimulatedEngine
from mla_attn.bench.serve.replay import Replay, rehearse, replay, watch
from mla_attn.bench.serve.trace import COMMON_PREFIXES, Load, Request, make_trace
from mla_attn.cache.formats import FORMATS
from mla_attn.dispatch import NAMES
from mla_attn.engine import Engine, SamplingParams
from mla_attn.models import CausalLM, load_checkpoint, random_model
from mla_attn.speculative import DraftTree

_USUAL = 4  # most tokens of a request, in means: 0.1 % of the lengths are longer at a spread of 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``mla-attn bench serve``."""
    parser.description = "Replay a synthetic trace of requests on the engine: throughput, latencies, a picture."
    parser.set_defaults(run=main)
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help=f"a folder, or one of {', '.join(CONFIGS)}: random weights")
    add("--requests", type=int, metavar="N", help="how many (default 64; of several batch sizes, 4 times each, from 8)")
    add("--rate", type=float, default=math.inf, metavar="R", help="arrivals per second, Poisson (default: all at once)")
    add("--prompt-tokens", type=int, default=256, metavar="MEAN", help="of a prompt, prefix apart (default 256)")
    add("--new-tokens", type=int, default=64, metavar="MEAN", help="generated per request (default 64)")
    add("--spread", type=float, default=0.5, metavar="X", help="deviation of the lengths' logarithms (default 0.5)")
    add("--shared-prefix", type=int, default=0, metavar="TOKENS", help=f"length of {COMMON_PREFIXES} common prefixes")
    add("--shared-share", type=float, default=0.5, metavar="0..1", help="requests that begin with one (default 0.5)")
    add(
        "--long-prompt",
        type=int,
        default=0,
        metavar="TOKENS",
        help="one more request, of such a prompt, after all others",
    )
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
    drafting = parser.add_mutually_exclusive_group()
    drafting.add_argument(
        "--speculate", default="0", metavar="K,K", help="draft K tokens per step (default 0); several, as 0,3, in turn"
    )
    add("--acceptance", metavar="X,X", help="pretend that each draft is right with this probability, 0 to 1")
    drafting.add_argument("--tree", metavar="W1xW2x...", help="draft a tree: children per node at each depth")
    add("--page-size", type=int, default=64, metavar="P", help="tokens per page (default 64)")
    add("--dtype", choices=tuple(FORMATS), default="bfloat16", help="of weights and cache (default bfloat16)")
    add(
        "--implementation",
        metavar="A",
        help=f"of attention, one of {', '.join(NAMES)} (default: the best)",
    )
    add("--seed", type=int, metavar="S", help="of the trace and of draws (default: a new one)")
    output.add_arguments(parser, picture="latencies, or throughput by batch size")


@dataclasses.dataclass(frozen=True)
class Case:
    """One replay: most requests running at a time, what they ask for, and how often drafts are made to be right."""

    max_batch: int
    load: Load
    params: SamplingParams
    acceptance: float | None


def main(options: argparse.Namespace) -> int:
    """Prints a table, or JSON. Exit status: 1 if a request did not get all its tokens, else 0.

    Several batch sizes or kinds of drafts are replayed one after the other on one engine, and each is printed as a row
    once it is done. JSON then has a list ``results``; a file holds those so far.
    """
    cases = _cases(options)
    _check_engine(options)
    output.check_files(options)
    say(f"{options.checkpoint}: loading")
    model = _model(options.checkpoint, options.dtype, drafts=any(case.params.speculation for case in cases))
    max_len, num_pages = _sizes(options, cases, model.max_position_embeddings)
    traces = [make_trace(case.load, vocab_size=model.vocab_size, max_len=max_len) for case in cases]
    engine = _engine(options, cases, model, max_len=max_len, num_pages=num_pages)
    say(f"{options.checkpoint}: compiling and warming up")
    engine.warm_up(progress=sys.stderr.isatty())
    results = []
    for case, trace in zip(cases, traces, strict=True):
        say(f"{options.checkpoint}: serving {case.load.requests} requests, at most {case.max_batch} at a time")
        replayed, device = _serve(engine, case, trace)
        results.append(_report(options, case, replayed, device, max_len=max_len, num_pages=num_pages))
        _show(options, results, replayed, several=len(cases) > 1)
    if options.json == "-":
        print(json.dumps({"results": results} if len(cases) > 1 else results[0]))
    return int(any(result["summary"]["served"] < result["summary"]["requests"] for result in results))


def _show(options: argparse.Namespace, results: list[dict], replayed: Replay, *, several: bool) -> None:
    """Prints the last result as a row, or the only one as a table, and writes all results so far to the files."""
    tell = say if options.json == "-" else functools.partial(print, flush=True)
    if several and len(results) == 1:
        tell(report.header(results[0]))
    if several:
        tell(report.row(results[-1]))
    elif options.json != "-":
        print(report.table(results[0]))
    output.save({"results": results} if several else results[0], options.json)
    if options.plot:
        title = f"{options.checkpoint} on {results[0]['machine']['device']}, {results[0]['machine']['date'][:10]}"
        if several:
            report.plot_batches(results, title, options.plot)
        else:
            report.plot(replayed, title, options.plot)


def _serve(engine: Engine, case: Case, trace: Sequence[Request]) -> tuple[Replay, dict[str, int | float] | None]:
    """Replays a case; on a GPU profiles some steps of another replay too, for what the device did."""
    engine.max_running = case.max_batch
    if case.acceptance is not None:
        assert isinstance(engine, SimulatedEngine)
        engine.simulate(case.acceptance)
    rehearse(engine, case.load, case.params)
    engine.clear_prefix_cache()
    replayed, device = replay(engine, trace, case.params, progress=sys.stderr.isatty()), None
    if jax.default_backend() == "gpu":
        engine.clear_prefix_cache()
        try:
            device = watch(engine, case.load, case.params)
        except RuntimeError as error:  # a failing profiler costs a figure, not the run
            say(f"what the device did is unknown: {error}")
    engine.clear_prefix_cache()
    return replayed, device


def _engine(
    options: argparse.Namespace, cases: Sequence[Case], model: CausalLM, *, max_len: int, num_pages: int
) -> Engine:
    """One engine for all cases."""
    batches = sorted({case.max_batch for case in cases})
    trees = dict.fromkeys(case.params.speculation for case in cases if case.params.speculation)
    simulated = any(case.acceptance is not None for case in cases)
    return (SimulatedEngine if simulated else Engine)(
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
    """A case for each batch size and kind of drafts, all of the same seed."""
    batches = _numbers("max_batch", options.max_batch, int)
    seed = secrets.randbits(31) if options.seed is None else options.seed
    facts = {field.name: getattr(options, field.name) for field in dataclasses.fields(Load)} | {"seed": seed}
    cases = []
    for batch in batches:
        if batch < 1:
            raise ValueError(f"max_batch={batch} must be at least 1")
        if options.requests is None:  # enough to fill the batch some times over
            facts["requests"] = 64 if len(batches) == 1 else max(8, 4 * batch)
        load = Load(**facts)
        for tree, acceptance in _drafting(options):
            # No stop tokens: lengths are those of the trace.
            params = SamplingParams(temperature=options.temperature, speculation=tree, seed=seed % 2**32)
            cases.append(Case(batch, load, params, acceptance))
    return cases


def _drafting(options: argparse.Namespace) -> list[tuple[DraftTree | None, float | None]]:
    """Draft trees, each with every probability that its drafts are right; None where that is not simulated."""
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
    """Values of an option that takes one, or several with commas between."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name}={text!r} must be of type {kind.__name__}, or several with commas between") from None


def _check_engine(options: argparse.Namespace) -> None:
    """Refuses what the engine would refuse only after minutes of loading."""
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
    long = load.long_prompt + load.new_tokens if load.long_prompt else 0
    max_len = min(max(usual, long), fitting) if options.max_len is None else options.max_len
    if max_len > fitting:
        raise ValueError(f"max_len={max_len} must be at most {fitting}, what the model and num_pages have room for")
    if options.num_pages is not None:
        return max_len, options.num_pages
    lengths = [max_len, *(most - 1) * [min(usual, max_len) if long else max_len]]
    return max_len, sum(-(-length // options.page_size) for length in lengths)


def _model(checkpoint: str, dtype: str, *, drafts: bool) -> CausalLM:
    if checkpoint in CONFIGS:
        config = CONFIGS[checkpoint] | {"num_nextn_predict_layers": int(drafts)}
        return random_model(config, dtype=jnp.dtype(dtype))
    if not pathlib.Path(checkpoint).is_dir():
        raise ValueError(f"checkpoint={checkpoint!r} must be a folder or one of {', '.join(CONFIGS)}")
    return load_checkpoint(checkpoint, dtype=jnp.dtype(dtype))


def _report(
    options: argparse.Namespace,
    case: Case,
    replayed: Replay,
    device: dict[str, int | float] | None,
    *,
    max_len: int,
    num_pages: int,
) -> dict:
    """The report of a replay, as JSON holds it."""
    tree = case.params.speculation
    configuration = {
        "checkpoint": options.checkpoint,
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
        "summary": report.summarize(replayed, device, drafts=tree is not None),
        "records": [dataclasses.asdict(record) for record in replayed.records],
        "timeline": replayed.timeline,
    }
