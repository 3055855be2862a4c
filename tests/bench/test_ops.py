"""``mla-attn bench ops``: it counts right, times nothing that is wrong, and says what it could not measure."""

import dataclasses
import json
import pathlib
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from mla_attn.bench import ceilings, timing
from mla_attn.bench.ops import command, problem, report
from mla_attn.bench.ops import run as bench_run
from mla_attn.bench.ops.shapes import GQA_SETS, SETS, Shape, parse_lengths, parse_shape
from mla_attn.cli import main
from mla_attn.dispatch import Implementation
from mla_attn.ops import gqa, mla
from mla_attn.reference.mla import mla_attention as reference
from mla_attn.specs import GQASpec, MLASpec

SMALL = ["--latent", "16+8", "--page-size", "4", "--repeats", "2", "--seed", "7"]
SHAPE = "3x2x2x9+2+5"
BLOCKS = ("--kv-dtype", "float8_e4m3fn:blocks")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    rates = ceilings.Ceilings(
        read_bytes=1e10, product_flops_short=1e11, product_flops_sustained=9e10, product="assumed"
    )
    monkeypatch.setattr(bench_run, "measure_ceilings", lambda dtype, seed: rates)
    monkeypatch.setattr(problem, "ROTATED_BYTES", dict.fromkeys(("cpu", "gpu"), 1))
    monkeypatch.setattr(bench_run, "_CHAIN_SECONDS", 0.02)
    monkeypatch.setattr(timing, "CHAIN_CALLS", 3)


def bench(capsys, *arguments, status=0):
    """The command's JSON."""
    assert main(["bench", "ops", *SMALL, "--json", *arguments]) == status
    return json.loads(capsys.readouterr().out)


# Counting


def test_operations_and_bytes_of_a_ragged_causal_call():
    shape = Shape("ragged", heads=3, q_len=2, kv_lens=(5, 3))
    spec = MLASpec(num_heads=3, kv_lora_rank=4, qk_rope_head_dim=2, scale=1.0)
    pairs = (4 + 5) + (2 + 3)  # the first of two rows does not see the last key
    assert shape.flops(spec) == pairs * 3 * 2 * ((4 + 2) + 4)
    cached, rows = (5 + 3) * 6, 2 * 2 * 3 * (6 + 4)  # 2 requests x 2 query tokens x 3 heads, queries in and output out
    assert shape.bytes(spec, row_bytes=12, itemsize=2) == 2 * (cached + rows)


def test_operations_and_bytes_of_deepseek():
    spec = MLASpec(num_heads=128, kv_lora_rank=512, qk_rope_head_dim=64, scale=1.0)
    shape = parse_shape("128x128x1x4096")
    assert shape.flops(spec) == 2176 * 128 * 128 * 4096
    assert shape.bytes(spec, row_bytes=1152, itemsize=2) == 1152 * 128 * 4096 + 2 * 1088 * 128 * 128


def test_operations_and_bytes_of_grouped_queries():
    shape = parse_shape("2x6/3x2x5+3")
    assert (shape.heads, shape.kv_heads, shape.kv_lens) == (6, 3, (5, 3))
    spec = GQASpec(num_heads=6, num_kv_heads=3, head_dim=4, v_head_dim=2, scale=1.0)
    assert shape.flops(spec) == (4 + 5 + 2 + 3) * 6 * 2 * (4 + 2)
    assert shape.bytes(spec, row_bytes=36, itemsize=2) == 36 * 8 + 2 * (2 * 2 * 6 * (4 + 2))


def test_bound_is_the_slower_of_memory_and_compute():
    rates = ceilings.Ceilings(read_bytes=10.0, product_flops_short=100.0, product_flops_sustained=50.0, product="")
    assert rates.bound(flops=100, nbytes=20) == (2.0, "memory")
    assert rates.bound(flops=300, nbytes=20) == (3.0, "compute")


# Shapes


def test_shapes_as_written():
    assert parse_shape("4x16x2x100") == Shape("4x16x2x100", 16, 2, (100,) * 4)
    assert parse_shape("4x16x1x90+3*7@12") == Shape("4x16x1x90+3*7@12", 16, 1, (90, 7, 7, 7), 12)
    assert parse_lengths("90,3*7") == [90, 7, 7, 7]
    uniform = parse_shape("128x128x1xuniform:8192")
    assert uniform.kv_lens == tuple(np.random.default_rng(0).integers(1, 8193, 128))
    assert min(parse_shape("64x1x4xuniform:9").kv_lens) == 4


