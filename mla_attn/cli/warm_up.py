"""``mla-attn warm-up``."""

import argparse
import sys

from mla_attn.bench.start import engine_options
from mla_attn.cli.drafts import open_drafts
from mla_attn.engine import Engine
from mla_attn.models import open_checkpoint


def main(options: argparse.Namespace) -> int:
    """Prints how many programs there are, the seconds they took, and the bytes of the folder. Exit status 0."""
    arguments = engine_options(options)
    checkpoint = open_checkpoint(options.checkpoint, dtype=options.dtype)
    _, load_draft = open_drafts(options, checkpoint.model, arguments["speculation"])
    engine = Engine(checkpoint.load(), draft=load_draft(), **arguments)
    if engine.folder is None:
        raise ValueError("--cache-dir is empty, must be a folder")
    seconds = engine.warm_up(progress=sys.stderr.isatty())
    folder, programs = engine.folder, engine.statistics.programs
    size = f"{folder.size() / 1e6:.1f} MB in {folder.path}"
    print(f"{programs} programs in {seconds:.1f} s, {folder.read} of them lowered before; {size}")
    return 0 if folder.read + folder.written >= programs else 1
