"""Files from strangers: whatever a header or a config holds, it is read right or refused in a line with its name."""

import json

import pytest

from checkpoints import GEMMA2, GPT_OSS, LLAMA3, QWEN3, V3, write_checkpoint
from damage import mutants
from mla_attn import cli
from mla_attn.models import CheckpointError
from mla_attn.models.loading import read_config
from mla_attn.models.safetensors import list_tensors, read_header

GOOD = '"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'


def one(**fields):
    """A header with one tensor, fields replaced by pieces of JSON."""
    fields = {"dtype": '"F32"', "shape": "[4]", "data_offsets": "[0,16]"} | fields
    return '{"a":{' + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}}"


def write(file, header, data=bytes(16)):
    header = header.encode() if isinstance(header, str) else header
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return file


HEADERS = {
    "a name twice": ("{" + GOOD + "," + GOOD.replace("[4]", "[2,2]") + "}", "it has the key a twice"),
    "a field twice": (one(dtype='"F32","dtype":"I32"'), "it has the key dtype twice"),
    "nested": ("[" * 200_000, "nested too deep"),
    "offset Infinity": (one(data_offsets="[0,Infinity]"), r"a has data_offsets \[0, inf\]"),
    "size 1e999": (one(shape="[1e999]"), r"a has shape \[inf\]"),
    "size 4.0": (one(shape="[4.0]"), r"a has shape \[4.0\]"),
    "size 4.7": (one(shape="[4.7]"), r"a has shape \[4.7\]"),
    "sizes -2, -2": (one(shape="[-2,-2]"), r"a has shape \[-2, -2\]"),
    "a size of many digits": (one(shape="[" + "9" * 5000 + "]"), "is corrupt: "),
    "a size that Python does not print": (one(shape="[" + "9" * 4300 + "]"), "a has shape"),
    "an offset that Python does not print": (one(data_offsets="[0," + "9" * 4300 + "]"), "a has data_offsets"),
    "more axes than an array has": (one(shape=str([1] * 1000)), "a has shape"),
    "shape a string": (one(shape='"4"'), "a has shape '4', must be a list"),
    "size true": (one(shape="[4,true]"), r"a has shape \[4, True\]"),
    "three offsets": (one(data_offsets="[0,16,16]"), "two integers"),
    "dtype a list": (one(dtype='["F32"]'), r"a has dtype \['F32'\]"),
    "a field more": (one(strides="[1]"), "a must have dtype, shape and data_offsets, nothing else"),
    "an entry that is none": ('{"a":[0,16]}', "a must have dtype"),
    "UTF-16": (("{" + GOOD + "}").encode("utf-16"), "'utf-8' codec can't decode"),
    "a byte order mark": (("{" + GOOD + "}").encode("utf-8-sig"), "Unexpected UTF-8 BOM"),
    "a list": ("[" + "1" * 30 + "]", "must hold a JSON object, has list"),
    "metadata of numbers": ('{"__metadata__":{"a":1},' + GOOD + "}", "__metadata__ must map strings to strings"),
    "a hole": ("{" + GOOD.replace("[0,16]", "[8,24]") + "}", r"a F32 \(4,\) has 16 bytes"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_the_format_forbids(tmp_path, case):
    header, message = HEADERS[case]
    file = write(tmp_path / "model.safetensors", header)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(file)
    check_message(caught.value, file)


def test_a_header_that_claims_gigabytes(tmp_path):
    """In a sparse file of that size; it must not be read to be refused."""
    file = tmp_path / "model.safetensors"
    with open(file, "wb") as f:
        f.write((6 << 30).to_bytes(8, "little"))
        f.truncate((6 << 30) + 8)
    with pytest.raises(CheckpointError, match="a header has at most 100000000 bytes, not 6442450944"):
        read_header(file)


def test_tensors_without_elements_lie_anywhere(tmp_path):
    empty = GOOD.replace('"a"', '"z"').replace("[4]", "[0,7]").replace("[0,16]", "[0,0]")
    assert read_header(write(tmp_path / "m", "{" + GOOD + "," + empty + "}"))["z"].shape == (0, 7)


def check_message(error, *files):
    assert any(str(file) in str(error) for file in files), error
    assert str(error).isprintable() and len(str(error)) < 1200, error


# Mutants.


def test_mutated_headers(tmp_path):
    entries, position = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, size in (("a", "F32", [2, 3], 24), ("b", "BF16", [3], 6), ("c", "F8_E4M3", [2], 2)):
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    refused = 0
    for header in mutants(entries, 1000, seed=0):
        file = write(tmp_path / "model.safetensors", header, bytes(position))
        try:
            found = read_header(file)
        except CheckpointError as error:
            check_message(error, file)
            refused += 1
        else:
            end = 8 + len(header) + position
            assert all(8 + len(header) <= tensor.begin <= tensor.end <= end for tensor in found.values())
    assert 700 < refused < 1000


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_mutated_configs(tmp_path, name):
    shard = "model-00001-of-00001.safetensors"
    folder = write_checkpoint(tmp_path / "c", json.loads((V3 / "config.json").read_text()), {})
    (folder / "model.safetensors").unlink()
    write(folder / shard, "{" + GOOD + "}")
    data = {
        "config.json": json.loads((V3 / "config.json").read_text()),
        "generation_config.json": {"eos_token_id": [257, 101], "bos_token_id": 256, "temperature": 0.6},
        "model.safetensors.index.json": {"metadata": {"total_size": 16}, "weight_map": {"a": shard}},
    }
    for other, right in data.items():
        (folder / other).write_text(json.dumps(right))
    read = {"model.safetensors.index.json": list_tensors}.get(name, read_config)
    read(folder)
    refused = 0
    for text in mutants(data[name], 600 if name == "config.json" else 200, seed=1):
        (folder / name).write_bytes(text)
        try:
            read(folder)
        except ValueError as error:
            check_message(error, folder / name)
            refused += 1
    assert refused > 60


@pytest.mark.parametrize("path", [LLAMA3, QWEN3, GEMMA2, GPT_OSS], ids=lambda path: path.name.split("-")[0])
def test_mutated_configs_of_grouped_query_families(tmp_path, path):
    data, refused = json.loads((path / "config.json").read_text()), 0
    for text in mutants(data, 300, seed=1):
        (tmp_path / "config.json").write_bytes(text)
        try:
            read_config(tmp_path)
        except ValueError as error:
            check_message(error, tmp_path / "config.json")
            refused += 1
    assert refused > 150


def test_the_command_line_says_so_in_a_line(tmp_path, capsys):
    """No traceback, status 2: of mutants of everything that is read before the weights."""
    folder = write_checkpoint(tmp_path / "c", json.loads((V3 / "config.json").read_text()), {})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(V3 / "model.safetensors")
    right = {"config.json": (V3 / "config.json").read_text(), "generation_config.json": '{"eos_token_id": 257}'}
    for name, text in right.items():
        for mutant in mutants(json.loads(text), 60, seed=2):
            (folder / name).write_bytes(mutant)
            try:
                read_config(folder)
            except ValueError:
                assert cli.main(["generate", str(folder), "--prompt-ids", "1"]) == 2
                out, err = capsys.readouterr()
                *warning, line = err.splitlines()
                assert (out, line[:17], len(warning) <= 1) == ("", "mla-attn: error: ", True)
                assert all(each.startswith("mla-attn: warning: ") for each in warning)
        (folder / name).write_text(text)
