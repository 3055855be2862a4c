"""Reading safetensors files with NumPy: an 8-byte little-endian header length, a JSON header, then the bytes.

The safetensors package is not used because it cannot return F8_E4M3 tensors as NumPy arrays (it looks for a type that
NumPy does not have). Files are memory-mapped, so a tensor needs memory only while it is converted.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mla_attn.models.files import MOST_JSON_BYTES, CheckpointError, exists, open_file, parse_json, read_json
from mla_attn.models.settings import is_integer
from mla_attn.text import plain, shown, some

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype(np.uint8),  # packed
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LARGEST_SIZE = 2**63 - 1  # limit of an axis or an offset
MOST_AXES = 32


class Stored(NamedTuple):
    """The location of a tensor: its file, dtype name, shape, and byte range in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(self) -> np.ndarray:
        """Returns the tensor as a read-only view of the mapped file, which is unmapped together with the view."""
        raw = np.memmap(self.file, np.uint8, "r", offset=self.begin, shape=(self.end - self.begin,))
        return raw.view(DTYPES[self.dtype]).reshape(self.shape)


def list_tensors(folder: Path) -> dict[str, Stored]:
    """Lists all tensors of a checkpoint folder: those of ``model.safetensors``, or of the shards in its index.

    Raises:
        CheckpointError: there is no such file, a shard or tensor of the index is missing, a tensor is stored twice, or
            a file is truncated or corrupt.
    """
    if exists(folder / SINGLE):
        return read_header(folder / SINGLE)
    if not exists(folder / INDEX):
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
        raise CheckpointError(f"{folder / INDEX}: weight_map must map tensor names to file names")
    tensors: dict[str, Stored] = {}
    for shard in sorted(set(index.values())):
        if shard in ("", "..") or Path(shard).name != shard or len(shard) > 255 or not shard.isprintable():
            raise CheckpointError(f"{folder / INDEX} names {shown(shard)}, which is not a file name in this folder")
        try:
            found = read_header(folder / shard)
        except CheckpointError as error:
            raise CheckpointError(f"{folder / INDEX} names {shown(shard)}: {error}") from error
        if twice := sorted(tensors.keys() & found.keys()):
            raise CheckpointError(f"{folder / shard}: {some(twice)} already stored in {tensors[twice[0]].file.name}")
        tensors |= found
    if astray := sorted(name for name in index if name not in tensors or tensors[name].file.name != index[name]):
        raise CheckpointError(f"{folder / INDEX}: {some(astray)} not in the shard it names")
    return tensors


def read_header(file: Path) -> dict[str, Stored]:
    """Lists the tensors of one file, after checking its header against the format and the file's size.

    Raises:
        CheckpointError: the file is truncated, corrupt, or not a regular file.
    """
    with open_file(file) as (opened, size):
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{file} is truncated: {size} bytes cannot hold its header")
        if length > MOST_JSON_BYTES:
            raise CheckpointError(f"{file} is corrupt: a header has at most {MOST_JSON_BYTES} bytes, not {length}")
        header = parse_json(file, opened.read(length))
    _check_metadata(file, header.pop("__metadata__", {}))
    tensors = {name: _stored(file, 8 + length, name, entry) for name, entry in header.items()}
    position = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][-2:]):
        # The format has no gaps. Types that this reader does not know are reported when the tensor is needed.
        held, itemsize = tensor.end - tensor.begin, DTYPES[tensor.dtype].itemsize if tensor.dtype in DTYPES else None
        if tensor.begin != position or held < 0 or (itemsize and held != itemsize * math.prod(tensor.shape)):
            raise CheckpointError(
                f"{file} is corrupt: {plain(name)} {plain(tensor.dtype)} {shown(tensor.shape)} has {held} bytes"
            )
        position = tensor.end
    if position != size:
        raise CheckpointError(f"{file} is truncated or corrupt: its header describes {position} bytes, it has {size}")
    return tensors


def _check_metadata(file: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file} is corrupt: its __metadata__ must map strings to strings")


def _stored(file: Path, start: int, name: str, entry: Any) -> Stored:
    """Checks one entry of a header; sizes must be integers, not values that Python would convert to integers."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{file} is corrupt: {plain(name)} must have dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    for key, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or not all(is_integer(size) and 0 <= size <= LARGEST_SIZE for size in value):
            raise CheckpointError(
                f"{file} is corrupt: {plain(name)} has {key} {shown(value)}, must be a list of integers from 0"
            )
        if len(value) > MOST_AXES:
            raise CheckpointError(f"{file} is corrupt: {plain(name)} has {key} of {len(value)}, at most {MOST_AXES}")
    if not isinstance(dtype, str) or len(offsets) != 2:
        raise CheckpointError(
            f"{file} is corrupt: {plain(name)} has dtype {shown(dtype)} and data_offsets {shown(offsets)}, must be a "
            "name and two integers"
        )
    return Stored(file, dtype, tuple(shape), start + offsets[0], start + offsets[1])
