"""``mla-attn bench serve``: builds an engine from the options and runs the replays."""

import argparse
import dataclasses
import functools
import json
import math
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mla_attn.bench import output
from mla_attn.bench.configs import CONFIGS
from mla_attn.bench.machine import machine
from mla_attn.bench.output import say
from mla_attn.bench.serve import report
from mla_attn.bench.serve.engines import SimulatedEngine
from mla_attn.bench.serve.replay import Replay, rehearse, replay, watch
from mla_attn.bench.serve.trace import Load, Request, make_trace
from mla_attn.engine import Engine, SamplingParams
from mla_attn.engine.sizes import check_engine_fits
from mla_attn.models import CausalLM, open_checkpoint, random_model
from mla_attn.speculative import DraftTree

_USUAL = 4  # most tokens of a request as a multiple of the mean: at a spread of 0.5, 0.1 % of the lengths are longer


@dataclasses.dataclass(frozen=True)
class Case:
    """One replay: the batch size, the load, the sampling parameters, and the simulated acceptance of drafts."""

    max_batch: int
    load: Load
    params: SamplingParams
    acceptance: float | None


def main(options: argparse.Namespace) -> int:
    """Prints a table, or JSON. Exit status: 1 if a request did not get all its tokens, else 0.

    Several batch sizes or kinds of drafts are replayed one after the other on one engine; each prints a row when it is
    done. JSON then has a list ``results``, and a file is written after every replay.
    """
    cases = _cases(options)
    drafts = any(case.params.speculation for case in cases)
    model, load = open_model(options.checkpoint, options.dtype, drafts=drafts)
    max_len, num_pages = _sizes(options, cases, model.max_position_embeddings)
    sizes = {"max_len": max_len, "num_pages": num_pages, "page_size": options.page_size}
    sizes |= {"max_batch": max(options.max_batch), "prompt_tokens": options.step_prompt_tokens}
    check_engine_fits(model, None, _trees(cases), **sizes)
    if drafts and options.acceptance is None:
        say(
            "note: prompts are random token ids, so drafts are seldom accepted and cost more than they save; "
            "--acceptance 0.8 simulates an acceptance of 80 %"
        )
    traces = [make_trace(case.load, vocab_size=model.vocab_size, max_len=max_len) for case in cases]
    say(f"{options.checkpoint}: loading")
    engine = _engine(options, cases, load(), **sizes)
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
    """Prints the last result as a row, or a single one as a table, and writes all results so far to the files."""
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
    """Replays a case; on a GPU also profiles some steps of another replay, to measure how busy the device is."""
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
        except RuntimeError as error:  # if the profiler fails, only a figure is missing
            say(f"device occupancy is unknown: {error}")
    engine.clear_prefix_cache()
    return replayed, device


def _engine(options: argparse.Namespace, cases: Sequence[Case], model: CausalLM, **sizes: Any) -> Engine:
    """Builds one engine for all cases."""
    batches = sorted({case.max_batch for case in cases})
    simulated = any(case.acceptance is not None for case in cases)
    return (SimulatedEngine if simulated else Engine)(
        model,
        **sizes,
        batches=batches if len(batches) > 1 else None,
        speculation=_trees(cases),
        max_waiting=max(max(case.load.requests, 2 * case.max_batch) for case in cases),
        implementation=options.implementation,
        cache_dir=options.cache_dir,
    )


def _trees(cases: Sequence[Case]) -> tuple[DraftTree, ...]:
    return tuple(dict.fromkeys(case.params.speculation for case in cases if case.params.speculation))


def _cases(options: argparse.Namespace) -> list[Case]:
    """One case for each batch size and kind of drafts, all with the same seed."""
    seed = secrets.randbits(31) if options.seed is None else options.seed
    facts = {field.name: getattr(options, field.name) for field in dataclasses.fields(Load)} | {"seed": seed}
    cases = []
    for batch in options.max_batch:
        if options.requests is None:  # enough to fill the batch several times
            facts["requests"] = 64 if len(options.max_batch) == 1 else max(8, 4 * batch)
        load = Load(**facts)
        for tree, acceptance in _drafting(options):
            # End tokens are ignored, so that lengths are those of the trace.
            params = SamplingParams(temperature=options.temperature, speculation=tree, seed=seed, ignore_eos=True)
            cases.append(Case(batch, load, params, acceptance))
    return cases


def _drafting(options: argparse.Namespace) -> list[tuple[DraftTree | None, float | None]]:
    """Draft trees, each with every acceptance probability to simulate; None if acceptance is not simulated."""
    chains = [DraftTree.chain(length) if length else None for length in options.speculate]
    trees = chains if options.tree is None else [DraftTree(options.tree)]
    rates = options.acceptance
    return [(tree, rate) for tree in trees for rate in (rates if tree and rates else (None,))]


def _sizes(options: argparse.Namespace, cases: Sequence[Case], positions: int) -> tuple[int, int]:
    """Most tokens of a request, and pages of the cache."""
    load, most = cases[0].load, max(case.max_batch for case in cases)  # loads differ only in the number of requests
    fitting = positions if options.num_pages is None else min(positions, options.num_pages * options.page_size)
    usual = load.shared_prefix + _USUAL * (load.prompt_tokens + load.new_tokens)
    long = load.long_prompt + load.new_tokens if load.long_prompt else 0
    max_len = min(max(usual, long), fitting) if options.max_len is None else options.max_len
    if max_len > fitting:
        raise ValueError(f"--max-len {max_len} must be at most {fitting}, what the model and --num-pages have room for")
    if load.mean_tokens > max_len:
        raise ValueError(
            f"--shared-prefix {load.shared_prefix}, --prompt-tokens {load.prompt_tokens} and --new-tokens "
            f"{load.new_tokens} are {load.mean_tokens} together, must be at most {max_len}, what the model has room for"
        )
    if long > max_len:
        raise ValueError(
            f"--long-prompt {load.long_prompt} and --new-tokens {load.new_tokens} are {long} together, must be at most "
            f"{max_len}, what the model has room for"
        )
    if options.num_pages is not None:
        return max_len, options.num_pages
    lengths = [max_len, *(most - 1) * [min(usual, max_len) if long else max_len]]
    return max_len, sum(-(-length // options.page_size) for length in lengths)


def open_model(checkpoint: str, dtype: str, *, drafts: bool) -> tuple[CausalLM, Callable[[], CausalLM]]:
    """An abstract model, and the function that creates it with arrays."""
    if checkpoint in CONFIGS:
        config = CONFIGS[checkpoint] | {"num_nextn_predict_layers": int(drafts)}
        make = functools.partial(random_model, config, dtype=jnp.dtype(dtype))
        return nnx.eval_shape(make), make
    opened = open_checkpoint(checkpoint, dtype=jnp.dtype(dtype))
    if drafts and not opened.model.can_draft:
        raise ValueError(f"{checkpoint}: {opened.model.draft_refusal}")
    return opened.model, opened.load


def _report(
    options: argparse.Namespace,
    case: Case,
    replayed: Replay,
    device: dict[str, int | float] | None,
    *,
    max_len: int,
    num_pages: int,
) -> dict:
    """The report of a replay, in the form that is written as JSON."""
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
