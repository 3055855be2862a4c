"""``mla-attn bench ops``: its options, and their checks."""

import argparse
import json
import secrets

import jax

from mla_attn.bench import output
from mla_attn.bench.ops import baseline, report, roofline
from mla_attn.bench.ops.run import default_implementations, run
from mla_attn.bench.ops.shapes import GRAMMAR, SETS, Shape, parse_lengths, parse_shape
from mla_attn.cache.formats import FORMATS
from mla_attn.dispatch import NAMES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``mla-attn bench ops``."""
    parser.description = f"Check and time MLA implementations. A shape is {GRAMMAR}"
    parser.set_defaults(run=main)
    add = parser.add_argument
    add("--shape", action="append", default=[], metavar="SHAPE", help="a shape; may be repeated")
    add("--set", choices=SETS, help="named shapes (default: cpu on a CPU, hopper elsewhere)")
    add("--kv-lens", metavar="LENGTHS", help="lengths of one more shape, as 32768,63*16, with --heads and --q-len")
    add("--heads", type=int, default=128, metavar="H", help="query heads of --kv-lens (default 128)")
    add("--q-len", type=int, default=1, metavar="S", help="query tokens of --kv-lens (default 1)")
    add("--list", action="store_true", help="print the named shapes and run nothing")
    add("--page-size", type=int, default=64, metavar="P", help="tokens per page (default 64)")
    add("--dtype", choices=tuple(FORMATS), default="bfloat16", help="of pool and queries (default bfloat16)")
    add("--latent", default="512+64", metavar="R+E", help="latent and rope channels (default 512+64)")
    add(
        "--implementation",
        metavar="A,B",
        help=f"which, of {', '.join(NAMES)}, {baseline.NAME} (default: all that are chosen unasked, and "
        f"{baseline.NAME}: a gather of the whole padded table, then one softmax)",
    )
    add("--repeats", type=int, default=7, metavar="N", help="timed chains, of which the median counts (default 7)")
    add(
        "--unroll",
        action="store_true",
        help="unroll the chain of calls instead of looping over it: a loop adds some 15 us a call to a GPU's wall time",
    )
    add("--seed", type=int, metavar="S", help="of all data (default: a new one)")
    output.add_arguments(parser, picture="a roofline picture")


def main(options: argparse.Namespace) -> int:
    """Runs the benchmark. Exit status: 1 if an implementation is wrong or fails, else 0."""
    if options.list:
        print(GRAMMAR)
        for name, texts in SETS.items():
            print(f"\n{name}:", *texts, sep="\n  ")
        return 0
    config = {
        "page_size": _at_least_one("--page-size", options.page_size),
        "dtype": options.dtype,
        "latent": _latent(options.latent),
        "repeats": _at_least_one("--repeats", options.repeats),
        "unroll": options.unroll,
        "seed": _seed(options.seed),
    }
    shapes, implementations = _shapes(options), _implementations(options.implementation)
    output.check_files(options)
    full = run(shapes, implementations, **config, save=lambda report: output.save(report, options.json))
    print(json.dumps(full) if options.json == "-" else report.table(full))
    if options.plot:
        roofline.draw(full, options.plot)
    return int(any(result["status"] in ("wrong", "failed") for result in full["results"]))


def _shapes(options: argparse.Namespace) -> list[Shape]:
    texts = list(SETS[options.set]) if options.set else []
    texts += options.shape
    if options.kv_lens:
        lengths = parse_lengths(options.kv_lens)
        texts.append(f"{len(lengths)}x{options.heads}x{options.q_len}x{options.kv_lens.replace(',', '+')}")
    return [parse_shape(text) for text in texts or SETS["cpu" if jax.default_backend() == "cpu" else "hopper"]]


def _implementations(text: str | None) -> list[str]:
    names = text.split(",") if text else default_implementations()
    allowed = (*NAMES, baseline.NAME)
    for name in names:
        if name not in allowed:
            raise ValueError(f"--implementation {name!r} must be one of {', '.join(allowed)}")
    return names


def _latent(text: str) -> tuple[int, int]:
    rank, plus, rope = text.partition("+")
    if not (plus and rank.isdecimal() and rope.isdecimal() and int(rank) > 0):
        raise ValueError(f"--latent {text!r} must be latent channels, at least 1, and rope channels, as 512+64")
    return int(rank), int(rope)


def _seed(seed: int | None) -> int:
    if seed is None:
        return secrets.randbits(31)
    if not 0 <= seed < 2**32:
        raise ValueError(f"--seed {seed} must be 0 to 2**32 - 1")
    return seed


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} {value} must be at least 1")
    return value
