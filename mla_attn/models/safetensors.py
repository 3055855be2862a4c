"""Reading safetensors files with NumPy: an 8-byte little-endian header length, a JSON header, then the bytes.

A reader of our own, because the safetensors package cannot give F8_E4M3 tensors to NumPy (it looks for a type that
NumPy does not have), and because nothing more than this is needed: files are mapped, not read, so a tensor costs memory
only while it is converted.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, or not what its ``config.json`` says."""


class Stored(NamedTuple):
    """Where one tensor lies: its file, dtype name, shape, and byte range in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(self) -> np.ndarray:
        """The tensor as a read-only view of the mapped file.

        The map lives as long as the view, so nothing stays mapped between tensors.
        """
        raw = np.memmap(self.file, np.uint8, "r", offset=self.begin, shape=(self.end - self.begin,))
        return raw.view(DTYPES[self.dtype]).reshape(self.shape)


def list_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint folder: ``model.safetensors``, or the shards that its index names.

    Raises:
        CheckpointError: no such file, a shard or a tensor that the index names and is not there, a tensor stored twice,
            or a file that is truncated or corrupt.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
        raise CheckpointError(f"{folder / INDEX}: weight_map must map tensor names to file names")
    tensors: dict[str, Stored] = {}
    for shard in sorted(set(index.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{folder / INDEX} names {shard!r}, which is not a file name in this folder")
        if not (folder / shard).is_file():
            raise CheckpointError(f"{folder / INDEX} names {shard}, which is missing")
        found = read_header(folder / shard)
        if twice := sorted(tensors.keys() & found.keys()):
            raise CheckpointError(f"{folder / shard}: {some(twice)} already stored in {tensors[twice[0]].file.name}")
        tensors |= found
    if astray := sorted(name for name in index if name not in tensors or tensors[name].file.name != index[name]):
        raise CheckpointError(f"{folder / INDEX}: {some(astray)} not in the shard it names")
    return tensors


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one file, its header checked against its size.

    Raises:
        CheckpointError: truncated or corrupt.
    """
    size = file.stat().st_size
    with open(file, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{file} is truncated: {size} bytes cannot hold its header")
        text = f.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _stored(file, 8 + length, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is corrupt: its header cannot be read ({error})") from error
    position = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        # The format leaves no holes. A type this reader cannot view is for whoever wants the tensor to report.
        held, itemsize = tensor.end - tensor.begin, DTYPES[tensor.dtype].itemsize if tensor.dtype in DTYPES else None
        if tensor.begin != position or held < 0 or (itemsize and held != itemsize * math.prod(tensor.shape)):
            raise CheckpointError(f"{file} is corrupt: {name} {tensor.dtype} {tensor.shape} has {held} bytes")
        position = tensor.end
    if position != size:
        raise CheckpointError(f"{file} is truncated or corrupt: its header describes {position} bytes, it has {size}")
    return tensors


def _stored(file: Path, start: int, entry: dict[str, Any]) -> Stored:
    begin, end = entry["data_offsets"]
    return Stored(file, str(entry["dtype"]), tuple(map(int, entry["shape"])), start + int(begin), start + int(end))


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: the file is missing or holds something else.
    """
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is corrupt: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} must hold a JSON object, has {type(data).__name__}")
    return data


def some(names: list[str], most: int = 8) -> str:
    """The first few names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
