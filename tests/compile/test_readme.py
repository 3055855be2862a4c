"""What the pages say is true: their examples run, their links lead somewhere, their figures are those of the data."""

import importlib
import json
import pathlib
import re

import jax
import pytest

from mla_attn.bench.ceilings import Ceilings
from mla_attn.bench.ops.shapes import parse_shape
from mla_attn.specs import MLASpec

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted(path for path in ROOT.rglob("README.md") if not {".venv", ".pytest_cache"} & set(path.parts))


def name(path):
    return str(path.relative_to(ROOT))


def example(path, number, code):
    """The root page's take longer than others: they compile a kernel's fallback, and an engine."""
    marks = [pytest.mark.slow] if path == ROOT / "README.md" else []
    return pytest.param(path, code, id=f"{name(path)}-{number}", marks=marks)


EXAMPLES = [
    example(path, number, code)
    for path in PAGES
    for number, code in enumerate(
        re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    )
]


@pytest.mark.parametrize("path, code", EXAMPLES)
def test_examples(path, code, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    # As for users: strict promotion is for the library's own code.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(compile(code, name(path), "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    for line in re.findall(r"print\(.*\)  # (.*)", code):  # what it says it prints
        assert line in printed
    assert printed or "print(" not in code


@pytest.mark.parametrize("path", [*PAGES, ROOT / "pallas_kernels/NOTES.md"], ids=name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!http)([^)]+)\)", path.read_text()):
        file, _, heading = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), f"{name(path)} links to {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", found.read_text(), flags=re.MULTILINE)
            assert heading in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles], target


def test_public_names_exist():
    """Modules are told with ``__all__``, whatever is in them; others name what is meant."""
    (section,) = re.findall(r"## What is public\n(.*?)\n## ", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    modules, _, others = section.partition(";")
    named = re.findall(r"`(mla_attn[\w.]*)`", modules)
    assert len(named) == 8
    for module in map(importlib.import_module, named):
        assert all(hasattr(module, public) for public in module.__all__)
    for path, _, public in (dotted.rpartition(".") for dotted in re.findall(r"`(mla_attn\.[\w.]+)`", others)):
        assert hasattr(importlib.import_module(path), public)


def test_the_first_page_is_short():
    text = (ROOT / "README.md").read_text()
    assert len([word for line in text.splitlines() if not line.startswith("|") for word in line.split()]) <= 900


def rows(page, columns, label):
    """Rows of that many columns, of any table of a page, whose first is ``label``, but for a remark in parentheses."""
    cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in (ROOT / page).read_text().splitlines())
    return [row for row in cells if len(row) == columns and row[0].partition(" (")[0] == label]


def label_of(shape):
    label = ", ".join(shape.split("@")[0].split("x", 3)).replace("uniform:", "uniform 1 to ")
    return {"64, 128, 1, 32768+63*16": "32768 beside 63 of 16, 128 heads"}.get(label, label)


def cost(text):
    """Operations and bytes of a shape."""
    shape = parse_shape(text)
    spec = MLASpec(num_heads=shape.heads, kv_lora_rank=512, qk_rope_head_dim=64, scale=1.0)
    return shape.flops(spec), shape.bytes(spec, row_bytes=1152, itemsize=2)


def measured():
    return json.loads((ROOT / "mla_attn/bench/measured.json").read_text())


def test_measured_figures_are_those_of_the_table():
    """The rows of both pages have the figures of the data; operations and bytes are those of the shapes."""
    columns = {"mla_attn (A)": 1, "mla_attn (D)": 5, "best peer (P)": 6, "XLA (X)": 7}
    data, compared = measured(), 0
    for result in [*data["results"], *data["not_drawn"]]:
        label, name = label_of(result["shape"]), result["implementation"]
        assert (result["flops"], result["bytes"]) == cost(result["shape"])
        if name not in columns:  # compared below
            continue
        (row,) = rows("mla_attn/bench/README.md", 8, label)
        assert float(row[columns[name]]) == result["kernel_us"]
        if name == "mla_attn (A)":
            assert [float(row[2]), float(row[3])] == [result["wall_us"], result["sustained_us"]]
            assert row[4] == f"{result['bound_us']} {result['bound']}"
        for row in rows("README.md", 7, label) if name == "XLA (X)" else ():
            assert row[6] == f"{result['kernel_us']}"
            compared += 1
    assert compared == 4


def test_bounds_of_the_picture_are_of_its_ceilings():
    data = measured()
    ceilings = Ceilings(**data["ceilings"])
    for result in data["results"]:
        seconds, bound = ceilings.bound(result["flops"], result["bytes"])
        assert (result["bound_us"], result["bound"]) == (round(seconds * 1e6, 1), bound)


def test_the_comparison_is_that_of_the_tables():
    """Both pages have the columns and figures of the data; ratios and bounds follow from them."""
    data, compared = measured(), 0
    ceilings, us = Ceilings(**data["comparison"]["ceilings"], product=""), {}
    for result in data["results"]:
        name, _, run = result["implementation"].partition(" (")
        if run == "F)":
            us.setdefault(result["shape"], {})[name] = result["kernel_us"]
    for shape, times in us.items():
        (row,) = rows("mla_attn/bench/README.md", 6, label_of(shape))
        assert row[1:5] == list(map(str, times.values()))
        ours, *others = times.values()
        assert float(row[5]) == pytest.approx(ours / min(others), abs=1e-3)  # of times that were not rounded
        seconds, bound = ceilings.bound(*cost(shape))
        for row in rows("README.md", 7, label_of(shape)):
            assert row[1:6] == [*map(str, times.values()), f"{seconds * 1e6:.0f} ({bound})"]
            compared += 1
    assert compared == 5
    for page, end in (("mla_attn/bench/README.md", " (F)"), ("README.md", "")):
        assert " | ".join(name + end for name in times) in (ROOT / page).read_text()


def test_the_cases_name_tests_that_exist():
    """Each line gives a file once, and after it names of tests in that file."""
    file, named = None, 0
    for path, test in re.findall(r"`(?:(tests/\S+?\.py)::)?(test_\w+)`", (ROOT / "tests/cases/README.md").read_text()):
        file = path or file
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file} has no {test}"
        named += 1
    assert named > 60
