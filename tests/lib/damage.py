"""Damaged checkpoint folders, drawn by a seed: bits, cuts, headers, indices, values, what lies in a folder."""

import base64
import json
import os
import random
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints import V3, quantise, write_checkpoint
from mla_attn.models import DeepseekConfig, DeepseekForCausalLM
from mla_attn.models.deepseek_weights import weights

JUNK = [None, True, False, -1, 0, 0.5, 1.0, 10**9, 2**31, 2**63, -(2**70), 10**400, 10**4000, 2**64, 1e-60, 1e308,
        float("nan"), float("inf"), "", "false", "1", "\ud800", "x\n" * 50, "\0", "yarn", [], [1], [[]],
        [-1, 2.5], {}, {"a": 1}, {"type": "yarn"}, list(range(1000))]  # fmt: skip
PIECES = [b"NaN", b"-Infinity", b"1e999", b"-", b"[", b"{" * 3000, b"[" * 100_000, b'"', b",", b"null", b"\xff\xfe",
          b"\xef\xbb\xbf", b"\0", b"9" * 5000, b'\\ud800', b'"a":1,"a":1', b"\n"]  # fmt: skip


def places(data, path=()):
    """Paths to all values in a JSON value."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


def with_other_value(data, rng):
    """A value replaced, left out, or under another's name."""
    data = json.loads(json.dumps(data))
    *way, key = rng.choice(list(places(data)))
    holder = data
    for step in way:
        holder = holder[step]
    kind = rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(["", "a" * 500, "\n", "\ud800", "model_type", "type"])] = holder.pop(key)
    elif kind == 2:
        holder[key] = [holder[key]]
    else:
        holder[key] = rng.choice(JUNK)
    return json.dumps(data).encode()


def with_other_bytes(text, rng):
    begin, kind = rng.randrange(len(text)), rng.randrange(7)
    end = min(begin + rng.randrange(1, 40), len(text))
    if kind == 0:
        return text[:begin]
    if kind == 1:
        return text[:begin] + bytes([text[begin] ^ 1 << rng.randrange(8)]) + text[begin + 1 :]
    if kind == 2:
        return text[:begin] + text[end:]
    if kind == 3:
        return text[:end] + text[begin:]
    if kind == 4:
        return text.decode().encode(rng.choice(["utf-16", "utf-32", "utf-8-sig"]))
    if kind == 5:
        return text[:begin] + rng.randbytes(end - begin) + text[end:]
    return text[:begin] + rng.choice(PIECES) + text[begin:]


def mutants(data, count, seed):
    rng, text = random.Random(seed), json.dumps(data).encode()
    for number in range(count):
        yield with_other_value(data, rng) if number % 2 else with_other_bytes(text, rng)


# Folders.

TINY = {
    "vocab_size": 258, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "q_lora_rank": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}


def write_folders(parent: Path) -> list[Path]:
    """Right ones: a single file with text as bytes; shards with a tokenizer.json; FP8 with a tiktoken.model."""
    config = json.loads((V3 / "config.json").read_text()) | TINY
    tensors = _tensors(config)
    single = write_checkpoint(parent / "single", config, tensors)
    _write(single / "generation_config.json", {"eos_token_id": [257, 101], "temperature": 0.6})
    shards = write_checkpoint(parent / "shards", config, tensors, shards=3)
    _write(shards / "tokenizer.json", _tokenizer())
    _write(shards / "tokenizer_config.json", {"add_bos_token": True, "bos_token": {"content": "<bos>"}})
    linear = {name for name in tensors if "proj" in name and "eh_proj" not in name}
    blocks = {name: quantise(tensors[name], (8, 8)) for name in linear}
    fp8 = {name: tensor for name, tensor in tensors.items() if name not in linear}
    fp8 |= {name: values for name, (values, _) in blocks.items()}
    fp8 |= {f"{name}_scale_inv": scales for name, (_, scales) in blocks.items()}
    kimi = write_checkpoint(parent / "fp8", config | {"quantization_config": FP8}, fp8, shards=2)
    ranks = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (kimi / "tiktoken.model").write_text("".join(ranks))
    added = {"256": {"content": "[BOS]", "special": True}, "260": {"content": "<|tool|>", "special": False}}
    _write(
        kimi / "tokenizer_config.json",
        {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "added_tokens_decoder": added},
    )
    return [single, shards, kimi]


def _tensors(config: dict) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = DeepseekConfig.from_hf(config)
    model = nnx.eval_shape(lambda: DeepseekForCausalLM(made, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    names = ((name, weight.shape) for weight in weights(model) for name in weight.names)
    return {name: rng.standard_normal(shape).astype(jnp.bfloat16) for name, shape in names}


def _tokenizer() -> dict:
    """A tokenizer.json of bytes: id 0 begins, 1 ends, then one id a byte."""
    import tokenizers

    vocab = {"<bos>": 0, "<eos>": 1}
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab |= {symbol: number + 2 for number, symbol in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<bos>", "<eos>"])
    return json.loads(made.to_str())


def _write(file: Path, data: dict) -> None:
    file.write_text(json.dumps(data))


def damage(folder: Path, rng: random.Random) -> str:
    """Do one thing to a folder; returns what."""
    file = rng.choice(sorted(folder.iterdir()))
    kind = rng.choice(["bit", "cut", "text", "text", "text", "entry"])
    if kind == "entry":
        return f"{file.name}: {_damage_entry(file, rng)}"
    data = file.read_bytes()
    if kind == "bit":
        place = rng.randrange(len(data))
        file.write_bytes(data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :])
    elif kind == "cut":
        file.write_bytes(data[: rng.randrange(len(data))])
    elif file.suffix == ".safetensors":
        length = int.from_bytes(data[:8], "little")
        header = _other_text(data[8 : 8 + length], rng)
        length = len(header) if rng.randrange(8) else rng.choice([0, 1, 2**63, 2**64 - 1, 6 << 30, len(data), length])
        file.write_bytes(length.to_bytes(8, "little") + header + data[8 + len(data[8 : 8 + length]) :][-len(data) :])
    else:
        file.write_bytes(_other_text(data, rng))
    return f"{file.name}: {kind}"


def _other_text(text: bytes, rng: random.Random) -> bytes:
    try:
        return with_other_value(json.loads(text), rng) if rng.randrange(2) else with_other_bytes(text, rng)
    except ValueError:  # no JSON
        return with_other_bytes(text, rng)


def _damage_entry(file: Path, rng: random.Random) -> str:
    """Something else under the name of a file, or the file under another name."""
    kind = rng.choice(
        ["gone", "folder", "pipe", "loop", "nowhere", "zero", "null", "empty", "link", "other", "added", "sparse"]
    )
    target = file.with_name(
        rng.choice(["model.safetensors", "tokenizer.model", "vocab.json", "tokenizer.json", "x.bin"])
    )
    if kind == "added":
        target.write_bytes(file.read_bytes())
        return f"copied to {target.name}"
    if kind == "other":
        file.rename(target)
        return f"renamed to {target.name}"
    if kind == "link":
        file.rename(file.parent.parent / "elsewhere")
        file.symlink_to(file.parent.parent / "elsewhere")
        return kind
    file.unlink()
    links = {"loop": file.name, "nowhere": "gone", "zero": "/dev/zero", "null": os.devnull}
    if kind in links:
        file.symlink_to(links[kind])
    elif kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind in ("empty", "sparse"):
        with open(file, "wb") as opened:
            opened.truncate(0 if kind == "empty" else 6 << 30)
    return kind
