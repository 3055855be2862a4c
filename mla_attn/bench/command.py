"""``mla-attn bench``."""

import argparse
import functools
import json
import secrets
import sys
from collections.abc import Collection, Mapping
from typing import Any

import jax

from mla_attn.bench import baseline, model, report, serve
from mla_attn.bench.run import default_implementations, run
from mla_attn.bench.shapes import GRAMMAR, SETS, Shape, parse_lengths, parse_shape
from mla_attn.cache.formats import FORMATS
from mla_attn.dispatch import NAMES

# Options that not all of them take: the bench of shapes, that of --model, and --serve.
_OF_SHAPES = ("shape", "set", "kv_lens", "heads", "q_len", "latent", "repeats", "unroll")
_OF_MODEL = ("model", "batch", "kv_len")
_NOT_OF_MODEL = ("dtype", "seed", "plot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = f"Check and time MLA implementations. A shape is {GRAMMAR}"
    add = parser.add_argument
    add("--shape", action="append", default=[], metavar="SHAPE", help="a shape; may be repeated")
    add("--set", choices=SETS, help="named shapes (default: cpu on a CPU, hopper elsewhere)")
    add("--kv-lens", metavar="LENGTHS", help="lengths of one more shape, as 32768,63*16, with --heads and --q-len")
    add("--heads", type=int, default=128, metavar="H", help="query heads of --kv-lens (default 128)")
    add("--q-len", type=int, default=1, metavar="S", help="query tokens of --kv-lens (default 1)")
    add("--list", action="store_true", help="print the named shapes and run nothing")
    add("--model", choices=model.CONFIGS, help="time decode steps of a whole model of random weights instead")
    add("--batch", default="1,16,64", metavar="B,B", help="batches of --model (default 1,16,64)")
    add("--kv-len", type=int, default=4096, metavar="N", help="tokens of each request of --model (default 4096)")
    add("--page-size", type=int, default=64, metavar="P", help="tokens per page (default 64)")
    add("--dtype", choices=tuple(FORMATS), default="bfloat16", help="of pool and queries (default bfloat16)")
    add("--latent", default="512+64", metavar="R+E", help="latent and rope channels (default 512+64)")
    add(
        "--implementation",
        metavar="A,B",
        help=f"which, of {', '.join(NAMES)}, {baseline.NAME} (default: all that serve unasked, and {baseline.NAME}: a "
        "gather of the whole padded table, then one softmax)",
    )
    add("--repeats", type=int, default=7, metavar="N", help="timed chains, of which the median counts (default 7)")
    add("--unroll", action="store_true", help="unroll the chain of calls instead of looping over it")
    add("--seed", type=int, metavar="S", help="of all data (default: a new one)")
    add("--json", nargs="?", const="-", metavar="FILE", help="write all there is to FILE, or print it for the table")
    add("--plot", metavar="FILE", help="draw a roofline picture, or one of latencies (needs matplotlib)")
    others = vars(parser.parse_args([])).keys()
    serve.add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    parser.set_defaults(run=functools.partial(_main, defaults=defaults, serving=defaults.keys() - others))


def _main(options: argparse.Namespace, *, defaults: Mapping[str, Any], serving: Collection[str]) -> int:
    """Exit status: 1 if an implementation is wrong or fails, else 0."""
    if options.list:
        print(GRAMMAR)
        for name, texts in SETS.items():
            print(f"\n{name}:", *texts, sep="\n  ")
        return 0

    def refuse(names: Collection[str], where: str) -> None:
        for name, value in defaults.items():
            if name in names and getattr(options, name) != value:
                raise ValueError(f"--{name.replace('_', '-')} must not be given {where}")

    if options.serve is not None:
        refuse((*_OF_SHAPES, *_OF_MODEL), "with --serve")
        return serve.main(options, _say)
    refuse(serving, "without --serve")
    if options.model:
        refuse((*_OF_SHAPES, *_NOT_OF_MODEL), "with --model")
        return model.main(options, _say)
    refuse(_OF_MODEL, "without --model")
    asked = {
        "page_size": _at_least_one("--page-size", options.page_size),
        "dtype": options.dtype,
        "latent": _latent(options.latent),
        "repeats": _at_least_one("--repeats", options.repeats),
        "unroll": options.unroll,
        "seed": _seed(options.seed),
    }
    shapes, implementations = _shapes(options), _implementations(options.implementation)
    report.check_files(options)
    found = run(shapes, implementations, **asked, say=_say, save=lambda found: report.save(found, options.json))
    print(json.dumps(found) if options.json == "-" else report.table(found))
    if options.plot:
        report.plot(found, options.plot)
    return int(any(result["status"] in ("wrong", "failed") for result in found["results"]))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