def test_table_width_is_the_longest_request_unless_wider():
    assert parse_shape("2x1x1x65+3").table_width(64) == 2
    assert parse_shape("2x1x1x65+3@1").table_width(64) == 2
    assert parse_shape("2x1x1x65+3@9").table_width(64) == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4x16x100", "must be BATCHxHEADS"),
        ("0x16x1x100", "requests must be 1 to 65536"),
        ("65537x16x1x100", "requests must be 1 to 65536"),
        ("1x0x1x100", "heads must be 1 to 1024"),
        ("1x16x99999x100", "query tokens must be 1 to 4096"),
        ("1x16x1x99999999999", "must be BATCHxHEADS|must be numbers"),
        ("1x16x1x9999999999", "must be at most 2147483647"),
        ("1x16x1x5@9999999999", "requests x WIDTH, must be at most 2147483647"),
        ("1x16x1x999999999*5", "must be at most 65536"),
        ("1x16x1xuniform:9999999999", "M of uniform:M must be 1 to"),
        ("3x16x1x5+6", "2 lengths for 3 requests"),
        ("2x16x4x3", "none may be less"),
        ("2x16x1xuniform:0", "M of uniform:M must be 1 to"),
        ("2x16x1x5+", "must be numbers"),
    ],
)
def test_malformed_shapes(text, message):
    with pytest.raises(ValueError, match=message):
        parse_shape(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "4x16"], "shape '4x16' must be"),
        (["--shape", "4x16/8x1x9"], "--shape 4x16/8x1x9 with --op mla: must be without key and value heads"),
        (["--op", "gqa", "--shape", "4x16x1x9"], "--shape 4x16x1x9 with --op gqa: must be with them, as 8x32/8x1x4096"),
        (["--op", "gqa", "--shape", "4x16/3x1x9"], "key and value heads must divide the query heads"),
        (["--implementation", "xla,cudnn"], "--implementation 'xla,cudnn' must be one of mosaic_gpu, triton, xla,"),
        (["--latent", "512"], "as 512+64"),
        (["--op", "gqa", *BLOCKS], "--kv-dtype float8_e4m3fn:blocks with --op gqa: it stores latent rows only"),
        (
            ["--latent", "16+8", *BLOCKS],
            "--kv-dtype float8_e4m3fn:blocks: latent channels of --latent must be a multiple",
        ),
        (["--latent", "0+0"], "--latent 0+0 must be latent channels, 1 to 65536, and rope channels"),
        (["--latent", "99999999999+64"], "--latent 99999999999+64 must be latent channels, 1 to 65536"),
        (["--seed", "-1"], "--seed -1 must be an integer from 0 to 4294967295"),
        (["--seed", "4294967296"], "--seed 4294967296 must be an integer from 0 to 4294967295"),
        (["--shape", "1x16x1x2147483647"], "the arrays of 1x16x1x2147483647 need "),
        (["--plot", "a.xyz"], "--plot 'a.xyz' must be a picture's name, in one of .png, .pdf"),
        (["--json", "/nodir/x.json"], "--json '/nodir/x.json' must be a file that can be written: No such file"),
        (["--page-size", "0"], "--page-size 0 must be"),
        (["--repeats", "0"], "--repeats 0 must be"),
    ],
)
def test_malformed_options(monkeypatch, capsys, arguments, message):
    """They are found before anything is measured."""
    monkeypatch.setattr(bench_run, "measure_ceilings", None)
    assert main(["bench", "ops", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_list_prints_the_named_shapes_and_runs_nothing(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "ops", "--list"])
    printed = capsys.readouterr().out.split()
    for sets, grouped in ((SETS, False), (GQA_SETS, True)):
        for text in (*sets["cpu"], *sets["hopper"]):
            assert text in printed
            assert (parse_shape(text).kv_heads is not None) == grouped


def test_the_command_names_its_shapes_and_implementations(monkeypatch):
    asked = []

    def run(shapes, implementations, **options):
        asked.append(([shape.name for shape in shapes], list(implementations)))
        return {"results": []}

    monkeypatch.setattr(command, "run", run)
    main(["bench", "ops", "--json"])
    main(["bench", "ops", "--json", "--set", "cpu", "--kv-lens", "6,2*3", "--heads", "2", "--implementation", "xla"])
    main(["bench", "ops", "--json", "--op", "gqa", "--kv-lens", "6,2", "--heads", "4", "--kv-heads", "2"])
    main(["bench", "ops", "--json", "--op", "gqa", "--set", "cpu"])
    assert asked[2:] == [(["2x4/2x1x6+2"], ["xla", "dense-gather"]), (list(GQA_SETS["cpu"]), ["xla", "dense-gather"])]
    cpu = list(SETS["cpu"])
    assert asked[:2] == [(cpu, ["xla", "dense-gather"]), ([*cpu, "3x2x1x6+2*3"], ["xla"])]


# Running


def test_ceilings_are_measured(monkeypatch):
    monkeypatch.setattr(ceilings, "_SIZES", {"cpu": (2**20, 64, 0.02)})
    rates = ceilings.measure_ceilings(np.dtype(jnp.bfloat16), 0)
    assert rates.read_bytes > 0 and rates.product == "bfloat16 64^3"
    assert rates.product_flops_short >= rates.product_flops_sustained > 0


def test_json_has_everything(capsys):
    found = bench(capsys, "--shape", SHAPE, "--implementation", "xla,dense-gather")
    assert found["configuration"] == {
        "implementations": ["xla", "dense-gather"],
        "page_size": 4,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "latent": [16, 8],
        "head_dim": 128,
        "repeats": 2,
        "unroll": False,
        "seed": 7,
    }
    assert found["machine"]["jax"] == jax.__version__
    assert found["ceilings"]["product"] == "assumed"
    assert [(r["shape"], r["implementation"]) for r in found["results"]] == [(SHAPE, "xla"), (SHAPE, "dense-gather")]
    for result in found["results"]:
        assert set(result) == {field.name for field in dataclasses.fields(bench_run.Result)}
        assert result["status"] == "ok" and set(result["errors"]) == {"maximum", "L2", "cosine", "lse"}
        low, high = result["wall_range_us"]
        assert 0 < low <= result["wall_us"] <= high
        assert result["kernel_us"] is None and "GPU" in result["kernel_reason"]
        assert result["temp_bytes"] > 0 and result["bound"] in ("memory", "compute")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_grouped_queries(capsys, dtype):
    shape, options = "3x4/2x2x9+2+5", ("--op", "gqa", "--head-dim", "16", "--dtype", dtype)
    found = bench(capsys, *options, "--shape", shape, "--implementation", "xla,dense-gather")
    assert [(r["implementation"], r["status"]) for r in found["results"]] == [("xla", "ok"), ("dense-gather", "ok")]
    assert found["configuration"]["head_dim"] == 16
    assert "heads of 16" in report.table(found)


@pytest.mark.parametrize(
    "op, kv_dtype", [("gqa", "float8_e5m2"), ("mla", "float8_e4m3fn"), ("mla", "float8_e4m3fn:blocks")]
)
def test_caches_of_float8(capsys, op, kv_dtype):
    """Checked like others, with NaN codes where nothing may be read, and counted by the cache's own bytes."""
    shape = "3x4/2x2x9+2+5" if op == "gqa" else "3x2x2x9+2+5"
    options = ("--op", op, "--head-dim", "16", "--latent", "128+8", "--kv-dtype", kv_dtype, "--shape", shape)
    found = bench(capsys, *options, "--implementation", "xla,dense-gather")
    xla, dense = found["results"]
    assert xla["status"] == "ok" and (dense["status"], dense["reason"]) == ("refused", f"a {kv_dtype} pool")
    row_bytes = {"gqa": 2 * 2 * 16, "mla": 128 + 8}[op] + (4 + 8 if kv_dtype.endswith("blocks") else 0)
    rows = 3 * 2 * 2 * (2 * 16 + 2 * 16) if op == "gqa" else 3 * 2 * 2 * (136 + 128)
    assert xla["bytes"] == row_bytes * (9 + 2 + 5) + 2 * rows
    assert f"bfloat16, cache {kv_dtype}" in report.table(found)


def test_grouped_queries_that_read_other_heads_are_wrong(monkeypatch, capsys):
    """Of two KV heads each stands alone in what is expected; and poison past lengths is met."""
    *_, real, specification = gqa.IMPLEMENTATIONS
    shape, options = "3x4/2x2x9+2+5", ("--op", "gqa", "--head-dim", "16", "--implementation", "xla", "--shape")

    def swapped(q, *arguments, **options):
        return real.run(q[:, ::-1], *arguments, **options)

    def longer(q, pool, metadata, *arguments, **options):
        metadata = dataclasses.replace(metadata, kv_lens=metadata.kv_lens + 1)
        return real.run(q, pool, metadata, *arguments, **options)

    for run, reason in ((swapped, "maximum error .* x its tolerance"), (longer, "NaN or infinity in the result")):
        monkeypatch.setattr(gqa, "IMPLEMENTATIONS", (dataclasses.replace(real, run=run), specification))
        (wrong,) = bench(capsys, *options, shape, status=1)["results"]
        assert wrong["status"] == "wrong" and re.search(reason, wrong["reason"])


def test_float32_and_unrolled_calls(capsys):
    found = bench(capsys, "--shape", SHAPE, "--dtype", "float32", "--unroll", "--implementation", "xla,dense-gather")
    assert [r["status"] for r in found["results"]] == ["ok", "ok"]


def replace_xla(monkeypatch, run):
    others = [i for i in mla.IMPLEMENTATIONS if i.name != "xla"]
    monkeypatch.setattr(mla, "IMPLEMENTATIONS", (Implementation("xla", lambda call, device: None, run), *others))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out, lse: (out * 1.01, lse), "L2 error"),
        (lambda out, lse: (out.at[1].set(out[0]), lse), "maximum error"),
        (lambda out, lse: (out, lse + 1e-3), "lse error"),
        (lambda out, lse: (out.at[0, 0, 0].set(jnp.nan), lse), "NaN"),
    ],
)
def test_what_is_wrong_is_reported_and_not_timed(monkeypatch, capsys, change, reason):
    replace_xla(monkeypatch, lambda *args, **options: change(*reference(*args, **options)))
    (wrong,) = bench(capsys, "--shape", SHAPE, "--implementation", "xla", status=1)["results"]
    assert wrong["status"] == "wrong" and reason in wrong["reason"] and wrong["wall_us"] is None


