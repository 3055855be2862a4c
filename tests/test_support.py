"""The contract's page says of implementations what they say themselves."""

import pathlib

import pytest

from mla_attn.dispatch import compiling_for
from mla_attn.support import CALLS, H200, IMPLEMENTATIONS, support_table, supports
from mla_attn.triton import gpus

PAGE = pathlib.Path(__file__).parents[1] / "mla_attn" / "README.md"


@pytest.fixture(autouse=True)
def jax_triton(monkeypatch):
    """Installed, with a GPU plugin: the page says what kernels support, not what is installed here."""
    monkeypatch.setattr(gpus, "missing", lambda: None)


def test_the_page_holds_the_support_table():
    """To renew it: replace what stands between the marks by what ``mla-attn supports`` prints."""
    text = PAGE.read_text()
    begin, end = "checked by a test -->\n", "<!-- end of support table -->"
    assert text[text.index(begin) + len(begin) : text.index(end)].strip() == support_table()


@pytest.mark.parametrize("op", CALLS)
def test_the_table_asks_every_implementation(op):
    rows = [line.strip("| ").split(" | ") for line in support_table().splitlines()]
    for label, (device, facts) in CALLS[op].items():
        answers = dict(zip(rows[0], next(row for row in rows if row[:2] == [f"`{op}`", label]), strict=True))
        where = {"platform": device.platform, "compute_capability": device.compute_capability, "arch": device.arch}
        told = supports(op, **where, **facts)
        assert list(told) == [i.name for i in IMPLEMENTATIONS[op]]
        unrun = device.platform == "gpu" and (device != H200 or op in ("ragged_attention", "grouped_matmul"))
        for name, reason in told.items():
            assert answers[name] == (reason or ("compiles, not run" if unrun and name == "triton" else "yes"))


def test_supports_answers_for_any_call(unchecked):
    answers = supports("mla_attention", num_heads=20, page_size=48, batch_invariant=True, platform="gpu")
    assert "batch_invariant" in answers["xla"]
    assert supports("mla_attention", num_heads=20)["xla"] is None
    with compiling_for(H200):  # the current device, unless told otherwise
        assert supports("mla_attention", num_heads=20)["mosaic_gpu"] is None
        assert supports("mla_attention", platform="cpu")["mosaic_gpu"] is not None
    assert supports("mla_attention", compute_capability="9.0")["mosaic_gpu"] is None
    hopper = {"platform": "gpu", "compute_capability": "9.0"}
    assert supports("mla_attention", num_heads=20, page_size=48, **hopper)["mosaic_gpu"] is None
    for facts, reason in (
        ({"platform": "cpu"}, "cpu"),
        ({**hopper, "compute_capability": "10.0"}, "compute capability 10.0"),
        ({**hopper, "dtype": "float32"}, "float32"),
        ({**hopper, "kv_lora_rank": 384}, "384 + 64"),
        ({**hopper, "row_width": 640, "rope_offset": 520}, "rope_offset=520: must be a multiple of 64"),
        ({**hopper, "row_width": 580}, "pool rows of 580 elements: must be a multiple of 8"),
        ({**hopper, "window": 128}, "window=128"),
        ({**hopper, "soft_cap": 3.0}, "soft_cap=3.0"),
        ({**hopper, "scale": 1e-4}, "scale=0.0001"),
    ):
        assert reason in supports("mla_attention", **facts)["mosaic_gpu"]
    for op, facts, reason in (
        ("grouped_matmul", {"depth": 1000}, "weights of 1000 x 2048: both must be multiples of 64"),
        ("grouped_matmul", {"dtype": "float32"}, "float32 rows and weights: must be bfloat16"),
    ):
        assert supports(op, **hopper, **facts) == {"mosaic_gpu": reason, "triton": None, "xla": None, "reference": None}
    for wrong in ({"compute_capability": 9.0}, {"compute_capability": "hopper"}, {**hopper, "platform": "cpu"}):
        with pytest.raises(ValueError, match=r"compute_capability=.* must be"):
            supports("mla_attention", **wrong)
    with pytest.raises(ValueError, match="batch_invariant='no' must be True or False"):
        supports("mla_attention", batch_invariant="no")
    with pytest.raises(ValueError, match="must be one of"):
        supports("fft")
    with pytest.raises(ValueError, match="colour"):
        supports("mla_attention", colour="red")
