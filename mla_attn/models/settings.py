"""Kinds of settings that a file of a checkpoint may hold, and reading them by a table: name, kind, default, use."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mla_attn.checks import check_integer, check_number
from mla_attn.text import shown

REQUIRED = object()
LARGEST_INT32 = 2**31 - 1


class Kind(NamedTuple):
    """What a setting may be.

    Attributes:
        check: takes its name and its value and returns the value, or raises ValueError with both.
        described: what is allowed, for the page of settings.
    """

    check: Callable[[str, Any], Any]
    described: str

    def __call__(self, name: str, value: Any) -> Any:
        return self.check(name, value)


@dataclasses.dataclass(frozen=True)
class Setting:
    """How one setting is read.

    Attributes:
        kind: checks the value.
        use: what is done with it, for the page of settings.
        default: what a file means that leaves it out or has null; ``REQUIRED`` if it must be there.
    """

    kind: Kind
    use: str
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


def integer(least: int = 0, most: int = LARGEST_INT32) -> Kind:
    """An integer from ``least`` to ``most``; 1.0 and true are none."""
    allowed = f"integer from {least}" + ("" if most == LARGEST_INT32 else f" to {most}")
    return Kind(lambda name, value: check_integer(name, value, least, most), allowed)


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def number(*, above: float | None = None, least: float | None = None) -> Kind:
    """A number that float32 holds as a finite one, above ``above`` or at least ``least``, there too."""
    bound = f" above {above:g}" if above is not None else f" of at least {least:g}" if least is not None else ""
    return Kind(lambda name, value: check_number(name, value, above=above, least=least), f"finite number{bound}")


def only(*supported: Any) -> Kind:
    """One of a few values, of the same type."""

    def check(name: str, value: Any) -> Any:
        if not any(type(value) is type(each) and value == each for each in supported):
            values = ", ".join(map(repr, supported))
            raise ValueError(f"{name}={shown(value)} is not supported; supported: {values}")
        return value

    return Kind(check, " or ".join(map(as_json, supported)))


def nullable(kind: Kind) -> Kind:
    """As ``kind``, or null, which must be written."""
    return Kind(lambda name, value: None if value is None else kind(name, value), f"{kind.described}, or null")


def section(name: str, value: Any) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise ValueError(f"{name}={shown(value)} must be an object")
    return value


def as_json(value: Any) -> str:
    """A value as a file would have it, in a page."""
    if value is None or isinstance(value, bool):
        value = {None: "null", True: "true", False: "false"}[value]
    return f"`{value}`"


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} must be true or false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}={shown(value)} must be a string")
    return value


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    if not all(is_integer(token) and 0 <= token <= LARGEST_INT32 for token in ids):
        raise ValueError(f"{name}={shown(value)} must be a token id or a list of them, integers from 0")
    return tuple(ids)


def _token_text(name: str, value: Any) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str):
        raise ValueError(f"{name}={shown(value)} must be a string, or an object with a string as its content")
    if any("\ud800" <= character <= "\udfff" for character in content):
        raise ValueError(f"{name}={shown(content)} must be text: half a surrogate pair is none")
    return content


def _block(name: str, value: Any) -> tuple[int, int]:
    if not (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(is_integer(n) and 0 < n <= LARGEST_INT32 for n in value)
    ):
        raise ValueError(f"{name}={shown(value)} must be two positive integers")
    return value[0], value[1]


def _layer_types(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(each in ("full_attention", "sliding_attention") for each in value):
        raise ValueError(f"{name}={shown(value)} must be a list of 'full_attention' and 'sliding_attention'")
    return tuple(value)


BOOLEAN = Kind(_boolean, "`true` or `false`")
TEXT = Kind(_text, "string")
OBJECT = Kind(section, "object")
TOKEN_ID = integer()
TOKEN_IDS = Kind(_token_ids, "token id, or a list of them")
TOKEN_TEXT = Kind(_token_text, "string, or an object with a string as its `content`")
LAYER_TYPES = Kind(_layer_types, "list of `full_attention` and `sliding_attention`, one a layer")
BLOCK = Kind(_block, "two integers from 1")
