"""The README's examples run as they stand."""

import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples(code, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    # As for users: strict promotion is for the library's own code.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    for line in re.findall(r"print\(.*\)  # (.*)", code):  # what it says it prints
        assert line in printed
    assert printed


def test_the_cases_name_tests_that_exist():
    """Each line gives a file once, and after it names of tests in that file."""
    file, named = None, 0
    for path, name in re.findall(r"`(?:(tests/\S+?\.py)::)?(test_\w+)`", (ROOT / "tests/cases/README.md").read_text()):
        file = path or file
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"
        named += 1
    assert named > 60
