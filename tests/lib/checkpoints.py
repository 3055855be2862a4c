"""The fixtures, and a writer that makes variants of them: other names, shapes, types, shards, FP8 blocks."""

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np

from mla_attn.models import DeepseekConfig
from mla_attn.models.safetensors import list_tensors

FIXTURES = Path(__file__).parents[1] / "fixtures"
V3 = FIXTURES / "deepseek-v3-tiny"
V2 = FIXTURES / "deepseek-v2-lite-tiny"
QWEN3, GPT_OSS, GEMMA2, LLAMA3 = (
    FIXTURES / name for name in ("qwen3-tiny", "gpt-oss-tiny", "gemma2-tiny", "llama3-tiny-fp8kv")
)
DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int8": "I8",
    "uint8": "U8",
}
E4M3_MAX = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)


def small_config(vocab_size: int) -> DeepseekConfig:
    """The V3 fixture's with one layer and a draft layer, and next to nothing to compute."""
    return dataclasses.replace(
        DeepseekConfig.from_hf(json.loads((V3 / "config.json").read_text())),
        num_hidden_layers=1,
        first_k_dense_replace=2,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        q_lora_rank=8,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        vocab_size=vocab_size,
    )


def read_checkpoint(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """config.json and all tensors of a folder."""
    tensors = {name: stored.read() for name, stored in list_tensors(folder).items()}
    return json.loads((folder / "config.json").read_text()), tensors


def write_checkpoint(folder: Path, config: dict, tensors: dict[str, np.ndarray], *, shards: int = 1) -> Path:
    """Write a folder; with more than one shard, tensors go to them in turn and an index names them."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_file(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = list(tensors)[shard::shards]
        write_file(folder / file, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_file(file: Path, tensors: dict[str, np.ndarray]) -> None:
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        span = [position, position + tensor.nbytes]
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": span}
        position += tensor.nbytes
    text = json.dumps(header).encode()
    text = text.ljust(-(-(len(text) + 8) // 64) * 64 - 8)  # aligned data could be used where they lie in the file
    with open(file, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            f.write(np.ascontiguousarray(tensor).tobytes())


def quantise(weight: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 values and the float32 scale of each block, which multiplied give the weight back."""
    blocks = tuple(-(-size // each) for size, each in zip(weight.shape, block, strict=True))
    values, scales = np.empty(weight.shape, ml_dtypes.float8_e4m3fn), np.empty(blocks, np.float32)
    for i, j in np.ndindex(*blocks):
        part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        cells = weight[part].astype(np.float32)
        scales[i, j] = np.abs(cells).max() / E4M3_MAX
        values[part] = (cells / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
    return values, scales
