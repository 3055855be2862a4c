"""The command line, as users call it."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import GPT_OSS, V2, V3
from mla_attn import cli
from mla_attn.cli import demo, generate
from mla_attn.cli.arguments import make_parser
from mla_attn.engine import EngineStatistics
from mla_attn.models.tokenizer import ByteTokenizer, load_tokenizer
from mla_attn.speculative import DraftTree
from recorder import programs_kept

NEW = 8
EXPECTED = np.load(V3 / "expected.npz")
PROMPT = EXPECTED["prompt_0"].tolist()
GREEDY = EXPECTED["greedy_0"].tolist()
SHOWN = bytes(token for token in PROMPT if token < 256).decode()  # without its begin token


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "programs"
    with programs_kept(folder):
        yield folder


@pytest.fixture
def call(capsys):
    """Exit status, standard output and standard error of a command."""

    def run(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def prompts_file(tmp_path):
    """A line of text, one of ids, blank lines, and a line with what ends a line elsewhere."""
    file = tmp_path / "prompts.txt"
    file.write_text(f"The GNU\n\n{', '.join(map(str, PROMPT))}\n   \nof\x0cit", encoding="utf-8")
    return file


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_byte_order_mark_is_no_text(tmp_path, encoding):
    file = tmp_path / "prompts.txt"
    file.write_text("hé", encoding=encoding)
    assert read_prompts(file) == [list("hé".encode())]


def read_prompts(file):
    options = make_parser().parse_args(["generate", str(V3), "--prompts-file", str(file)])
    return generate.read_prompts(options, load_tokenizer(V3))


def test_prompts_from_stdin(tmp_path):
    """Of a process's own, which stays open."""
    (tmp_path / "in").write_text("hi\n1,2\n")
    kept, given = os.dup(0), os.open(tmp_path / "in", os.O_RDONLY)
    try:
        os.dup2(given, 0)
        assert read_prompts("-") == [list(b"hi"), [1, 2]]
        os.fstat(0)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(given)


def test_a_number_alone_is_text_in_a_file_of_prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("42\n42,\n 1, 2\n1,\n,\n")
    assert read_prompts(file) == [[ord("4"), ord("2")], [42], [1, 2], [1], [ord(",")]]


@pytest.fixture
def generate_json(call, prompts_file):
    def run(*options, checkpoint=V3):
        arguments = ("--prompts-file", prompts_file, "--max-new-tokens", NEW, "--dtype", "float32", "--json")
        status, out, err = call("generate", checkpoint, *arguments, *options)
        assert (status, err) == (0, "")
        return json.loads(out)

    return run


def test_json(generate_json):
    result = generate_json()
    assert set(result) == {"requests", "seed", "stats"}
    assert [request["prompt_ids"] for request in result["requests"]] == [list(b"The GNU"), PROMPT, list(b"of\x0cit")]
    for request in result["requests"]:
        assert set(request) == {"prompt_ids", "tokens", "text"}
        assert len(request["tokens"]) == NEW
        assert request["text"] == bytes(request["tokens"]).decode()
    assert result["requests"][1]["tokens"] == GREEDY[:NEW]
    stats = result["stats"]
    assert set(stats) == {field.name for field in dataclasses.fields(EngineStatistics)}
    assert stats["acceptance_length"] is None
    assert stats["target_steps"] == NEW - 1
    assert stats["compiles_after_warm_up"] == 0
    assert stats["tokens_per_second"] > 0
    assert (stats["prompt_tokens"], stats["new_tokens"], stats["finished"]) == (7 + 41 + 5, 3 * NEW, 3)


