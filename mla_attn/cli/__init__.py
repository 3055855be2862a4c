"""Command line: ``mla-attn generate | demo | bench | supports``.

Nothing is imported here that takes time: what is wrong with a call is said at once. ``arguments`` has the options of
every command, ``options`` their kinds and ranges, ``process`` what a program owes the shell; a command itself is the
``main`` of the module that ``arguments`` names, which may import JAX.
"""

import importlib
import sys
from collections.abc import Sequence

from mla_attn.cli import process
from mla_attn.cli.arguments import make_parser
from mla_attn.text import line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 if a benchmark found something wrong, or 2 for a call that cannot
    be served, told in one line.

    Args:
        arguments: of the command; those of the process if None, which then is all this command's: its signals and
            streams are set as those of programs that shells run.
    """
    if arguments is None:
        process.own()
    try:
        options = make_parser().parse_args(arguments)
        options.check(options)
        process.start_jax()
        return importlib.import_module(options.run).main(options)
    except (ValueError, NotImplementedError, OSError, ImportError, MemoryError) as error:
        print(f"mla-attn: error: {line(str(error)) or type(error).__name__}", file=sys.stderr)
    except RuntimeError as error:
        if not process.is_out_of_memory(error):
            raise
        print(f"mla-attn: error: out of memory: {line(str(error), 300)}", file=sys.stderr)
    return 2
