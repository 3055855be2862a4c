"""The report of replays, as text, as JSON and as pictures."""

import collections
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from mla_attn.bench.serve.replay import Record, Replay

_PERCENTILES = (50, 90, 99)


def percentiles(values: Sequence[float | None]) -> dict[str, float] | None:
    """p50, p90 and p99 of the values that are not None; None if there are none."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    return {f"p{p}": value for p, value in zip(_PERCENTILES, np.percentile(there, _PERCENTILES).tolist(), strict=True)}


def summarize(replay: Replay, device: dict[str, int | float] | None = None, *, drafts: bool) -> dict:
    """Figures of a replay and of ``watch``; times in seconds, rates per second, None for missing figures."""
    records, statistics = replay.records, replay.statistics
    prompt_tokens = sum(record.prompt_tokens for record in records)
    new_tokens = sum(record.new_tokens for record in records)
    looked_up = replay.reused_rows + replay.prompt_rows
    per_second = 1 / replay.duration if replay.duration else 0.0
    return {
        "requests": len(records),
        "served": sum(record.served for record in records),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "duration": replay.duration,
        "output_tokens_per_second": new_tokens * per_second,
        "total_tokens_per_second": (prompt_tokens + new_tokens) * per_second,
        "time_to_first_token": percentiles([record.time_to_first_token for record in records]),
        "time_per_output_token": percentiles([record.time_per_token for record in records]),
        "latency": percentiles([record.latency for record in records]),
        "acceptance_length": _acceptance_length(records) if drafts else None,
        "prefix_share": replay.reused_rows / looked_up if looked_up else 0.0,
        "preemptions": replay.preemptions,
        "most_pages": replay.most_pages,
        "steps": replay.steps,
        "step_time": replay.step_seconds / replay.steps if replay.steps else None,
        "host_time": (replay.step_seconds - replay.wait_seconds) / replay.steps if replay.steps else None,
        "device": device,
        "programs": statistics.programs,
        "warm_up_seconds": statistics.warm_up_seconds,
        "compiles_after_warm_up": statistics.compiles_after_warm_up,
    }


def _acceptance_length(records: Sequence[Record]) -> float | None:
    """Mean tokens per request and verify pass. A request's first token comes from its prompt and does not count."""
    passes = sum(max(record.outputs - 1, 0) for record in records)
    return sum(max(record.new_tokens - 1, 0) for record in records) / passes if passes else None


def table(report: dict) -> str:
    """The report as text: configuration and machine, then one figure per line."""
    config, summary = report["configuration"], report["summary"]
    rate = "all at once" if config["rate"] is None else f"{config['rate']:g} per second"
    accepted = "-" if summary["acceptance_length"] is None else f"{summary['acceptance_length']:.2f}"
    lines = {
        "requests": f"{summary['requests']}, {summary['served']} served in full, {rate}",
        "prompt tokens": f"{summary['prompt_tokens']}, {100 * summary['prefix_share']:.1f} % found in the prefix cache",
        "new tokens": f"{summary['new_tokens']}, acceptance length {accepted}",
        "duration": f"{summary['duration']:.2f} s, {summary['steps']} engine steps of "
        f"{_figure(summary['step_time'], 1e3)} ms",
        "host ms per step": _figure(summary["host_time"], 1e3),
        "throughput": f"{summary['output_tokens_per_second']:.1f} output tokens/s, "
        f"{summary['total_tokens_per_second']:.1f} with prompts",
        "pages": f"{summary['most_pages']} of {config['num_pages']} held at most by requests; "
        f"{summary['preemptions']} preemptions",
        "programs": f"{summary['programs']}, compiled in {summary['warm_up_seconds']:.1f} s; "
        f"{summary['compiles_after_warm_up']} more after warm-up",
    }
    if (device := summary["device"]) is not None:
        lines["device"] = (
            f"busy {100 * device['busy']:.1f} %, waits for the host {100 * device['waited']:.1f} % of "
            f"{device['steps']} steps of {1e3 * device['step_time']:.2f} ms under the profiler"
        )
    head = [
        _machine(report),
        f"{config['checkpoint']}, {config['dtype']}, page {config['page_size']}, at most {config['max_batch']} "
        f"requests of {config['max_len']} tokens at a time, {_drafts(config)}, seed {config['seed']}",
    ]
    return "\n".join([*head, "", *(f"{name:<16}{value}" for name, value in lines.items()), "", _latencies(summary)])


