"""What is wrong with a command line is told in a line, at once; and what a shell expects of a program."""

import argparse
import collections
import functools
import os
import pathlib
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import hypothesis
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

import mla_attn
from checkpoints import V3
from mla_attn import cli
from mla_attn.bench import model as bench_model
from mla_attn.bench.ops import run as bench_run
from mla_attn.bench.serve import command as bench_serve
from mla_attn.cache.formats import FORMATS
from mla_attn.cli import arguments, generate, process, warm_up
from mla_attn.dispatch import NAMES
from mla_attn.models import loading
from mla_attn.names import DTYPES, IMPLEMENTATIONS, KV_DTYPES
from mla_attn.ops import mla

NASTY = [
    "0", "1", "2", "-1", "64", "255", "256", "4096", "65536", "100000", "2147483647", "2147483648", "4294967295", "-",
    "99999999999", "9" * 30, "9" * 5000, "-" + "9" * 30, "1.5", "1e-30", "1e-40", "1e30", "1e308", "1e999", "-1e308",
    "nan", "inf", "-inf", "0x10", "1_0", "٣", "", " ", "\n", "a\nb", "\udcff", "é", "1,2", "1,,2", "1," * 40 + "1",
    "0,3", "0.5,1", "3x2", "1x1x1", "258x258", "x", "9x" * 300 + "9", "2x0", "512+64", "99999999999+64", "1x16x1x64",
    "1x16x1xuniform:64", "1x16x1x1024@99999999999", "65536x1024x4096x4096", "2x1x1x64+3*5", "xla", "triton", "cpu",
    "xla,reference", "--", "v2-lite", "a.xyz", "a.png", str(V3), "/", "/nodir/a.png", "/dev/null",
]  # fmt: skip


