"""``mla-attn bench ops | roofline | model | serve | host``."""

import argparse

from mla_attn.bench import model
from mla_attn.bench.ops import command as ops
from mla_attn.bench.ops import roofline
from mla_attn.bench.serve import command as serve
from mla_attn.bench.serve import host


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A subcommand for each kind of benchmark, with options of its own."""
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    ops.add_arguments(kinds.add_parser("ops", help="check and time attention implementations, call by call"))
    roofline.add_arguments(kinds.add_parser("roofline", help="draw the picture of a report of `bench ops`"))
    model.add_arguments(kinds.add_parser("model", help="time decode steps of a whole model of random weights"))
    serve.add_arguments(kinds.add_parser("serve", help="replay a trace of requests on the engine"))
    host.add_arguments(kinds.add_parser("host", help="time the engine's own work, without a device's"))