def test_reading_past_a_length_meets_poison(monkeypatch, capsys):
    def run(q_latent, q_rope, pool, metadata, *arrays, **options):
        longer = dataclasses.replace(metadata, kv_lens=metadata.kv_lens + 1)
        return reference(q_latent, q_rope, pool, longer, *arrays, **options)

    replace_xla(monkeypatch, run)
    (result,) = bench(capsys, "--shape", SHAPE, "--implementation", "xla", status=1)["results"]
    assert result["status"] == "wrong" and "NaN" in result["reason"]


def test_a_failure_does_not_stop_the_others(monkeypatch, capsys):
    def run(*args, **options):
        raise RuntimeError("ptxas exited with 255")

    replace_xla(monkeypatch, run)
    arguments = ("--shape", SHAPE, "--implementation", "xla,dense-gather")
    failed, right = bench(capsys, *arguments, status=1)["results"]
    assert failed["status"] == "failed" and failed["reason"] == "RuntimeError: ptxas exited with 255"
    assert right["status"] == "ok"


def test_a_profile_without_kernels_costs_a_column_and_not_the_run(monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "REST", 0.0)
    (result,) = bench(capsys, "--shape", SHAPE, "--implementation", "xla")["results"]
    assert result["kernel_us"] is None and "0 kernels for 10 calls" in result["kernel_reason"]
    assert result["wall_us"] > 0 and result["host_us"] > 0 and result["sustained_us"] > 0