def commands(parser, path=()):
    """Every command with its arguments, as the parser has them."""
    (inner,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)] or [None]
    if inner is None:
        yield path, [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
        return
    for name, each in inner.choices.items():
        yield from commands(each, (*path, name))


COMMANDS = list(commands(arguments.make_parser()))
VALUES = (
    st.sampled_from(NASTY)
    | st.integers().map(str)
    | st.floats().map(str)
    | st.text(st.characters(exclude_characters="/\0"))
)


# What must be there.
RIGHT = {"CHECKPOINT": str(V3), "WHAT": "kernels", "model": "v2-lite", "REPORT": "report.json", "PICTURE": "a.png"}


MUST = {("generate",): ["--prompt", "x"], ("calibrate",): ["--prompts-file", "f", "--output", "scales.json"]}


def least(path, actions):
    """A right command line, of what must be there alone."""
    there = [RIGHT[action.metavar or action.dest] for action in actions if not action.option_strings]
    return [*path, *there, *MUST.get(path, [])]


@st.composite
def command_lines(draw):
    """Right but for a few options, or not even that."""
    path, actions = draw(st.sampled_from(COMMANDS))
    options = [action for action in actions if action.option_strings]
    line = least(path, actions)
    for action in draw(st.lists(st.sampled_from(options), max_size=5)) if options else []:
        value = [] if action.nargs == 0 else [draw(st.sampled_from(sorted(action.choices or NASTY)) | VALUES)]
        line += draw(
            st.sampled_from([[action.option_strings[0], *value], ["=".join([action.option_strings[0], *value])]])
        )
    return draw(st.sampled_from([line, line, line, line[:-1], line[1:], [*line, draw(VALUES)]]))


def outcome(line, capsys):
    """Status of a command line, which may exit; and a refusal is one line."""
    begin = time.process_time()
    try:
        status = cli.main(line)
    except SystemExit as stop:
        status = stop.code or 0
    assert time.process_time() - begin < 5, line
    out, err = capsys.readouterr()
    if status == 2:
        assert err.startswith("mla-attn: error: ") or "\nmla-attn: error: " in err, (line, err)
        last = err[err.rindex("mla-attn: error: ") :]
        assert last.count("\n") == 1 and last[:-1].isprintable() and len(last) < 1100, (line, err)
        assert out == ""
    return status


usual = functools.partial(
    hypothesis.settings,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    derandomize=True,
    database=None,
)


@pytest.fixture
def nothing_imported(monkeypatch, tmp_path):
    """Nothing that takes time is imported for a command line: what a command would run is replaced."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "start_jax", lambda: None)
    monkeypatch.setattr(
        cli, "importlib", SimpleNamespace(import_module=lambda name: SimpleNamespace(main=lambda options: 0))
    )


def test_every_option_with_every_nasty_value(nothing_imported, capsys):
    found = collections.Counter()
    for path, actions in COMMANDS:
        assert outcome(least(path, actions), capsys) == 0
        for action in actions:
            for value in NASTY if action.nargs != 0 else []:
                line = least(path, actions)
                if action.option_strings:
                    line.append(f"{action.option_strings[0]}={value}")
                else:
                    line[len(path)] = value
                found[outcome(line, capsys)] += 1
    assert found.keys() == {0, 2} and 200 < found[0] < found[2]


@usual(max_examples=300)
@hypothesis.given(line=command_lines())
def test_any_command_line_is_taken_or_refused_in_a_line(line, nothing_imported, capsys):
    assert outcome(line, capsys) in (0, 2)


class Reached(NotImplementedError):
    """What would take time would begin here."""


@pytest.fixture
def nothing_runs(monkeypatch, tmp_path):
    """Commands stop where weights would be read, arrays made or programs compiled."""

    def reached(*_, **__):
        raise Reached("reached")

    opened = functools.cache(loading.open_checkpoint)
    monkeypatch.chdir(tmp_path)
    for module in (generate, bench_serve, warm_up):
        monkeypatch.setattr(module, "open_checkpoint", lambda path, dtype: opened(path, dtype=dtype))
    monkeypatch.setattr(loading.Checkpoint, "load", reached)
    monkeypatch.setattr("mla_attn.generation.generate", reached)
    monkeypatch.setattr(bench_run, "measure_ceilings", reached)
    small = opened(V3, dtype=jnp.dtype("float32")).model
    monkeypatch.setattr(bench_model, "random_model", reached)
    monkeypatch.setattr(bench_model, "nnx", SimpleNamespace(eval_shape=lambda make: small))
    monkeypatch.setattr(bench_serve, "random_model", reached)
    monkeypatch.setattr(bench_serve, "nnx", SimpleNamespace(eval_shape=lambda make: small))


@st.composite
def right_lines(draw):
    """Commands of which each argument alone is right, extremes included."""
    numbers = st.sampled_from(["1", "2", "64", "255", "1000", "4096", "65536", "1000000", "2147483647"])
    shares = st.sampled_from(["0", "1e-30", "0.5", "1"])
    trees = st.sampled_from(["1", "3x2", "1x1x1", "254"])
    shapes = st.sampled_from(
        ["1x16x1x64", "65536x1024x4096x4096", "2x1x2x3+2147483640", "1x1x1xuniform:2147483647@2147483647"]
    )
    path, actions = draw(
        st.sampled_from(
            [
                each
                for each in COMMANDS
                if each[0] not in (("demo",), ("supports",), ("bench", "roofline"), ("bench", "host"))
            ]
        )
    )
    line = [*path]
    if path == ("generate",):
        line += draw(
            st.sampled_from([["--prompt", "x"], ["--prompt", ""], ["--prompt-ids", "1,2"], ["--prompt-ids", "9" * 40]])
        )
    for action in actions:
        flag = (action.option_strings or [""])[0]
        if not flag:
            line.append("v2-lite" if action.choices else str(V3))
        elif flag in ("--prompt", "--prompt-ids", "--prompts-file", "--list", "--json", "--plot") or draw(
            st.booleans()
        ):
            continue
        elif action.nargs == 0:
            line.append(flag)
        else:
            kind = {
                "--tree": trees,
                "--draft": st.sampled_from(["ngram:1", "ngram:64", "."]),
                "--shape": shapes,
                "--latent": st.sampled_from(["1+0", "65536+65536"]),
                "--kv-lens": st.sampled_from(["7,63*16"]),
            }
            share = flag in ("--top-p", "--shared-share", "--acceptance", "--temperature", "--spread")
            value = kind.get(flag, shares if share else numbers)
            line += [flag, draw(st.sampled_from(sorted(action.choices)) if action.choices else value)]
    return line


@usual(max_examples=150)
@hypothesis.given(line=right_lines())
def test_a_call_that_cannot_be_served_is_refused_before_anything_is_made(line, nothing_runs, capsys):
    assert outcome(line, capsys) == 2


def test_help_needs_no_jax():
    code = "import sys, mla_attn.cli.arguments as a; a.make_parser().format_help()\n"
    code += "assert not {'jax', 'numpy', 'flax', 'jaxtyping', 'tqdm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("line", "lists"), [([], "generate"), (["bench"], "serve")])
def test_without_a_command_the_help_is_printed(line, lists, nothing_imported, capsys):
    assert cli.main(line) == 2
    out, err = capsys.readouterr()
    assert (out, f"\n    {lists} " in err) == ("", True)
    assert err.endswith((f"{lists}, calibrate, warm-up, demo, bench, supports\n", f"{lists}, host, start, rungs\n"))


def test_names_that_are_written_out_are_those_there_are():
    assert set(DTYPES) <= set(FORMATS) == set(KV_DTYPES)
    assert set(IMPLEMENTATIONS) == {implementation.name for implementation in mla.IMPLEMENTATIONS} <= set(NAMES)


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"mla-attn {mla_attn.__version__}\n" and mla_attn.__version__[0].isdigit()


# The process.


def started(*arguments, **rest):
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored, which children inherit
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "mla_attn.cli", *arguments], stderr=subprocess.PIPE, text=True, **rest
        )
    finally:
        signal.signal(signal.SIGINT, handler)


def test_an_interrupt_ends_it_at_once_and_without_a_word():
    child = started("supports", stdout=subprocess.DEVNULL)
    maps = pathlib.Path(f"/proc/{child.pid}/maps")
    while maps.exists() and b"jaxlib" not in maps.read_bytes():  # until it is in the middle of imports
        time.sleep(0.01)
    time.sleep(0.0 if maps.exists() else 0.5)
    child.send_signal(signal.SIGINT)
    begin = time.monotonic()
    assert (child.communicate()[1], child.returncode) == ("", -signal.SIGINT)  # 130, says a shell
    assert time.monotonic() - begin < 1


def test_a_reader_that_leaves_ends_it_without_a_word():
    read, write = os.pipe()
    os.close(read)
    child = started("bench", "ops", "--list", stdout=write)
    os.close(write)
    assert (child.communicate()[1], child.returncode) == ("", -signal.SIGPIPE)


@pytest.mark.parametrize(
    ("closed", "code", "said"),
    [
        ("2>&-", "sys.stderr.write('x'); f = open('/dev/zero'); print(f.fileno() > 2)", "True\n"),
        ("2>&- <&-", "print('x', file=sys.stderr)", ""),
        ("", "print('h\\u00e9')", "h?\n"),
    ],
)
def test_streams(closed, code, said):
    line = f'exec "$0" -c "import sys; from mla_attn.cli import process; process.own(); {code}" {closed}'
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_a_platform_that_is_not_there():
    child = started("supports", stdout=subprocess.DEVNULL, env=os.environ | {"JAX_PLATFORMS": "cuda"})
    assert (child.communicate()[1].count("\n"), child.returncode) == (1, 2)


def test_memory_that_there_is_not(monkeypatch, capsys):
    def fails(options):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.\n0. more")

    monkeypatch.setattr(cli, "importlib", SimpleNamespace(import_module=lambda name: SimpleNamespace(main=fails)))
    assert cli.main(["supports"]) == 2
    assert capsys.readouterr().err.startswith("mla-attn: error: out of memory: RESOURCE_EXHAUSTED: Out of memory while")
