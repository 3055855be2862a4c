"""``mla-attn bench model``."""

import dataclasses
import json

import pytest

from mla_attn.bench import model
from mla_attn.cli import main


@pytest.mark.parametrize("to_file", [False, True])
def test_decode_steps_of_a_model(monkeypatch, capsys, tmp_path, to_file):
    step = model.ModelStep(batch=2, kv_len=8, step_us=4.0, host_us=1.0, kernel_us=None, kernels=None, short_us=1.0)
    monkeypatch.setattr(model, "measure", lambda *arguments, **options: [step])
    file = tmp_path / "model.json"
    assert main(["bench", "model", "v2-lite", "--batch", "2", "--json", *([str(file)] if to_file else [])]) == 0
    printed = capsys.readouterr().out
    assert json.loads(file.read_text() if to_file else printed)["steps"] == [dataclasses.asdict(step)]
    assert ("| 2 | 8 | 4 | 75 % |" in printed) == to_file


def test_files_that_cannot_be_written_are_found_before_the_run(monkeypatch, capsys):
    monkeypatch.setattr(model, "measure", None)
    assert main(["bench", "model", "v2-lite", "--json", "/nodir/x.json"]) == 2
    assert "--json '/nodir/x.json' must be a file that can be written" in capsys.readouterr().err
