"""Formatting of untrusted values and names in one-line messages."""

from typing import Any


def shown(value: Any) -> str:
    """``repr`` of any value, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4300 digits
        return f"a {type(value).__name__} of too many digits to show"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def plain(name: str) -> str:
    """A name without quotes, unless it is long or has unprintable characters."""
    return name if name.isprintable() and len(name) <= 80 else shown(name)


def some(names: list[str], most: int = 8) -> str:
    """The first few names, and the number of further ones."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(plain, names[:most])) + more


def line(text: str, most: int = 1000) -> str:
    """A message as one line of at most ``most`` printable characters."""
    words = " ".join(text.split())
    words = "".join(each if each.isprintable() else repr(each)[1:-1] for each in words)
    return words if len(words) <= most else f"{words[: most - 4]} ..."


def gibibytes(count: int) -> str:
    """A number of bytes as text in GiB."""
    return f"{count / 2**30:.3g} GiB" if count < 1000 * 2**30 else f"{count // 2**30} GiB"
