"""The command line: ``mla-attn generate | calibrate | warm-up | demo | bench | supports``.

This module imports nothing slow, so that wrong arguments are reported at once. ``arguments`` defines the options of
every command, ``options`` their types and ranges, ``process`` sets up signals and streams. A command is the ``main`` of
the module that ``arguments`` names; only that module may import JAX.
"""

import importlib
import sys
from collections.abc import Sequence

from mla_attn.cli import process
from mla_attn.cli.arguments import make_parser
from mla_attn.text import line


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 if a benchmark found a wrong result, or 2 for an error, which is
    printed in one line.

    Args:
        arguments: arguments of the command. None takes those of the process, and sets up the process's signals and
            streams as for a program run by a shell.
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
