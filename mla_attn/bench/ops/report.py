"""The report of ``mla-attn bench ops`` as text."""

from mla_attn.bench.ops.run import Result


def table(report: dict) -> str:
    """The report as Markdown: machine and ceilings, a row per shape and implementation, and reasons for gaps."""
    machine, configuration, (short, sustained, read) = report["machine"], report["configuration"], rates_of(report)
    results, (prefix, unit) = results_of(report), unit_of(report)
    columns = ["shape", "implementation", "kernel us", "kernels", "wall us", "sustained us", "host us"]
    columns += [f"{prefix}B/s", f"{prefix}FLOP/s", "% of bound", "bound", "temp MiB"]
    rows = [columns, ["---"] * 2 + ["---:"] * (len(columns) - 2), *(_row(r, unit) for r in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines = [
        f"{machine['device']}, jax {machine['jax']}, jaxlib {machine['jaxlib']}, {machine['date']}",
        f"{_dtypes(configuration)}, page {configuration['page_size']}, {_channels(report)}, seed "
        f"{configuration['seed']}, calls chained in {'one unrolled program' if configuration['unroll'] else 'a loop'}",
        f"ceilings: read {_number(read / unit)} {prefix}B/s, {report['ceilings']['product']} product "
        f"{_number(short / unit)} {prefix}FLOP/s in a short run (the bound), {_number(sustained / unit)} sustained",
        "",
        *("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows),
        "",
        f"{prefix}B/s, {prefix}FLOP/s, % of bound: least bytes and operations of the shape, divided by kernel time, "
        "or by wall time where that is unknown. Kernel and wall us: in short runs after a rest. Wall: per call of a "
        "chain; on a GPU by its clock with all gaps, without command buffers, and without --unroll with the loop's "
        "own kernels (about 15 us per call). Sustained: calls back to back, after a power limit has lowered the GPU's "
        "clocks.",
    ]
    notes = [f"{r.shape}, {r.implementation}: {r.status}: {r.reason}" for r in results if r.status != "ok"]
    notes += dict.fromkeys(f"no kernel time: {r.kernel_reason}" for r in results if r.kernel_reason)
    return "\n".join(lines + notes)


def _dtypes(configuration: dict) -> str:
    dtype, kv_dtype = configuration["dtype"], configuration.get("kv_dtype")
    return dtype if kv_dtype in (None, dtype) else f"{dtype}, cache {kv_dtype}"


def _channels(report: dict) -> str:
    configuration = report["configuration"]
    if any("/" in result["shape"] for result in report["results"]):
        return f"heads of {configuration['head_dim']}"
    return f"latent {configuration['latent']}"


def results_of(report: dict) -> list[Result]:
    """The results of a report that was read from JSON."""
    return [Result(**result) for result in report["results"]]


def rates_of(report: dict) -> tuple[float, float, float]:
    """The ceilings of a report: product in a short run, product sustained (FLOP/s), read (bytes/s)."""
    ceilings = report["ceilings"]
    return ceilings["product_flops_short"], ceilings["product_flops_sustained"], ceilings["read_bytes"]


def unit_of(report: dict) -> tuple[str, float]:
    """Prefix and size of the unit in which rates are printed."""
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
