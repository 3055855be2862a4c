"""Every notebook is a jupytext pair: the text is run here, and the notebook must hold the same cells."""

import json
import pathlib
import re

import jax
import matplotlib
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "notebooks").glob("*.py"))
# Here they run on less: every cell, with fewer draft trees, prompts, tokens and repeats.
LESS = {
    "quickstart": {
        '["1", "1x1", "1x1x1", "1x1x1x1"]': '["1x1"]',
        '["2", "2x2", "4x1x1"]': '["2x2"]',
        "max_new_tokens=64": "max_new_tokens=16",
    },
    "speculative_decoding": {
        "\nNEW = 48\n": "\nNEW = 16\n",
        "\nREPEATS = 3\n": "\nREPEATS = 1\n",
        " for text in texts]": " for text in texts[:4]]",
    },
}


def text_cells(path):
    """(kind, source) of each cell of a percent script, its header left out."""
    cells = []
    for part in re.split(r"^# %%", path.read_text(), flags=re.MULTILINE)[1:]:
        mark, _, body = part.partition("\n")
        if "[markdown]" in mark:
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        cells.append(("markdown" if "[markdown]" in mark else "code", body.strip()))
    return cells


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pair_is_in_step(path):
    notebook = json.loads(path.with_suffix(".ipynb").read_text())
    cells = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in notebook["cells"]]
    assert cells == text_cells(path)
    errors = [
        o for c in notebook["cells"] for o in c.get("outputs", []) if "stderr" in (o.get("name"), o["output_type"])
    ]
    assert not errors, "the notebook as shown holds warnings"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path):
    matplotlib.use("agg")
    text = path.read_text()
    for whole, less in LESS.get(path.stem, {}).items():
        assert whole in text
        text = text.replace(whole, less)
    # As for users: strict promotion is for the library's own code.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(compile(text, str(path), "exec"), {"__file__": str(path), "__name__": "notebook"})
