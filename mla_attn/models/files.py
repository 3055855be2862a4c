"""Reading the files of a checkpoint folder, which may be untrusted or incomplete."""

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mla_attn.text import plain

MOST_JSON_BYTES = 100_000_000  # limit of a file or header; the safetensors package has the same for headers


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, or does not match its ``config.json``."""


def exists(file: Path) -> bool:
    """Whether a file or folder of that name exists, including a broken link.

    Raises:
        CheckpointError: this cannot be determined: no permission, or the name is too long.
    """
    try:
        os.lstat(file)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {getattr(error, 'strerror', error)}") from error
    return True


@contextlib.contextmanager
def open_file(file: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Opens a regular file for reading; gives the file and its size. It follows links, and never blocks on pipes.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
    """
    try:
        # Inspect the opened file, because the name may refer to another file by then.
        with open(file, "rb", opener=_open_regular) as opened:
            yield opened, os.fstat(opened.fileno()).st_size
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def _open_regular(file: str, flags: int) -> int:
    descriptor = os.open(file, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise CheckpointError(f"{file} is not a regular file")


def read_bytes(file: Path, *, most: int) -> bytes:
    """Reads a whole file of at most ``most`` bytes; raises CheckpointError if it is larger or cannot be read."""
    with open_file(file) as (opened, size):
        if size > most:
            raise CheckpointError(f"{file} has {size} bytes, must have at most {most}")
        data = opened.read(most + 1)
        if len(data) > most:  # the file has grown
            raise CheckpointError(f"{file} must have at most {most} bytes")
        return data


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object; raises CheckpointError if the file cannot be read or has something else."""
    return parse_json(file, read_bytes(file, most=MOST_JSON_BYTES))


def parse_json(file: Path, text: bytes) -> dict[str, Any]:
    """Parses the UTF-8 ``text`` of ``file`` as a JSON object. NaN and Infinity are allowed, as Python writes them.

    Raises:
        CheckpointError: it is something else, an object has a duplicate key, or it is nested too deep.
    """
    try:
        data = json.loads(text.decode(), object_pairs_hook=_without_doubles)
    except RecursionError:
        raise CheckpointError(f"{file} is corrupt: its JSON is nested too deep") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is corrupt: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} must hold a JSON object, has {type(data).__name__}")
    return data


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"it has the key {plain(twice)} twice")
    return data