@pytest.mark.slow
def test_speculation_for_one_prompt(call):
    options = "--dtype float32 --speculate 3 --prefill-chunk 7 --page-size 1 --max-new-tokens 32 --json"
    status, out, err = call("generate", V3, "--prompt-ids", ",".join(map(str, PROMPT)), *options.split())
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert [request["tokens"] for request in result["requests"]] == [GREEDY[:32]]
    stats = result["stats"]
    accepted = stats["acceptance_length"]  # 1 if no draft ever is, 4 if all three always are
    assert accepted > 1 and accepted <= 4
    # One pass may be launched before the last token is read.
    assert 31 / stats["acceptance_length"] in (stats["target_steps"], stats["target_steps"] - 1)
    assert stats["compiles_after_warm_up"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("draft", [V2, "ngram:3"])
def test_other_drafters(call, draft):
    """Another checkpoint's drafts, and those from the text: the same tokens, in fewer passes."""
    options = f"--dtype float32 --speculate 3 --draft {draft} --page-size 16 --max-new-tokens 32 --json"
    status, out, err = call("generate", V3, "--prompt-ids", ",".join(map(str, PROMPT)), *options.split())
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert [request["tokens"] for request in result["requests"]] == [GREEDY[:32]]
    assert 1 < result["stats"]["acceptance_length"] <= 4 and result["stats"]["target_steps"] < 31
    assert set(result["stats"]["pages"]) == {"full", *(["draft.full"] if draft == V2 else [])}


def test_the_reference_implementation(generate_json):
    assert generate_json("--implementation", "reference")["requests"] == generate_json()["requests"]


@pytest.fixture
def checkpoint(tmp_path):
    """Copies the fixture's folder, with files changed or added."""

    def make(files=None, **config):
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(V3 / "model.safetensors")
        config = json.loads((V3 / "config.json").read_text()) | config
        for name, data in ({"config.json": config} | (files or {})).items():
            (folder / name).write_text(data if isinstance(data, str) else json.dumps(data))
        return folder

    return make


def test_end_of_sequence(generate_json, checkpoint):
    """A checkpoint that ends its texts with a space, as its second config says."""
    folder = checkpoint({"generation_config.json": {"eos_token_id": [GREEDY[3], 257]}})
    requests = generate_json()["requests"]
    assert generate_json("--ignore-eos", checkpoint=folder)["requests"] == requests
    stopped = generate_json(checkpoint=folder)["requests"][1]
    assert stopped["tokens"] == GREEDY[:4]
    assert stopped["text"] == bytes(GREEDY[:4]).decode()


def test_several_prompts_as_text(call, prompts_file, generate_json):
    texts = [request["text"] for request in generate_json()["requests"]]
    status, out, err = call(
        "generate", V3, "--prompts-file", prompts_file, "--max-new-tokens", NEW, "--dtype", "float32"
    )
    assert status == 0
    assert out == "".join(f"[{number}] {text}\n" for number, text in enumerate(texts))
    prompts = "".join(f"[{n}] prompt: {text}\n" for n, text in enumerate(("The GNU", SHOWN, "of\x0cit")))
    assert err.startswith(prompts)
    assert re.fullmatch(
        rf"{3 * NEW} tokens in \S+ s \(\d+ tokens/s\), {NEW - 1} target steps; compiling took \S+ s before\n",
        err.removeprefix(prompts),
    )


def test_one_prompt_as_it_comes(call, monkeypatch):
    """Every token is printed, and flushed, when it is there."""
    printed = []
    real = print
    monkeypatch.setattr("builtins.print", lambda *args, **kw: (printed.append((args, kw)), real(*args, **kw))[1])
    ids = ",".join(map(str, PROMPT))
    status, out, err = call("generate", V3, "--prompt-ids", ids, "--max-new-tokens", NEW, "--dtype", "float32")
    assert (status, out) == (0, bytes(GREEDY[:NEW]).decode() + "\n")
    assert err.startswith(f"prompt: {SHOWN}\n{NEW} tokens in")
    pieces = [("".join(args), kw["flush"]) for args, kw in printed if "sep" in kw]
    assert pieces == [(chr(token), True) for token in GREEDY[:NEW]]


def test_as_a_process(programs):
    """In bfloat16, as it is unless asked otherwise."""
    command = [
        sys.executable,
        "-m",
        "mla_attn.cli",
        "generate",
        str(V3),
        "--prompt",
        "The GNU",
        "--max-new-tokens",
        "8",
    ]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(programs)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) == 8 + 1
    assert done.stderr.startswith("prompt: The GNU\n8 tokens in ")
    assert done.stderr.count("\n") == 2


def test_ids_where_there_is_no_text(call, checkpoint):
    """The way round for a checkpoint whose tokenizer is not read."""
    folder = checkpoint({"tokenizer.model": ""})
    assert call("generate", folder, "--prompt", "x") == (
        2,
        "",
        f"mla-attn: error: {folder / 'tokenizer.model'} is not read: give prompts as token ids (--prompt-ids), or put "
        "the same tokenizer's tokenizer.json beside it\n",
    )
    options = ("--prompt-ids", ",".join(map(str, PROMPT)), "--max-new-tokens", NEW, "--dtype", "float32")
    status, out, err = call("generate", folder, *options)
    assert (status, out) == (0, "".join(f"{token} " for token in GREEDY[:NEW]) + "\n")
    assert err.startswith("mla-attn: warning: no text, token ids alone: ")
    _, out, _ = call("generate", folder, *options, "--json")
    (request,) = json.loads(out)["requests"]
    assert (request["tokens"], request["text"]) == (GREEDY[:NEW], None)


