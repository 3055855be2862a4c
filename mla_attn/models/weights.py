"""Maps from checkpoint tensors to parameters, and dequantisation of stored tensors."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from mla_attn.models.safetensors import Stored

SCALE = "_scale_inv"  # suffix of the scales of FP8 blocks, which are multiplied in spite of the name
BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of MXFP4 tensors
MXFP4_BLOCK = 32  # elements that share a scale
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])  # value of each 4-bit code


@dataclasses.dataclass(frozen=True)
class Weight:
    """One or more tensors of a checkpoint and the parameters they fill.

    Attributes:
        params: usually one; two for ``kv_b_proj`` and the experts of gpt-oss.
        names: usually one tensor; one for each expert if ``params[0]`` is stacked.
        shape: shape of each tensor in the checkpoint.
        convert: function from a tensor to the value of each parameter, or of each row of a stacked one.
        fallbacks: other names for the tensor, tried in order.
        stacked: whether each tensor is a row of the one parameter.
        by_row: whether the rows of the one tensor, and so of the parameters, are converted one by one.
    """

    params: tuple[nnx.Param, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    convert: Callable[[np.ndarray], tuple[np.ndarray, ...]] = lambda tensor: (tensor,)
    fallbacks: tuple[str, ...] = ()
    stacked: bool = False
    by_row: bool = False

    def fill(self, read: Callable[[str, int | None], np.ndarray], shardings: Mapping[int, Any]) -> None:
        """Sets the parameters, in their dtypes.

        Args:
            read: function that returns a tensor, or one of its rows.
            shardings: shardings of parameters by their ids; of others None, which means the default device.
        """
        if not self.stacked and not self.by_row:
            for param, value in zip(self.params, self.convert(read(self.names[0], None)), strict=True):
                # A copy, because on a CPU the device array may alias the given memory.
                host = np.array(value, param.dtype, order="C")
                param.set_value(jax.device_put(host, shardings[id(param)]))
            return
        hosts = [np.empty(param.shape, param.dtype) for param in self.params]
        for row in range(len(hosts[0])):
            values = read(self.names[row], None) if self.stacked else read(self.names[0], row)
            for host, value in zip(hosts, self.convert(values), strict=True):
                host[row] = value
        for param, host in zip(self.params, hosts, strict=True):
            param.set_value(jax.device_put(host, shardings[id(param)]))


def plain(param: nnx.Param, name: str) -> Weight:
    """The map of a tensor that is not converted."""
    return Weight((param,), (name,), param.shape)


def matrix(param: nnx.Param, name: str) -> Weight:
    """The map of a matrix, which checkpoints store as [out, in]."""
    return Weight((param,), (name,), param.shape[::-1], transposed)


def transposed(tensor: np.ndarray) -> tuple[np.ndarray, ...]:
    return (tensor.T,)


def scale_name(name: str, dtype: str) -> str | None:
    """Name of the tensor with the scales of a quantised tensor; None if it is not quantised."""
    if dtype == "F8_E4M3":
        return name + SCALE
    return name.removesuffix(BLOCKS) + SCALES if name.endswith(BLOCKS) else None


def dequantise(
    tensors: dict[str, Stored], name: str, block: tuple[int, int] | None, row: int | None = None
) -> np.ndarray:
    """Reads a tensor, or a row of it: as stored or, if quantised, multiplied by the scales of its blocks in float32.

    The last blocks of FP8 may be partial. MXFP4 has blocks of 32 on the last axis: bytes [..., n, 16] become
    [..., 32 n].
    """

    def read(name: str) -> np.ndarray:
        return tensors[name].read() if row is None else tensors[name].read()[row]

    value, dtype = read(name), tensors[name].dtype
    if name.endswith(BLOCKS):
        scale = read(name.removesuffix(BLOCKS) + SCALES).astype(np.int32) - 127
        numbers = _E2M1[np.stack([value & 15, value >> 4], axis=-1)]  # the low half of a byte is first
        return np.ldexp(numbers.reshape(*scale.shape, -1), scale[..., None]).reshape(*scale.shape[:-1], -1)
    if block is None or dtype != "F8_E4M3":
        return value
    scale = read(name + SCALE)
    rows, columns = (np.arange(size) // each for size, each in zip(value.shape, block, strict=True))
    return value.astype(np.float32) * scale[rows][:, columns]
