"""``mla-attn bench start``, ``bench rungs`` and ``warm-up``."""

import json
import re

import jax
import pytest

from checkpoints import QWEN3, V3
from mla_attn.bench import rungs, start
from mla_attn.bench.configs import CONFIGS
from mla_attn.cli import main
from mla_attn.dispatch import compiling_for
from mla_attn.engine import Engine, NgramDrafts
from mla_attn.passes.passes import forget_programs
from mla_attn.speculative import DraftTree
from mla_attn.support import H200
from traffic import small_model

SIZES = ["--max-batch", "2", "--max-len", "48", "--num-pages", "18", "--page-size", "4", "--prompt-tokens", "16"]


def test_an_engine_from_an_empty_folder_and_from_a_full_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(start, "open_model", lambda *_, **__: (small_model(), small_model))
    found = []
    for _ in range(2):
        forget_programs()  # as in another process
        options = ["--cache-dir", str(tmp_path / "programs"), "--json"]
        assert main(["bench", "start", str(V3), *SIZES, *options]) == 0
        found.append(json.loads(capsys.readouterr().out))
    forget_programs()
    cold, warm = found
    assert (cold["programs"], cold["read"], warm["programs"], warm["read"]) == (4, 0, 4, 4)
    for report in found:
        seconds = report["seconds"]
        assert 0 < seconds["created"] < seconds["first_token"] <= seconds["first_request"] < seconds["all_programs"]
        assert {row["name"]: row["programs"] for row in report["made"]} == {"prefill": 1, "decode": 2, "extend": 1}
        assert min(row["lower"] for row in report["made"]) > 0
    assert sum(row["lower"] for row in warm["made"]) < sum(row["lower"] for row in cold["made"])
    assert warm["folder_bytes"] == sum(file.stat().st_size for file in (tmp_path / "programs").glob("*.program"))
    assert "cache_dir" in warm["sizes"] and warm["batches"] == [1, 2]


def test_single_calls(monkeypatch, capsys):
    monkeypatch.setattr(start, "_CALLS", ((2, 1, 64),))
    before = jax.config.jax_enable_compilation_cache
    assert main(["bench", "start", "kernels"]) == 0
    assert jax.config.jax_enable_compilation_cache == before
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\| `mla_attention`, 2 heads, .*, xla \| 1 \| [\d.]+ \| [\d.]+ \| \d+ \|", lines[-2])
    assert "`grouped_matmul`" in lines[-1]
    with compiling_for(H200):
        names = [name for name, *_ in start._calls()]
    assert [name.rpartition(" ")[2] for name in names] == ["mosaic_gpu", "xla"] * 2 + ["`attention_mgpu`"]


def test_programs_larger_than_need_be(monkeypatch, capsys):
    small = {"num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 16, "num_attention_heads": 2}
    small |= {"intermediate_size": 16, "first_k_dense_replace": 1, "kv_lora_rank": 8, "qk_rope_head_dim": 8}
    monkeypatch.setattr(rungs, "CONFIGS", {"v2-lite": CONFIGS["v2-lite"] | small})
    sizes = ["--batch", "1,2", "--rows", "8", "--kv-len", "8", "--page-size", "4"]
    assert main(["bench", "rungs", "v2-lite", *sizes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["program"], row["live"]) for row in report["decode"]] == [(1, 1), (2, 1), (2, 2)]
    assert [(row["program"], row["live"]) for row in report["prefill"]] == [(8, 8)]
    assert min(row["us"] for row in report["decode"] + report["prefill"]) > 0


def test_the_table_of_programs():
    rows = [(1, 1, 10.0), (8, 1, 11.0), (8, 8, 20.0)]
    text = rungs.table("requests", [{"program": p, "live": n, "us": us} for p, n, us in rows])
    assert text.splitlines()[0] == "| requests | in 1 | in 8 |"
    assert text.splitlines()[2:] == ["| 1 | 10 (+0.0 %) | 11 (+10.0 %) |", "| 8 |  | 20 (+0.0 %) |"]


@pytest.mark.slow
def test_warm_up(tmp_path, capsys):
    sizes = ["--max-batch", "1", "--max-len", "64", "--num-pages", "4", "--prompt-tokens", "16"]
    for read in (0, 3):
        forget_programs()
        assert main(["warm-up", str(V3), *sizes, "--cache-dir", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert re.fullmatch(rf"3 programs in .* s, {read} of them lowered before; .* MB in {tmp_path}\n", printed)
    forget_programs()
    assert main(["warm-up", str(V3), *sizes, "--cache-dir", ""]) == 2


@pytest.mark.slow
def test_warm_up_of_a_float8_cache(tmp_path, capsys):
    """An engine with this format and these scales finds all its programs; one with another finds none."""
    sizes = {"max_batch": 1, "max_len": 64, "num_pages": 4, "prompt_tokens": 16}
    options = [str(part) for name, size in sizes.items() for part in (f"--{name.replace('_', '-')}", size)]
    scales = {"full": {"k_scale": [0.5] * 4, "v_scale": [0.25] * 4}}
    (tmp_path / "scales").write_text(json.dumps(scales))
    line = ["warm-up", str(QWEN3), *options, "--cache-dir", str(tmp_path / "kept")]
    assert main([*line, "--kv-scales", str(tmp_path / "scales")]) == 2
    assert "--kv-scales needs --kv-dtype with float8" in capsys.readouterr().err
    assert main([*line, "--kv-dtype", "float8_e4m3fn", "--kv-scales", str(tmp_path / "scales")]) == 0
    found = []
    for stored in ({"kv_dtype": "float8_e4m3fn", "kv_scale": scales}, {}):
        forget_programs()
        engine = Engine.from_checkpoint(QWEN3, **sizes, **stored, cache_dir=tmp_path / "kept")
        engine.warm_up(progress=False)
        found.append((engine.statistics.programs_read, engine.statistics.programs))
    assert found == [(3, 3), (0, 3)]
    forget_programs()


@pytest.mark.slow
def test_warm_up_with_drafts_from_the_text(tmp_path, capsys):
    """An engine with these drafts, of a checkpoint without a draft layer, finds all its programs."""
    sizes = {"max_batch": 1, "max_len": 64, "num_pages": 4, "prompt_tokens": 16}
    options = [str(part) for name, size in sizes.items() for part in (f"--{name.replace('_', '-')}", size)]
    line = ["warm-up", str(QWEN3), *options, "--speculate", "2", "--cache-dir", str(tmp_path)]
    assert main(line) == 2
    assert f"{QWEN3}: " in capsys.readouterr().err
    assert main([*line, "--draft", "ngram:3"]) == 0
    forget_programs()
    engine = Engine.from_checkpoint(
        QWEN3, **sizes, speculation=(DraftTree.chain(2),), draft=NgramDrafts(3), cache_dir=tmp_path
    )
    engine.warm_up(progress=False)
    assert engine.statistics.programs_read == engine.statistics.programs > 0
    forget_programs()
