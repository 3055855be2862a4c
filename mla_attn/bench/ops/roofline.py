"""The roofline picture of a report of ``mla-attn bench ops``: drawn after a run, or from its JSON."""

import argparse
import json
import math
import pathlib

from mla_attn.bench.ops.report import rates_of, results_of, unit_of


def main(options: argparse.Namespace) -> int:
    """Draw the picture of ``mla-attn bench roofline``. Exit status 0."""
    try:
        with open(options.report, encoding="utf-8") as file:
            report = json.load(file)
        draw(report, options.plot)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{options.report!r} must be a report of `mla-attn bench ops --json`: {error!r}") from None
    return 0


def draw(report: dict, path: str | pathlib.Path) -> None:
    """Achieved rate against intensity (operations per byte, both the least there are), under the run's ceilings."""
    import matplotlib
    from matplotlib.figure import Figure

    prefix, scale = unit_of(report)
    short, sustained, read = (rate / scale for rate in rates_of(report))
    points = [
        (r.implementation, r.shape, r.flops / r.bytes, r.flops / r.seconds / scale)
        for r in results_of(report)
        if r.seconds
    ]
    left, right = (f([short / read, *(x for _, _, x, _ in points)]) for f in (min, max))
    left, right = left / 1.5, right * 3
    axes = (figure := Figure(figsize=(8, 5), layout="constrained")).add_subplot(xscale="log", yscale="log")
    axes.plot([left, short / read, right], [left * read, short, short], "k-", label="read; product, short run")
    axes.plot([sustained / read, right], [sustained, sustained], "k:", label="product, sustained")
    for number, implementation in enumerate(dict.fromkeys(name for name, *_ in points)):
        mine = [(x, y) for name, _, x, y in points if name == implementation]
        # Hollow marks of several sizes: most peers lie within a few percent of each other.
        size = 6 + 3 * number
        axes.plot(
            *zip(*mine, strict=True), "osD^v"[number % 5], markersize=size, fillstyle="none", label=implementation
        )
    for names, (x, y) in _labels(points):
        if x > short / read and y > 0.7 * short:  # close below the roof: above it, away from the neighbours
            side = "right" if x < 2 * short / read else "left"
            axes.annotate(names, (x, 1.1 * short), ha=side, va="bottom", fontsize=6)
        else:
            axes.annotate(names, (x, y), textcoords="offset points", xytext=(9, -4), va="top", fontsize=6)
    axes.set(xlabel="FLOP/byte", ylabel=f"{prefix}FLOP/s", ylim=(None, 2.5 * short))
    axes.set_title(f"{report['machine']['device']}, {report['machine']['date'][:10]}")
    axes.legend(loc="upper left")
    axes.grid(visible=True, alpha=0.2)
    # Text as text, and nothing that differs from one drawing to the next.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "roofline"}):
        metadata = {"Date": None} if str(path).endswith(".svg") else None
        figure.savefig(path, dpi=150, metadata=metadata)


def _labels(points) -> list[tuple[str, tuple[float, float]]]:
    """Names of shapes, a line each, for every group of like intensity and rate; below the best of its points."""
    best = {}
    for _, shape, x, y in points:
        best[shape] = max(best.get(shape, (x, y)), (x, y), key=lambda at: at[1])
    groups: dict[tuple[int, int], list[str]] = {}
    for shape, (x, y) in sorted(best.items(), key=lambda item: -item[1][1]):
        groups.setdefault((round(4 * math.log2(x)), round(1.5 * math.log2(y))), []).append(shape)
    return [("\n".join(shapes), best[shapes[0]]) for shapes in groups.values()]
