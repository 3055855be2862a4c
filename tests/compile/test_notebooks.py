"""Every notebook is a jupytext pair: the text is run here, and the notebook must hold the same cells."""

import json
import pathlib
import re
import runpy

import jax
import matplotlib
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "notebooks").glob("*.py"))


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
def test_runs(path, monkeypatch):
    matplotlib.use("agg")
    # As for users: strict promotion is for the library's own code.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        runpy.run_path(str(path))