def test_the_end_of_a_stream_is_printed(capsys):
    """A character that the length limit cut in half."""
    show = generate.Printer(ByteTokenizer(), prefix="> ")
    for request, tokens in ((0, [104]), (1, [105]), (0, [195])):
        show(request, tokens)
    show.finish()
    assert capsys.readouterr().out == "> h\ufffd"


def test_demo_prompts_are_encoded_as_any_others(call, checkpoint, monkeypatch):
    """The begin token is the tokenizer's business alone."""
    prompts = []
    monkeypatch.setattr(demo, "generate", lambda model, p, **options: prompts.append(p) or 1 / 0)
    for config, begin in (({}, []), ({"tokenizer_config.json": {"add_bos_token": True}}, [256])):
        with pytest.raises(ZeroDivisionError):
            cli.main(["demo", str(V3 if not config else checkpoint(config))])
        assert prompts.pop() == [[*begin, *text.encode()] for text in demo.PROMPTS]


def test_draws(generate_json):
    """Equal prompts with seeds of their own; the same command, the same text."""
    greedy = generate_json()["requests"]
    drawn = generate_json("--temperature", 1.5, "--seed", 3)["requests"]
    assert drawn != greedy
    assert generate_json("--temperature", 1.5, "--seed", 3)["requests"] == drawn
    assert generate_json("--temperature", 1.5, "--seed", 4)["requests"] != drawn
    assert generate_json("--temperature", 1.5, "--seed", 3, "--top-p", 1e-6)["requests"] == greedy
    assert generate_json("--temperature", 1.5, "--seed", 3, "--top-k", 1)["requests"] == greedy


def test_few_slots_and_pages(generate_json):
    """One prompt at a time, in pages for one."""
    result = generate_json("--max-batch", 1, "--num-pages", 1)
    assert result["requests"] == generate_json()["requests"]
    assert result["stats"]["target_steps"] == 3 * (NEW - 1)


def test_calibrated_scales(call, generate_json, prompts_file, tmp_path):
    """With them a float8 cache gives the same text; with others, of the same programs, another."""
    file = tmp_path / "scales.json"
    options = ("--prompts-file", prompts_file, "--dtype", "float32", "--prefill-chunk", 16, "--output", file)
    status, out, err = call("calibrate", V3, *options)
    assert status == 0
    assert re.fullmatch(r"full: scale of 4 layers, 0\.\d+ to 0\.\d+\n", out)
    assert err == f"3 prompts, 53 tokens; scales are in {file}\n"
    scales = json.loads(file.read_text())
    assert len(set(scales["full"]["scale"])) == 4
    stored = ("--kv-dtype", "float8_e4m3fn", "--kv-scales", file)
    assert generate_json(*stored)["requests"][1]["tokens"] == GREEDY[:NEW]
    file.write_text(json.dumps({"full": {"scale": [scale / 100 for scale in scales["full"]["scale"]]}}))
    assert generate_json(*stored)["requests"][1]["tokens"] != GREEDY[:NEW]


def test_options_reach_the_engine(call, monkeypatch):
    calls = []

    def fake(model, **options):
        calls.append((model, options))
        raise NotImplementedError("not now")

    monkeypatch.setattr(generate, "Engine", fake)
    assert call("generate", V2, "--prompt", "hé") == (2, "", "mla-attn: error: not now\n")
    model, options = calls.pop()
    assert model.lm_head.kernel.dtype == jnp.bfloat16
    assert options == {
        "max_batch": 1,
        "num_pages": 2,
        "page_size": 64,
        "max_len": 3 + 64,
        "speculation": (),
        "draft": None,
        "prompt_tokens": 3,
        "max_waiting": 1,
        "batches": (1,),
        "implementation": None,
        "skip_threshold": None,
        "cache_dir": None,
        "kv_dtype": None,
        "kv_scale": None,
        "draft_kv_dtype": None,
    }
    other = "--max-new-tokens 5 --speculate 2 --page-size 16 --prefill-chunk 7 --max-batch 3 --implementation xla"
    call("generate", V3, "--prompt-ids", "1, 2", "--dtype", "float32", *other.split())
    model, options = calls.pop()
    assert model.lm_head.kernel.dtype == jnp.float32
    assert options == {
        "max_batch": 1,
        "num_pages": 1,
        "page_size": 16,
        "max_len": 7,
        "speculation": (DraftTree((1, 1)),),
        "draft": None,
        "prompt_tokens": 2,
        "max_waiting": 1,
        "batches": (1,),
        "implementation": "xla",
        "skip_threshold": None,
        "cache_dir": None,
        "kv_dtype": None,
        "kv_scale": None,
        "draft_kv_dtype": None,
    }


