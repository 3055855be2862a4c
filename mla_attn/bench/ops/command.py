"""``mla-attn bench ops``."""

import argparse
import json
import secrets

import jax
import jax.numpy as jnp

from mla_attn.bench import output
from mla_attn.bench.ops import report, roofline
from mla_attn.bench.ops.check import check
from mla_attn.bench.ops.run import default_implementations, run
from mla_attn.bench.ops.shapes import GQA_SETS, SETS, Shape, parse_shape


def main(options: argparse.Namespace) -> int:
    """Runs the benchmark. Exit status: 1 if an implementation is wrong or fails, else 0."""
    if options.check_alone:
        return _check(options)
    full = run(
        _shapes(options),
        options.implementation or default_implementations(options.op),
        page_size=options.page_size,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        latent=options.latent,
        head_dim=options.head_dim,
        repeats=options.repeats,
        unroll=options.unroll,
        seed=secrets.randbits(31) if options.seed is None else options.seed,
        save=lambda report: output.save(report, options.json),
    )
    print(json.dumps(full) if options.json == "-" else report.table(full))
    if options.plot:
        roofline.draw(full, options.plot)
    return int(any(result["status"] in ("wrong", "failed") for result in full["results"]))


def _check(options: argparse.Namespace) -> int:
    """Checks results alone; of the set ``triton`` those of both ops."""
    shapes, usual = _shapes(options), default_implementations(options.op)[:1]
    if options.set == "triton":
        others = GQA_SETS if options.op == "mla" else SETS
        shapes, usual = [*shapes, *map(parse_shape, others["triton"])], ["triton"]
    sizes = {"page_size": options.page_size, "dtype": jnp.dtype(options.dtype)}
    sizes |= {"kv_dtype": options.kv_dtype or options.dtype, "seed": options.seed or 0}
    channels = {"latent": options.latent, "head_dim": options.head_dim}
    return int(not check(shapes, options.implementation or usual, **channels, **sizes))


def _shapes(options: argparse.Namespace) -> list[Shape]:
    usual = None if options.shape else "cpu" if jax.default_backend() == "cpu" else "hopper"
    named = options.set or usual
    sets = SETS if options.op == "mla" else GQA_SETS
    return [*map(parse_shape, sets[named] if named else ()), *(options.shape or ())]
