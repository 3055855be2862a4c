"""``mla-attn bench serve``: the trace is what was asked for, the clock is read right, and all requests are served."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from checkpoints import V3
from mla_attn.bench import output, timing
from mla_attn.bench.serve import command, host, report
from mla_attn.bench.serve import replay as replaying
from mla_attn.bench.serve.engines import SimulatedEngine
from mla_attn.bench.serve.replay import Record, replay
from mla_attn.bench.serve.report import percentiles
from mla_attn.bench.serve.trace import COMMON_PREFIXES, Load, Request, make_trace
from mla_attn.cli import main
from mla_attn.cli.arguments import make_parser
from mla_attn.engine import Engine, EngineStatistics, Output, SamplingParams
from recorder import programs_kept
from traffic import CHAIN, TREE, small_engine, small_model

LOAD = Load(requests=400, rate=20.0, prompt_tokens=40, new_tokens=10, spread=0.6, shared_prefix=24, shared_share=0.3)


def trace(load=LOAD, max_len=150, **changes):
    return make_trace(dataclasses.replace(load, **changes), vocab_size=100, max_len=max_len)


# The trace


def test_a_trace_follows_from_its_seed():
    assert trace() == trace()
    assert trace(seed=1)[0].prompt != trace()[0].prompt


def test_the_rate_moves_arrivals_alone():
    slow, fast, at_once = trace(rate=20.0), trace(rate=40.0), trace(rate=math.inf)
    assert [(r.prompt, r.new_tokens) for r in slow] == [(r.prompt, r.new_tokens) for r in at_once]
    np.testing.assert_allclose([r.arrival for r in slow], [2 * r.arrival for r in fast])
    assert {r.arrival for r in at_once} == {0.0}


def test_arrivals_are_a_poisson_process():
    arrivals = [r.arrival for r in trace(requests=4000, prompt_tokens=1, new_tokens=1, shared_prefix=0)]
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0 and (gaps >= 0).all()
    assert np.mean(gaps) == pytest.approx(1 / 20, rel=0.06) and np.std(gaps) == pytest.approx(1 / 20, rel=0.1)


def test_lengths_have_the_means_asked_for():
    requests = trace(requests=4000, shared_prefix=0, max_len=5000)
    for lengths, mean in (([len(r.prompt) for r in requests], 40), ([r.new_tokens for r in requests], 10)):
        assert np.mean(lengths) == pytest.approx(mean, rel=0.05)
        assert np.std(np.log(lengths)) == pytest.approx(0.6, rel=0.1)
    assert {(len(r.prompt), r.new_tokens) for r in trace(spread=0.0, shared_share=0.0)} == {(40, 10)}


def test_lengths_stay_within_the_limit():
    requests = trace(spread=2.0, max_len=80)
    totals = [len(r.prompt) + r.new_tokens for r in requests]
    assert max(totals) == 80 and min(r.new_tokens for r in requests) == 1
    assert min(len(r.prompt) - (0 if r.prefix is None else 24) for r in requests) == 1
    assert max(len(r.prompt) for r in requests) == 80 - 10  # room for the mean of new tokens


def test_common_prefixes():
    requests = trace()
    shared = [r for r in requests if r.prefix is not None]
    assert len(shared) / len(requests) == pytest.approx(0.3, abs=0.07)
    assert {r.prefix for r in shared} == set(range(COMMON_PREFIXES))
    assert len({(r.prefix, r.prompt[:24]) for r in shared}) == len({r.prompt[:24] for r in shared}) == COMMON_PREFIXES
    assert len({r.prompt for r in requests}) == len(requests)
    assert {token for r in requests for token in r.prompt} == set(range(100))
    assert {r.prefix for r in trace(shared_prefix=0, shared_share=1.0)} == {None}


def test_a_long_prompt_comes_after_all_others():
    *others, last = trace(long_prompt=100)
    assert tuple(others) == trace()
    assert (last.arrival, len(last.prompt), last.new_tokens) == (others[-1].arrival, 100, 10)
    with pytest.raises(
        ValueError, match="long_prompt=141 and new_tokens=10 are 151 together, must be at most max_len=150"
    ):
        trace(long_prompt=141)


# The replay


class FakeEngine(Engine):
    """Gives every request a token a step, two from its second on; a step takes 0.1 s, and ``add_request`` no time."""

    def __init__(self, clock):
        self.clock, self.requests, self.added = clock, [], []

    @property
    def busy(self):
        return bool(self.requests)

    def add_request(self, prompt, params=None, *, on_output=None):
        self.added.append((self.clock.now, params))
        self.requests.append([params.max_new_tokens, on_output, 1])
        return len(self.added)

    def step(self):
        self.clock.now += 0.1
        outputs = []
        for request in self.requests:
            left, on_output, count = request
            new = min(left, count)
            outputs.append(Output(0, [0] * new, "length" if new == left else None))
            on_output(outputs[-1])
            request[:] = left - new, on_output, 2
        self.requests = [r for r in self.requests if r[0]]
        return outputs

    @property
    def statistics(self):
        figures = dict.fromkeys((f.name for f in dataclasses.fields(EngineStatistics)), 0)
        return EngineStatistics(**figures | {"running": len(self.requests), "pages_used": 7 * len(self.requests)})


class Clock:
    """Stands in for ``time``: sleeping takes no time."""

    now, slept = 100.0, 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        assert 0 < seconds <= 0.01
        self.now += seconds
        self.slept += seconds


def test_replay_measures_from_the_arrival(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(replaying, "time", clock)
    engine = FakeEngine(clock)
    requests = [Request(at, (1, 2), new, None) for at, new in ((0.0, 4), (0.05, 1), (1.0, 2))]
    found = replay(engine, requests, SamplingParams(seed=2**32 - 1, temperature=0.5), progress=False)

    # The second arrives during the first step; before the third the engine is idle.
    at, params = zip(*engine.added, strict=True)
    assert at == pytest.approx([100.0, 100.1, 101.0])
    assert [p.seed for p in params] == [2**32 - 1, 0, 1]
    assert {(p.temperature, p.stop_token_ids) for p in params} == {(0.5, ())}
    first, second, third = found.records
    assert (first.time_to_first_token, first.latency) == pytest.approx((0.1, 0.3))
    assert first.time_per_token == pytest.approx(0.2 / 3)
    assert (second.time_to_first_token, second.latency) == pytest.approx((0.15, 0.15))  # waited 0.05 to be added
    assert second.time_per_token is None
    assert (third.time_to_first_token, third.latency) == pytest.approx((0.1, 0.2))
    assert all(record.served for record in found.records)
    assert found.duration == pytest.approx(1.2) and clock.slept == pytest.approx(0.7)
    assert [running for _, running, _ in found.timeline] == [1, 1, 0, 1, 0] and found.most_pages == 7

    summary = report.summarize(found, drafts=True)
    assert (summary["prompt_tokens"], summary["new_tokens"], summary["served"]) == (6, 7, 3)
    assert summary["output_tokens_per_second"] == pytest.approx(7 / 1.2)
    assert summary["total_tokens_per_second"] == pytest.approx(13 / 1.2)
    assert summary["acceptance_length"] == pytest.approx((3 + 0 + 1) / (2 + 0 + 1))
    assert report.summarize(found, drafts=False)["acceptance_length"] is None


def test_percentiles_are_those_of_numpy():
    drawn = np.random.default_rng(0).exponential(size=41)
    records = [Record(arrival=i, prompt_tokens=1, max_new_tokens=2, first=i + x) for i, x in enumerate(drawn.tolist())]
    records.insert(5, Record(arrival=0.0, prompt_tokens=1, max_new_tokens=2))  # got nothing
    found = percentiles([record.time_to_first_token for record in records])
    assert list(found) == ["p50", "p90", "p99"]
    np.testing.assert_allclose(list(found.values()), np.percentile(drawn, [50, 90, 99]))
    assert percentiles([None]) is None


def test_a_request_cut_short_is_not_served():
    record = Record(arrival=0.0, prompt_tokens=1, max_new_tokens=3)
    record.add(Output(0, [5, 6]), 0.1)
    record.add(Output(0, [], "cancelled"), 0.2)
    assert not record.served and record.last == 0.1
    record.add(Output(0, [7], "length"), 0.3)
    assert record.served


# The command

SMALL = ["--dtype", "float32", "--max-batch", "2", "--page-size", "8", "--step-prompt-tokens", "32", "--max-len", "64"]
ASKED = ["--requests", "7", "--prompt-tokens", "12", "--new-tokens", "5", "--shared-prefix", "16", "--seed", "3"]


def test_requests_are_served(monkeypatch, tmp_path_factory, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    model = small_model()
    monkeypatch.setattr(command, "open_model", lambda *_, **__: (model, lambda: model))
    data, picture = tmp_path / "serve.json", tmp_path / "serve.png"
    options = [*SMALL, *ASKED, "--rate", "50", "--json", str(data), "--plot", str(picture)]
    with programs_kept(tmp_path_factory.getbasetemp() / "programs"):
        assert main(["bench", "serve", str(V3), *options]) == 0
    found = json.loads(data.read_text())
    load = Load(requests=7, rate=50.0, prompt_tokens=12, new_tokens=5, shared_prefix=16, seed=3)
    asked = make_trace(load, vocab_size=model.vocab_size, max_len=64)
    for record, request in zip(found["records"], asked, strict=True):
        assert (record["arrival"], record["prompt_tokens"]) == (request.arrival, len(request.prompt))
        assert record["max_new_tokens"] == record["new_tokens"] == record["outputs"] == request.new_tokens
        assert request.arrival < record["first"] <= record["last"] <= found["summary"]["duration"]
    summary, configuration = found["summary"], found["configuration"]
    assert (summary["served"], summary["compiles_after_warm_up"], summary["preemptions"]) == (7, 0, 0)
    assert summary["new_tokens"] == sum(r.new_tokens for r in asked) and summary["acceptance_length"] is None
    repeated = sum(r.prefix is not None for r in asked) - len({r.prefix for r in asked} - {None})
    assert 0 < summary["prefix_share"] <= 16 * repeated / summary["prompt_tokens"]
    assert 0 < summary["most_pages"] <= configuration["num_pages"] == 2 * 8
    assert max(running for _, running, _ in found["timeline"]) <= 2 and summary["steps"] <= len(found["timeline"])
    for name in ("time_to_first_token", "time_per_output_token", "latency"):
        assert 0 < summary[name]["p50"] <= summary[name]["p90"] <= summary[name]["p99"] <= summary["duration"]
    assert found["machine"]["jax"] and configuration["rate"] == 50.0 and configuration["tree"] is None
    assert report.table(found) + "\n" == capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_several_cases_share_an_engine(monkeypatch, tmp_path_factory, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "open_model", lambda *_, **__: (small_model(), small_model))
    data, picture = tmp_path / "serve.json", tmp_path / "serve.png"
    options = ["--dtype", "float32", "--page-size", "4", "--step-prompt-tokens", "16", "--max-len", "48", "--seed", "3"]
    options += ["--max-batch", "2,1", "--speculate", "0,1", "--acceptance", "0,1", "--new-tokens", "9"]
    options += ["--prompt-tokens", "12", "--num-pages", "400", "--json", str(data), "--plot", str(picture)]
    with programs_kept(tmp_path_factory.getbasetemp() / "programs"):
        assert main(["bench", "serve", str(V3), *options]) == 0
    results = json.loads(data.read_text())["results"]
    asked, got = zip(*[(made["configuration"], made["summary"]) for made in results], strict=True)
    kinds = [(None, None), ([1], 0.0), ([1], 1.0)]
    assert [(a["max_batch"], a["tree"], a["simulated_acceptance"]) for a in asked] == [
        (batch, *kind) for batch in (2, 1) for kind in kinds
    ]
    assert {(a["num_pages"], g["programs"], g["compiles_after_warm_up"]) for a, g in zip(asked, got, strict=True)} == {
        (400, 3 + 3 * 2, 0)
    }
    assert [g["served"] for g in got] == [8] * 6
    # All serve the same requests, and none finds prompts that another left in the cache.
    assert len({(g["prompt_tokens"], g["new_tokens"]) for g in got}) == 1 and {g["prefix_share"] for g in got} == {0}
    for right in (0, 3):
        assert (got[right]["acceptance_length"], got[right + 1]["acceptance_length"]) == (None, 1)
        assert got[right + 2]["acceptance_length"] > 1.5
    assert max(running for made in results[3:] for _, running, _ in made["timeline"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [*report.header(results[0]).splitlines(), *map(report.row, results)]
    assert picture.read_bytes().startswith(b"\x89PNG")


# The engine's own work


def test_host_time(monkeypatch, tmp_path, capsys):
    """Steps as many as the prompts have parts; who waits waits, and a decode step that is timed decodes."""
    pytest.importorskip("matplotlib")
    for name, value in {
        "PROMPT_TOKENS": 32, "BESIDE": 3, "RUNNING": (2,), "WAITING": (5,), "_WAITER": 128, "_DECODED": 20,
        "_WINDOW": 70, "_TIMES": 1,
    }.items():  # fmt: skip
        monkeypatch.setattr(host, name, value)
    engines, timed, picture = [], host._time, tmp_path / "host.png"
    monkeypatch.setattr(host, "_time", lambda *given: (engines.append(given[0]), timed(*given))[1])
    assert main(["bench", "host", "--prompt-tokens", "100", "--json", "--plot", str(picture)]) == 0
    rows = json.loads(capsys.readouterr().out)["steps"]
    asked = [(r["prompt"], r["found"], r["running"], r["waiting"], r["steps"]) for r in rows]
    assert asked == [(100, False, 0, 0, 4), (100, True, 0, 0, 1), (100, False, 3, 0, 4), (0, False, 2, 5, 20),
                     (0, False, 2, 0, 20)]  # fmt: skip
    assert all(0 < r["mean"] <= r["worst"] for r in rows)
    assert [(e.statistics.waiting, e.statistics.running) for e in engines] == [(0, 1), (0, 1), (0, 4), (5, 2), (0, 2)]
    assert [e.statistics.reused_tokens for e in engines] == [0, 2 * 64, 0, 0, 0]
    assert [len(e._scheduler.tables.windowed) for e in engines] == [0, 0, 0, 0, 1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "host", "--prompt-tokens", "1,x"]) == 2
    assert "--prompt-tokens '1,x' must be an integer from 1" in capsys.readouterr().err


def test_requests_scale_with_several_batch_sizes():
    def requests(*arguments):
        options = make_parser().parse_args(["bench", "serve", str(V3), *arguments])
        return [(case.max_batch, case.load.requests) for case in command._cases(options)]

    assert requests() == [(8, 64)] and requests("--max-batch", "128") == [(128, 64)]
    assert requests("--max-batch", "64,1,2") == [(64, 256), (1, 8), (2, 8)]
    assert requests("--max-batch", "64,1", "--requests", "5") == [(64, 5), (1, 5)]


def test_an_engine_runs_as_few_requests_as_it_is_told(tmp_path_factory):
    engine, most = small_engine(), []
    with programs_kept(tmp_path_factory.getbasetemp() / "programs"):
        for engine.max_running in (2, 4):
            for _ in range(6):
                engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=5))
            most.append(max(sum(slot is not None for slot in engine._scheduler.slots) for _ in engine.run()))
    assert most == [2, 4]


# What the device does


LOAD_OF_FEW = Load(requests=3, prompt_tokens=8, new_tokens=30, spread=0.0, seed=1)


def test_the_profile_is_of_a_full_batch(monkeypatch, tmp_path_factory):
    engine, seen = small_engine(), []
    engine.max_running = 3
    monkeypatch.setattr(replaying, "_PROFILED_STEPS", 4)

    def occupancy(run):
        seen.append((engine.statistics, run(), engine.statistics))
        return timing.Occupancy(span=2.0, busy=1.5, waited=0.1)

    monkeypatch.setattr(timing, "occupancy", occupancy)
    with programs_kept(tmp_path_factory.getbasetemp() / "programs"):
        found = replaying.watch(engine, LOAD_OF_FEW, SamplingParams())
    assert found == {"steps": 4, "step_time": 0.5, "busy": 0.75, "waited": 0.05}
    ((before, _, after),) = seen
    assert (before.running, before.waiting, after.running) == (3, 3, 3) and after.new_tokens > before.new_tokens
    assert not engine.busy and engine.statistics.cancelled == 6


def test_a_failing_profile_costs_a_figure_and_not_the_run(monkeypatch, tmp_path_factory, capsys):
    def occupancy(run):
        raise RuntimeError("no kernels on these lines: none")

    monkeypatch.setattr(command, "jax", SimpleNamespace(default_backend=lambda: "gpu"))
    monkeypatch.setattr(timing, "occupancy", occupancy)
    engine = small_engine()
    case = command.Case(2, LOAD_OF_FEW, SamplingParams(), None)
    trace = make_trace(case.load, vocab_size=13, max_len=48)
    with programs_kept(tmp_path_factory.getbasetemp() / "programs"):
        found, device = command._serve(engine, case, trace)
    assert device is None and all(record.served for record in found.records) and not engine.busy
    assert "device occupancy is unknown: no kernels on these lines: none\n" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "tree"), [(0.0, CHAIN), (1.0, CHAIN), (0.7, TREE)])
def test_simulated_acceptance(rate, tree, tmp_path_factory):
    engine = small_engine(SimulatedEngine, speculation=(tree,))
    engine.simulate(rate)
    outputs = []
    with programs_kept(tmp_path_factory.getbasetemp() / "programs"):
        for seed in range(40):
            params = SamplingParams(max_new_tokens=31, seed=seed, speculation=tree)
            engine.add_request([1, 2, 3], params, on_output=outputs.append)
        list(engine.run())
    # Two levels of drafts: 1 + a + a**2 tokens a step, less what is cut at the end of a request.
    assert engine.statistics.acceptance_length == pytest.approx(1 + rate + rate**2, abs=0.15)
    assert max(len(o.tokens) for o in outputs) == (1 if rate == 0 else 3)


def test_the_engine_is_made_as_asked(monkeypatch):
    class Made(Exception):
        pass

    def engine(model, **options):
        raise Made(options)

    monkeypatch.setattr(command, "Engine", engine)

    def made(*options):
        with pytest.raises(Made) as caught:
            main(["bench", "serve", str(V3), *options])
        return caught.value.args[0]

    options = made(*SMALL, *ASKED, "--speculate", "2", "--implementation", "xla")
    assert [tree.widths for tree in options["speculation"]] == [(1, 1)]
    assert (options["max_batch"], options["page_size"], options["num_pages"]) == (2, 8, 2 * 8)
    assert (options["max_len"], options["prompt_tokens"], options["max_waiting"]) == (64, 32, 7)
    assert options["implementation"] == "xla"
    options = made(*ASKED, "--tree", "3x2", "--num-pages", "2", "--page-size", "40")
    assert [tree.widths for tree in options["speculation"]] == [(3, 2)]
    assert (options["max_len"], options["num_pages"]) == (80, 2)
    assert options["batches"] is None
    options = made(*ASKED, "--max-batch", "4,1", "--speculate", "0,3")
    assert (options["max_batch"], options["batches"], options["num_pages"]) == (4, [1, 4], 4 * 2)
    assert [tree.widths for tree in options["speculation"]] == [(1, 1, 1)]
    assert options["max_waiting"] == 8
    options = made(*ASKED)
    assert (options["max_len"], options["num_pages"], options["speculation"]) == (16 + 4 * 17, 8 * 2, ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "--requests 0 must be an integer from 1 to 100000"),
        (["--rate", "0"], "--rate 0 must be a number of at least 0.001"),
        (["--rate", "nan"], "--rate 'nan' must be a number of at least 0.001"),
        (["--prompt-tokens", "0"], "--prompt-tokens 0 must be an integer from 1"),
        (["--new-tokens", "0"], "--new-tokens 0 must be an integer from 1"),
        (["--spread", "-1"], "--spread -1 must be a number of at least 0, at most 10"),
        (["--shared-prefix", "-1"], "--shared-prefix -1 must be an integer from 0"),
        (["--shared-share", "1.5"], "--shared-share 1.5 must be a number of at least 0, at most 1"),
        (["--seed", "-1"], "--seed -1 must be an integer from 0"),
        (["--max-batch", "0"], "--max-batch 0 must be an integer from 1 to 4096, or up to 16"),
        (["--max-batch", "2,0"], "--max-batch '2,0' must be an integer from 1 to 4096, or up to 16"),
        (["--max-batch", "2,x"], "--max-batch '2,x' must be an integer from 1 to 4096, or up to 16"),
        (["--num-pages", "0"], "--num-pages 0 must be an integer from 1"),
        (["--step-prompt-tokens", "0"], "--step-prompt-tokens 0 must be an integer from 1"),
        (["--max-len", "5000"], "--max-len 5000 must be at most 4096"),
        (["--num-pages", "2", "--max-len", "129"], "--max-len 129 must be at most 128"),
        (
            ["--prompt-tokens", "4096"],
            "--prompt-tokens 4096 and --new-tokens 64 are 4160 together, must be at most 4096",
        ),
        (["--long-prompt", "4096"], "--long-prompt 4096 and --new-tokens 64 are 4160 together, must be at most 4096"),
        (["--temperature", "-1"], "--temperature -1 must be a number of at least 0"),
        (["--speculate=-1"], "--speculate -1 must be an integer from 0 to 255"),
        (["--speculate", "0,-1"], "--speculate '0,-1' must be an integer from 0 to 255"),
        (["--acceptance", "0.5", "--speculate", "0"], "--acceptance needs --speculate or --tree"),
        (
            ["--acceptance", "0.5,x", "--speculate", "2"],
            "--acceptance '0.5,x' must be a number of at least 0, at most 1, or up to",
        ),
        (["--acceptance", "0.5"], "--acceptance needs --speculate or --tree"),
        (["--acceptance", "1.5", "--speculate", "2"], "--acceptance 1.5 must be a number of at least 0, at most 1"),
        (["--tree", "3x0"], "--tree '3x0' must be widths"),
        (["--implementation", "xla,reference"], "argument --implementation: invalid choice: 'xla,reference'"),
        (["--spread", "1e308"], "--spread 1e308 must be"),
        (["--requests", "100000", "--prompt-tokens", "4000"], "must be at most 100000000 tokens together"),
        (["--num-pages", "2000000000"], "2000000000 pages of 64 tokens ("),
        (["--tree", "2", "--speculate", "1"], "--tree is not allowed with --speculate"),
        (["--plot", "a"], "--plot 'a' must be a picture's name, in one of .png"),
        (["--json", "/nodir/x.json"], "--json '/nodir/x.json' must be a file that can be written: No such file"),
        (["--plot", "/nodir/x.png"], "--plot '/nodir/x.png' must be a file that can be written: No such file"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(output, "find_matplotlib", lambda: None)
    assert main(["bench", "serve", str(V3), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there(capsys):
    assert main(["bench", "serve", "nowhere"]) == 2
    assert "CHECKPOINT 'nowhere' must be a folder or one of v2-lite, v3-4-layers" in capsys.readouterr().err


def test_missing_matplotlib_is_found_before_the_run(monkeypatch, capsys):
    monkeypatch.setattr(output.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "open_model", None)
    assert main(["bench", "serve", str(V3), "--plot", "picture.png"]) == 2
    assert "pip install 'mla-attn[bench]'" in capsys.readouterr().err