def test_several_devices(call):
    """The tokens of one device, with a draft model of the same checkpoint on the same devices."""
    devices = ["--tensor-parallel", "2", "--context-parallel", "2", "--expert-parallel", "4", "--page-size", "16"]
    drafts = ("--draft", V3, "--speculate", "2")
    arguments = ("--prompt-ids", ",".join(map(str, PROMPT)), "--max-new-tokens", NEW, "--dtype", "float32", "--json")
    status, out, _ = call("generate", V3, *arguments, *devices, *drafts)
    assert status == 0 and json.loads(out)["requests"][0]["tokens"] == GREEDY[:NEW]
    assert json.loads(out)["stats"]["compiles_after_warm_up"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["generate", V3, "--prompt", "x", "--tensor-parallel", "3", "--context-parallel", "3", "--page-size", "9"],
            "--tensor-parallel 3 and --context-parallel 3 need 9 devices, there are 8 of the kind 'cpu'",
        ),
        (
            ["generate", V3, "--prompt", "x", "--tensor-parallel", "2", "--expert-parallel", "3"],
            "--expert-parallel 3 must be one of 1, 2, as --tensor-parallel is 2 and --context-parallel 1",
        ),
        (
            ["generate", V3, "--prompt", "x", "--context-parallel", "3"],
            "--page-size 64 must be a multiple of --context-parallel 3",
        ),
        (["generate", "/no/such/folder", "--prompt", "x"], "CHECKPOINT '/no/such/folder' must be a folder"),
        (["generate", "", "--prompt", "x"], "CHECKPOINT '' must be a folder"),
        (["generate", V3, "--prompt", ""], "prompt is empty"),
        (["generate", V3, "--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens 0 must be"),
        (["generate", V3, "--prompt", "x", "--max-new-tokens", "-5"], "--max-new-tokens -5 must be"),
        (
            ["generate", V3, "--prompt", "x", "--max-new-tokens", "ten"],
            "--max-new-tokens 'ten' must be an integer from 1 to",
        ),
        (
            ["generate", V3, "--prompt", "x", "--max-new-tokens", "5000"],
            "the longest prompt has 1 tokens and --max-new-tokens is 5000: together they must be at most "
            "max_position_embeddings=4096",
        ),
        (["generate", V3, "--prompt", "x", "--page-size", "-1"], "--page-size -1 must be"),
        (["generate", V3, "--prompt", "x", "--prefill-chunk", "0"], "--prefill-chunk 0 must be"),
        (["generate", V3, "--prompt", "x", "--speculate", "-2"], "--speculate -2 must be"),
        (["generate", V3, "--prompt", "x", "--max-batch", "0"], "--max-batch 0 must be"),
        (["generate", V3, "--prompt", "x", "--num-pages", "0"], "--num-pages 0 must be"),
        (
            ["generate", V3, "--prompt", "x", "--page-size", "1", "--num-pages", "64"],
            "--num-pages 64 must be at least 65: the longest",
        ),
        (
            ["generate", V3, "--prompt", "x", "--num-pages", "20000000"],
            "20000000 pages of 64 tokens (5493 GiB) and the",
        ),
        (["generate", V3, "--prompt", "x", "--temperature", "-1"], "--temperature -1 must be a number of at least 0"),
        (["generate", V3, "--prompt", "x", "--top-p", "0"], "--top-p 0 must be a number above 0, at most 1"),
        (["generate", V3, "--prompt", "x", "--seed", "-1"], "--seed -1 must be an integer from 0 to 4294967295"),
        (
            ["generate", V3, "--prompt", "x", "--seed", str(2**32)],
            "--seed 4294967296 must be an integer from 0 to 4294967295",
        ),
        (["generate", V2, "--prompt", "x", "--speculate", "3"], "no MTP layer"),
        (
            ["generate", V3, "--prompt", "x", "--speculate", "3", "--tree", "2x1"],
            "--tree is not allowed with --speculate",
        ),
        (["generate", V3, "--prompt", "x", "--draft", "ngram:3"], "--draft needs --speculate or --tree"),
        (["generate", V3, "--prompt", "x", "--kv-scales", "f"], "--kv-scales needs --kv-dtype with float8"),
        (["generate", V3, "--prompt", "x", "--kv-dtype", "fp8"], "--kv-dtype: invalid choice: 'fp8'"),
        (["generate", V3, "--prompt", "x", "--draft-kv-dtype", "bfloat16"], "--draft-kv-dtype needs --speculate or"),
        (
            ["generate", V3, "--prompt", "x", "--speculate", "1", "--draft", "ngram:2", "--draft-kv-dtype", "bfloat16"],
            "--draft-kv-dtype needs --speculate or --tree, with drafts of a model",
        ),
        (["calibrate", V3, "--output", os.devnull], "the following arguments are required: --prompts-file"),
        (["calibrate", V3, "--prompts-file", "/no/such/file", "--output", os.devnull], "/no/such/file"),
        (
            ["calibrate", V3, "--prompts-file", os.devnull, "--output", "/no/such/file"],
            "--output '/no/such/file' must be a file that can be written: No such file or directory",
        ),
        (["calibrate", V3, "--prompts-file", os.devnull, "--output", os.devnull], "holds no prompt, must hold one"),
        (
            ["calibrate", V3, "--prompts-file", "f", "--output", os.devnull, "--prefill-chunk", "0"],
            "--prefill-chunk 0 must be an integer from 1",
        ),
        (
            ["generate", V3, "--prompt", "x", "--speculate", "2", "--draft", "ngram:0"],
            "--draft 'ngram:0' must be a folder, or ngram:N with N from 1 to 64",
        ),
        (["generate", V3, "--prompt", "x", "--tree", "2x0"], "--tree '2x0' must be widths of at least 1 joined by x"),
        (["generate", V3, "--prompt-ids", "1,258"], "a prompt holds token 258, must be 0 to 257"),
        (["generate", V3, "--prompt-ids", "1,,2"], "--prompt-ids '1,,2' must be comma-separated token ids, as 1,2,3"),
        (["generate", V3, "--prompt-ids=-1,2"], "--prompt-ids '-1,2' must be comma-separated token ids"),
        (["generate", V3, "--prompts-file", "/no/such/file"], "/no/such/file"),
        (["generate", V3, "--prompts-file", os.devnull], "holds no prompt, must hold one a line"),
        (["generate", V3, "--prompts-file", V3 / "model.safetensors"], "model.safetensors' must be text in UTF-8: "),
        (["generate", V3, "--prompt", "x", "--prompt-ids", "1"], "not allowed with argument --prompt"),
        (["generate", V3], "one of the arguments --prompt --prompt-ids --prompts-file is required"),
        (["generate", V3, "--prompt", "x", "--implementation", "cuda"], "invalid choice: 'cuda'"),
        (["generate", V3, "--prompt", "x", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["demo", "/no/such/folder"], "/no/such/folder"),
        (["translate"], "invalid choice: 'translate'"),
    ],
    ids=lambda value: " ".join(map(str, value[2:])) if isinstance(value, list) else "",
)
def test_wrong_calls(call, arguments, message):
    status, out, err = call(*arguments)
    assert status == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1 and err.startswith("mla-attn: error: ")