def test_wall_time_on_a_gpu_is_that_of_one_chain_on_its_own_clock(monkeypatch):
    done = []

    def wall(backend, occupancy):
        done.clear()
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(timing, "occupancy", occupancy)
        return timing.wall_seconds(done.append, ("chain",), 7, 4)

    def profiled(run):
        run()
        return timing.Occupancy(21e-6, 20e-6, 0.0)

    def failing(run):
        raise timing.ProfileError("no kernels")

    monkeypatch.setattr(timing, "rest", lambda: done.append("rest"))
    monkeypatch.setattr(timing, "chain_seconds", lambda *_: done.append("burst") or 5e-6)
    assert wall("gpu", profiled) == pytest.approx(3e-6) and done == ["rest", "chain"]
    assert wall("gpu", failing) == 5e-6 and done == ["rest", "rest", "burst"]
    assert wall("cpu", profiled) == 5e-6 and done == ["rest", "burst"]


def test_kernel_time_is_the_median_of_profiles_of_a_rested_device(monkeypatch, capsys):
    profiles = iter([5e-6, 9e-6, 1e-6])
    rests = []

    def kernel_seconds(run, calls):
        assert len(rests) == rested + 1  # once more for each profile
        rests.pop()
        return {"mla": (1.0, next(profiles)), "combine": (1.0, 1e-6)}

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "rest", lambda: rests.append(None))
    monkeypatch.setattr(timing, "kernel_seconds", kernel_seconds)
    rested = 6  # before each of the timed chains: of a profile that has no kernels, then on the host's clock
    (result,) = bench(capsys, "--shape", SHAPE, "--implementation", "xla", "--repeats", "3")["results"]
    assert result["kernel_us"] == pytest.approx(6) and result["kernels"]["mla"] == [1.0, pytest.approx(5)]


