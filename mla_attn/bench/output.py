"""The output of benchmarks: progress on stderr, and the files of ``--json`` and ``--plot``."""

import argparse
import importlib.util
import json
import pathlib
import sys

from mla_attn.text import shown

PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps", ".ps")


def say(text: str) -> None:
    """Prints progress to stderr, so that stdout has only results."""
    print(text, file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser, *, picture: str | None) -> None:
    """Adds ``--json``, and ``--plot`` if the benchmark can draw a picture."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the report to FILE, or print it instead of the table",
    )
    if picture is not None:
        parser.add_argument("--plot", metavar="FILE", help=f"draw {picture} (needs matplotlib)")
    else:
        parser.set_defaults(plot=None)


def check_files(options: argparse.Namespace, *, picture: str = "--plot") -> None:
    """Raises ImportError or ValueError before the run if the files of ``--json`` or of a picture cannot be written.

    Args:
        options: options with ``json`` and ``plot``.
        picture: the argument that names the picture, for messages.
    """
    if options.plot is not None:
        if pathlib.Path(options.plot).suffix.lower() not in PICTURES:
            raise ValueError(
                f"{picture} {shown(options.plot)} must be a picture's name, in one of {', '.join(PICTURES)}"
            )
        find_matplotlib()
    for option, path in (("--json", options.json), (picture, options.plot)):
        if path not in (None, "-"):
            check_file(option, path)


def check_file(option: str, path: str) -> None:
    """Raises ValueError unless the file that an option names can be written."""
    try:
        open(path, "a", encoding="utf-8").close()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{option} {shown(path)} must be a file that can be written: {reason}") from None


def save(report: dict, path: str | None) -> None:
    """Writes a report as JSON if ``--json`` names a file."""
    if path not in (None, "-"):
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


def find_matplotlib() -> None:
    """Raises ImportError, which says what to install, if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install 'mla-attn[bench]'")