def test_supports(call):
    status, out, _ = call("supports")
    assert status == 0
    lines = out.splitlines()
    assert re.match(r"\| op \| call \|.* xla \| reference \|$", lines[0])
    assert re.match(r"(\| --- )+\|$", lines[1])
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert any("`mla_attention` | CPU: decode |" in line and "| yes |" in line for line in lines)


@pytest.mark.slow
def test_demo(call):
    """Of a checkpoint with an MTP layer and of one without, in a row."""
    status, out, err = call("demo", V3, GPT_OSS)
    assert (status, err) == (0, "")
    _, first, second = out.split("\nplain: ")
    assert second.count("288 tokens in") == 1 and "speculative" not in second
    plain, speculative = first.split("\nspeculative, K = 3: ")
    for text in (plain, speculative):
        assert "[0] This program is free software" in text
        assert "[1] Permission is hereby granted" in text
        assert re.search(r"288 tokens in .* tokens/s\), \d+ target steps", text)
    assert plain.split("\n", 1)[1].split("288 tokens")[0] == speculative.split("\n", 1)[1].split("288 tokens")[0]
    assert float(re.search(r"acceptance length (\S+);", speculative)[1]) > 2
    assert "same tokens from both: yes" in speculative
    steps = re.search(r"target steps: (\d+) plain, (\d+) speculative", speculative)
    assert int(steps[1]) == 95 > int(steps[2])
