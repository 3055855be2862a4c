"""The report as text and as a roofline picture."""

import pathlib

from mla_attn.bench.ops.run import Result


def table(report: dict) -> str:
    """Markdown: machine and ceilings, then a row per shape and implementation, then what was not measured and why."""
    machine, configuration, (short, sustained, read) = report["machine"], report["configuration"], _ceilings(report)
    results, (prefix, unit) = _results(report), _unit(report)
    columns = ["shape", "implementation", "kernel us", "kernels", "wall us", "sustained us", "host us"]
    columns += [f"{prefix}B/s", f"{prefix}FLOP/s", "% of bound", "bound", "temp MiB"]
    rows = [columns, ["---"] * 2 + ["---:"] * (len(columns) - 2), *(_row(r, unit) for r in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = [
        f"{machine['device']}, jax {machine['jax']}, jaxlib {machine['jaxlib']}, {machine['date']}",
        f"{configuration['dtype']}, page {configuration['page_size']}, latent {configuration['latent']}, seed "
        f"{configuration['seed']}, calls chained in {'one unrolled program' if configuration['unroll'] else 'a loop'}",
        f"ceilings: read {_number(read / unit)} {prefix}B/s, {report['ceilings']['product']} product "
        f"{_number(short / unit)} {prefix}FLOP/s in a short run (the bound), {_number(sustained / unit)} sustained",
        "",
        *("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows),
        "",
        f"{prefix}B/s, {prefix}FLOP/s, % of bound: from the least bytes and operations of the shape, and from kernel "
        "time, or wall time where that is unknown. Kernel and wall us: of short runs after a rest. Wall: a "
        "call of a chain; on a GPU by the GPU's clock, with the loop's own kernels and all gaps, and launched without "
        "command buffers. Sustained: calls back to back, once a power limit has lowered the GPU's frequency.",
    ]
    notes = [f"{r.shape}, {r.implementation}: {r.status}: {r.reason}" for r in results if r.status != "ok"]
    notes += dict.fromkeys(f"no kernel time: {r.kernel_reason}" for r in results if r.kernel_reason)
    return "\n".join(lines + notes)


def _results(report: dict) -> list[Result]:
    return [Result(**result) for result in report["results"]]


def _ceilings(report: dict) -> tuple[float, float, float]:
    ceilings = report["ceilings"]
    return ceilings["product_flops_short"], ceilings["product_flops_sustained"], ceilings["read_bytes"]


def _unit(report: dict) -> tuple[str, float]:
    return ("T", 1e12) if report["ceilings"]["read_bytes"] > 1e11 else ("G", 1e9)


def _row(r: Result, unit: float) -> list[str]:
    launches = None if r.kernels is None else sum(count for count, _ in r.kernels.values())
    rates = [None] * 3
    if r.seconds is not None:
        rates = [r.bytes / r.seconds / unit, r.flops / r.seconds / unit, r.bound_us / r.seconds * 1e-4]
    temp = None if r.temp_bytes is None else r.temp_bytes / 2**20
    wall = _number(r.wall_us) if r.status == "ok" else r.status
    numbers = [_number(r.kernel_us), _number(launches), wall, _number(r.sustained_us), _number(r.host_us)]
    numbers += map(_number, rates)
    return [r.shape, r.implementation, *numbers, r.bound, _number(temp)]


def _number(x: float | None) -> str:
    if x is None:
        return "-"
    return f"{x:.0f}" if x >= 1000 else f"{x:.4g}"


def plot(report: dict, path: str | pathlib.Path) -> None:
    """Achieved rate against intensity (operations per byte, both the least there are), under this run's ceilings."""
    from matplotlib.figure import Figure

    prefix, unit = _unit(report)
    short, sustained, read = (rate / unit for rate in _ceilings(report))
    points = [
        (r.implementation, r.shape, r.flops / r.bytes, r.flops / r.seconds / unit)
        for r in _results(report)
        if r.seconds
    ]
    left, right = (f([short / read, *(x for _, _, x, _ in points)]) for f in (min, max))
    left, right = left / 2, right * 2
    axes = (figure := Figure(figsize=(9, 6), layout="constrained")).add_subplot(xscale="log", yscale="log")
    axes.plot([left, short / read, right], [left * read, short, short], "k-", label="read; product, short run")
    axes.plot([sustained / read, right], [sustained, sustained], "k:", label="product, sustained")
    for implementation in dict.fromkeys(name for name, *_ in points):
        mine = [(x, y) for name, _, x, y in points if name == implementation]
        axes.plot(*zip(*mine, strict=True), "o", label=implementation)
    for shape in dict.fromkeys(shape for _, shape, *_ in points):
        at = max(((x, y) for _, name, x, y in points if name == shape), key=lambda at: at[1])
        axes.annotate(shape, at, textcoords="offset points", xytext=(5, 4), fontsize=7)
    axes.set(xlabel="FLOP/byte", ylabel=f"{prefix}FLOP/s")
    axes.set_title(f"{report['machine']['device']}, {report['machine']['date'][:10]}")
    axes.legend()
    axes.grid(visible=True, which="both", alpha=0.2)
    figure.savefig(path, dpi=150)
