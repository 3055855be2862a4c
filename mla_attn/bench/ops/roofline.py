"""The roofline picture of a report of ``mla-attn bench ops``, drawn after a run or from its JSON."""

import argparse
import json
import pathlib

from mla_attn.bench.ops.report import rates_of, results_of, unit_of


def main(options: argparse.Namespace) -> int:
    """Draws the picture of ``mla-attn bench roofline``. Exit status 0."""
    try:
        with open(options.report, encoding="utf-8") as file:
            report = json.load(file)
        draw(report, options.plot)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{options.report!r} must be a report of `mla-attn bench ops --json`: {error!r}") from None
    return 0


def draw(report: dict, path: str | pathlib.Path) -> None:
    """Draws the roofline, and beside it the share of its bound that each implementation reaches on each shape.

    Roofline: achieved rate against intensity (operations per byte, both the least that the shape needs), under the
    ceilings of the report.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    prefix, scale = unit_of(report)
    short, sustained, read = (rate / scale for rate in rates_of(report))
    results = [(r, r.seconds) for r in results_of(report) if r.seconds]
    intensity = {r.shape: r.flops / r.bytes for r, _ in results}
    left, right = (f([short / read, *intensity.values()]) for f in (min, max))
    left, right = left / 1.5, right * 1.5
    shapes = sorted(intensity, key=lambda shape: -intensity[shape])
    implementations = list(dict.fromkeys(r.implementation for r, _ in results))
    figure = Figure(figsize=(10, max(4.0, 0.35 * len(shapes))), layout="constrained")
    roof, shares = figure.subplots(1, 2)
    roof.plot([left, short / read, right], [left * read, short, short], "k-", label="read; product, short run")
    roof.plot([sustained / read, right], [sustained, sustained], "k:", label="product, sustained")
    for number, implementation in enumerate(implementations):
        mine = [(r, seconds) for r, seconds in results if r.implementation == implementation]
        marker = {"marker": "osD^vP"[number % 6], "markersize": 5, "linestyle": "", "label": implementation}
        roof.plot([intensity[r.shape] for r, _ in mine], [r.flops / s / scale for r, s in mine], **marker)
        # The implementations of a shape are one below the other, because most differ by a few percent.
        offset = 0.7 * ((number + 0.5) / len(implementations) - 0.5)
        rows = [shapes.index(r.shape) + offset for r, _ in mine]
        shares.plot([100 * r.bound_us * 1e-6 / s for r, s in mine], rows, **marker)
    roof.set(xscale="log", yscale="log", xlabel="FLOP/byte", ylabel=f"{prefix}FLOP/s")
    roof.legend(loc="lower right", fontsize="small")
    shares.set(xlabel="% of the bound", xlim=(0, 105), ylim=(len(shapes) - 0.5, -0.5), yticks=range(len(shapes)))
    shares.set_yticklabels(shapes, fontsize="small")
    for axis in (roof.xaxis, roof.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    for axes in (roof, shares):
        axes.grid(visible=True, alpha=0.2)
    figure.suptitle(f"{report['machine']['device']}, {report['machine']['date'][:10]}")
    # Text as text, and nothing that differs from one drawing to the next.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "roofline"}):
        metadata = {"Date": None} if str(path).endswith(".svg") else None
        figure.savefig(path, dpi=150, metadata=metadata)