def test_table_and_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture, data = tmp_path / "roofline.png", tmp_path / "bench.json"
    options = ["--shape", SHAPE, "--implementation", "mosaic_gpu,dense-gather"]
    options += ["--plot", str(picture), "--json", str(data)]
    assert main(["bench", "ops", *SMALL, *options]) == 0
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]
    assert rows[0][:2] == ["shape", "implementation"] and {len(row) for row in rows} == {12}
    assert rows[2][4] == "refused" and "mosaic_gpu: refused: " in printed
    assert rows[3][:4] == [SHAPE, "dense-gather", "-", "-"] and float(rows[3][4]) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert report.table(json.loads(data.read_text())) + "\n" == printed
    again = tmp_path / "again.svg"  # from the JSON alone, its names as text
    assert main(["bench", "roofline", str(data), str(again)]) == 0
    assert SHAPE in again.read_text()
    data.write_text("{}")
    assert main(["bench", "roofline", str(data), str(again)]) == 2
    assert "must be a report of `mla-attn bench ops --json`" in capsys.readouterr().err


def test_the_measured_figures_are_drawn_as_shown(tmp_path):
    """The picture in the README is the command's, of the data beside it; drawn twice it is the same."""
    pytest.importorskip("matplotlib")
    folder = pathlib.Path(problem.__file__).parents[1]
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in pictures:
        assert main(["bench", "roofline", str(folder / "measured.json"), str(picture)]) == 0
    first, second = (picture.read_text() for picture in pictures)
    assert first == second
    texts = re.compile(r"<text[^>]*>([^<]*)<|<!-- (.*?) -->")
    assert texts.findall(first) == texts.findall((folder / "roofline.svg").read_text())


def test_layers_hold_different_data_and_table_tails_are_hostile():
    spec = MLASpec(num_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, scale=0.2)
    made = problem.make_problem(
        parse_shape("2x2x1x9+2"), spec, page_size=4, dtype=np.dtype(jnp.float32), kv_dtype="float32", seed=0
    )
    first, second = np.asarray(made.pool.data).reshape(2, made.pool.num_pages, 4, 24)
    assert np.isnan(first).sum() == np.isnan(second).sum() == 24 * (3 * 4 + 3 + 2)  # free pages and both tails
    assert not (first == second).any()
    table = np.asarray(made.metadata.page_table)
    assert not np.isin(table[1, 1:], table[[0, 0, 0, 1], [0, 1, 2, 0]]).any()


# Timing


@pytest.mark.parametrize("unroll", [False, True])
def test_each_call_of_a_chain_depends_on_the_one_before(unroll):
    def call(q_latent, q_rope, pool, metadata, layer):
        return 2 * q_latent + layer.astype(q_latent.dtype), q_rope

    program = jax.jit(timing.chain(call, 5, 3, unroll=unroll))
    out, _ = program(jnp.ones((2, 2, 1)), jnp.zeros((2, 2)), None, None)
    value = 1.0
    for layer in (0, 1, 2, 0, 1):
        value = 2 * value + layer
    np.testing.assert_array_equal(out, value)


GPU_TRACE = """
planes { name: "/device:GPU:0"
  lines { name: "Stream #13(Compute)"
    events { metadata_id: 1 duration_ps: 3000000 } events { metadata_id: 2 duration_ps: 500000 }
    events { metadata_id: 1 duration_ps: 5000000 } events { metadata_id: 2 duration_ps: 500000 } }
  lines { name: "XLA Modules" events { metadata_id: 1 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "mla_decode" } } event_metadata { key: 2 value { id: 2 name: "combine" } }
}
planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 duration_ps: 1 } } }
"""


