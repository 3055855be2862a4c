"""The kinds of settings in checkpoint files, and their reader, driven by a table of name, kind, default and use."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mla_attn.checks import check_integer, check_number
from mla_attn.text import shown

REQUIRED = object()
LARGEST_INT32 = 2**31 - 1


class Kind(NamedTuple):
    """A kind of setting.

    Attributes:
        check: function of name and value that returns the value, or raises ValueError with both.
        described: description of allowed values, for the page of settings.
    """

    check: Callable[[str, Any], Any]
    described: str

    def __call__(self, name: str, value: Any) -> Any:
        return self.check(name, value)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The reading of one setting.

    Attributes:
        kind: kind of the value.
        use: description of its effect, for the page of settings.
        default: value if the file does not have it or has null; ``REQUIRED`` if the file must have it.
    """

    kind: Kind
    use: str
    default: Any = REQUIRED


def read_settings(data: Mapping[str, Any], table: Mapping[str, Setting], *, within: str = "") -> dict[str, Any]:
    """Reads the settings of ``table`` from ``data``.

    Args:
        data: object parsed from JSON.
        table: settings by name.
        within: name of the object ``data`` in messages; empty for the file itself.

    Raises:
        ValueError: a required setting is missing, or a value is not of its kind; the message names it.
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
    """The kind of integers from ``least`` to ``most``; it refuses 1.0 and true."""
    allowed = f"integer from {least}" + ("" if most == LARGEST_INT32 else f" to {most}")
    return Kind(lambda name, value: check_integer(name, value, least, most), allowed)


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def number(*, above: float | None = None, least: float | None = None) -> Kind:
    """The kind of numbers that are finite in float32, and there above ``above`` or at least ``least``."""
    bound = f" above {above:g}" if above is not None else f" of at least {least:g}" if least is not None else ""
    return Kind(lambda name, value: check_number(name, value, above=above, least=least), f"finite number{bound}")


def only(*supported: Any) -> Kind:
    """The kind of these values, with their types."""

    def check(name: str, value: Any) -> Any:
        if not any(type(value) is type(each) and value == each for each in supported):
            values = ", ".join(map(repr, supported))
            raise ValueError(f"{name}={shown(value)} is not supported; supported: {values}")
        return value

    return Kind(check, " or ".join(map(as_json, supported)))


def nullable(kind: Kind) -> Kind:
    """The kind of values of ``kind`` and null, which must be written explicitly."""
    return Kind(lambda name, value: None if value is None else kind(name, value), f"{kind.described}, or null")


def section(name: str, value: Any) -> dict[str, Any]:
    """Checks that a value is a JSON object, and returns it."""
    if not isinstance(value, dict):
        raise ValueError(f"{name}={shown(value)} must be an object")
    return value


def as_json(value: Any) -> str:
    """A value as JSON in Markdown."""
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