def _machine(report: dict) -> str:
    host = report["machine"]
    return f"{host['device']}, jax {host['jax']}, jaxlib {host['jaxlib']}, {host['date']}"


def _drafts(config: dict) -> str:
    drafts = "no drafts" if config["tree"] is None else "drafts " + "x".join(map(str, config["tree"]))
    if config["simulated_acceptance"] is None:
        return drafts if config["tree"] is None else f"{drafts} (of random prompts)"
    return f"{drafts} (each SIMULATED to be right with probability {config['simulated_acceptance']:g})"


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


# Columns of the table of several replays: (title, width, function from a result to its figure).
_COLUMNS: tuple[tuple[str, int, Callable[[dict, dict], str]], ...] = (
    ("batch", 5, lambda config, summary: str(config["max_batch"])),
    ("requests", 9, lambda config, summary: f"{summary['served']}/{summary['requests']}"),
    ("tokens/s", 9, lambda config, summary: f"{summary['output_tokens_per_second']:.1f}"),
    ("accepted", 9, lambda config, summary: _figure(summary["acceptance_length"])),
    ("step ms", 8, lambda config, summary: _figure(summary["step_time"], 1e3)),
    ("host ms", 8, lambda config, summary: _figure(summary["host_time"], 1e3)),
    ("busy %", 7, lambda config, summary: _figure((summary["device"] or {}).get("busy"), 1e2)),
    ("waits %", 8, lambda config, summary: _figure((summary["device"] or {}).get("waited"), 1e2)),
    ("ms/token", 9, lambda config, summary: _figure((summary["time_per_output_token"] or {}).get("p50"), 1e3)),
)


def _figure(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{unit * value:.2f}"


def header(report: dict) -> str:
    """The lines above the rows of several replays."""
    config, summary = report["configuration"], report["summary"]
    return "\n".join(
        [
            _machine(report),
            f"{config['checkpoint']}, {config['dtype']}, page {config['page_size']}, requests of at most "
            f"{config['max_len']} tokens, {summary['programs']} programs compiled in "
            f"{summary['warm_up_seconds']:.1f} s, seed {config['seed']}",
            "tokens/s: output tokens; accepted: tokens per verify pass; busy, waits (for the host): shares of the "
            "device's time in a profile; ms/token: p50",
            "",
            " ".join(title.rjust(width) for title, width, _ in _COLUMNS) + "  drafts",
        ]
    )


def row(report: dict) -> str:
    """The row of one of several replays."""
    config, summary = report["configuration"], report["summary"]
    return " ".join(figure(config, summary).rjust(width) for _, width, figure in _COLUMNS) + f"  {_drafts(config)}"


def plot_batches(results: Sequence[dict], title: str, path: str | pathlib.Path) -> None:
    """Draws output tokens per second against the batch size, one line for each kind of drafts."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(9, 6), layout="constrained")).add_subplot(xscale="log")
    lines = collections.defaultdict(list)
    for report in results:
        point = report["configuration"]["max_batch"], report["summary"]["output_tokens_per_second"]
        lines[_drafts(report["configuration"])].append(point)
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), "o-", label=name)
    batches = sorted({batch for points in lines.values() for batch, _ in points})
    axes.set_xticks(batches, labels=map(str, batches))
    axes.minorticks_off()
    axes.set(xlabel="most running requests", ylabel="output tokens per second", ylim=(0, None))
    axes.legend()
    axes.grid(visible=True, alpha=0.2)
    axes.set_title(title)
    figure.savefig(path, dpi=150)


def plot(replay: Replay, title: str, path: str | pathlib.Path) -> None:
    """Draws the distributions of time to first token and time per output token, and running and waiting requests over
    time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.5), layout="constrained")
    first, per_token, timeline = figure.subplots(1, 3)
    for axes, name, values in (
        (first, "time to first token", [record.time_to_first_token for record in replay.records]),
        (per_token, "time per output token, mean of a request", [record.time_per_token for record in replay.records]),
    ):
        there = [1e3 * value for value in values if value is not None]
        if there:  # requests of one token have no time between tokens
            axes.ecdf(there)
        axes.set(xlabel=f"{name}, ms", ylabel="share of requests", ylim=(0, 1))
    seconds, running, waiting = zip(*replay.timeline, strict=True)
    timeline.step(seconds, running, where="post", label="running")
    timeline.step(seconds, waiting, where="post", label="waiting")
    timeline.set(xlabel="seconds", ylabel="requests", ylim=(0, None))
    timeline.legend()
    for axes in (first, per_token, timeline):
        axes.grid(visible=True, alpha=0.2)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