@pytest.fixture
def recorded(monkeypatch):
    """Profiles hold ``GPU_TRACE``."""

    class Trace:
        def __init__(self, folder, **_):
            self.path = pathlib.Path(folder) / "host.xplane.pb"

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.path.write_bytes(ProfileData.text_proto_to_serialized_xspace(GPU_TRACE))

    fakes = {"trace": Trace, "ProfileData": ProfileData, "ProfileOptions": SimpleNamespace}
    monkeypatch.setattr(jax, "profiler", SimpleNamespace(**fakes))


def test_kernel_time_is_that_of_the_streams(recorded):
    kernels = timing.kernel_seconds(lambda: None, 2)
    assert kernels == {"mla_decode": (1.0, pytest.approx(4e-6)), "combine": (1.0, pytest.approx(0.5e-6))}


def test_lost_kernels_are_noticed(recorded):
    with pytest.raises(RuntimeError, match=r"4 kernels for 3 calls on these lines: .*GPU:0 Stream #13"):
        timing.kernel_seconds(lambda: None, 3)


IDLE_TRACE = """
planes { name: "/device:GPU:0"
  lines { name: "Stream #13(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 10000000 }
    events { metadata_id: 1 offset_ps: 14000000 duration_ps: 6000000 }
    events { metadata_id: 1 offset_ps: 100000000 duration_ps: 20000000 } }
  lines { name: "Stream #14(Compute,MemcpyH2D)"
    events { metadata_id: 1 offset_ps: 5000000 duration_ps: 7000000 }
    events { metadata_id: 2 offset_ps: 60000000 duration_ps: 30000000 } }
  lines { name: "XLA Modules" events { metadata_id: 1 offset_ps: 0 duration_ps: 120000000 } }
  event_metadata { key: 1 value { id: 1 name: "mla_decode" } }
  event_metadata { key: 2 value { id: 2 name: "MemcpyH2D" } }
}
"""


def test_a_device_is_busy_where_any_stream_is_and_waits_in_long_gaps(recorded, monkeypatch):
    monkeypatch.setitem(globals(), "GPU_TRACE", IDLE_TRACE)
    # Kernels from 0 to 12, 14 to 20 and 100 to 120 us; a copy from the host does not end the wait for it.
    found = timing.occupancy(lambda: None)
    assert dataclasses.astuple(found) == pytest.approx((120e-6, 38e-6, 80e-6))


def test_a_device_without_kernels_is_told(recorded, monkeypatch):
    monkeypatch.setitem(globals(), "GPU_TRACE", 'planes { name: "/host:CPU" }')
    with pytest.raises(RuntimeError, match="no kernels on these lines: /host:CPU"):
        timing.occupancy(lambda: None)


# Checks alone


def test_a_check_prints_versions_and_passes(capsys):
    assert main(["bench", "ops", *SMALL, "--shape", SHAPE, "--check", "--implementation", "xla,triton"]) == 0
    versions, xla, triton = capsys.readouterr().out.splitlines()
    assert all(name in versions for name in ("device", "jaxlib", "triton", "jax-triton"))
    assert xla == f"{SHAPE} xla: pass"
    assert triton.startswith(f"{SHAPE} triton: refused: ") and "cpu: must be a GPU" in triton


def test_a_check_names_the_first_wrong_row(monkeypatch, capsys):
    def wrong(*args, **options):
        out, lse = reference(*args, **options)
        return out.at[3, 1].multiply(1.5), lse

    spies = (Implementation("xla", lambda call, device: None, wrong), mla.IMPLEMENTATIONS[-1])
    monkeypatch.setattr(mla, "IMPLEMENTATIONS", spies)
    assert main(["bench", "ops", *SMALL, "--shape", SHAPE, "--check", "--implementation", "xla"]) == 1
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith(f"{SHAPE} xla: wrong: row 3, head 1: maximum error is ")


def test_the_set_of_triton_is_checked_for_both_ops(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "check", lambda shapes, names, **_: seen.append((shapes, names)) or True)
    for op in ("mla", "gqa"):
        assert main(["bench", "ops", "--op", op, "--set", "triton", "--check"]) == 0
    for shapes, names in seen:
        assert names == ["triton"]
        assert {shape.name for shape in shapes} == {*SETS["triton"], *GQA_SETS["triton"]}
