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
