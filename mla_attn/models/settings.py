"""Kinds of settings that a ``config.json`` may hold, and reading them by a table: name, kind, what if it is absent.

A kind is a function of a setting's name and value that returns the value checked, or raises ValueError with both.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mla_attn.checks import check_integer, check_number
from mla_attn.text import shown

Kind = Callable[[str, Any], Any]
REQUIRED = object()
LARGEST_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Setting:
    """How one setting is read.

    Attributes:
        kind: checks the value.
        default: what a file means that leaves it out or has null; ``REQUIRED`` if it must be there.
    """

    kind: Kind
    default: Any = REQUIRED


def read_settings(data: Mapping[str, Any], table: Mapping[str, Setting], *, within: str = "") -> dict[str, Any]:
    """The values that ``data`` has for the settings of ``table``.

    Args:
        data: as parsed from JSON.
        table: by name.
        within: name of the object that ``data`` is, for messages; empty for the file itself.

    Raises:
        ValueError: a required one is missing, or a value is not of its kind; with its name.
    """
    values = {}
    for name, setting in table.items():
        label, value = f"{within} {name}".lstrip(), data.get(name)
        if value is None and setting.default is not REQUIRED:
            values[name] = setting.default
        elif name not in data:
            raise ValueError(f"{label} is missing")
        else:
            values[name] = setting.kind(label, value)
    return values


def integer(least: int = 0, most: int | None = None) -> Kind:
    """An integer from ``least`` to ``most``, or to what int32 holds; 1.0 and true are none."""

    def check(name: str, value: Any) -> int:
        return check_integer(name, value, least, most)

    return check


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def number(*, above: float | None = None, least: float | None = None) -> Kind:
    """A number that float32 holds as a finite one, above ``above`` or at least ``least``, there too."""

    def check(name: str, value: Any) -> float:
        return check_number(name, value, above=above, least=least)

    return check


def boolean(name: str, value: Any) -> bool:
    """true or false, and no text that says so."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} must be true or false")
    return value


def text(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={shown(value)} must be a string")
    return value


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """One token id or a list of them."""
    ids = value if isinstance(value, list) else [value]
    if not all(is_integer(token) and 0 <= token <= LARGEST_INT32 for token in ids):
        raise ValueError(f"{name}={shown(value)} must be a token id or a list of them, integers from 0")
    return tuple(ids)


def only(*supported: Any) -> Kind:
    """One of a few values, of the same type."""

    def check(name: str, value: Any) -> Any:
        if not any(type(value) is type(each) and value == each for each in supported):
            values = ", ".join(map(repr, supported))
            raise ValueError(f"{name}={shown(value)} is not supported; supported: {values}")
        return value

    return check


def nullable(kind: Kind) -> Kind:
    """As ``kind``, or null, which must be written."""
    return lambda name, value: None if value is None else kind(name, value)


def section(name: str, value: Any) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise ValueError(f"{name}={shown(value)} must be an object")
    return value
