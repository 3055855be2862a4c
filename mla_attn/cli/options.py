"""The kinds of options: how the text of an argument is parsed, and the range of every number."""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from mla_attn.text import shown

INT32_MAX = 2**31 - 1
MOST_SEED = 2**32 - 1
MOST_DRAFTS = 255  # drafts of a chain or tree, so that a verify pass has at most 256 rows per request
MOST_BATCH = 4096
MOST_DEVICES = 1024
MOST_PAGE_SIZE = 65536  # tokens
MOST_NGRAM = 64  # tokens that drafts from n-grams match
MOST_VALUES = 16  # values of an option that takes several


class Kind(NamedTuple):
    """A kind of argument: how to parse it, and what is allowed.

    Attributes:
        parse: function from text to value; raises ValueError for invalid text.
        allowed: text after "must be" in messages; None if the message of ``parse`` is the whole message.
    """

    parse: Callable[[str], Any]
    allowed: str | None


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError where argparse would print its usage and exit: one place handles all errors."""

    def error(self, message: str) -> NoReturn:
        own = re.fullmatch(r"argument [^:]*: \0(.*)", message, re.DOTALL)  # a message of ``add``, after a prefix
        raise ValueError(own[1] if own else f"{message} (see {self.prog} --help)")

    def parse_args(self, *arguments: Any) -> argparse.Namespace:  # pyright: ignore[reportIncompatibleMethodOverride]
        options = super().parse_args(*arguments)
        for name, value in vars(options).items():
            if isinstance(value, list) and (value == [] or [] in value):  # Python 3.12 parses "--option=--" to this
                self.error(f"argument --{name.replace('_', '-')}: expected one argument")
        return options

    def add_commands(self, metavar: str) -> Any:
        """Adds commands, one of which must be given. Without a command, ``check`` of the options prints the help to
        stderr and raises."""

        def check(options: argparse.Namespace) -> NoReturn:
            self.print_help(sys.stderr)
            raise ValueError(f"no {metavar}: must be one of {', '.join(commands.choices)}")

        commands = self.add_subparsers(metavar=metavar)
        self.set_defaults(run=None, check=check)
        return commands

    def add(self, flag: str, kind: Kind, **rest: Any) -> None:
        """Adds an argument of a kind, which messages call ``flag``."""

        def parse(text: str) -> Any:
            try:
                return kind.parse(text)
            except ValueError as error:
                given = text if re.fullmatch(r"[-+]?[0-9][0-9.e+-]{,30}", text) else shown(text)
                reason = f"{rest.get('metavar') if flag[0] != '-' else flag} {given} must be {kind.allowed}"
                raise argparse.ArgumentTypeError(f"\0{error if kind.allowed is None else reason}") from None

        self.add_argument(flag, type=parse, **rest)


def integer(least: int, most: int) -> Kind:
    """The kind of integers in decimal digits."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[-+]?[0-9]{1,20}", text) or not least <= int(text) <= most:
            raise ValueError
        return int(text)

    return Kind(parse, f"an integer from {least} to {most}")


def number(least: int | float, most: int | float, *, above: bool = False) -> Kind:
    """The kind of numbers from ``least`` (or above it) to ``most``."""

    def parse(text: str) -> float:
        value = float(text)
        flushed = 0 < abs(value) < 1.2e-38  # devices flush such values to zero
        if flushed or not least <= value <= most or (above and value == least):  # false for NaN
            raise ValueError
        return value

    upper = "" if most == math.inf else f", at most {most:g}"
    return Kind(parse, f"a number {'above' if above else 'of at least'} {least:g}{upper}")


def several(kind: Kind) -> Kind:
    """The kind of one or more values with commas between, as a tuple."""

    def parse(text: str) -> tuple[Any, ...]:
        parts = text.split(",", MOST_VALUES)
        if len(parts) > MOST_VALUES:
            raise ValueError
        return tuple(kind.parse(part) for part in parts)

    return Kind(parse, f"{kind.allowed}, or up to {MOST_VALUES} of them with commas between")


def words(*allowed: str) -> Kind:
    """The kind of one or more of these words, with commas between."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(allowed):
            raise ValueError
        return names

    return Kind(parse, f"one of {', '.join(allowed)}, or several with commas between")


def _draft(text: str) -> str | int:
    """A folder as text, or the N of n-grams."""
    return integer(1, MOST_NGRAM).parse(text[6:]) if text.startswith("ngram:") else FOLDER.parse(text)


def _tree(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(re.fullmatch(r"[1-9][0-9]{,3}", part) for part in parts):
        raise ValueError
    widths, level, nodes = tuple(map(int, parts)), 1, 0
    for width in widths:
        level *= width
        nodes += level
        if nodes > MOST_DRAFTS:
            raise ValueError
    return widths


DRAFT = Kind(_draft, f"a folder, or ngram:N with N from 1 to {MOST_NGRAM}")
TREE = Kind(_tree, f"widths of at least 1 joined by x, as 3x2x1, of at most {MOST_DRAFTS} drafts together")


def _folder(text: str) -> str:
    if not os.path.isdir(text):
        raise ValueError
    return text


FOLDER = Kind(_folder, "a folder")
