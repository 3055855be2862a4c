"""Buckets over a small function, then the passes of a small model over their ladders."""

import contextlib
import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints import small_config
from mla_attn import buckets as module
from mla_attn.buckets import Buckets, backend_compiles, ladder, warm_up
from mla_attn.models import DeepseekForCausalLM
from mla_attn.models.deepseek import GROUP
from mla_attn.passes import SAMPLING, DraftPasses, Passes, Shapes, zeros
from mla_attn.speculative import DraftTree

compile_events = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compile_events.append(event) if event.endswith("backend_compile_duration") else None
)


@pytest.mark.parametrize(
    ("largest", "options", "want"),
    [
        (1, {}, (1,)),
        (2, {}, (1, 2)),
        (5, {}, (1, 2, 4, 8)),
        (8, {}, (1, 2, 4, 8)),
        (100, {"smallest": 16}, (16, 32, 64, 128)),
        (3, {"smallest": 8}, (8,)),
        (9, {"smallest": 5}, (8, 16)),
    ],
)
def test_ladder(largest, options, want):
    assert ladder(largest, **options) == want


def test_ladder_of_nothing():
    with pytest.raises(ValueError, match="largest=0 must be at least 1"):
        ladder(0)
    with pytest.raises(ValueError, match="smallest=0 and largest=4 must be at least 1"):
        ladder(4, smallest=0)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def make_buckets(rungs=((2, 3), (4, 3), (4, 8))):
    """Gives back what reaches the program, and adds the state to the pool."""

    def echo(state, pool, inputs):
        return inputs, pool + state

    return Buckets("echo", echo, [{"rows": ints(*shape), "lens": ints(shape[0])} for shape in rungs])


def state_and_pool():
    return jnp.float32(1), jnp.zeros(5)


def inputs(batch, width):
    rows = np.arange(1, 1 + batch * width, dtype=np.int32).reshape(batch, width)
    return {"rows": rows, "lens": np.full(batch, 7, np.int32)}


@pytest.mark.parametrize(
    ("batch", "width", "want"),
    [(2, 3, (2, 3)), (1, 1, (2, 3)), (0, 0, (2, 3)), (3, 3, (4, 3)), (0, 4, (4, 8)), (4, 4, (4, 8)), (4, 8, (4, 8))],
)
def test_the_first_rung_that_holds_a_call_padded_with_zeros(batch, width, want):
    given = inputs(batch, width)
    outputs, _ = make_buckets()(*state_and_pool(), given)
    padded = np.zeros(want, np.int32)
    padded[:batch, :width] = given["rows"]
    np.testing.assert_array_equal(outputs["rows"], padded)
    np.testing.assert_array_equal(outputs["lens"], [7] * batch + [0] * (want[0] - batch))


def test_arrays_on_the_device_and_other_integers():
    given = {"rows": jnp.ones((4, 8), jnp.int32), "lens": [1, 2, 3]}  # lists of Python integers are host arrays
    outputs, _ = make_buckets()(*state_and_pool(), {**given, "lens": np.array(given["lens"], np.int64)})
    np.testing.assert_array_equal(outputs["rows"], given["rows"])
    np.testing.assert_array_equal(outputs["lens"], [1, 2, 3, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": np.ones((5, 3), np.int32)}, r"inputs of 'echo' have shapes .*\(5, 3\).*, must fit one of"),
        ({"rows": np.ones((2, 9), np.int32)}, r"\(2, 9\)\), must fit one of"),
        ({"rows": np.ones(2, np.int32)}, "must fit one of"),
        ({"more": np.ones(2, np.int32)}, "inputs of 'echo' have structure .*'more'.*, must be"),
        ({"lens": None}, "inputs of 'echo' have structure"),
        ({"lens": lambda: jnp.ones(1, jnp.int32)}, r"'echo' is a device array int32\[1\], must be int32\[2\]"),
        ({"lens": lambda: jnp.ones(2)}, r"'echo' is a device array float32\[2\], must be int32\[2\]"),
        ({"lens": np.ones(2)}, "an input of 'echo' has dtype float64, must be int32"),
    ],
)
def test_refused_inputs_leave_the_pool_alone(changes, message):
    state, pool = state_and_pool()
    echo = make_buckets()
    changes = {name: value() if callable(value) else value for name, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        echo(state, pool, {**inputs(2, 3), **changes})
    assert not pool.is_deleted()
    assert echo.compiles == 0


def test_no_rungs():
    with pytest.raises(ValueError, match="rungs of 'nothing' is empty, must hold at least one"):
        Buckets("nothing", lambda state, pool, inputs: (inputs, pool), [])


def test_the_pool_is_donated():
    state, pool = state_and_pool()
    _, after = make_buckets()(state, pool, inputs(2, 3))
    assert pool.is_deleted()
    assert not state.is_deleted()
    np.testing.assert_array_equal(after, np.ones(5))


def test_a_cold_compile_is_counted_and_warned_of(caplog):
    echo = make_buckets()
    for _ in range(2):
        echo(*state_and_pool(), inputs(3, 2))
    assert (echo.compiles, echo.cold_compiles, echo.pending) == (1, 1, [0, 2])
    assert echo.compile_seconds > 0
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == "echo 4x3: compiled by a call; warm_up() would have done it before"


def test_warm_up_compiles_what_is_pending(caplog, monkeypatch):
    bars = []

    class Bar(module.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.labels = []
            bars.append(self)

        def set_postfix_str(self, label, **_):
            self.labels.append(label)

    monkeypatch.setattr(module, "tqdm", Bar)
    both = [make_buckets(), make_buckets([(1, 1)])]
    state, pool = state_and_pool()
    both[0](state, pool, inputs(2, 3))
    pool = jnp.zeros(5)
    begin, events = backend_compiles(), len(compile_events)
    assert warm_up(both, state, pool) > 0
    assert backend_compiles() - begin == len(compile_events) - events == 3
    assert not pool.is_deleted()  # nothing ran
    [bar] = bars
    assert bar.labels == ["echo 4x8", "echo 1", "echo 4x3"]  # the largest of each, which serve every call, come first
    assert (bar.total, bar.n) == (3, 3)
    assert [b.compiles for b in both] == [3, 1]
    assert [b.pending for b in both] == [[], []]
    assert both[0].cold_compiles == 1
    caplog.clear()

    both[0](state, pool, inputs(4, 8))
    warm_up(both, state, state_and_pool()[1], progress=False)
    assert len(compile_events) - events == 3
    assert not caplog.records


def test_an_interrupt_does_not_wait_for_what_is_compiling(monkeypatch):
    """It is finished later, and kept."""
    buckets, go_on, compile_one = make_buckets(), threading.Event(), Buckets._compile

    def slow(self, index, lowered):
        assert go_on.wait(60)
        return compile_one(self, index, lowered)

    def interrupted(self, index, state, pool):
        if index == 1:
            raise KeyboardInterrupt
        return lower(self, index, state, pool)

    lower = Buckets._lower
    monkeypatch.setattr(Buckets, "_compile", slow)
    with monkeypatch.context() as patch:
        patch.setattr(Buckets, "_lower", interrupted)
        with pytest.raises(KeyboardInterrupt):
            warm_up([buckets], *state_and_pool(), progress=False)
    assert buckets.compiles == 0
    go_on.set()
    warm_up([buckets], *state_and_pool(), progress=False)
    assert buckets.pending == []


def test_the_first_two_programs_are_compiled_alone(monkeypatch):
    """The others are lowered meanwhile, and begin once both are there."""
    echo, begun, go_on, compile_one = (
        make_buckets([(n, 1) for n in range(1, 6)]),
        [],
        threading.Event(),
        Buckets._compile,
    )

    def held(buckets, index, lowered):
        begun.append(index)
        assert go_on.wait(60)
        return compile_one(buckets, index, lowered)

    monkeypatch.setattr(Buckets, "_compile", held)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # where several are compiled at a time
    thread = threading.Thread(target=warm_up, args=([echo], *state_and_pool()), kwargs={"progress": False})
    thread.start()
    while len(echo._making) < 5 or len(begun) < 2:
        time.sleep(0.001)
    time.sleep(0.1)
    assert sorted(begun) == [0, 4]
    go_on.set()
    thread.join()
    assert echo.pending == [] and sorted(begun) == [0, 1, 2, 3, 4]


def test_warm_up_tells_of_a_program_that_does_not_compile(monkeypatch):
    def compile(self, index, lowered):
        if index == 1:
            raise RuntimeError("out of registers")

    monkeypatch.setattr(Buckets, "_compile", compile)
    with pytest.raises(RuntimeError, match="out of registers"):
        warm_up([make_buckets()], *state_and_pool(), progress=False)


class Gate:
    """Holds up compiling of all rungs but some."""

    def __init__(self, monkeypatch, *free):
        self.open, compile_one = threading.Event(), Buckets._compile

        def held(buckets, index, lowered):
            if index not in free:
                assert self.open.wait(60)
            return compile_one(buckets, index, lowered)

        monkeypatch.setattr(Buckets, "_compile", held)
        monkeypatch.setattr(module, "_on_cpu", contextlib.nullcontext())  # a call may compile beside the one held up

    def warm_up(self, buckets):
        """In a thread, until the largest rung is compiled or held up."""
        arguments = ([buckets], *jax.eval_shape(state_and_pool))
        self.thread = threading.Thread(target=warm_up, args=arguments, kwargs={"progress": False})
        self.thread.start()
        largest = len(buckets._rungs) - 1
        while largest not in (buckets._making if not buckets.compiles else buckets._programs):
            time.sleep(0.001)

    def let_go(self):
        self.open.set()
        self.thread.join()


def test_a_call_takes_a_larger_program_while_a_warm_up_goes_on(monkeypatch, caplog):
    echo, gate = make_buckets(), Gate(monkeypatch, 2)
    gate.warm_up(echo)
    given = inputs(2, 3)
    outputs, _ = echo(*state_and_pool(), given)
    assert echo.awaits(0)
    assert outputs["rows"].shape == (4, 8)
    np.testing.assert_array_equal(outputs["rows"][:2, :3], given["rows"])
    gate.let_go()
    assert echo(*state_and_pool(), given)[0]["rows"].shape == (2, 3)
    assert (echo.compiles, echo.cold_compiles, caplog.records) == (3, 0, [])


def test_a_call_waits_for_what_is_on_its_way(monkeypatch):
    echo, gate = make_buckets(), Gate(monkeypatch)
    arguments = (*state_and_pool(), inputs(2, 3))
    gate.warm_up(echo)
    threading.Timer(0.2, gate.open.set).start()
    assert echo(*arguments)[0]["rows"].shape == (4, 8)
    gate.let_go()
    assert echo.compiles == 3


def test_arrays_on_the_device_have_their_own_program_compiled(monkeypatch, caplog):
    """They cannot be padded; the warm-up then does not compile it again."""
    echo, gate = make_buckets(), Gate(monkeypatch, 0, 2)
    arguments, begin = (*state_and_pool(), jax.device_put(inputs(2, 3))), len(compile_events)
    gate.warm_up(echo)
    outputs, _ = echo(*arguments)
    assert outputs["rows"].shape == (2, 3)
    gate.let_go()
    assert (echo.compiles, echo.cold_compiles, caplog.records) == (3, 0, [])
    assert len(compile_events) - begin == 3


def test_a_warm_up_ends_where_nobody_wants_it():
    asked, echo = iter([True, True, False]), make_buckets()
    warm_up([echo], *state_and_pool(), progress=False, wanted=lambda: next(asked))
    assert echo.pending == [1] and not echo._promised


def test_what_failed_ahead_of_time_is_compiled_by_its_call(monkeypatch):
    echo, compile_one = make_buckets(), Buckets._compile
    with monkeypatch.context() as patch:
        patch.setattr(Buckets, "_compile", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            warm_up([echo], *state_and_pool(), progress=False)
    assert Buckets._compile is compile_one and not echo._making and not echo._promised
    assert echo(*state_and_pool(), inputs(2, 3))[0]["rows"].shape == (2, 3)


def test_programs_bear_the_name():
    program = make_buckets().compile(0, *state_and_pool())
    assert program.as_text().startswith("HloModule jit_echo")


def test_choosing_and_padding_cost_little(monkeypatch, capsys):
    """On the host, of a decode step's inputs; what the program costs is left out."""
    rungs = [{"page_table": ints(b, 64), "tokens": ints(b), "lens": ints(b), "active": ints(b)} for b in ladder(256)]
    decode = Buckets("decode", lambda state, pool, inputs: (inputs, pool), rungs)
    monkeypatch.setattr(Buckets, "compile", lambda *_: lambda state, pool, inputs: (inputs, pool))
    table, ones = np.ones((100, 64), np.int32), np.ones(100, np.int32)
    host = {"page_table": table, "tokens": ones, "lens": ones, "active": ones}
    device = {name: jax.device_put(np.resize(array, (128, *array.shape[1:]))) for name, array in host.items()}
    decode._programs = {index: decode.compile() for index in decode.pending}
    cost = {}
    for label, given in (("padded on the host", host), ("on the device", device)):
        times = []
        for _ in range(1000):
            begin = time.perf_counter()
            decode(None, None, given)
            times.append(time.perf_counter() - begin)
        cost[label] = sorted(times)[500] * 1e6
    with capsys.disabled():
        print("\nbucket and padding:", ", ".join(f"{micros:.0f} us {label}" for label, micros in cost.items()))
    assert max(cost.values()) < 500  # below 100 on a quiet machine


# The passes of a model of one layer and a draft layer.

P, W, DRAFTS = 4, 5, 2
BATCHES, ROWS = (1, 4), (16,)
PASSES = ("prefill", "extend", "draft_prefill", "decode", "draft_decode", "target_verify", "draft_extend")


@pytest.fixture(scope="module")
def passes():
    model = DeepseekForCausalLM(small_config(32), dtype=jnp.float32, rngs=nnx.Rngs(0))
    shapes = Shapes(
        batches=BATCHES,
        prompt_rows=ROWS,
        table_width=W,
        page_size=P,
        max_len=W * P,
    )
    made = Passes(model, shapes)
    pool, begin = fresh_pools(made), len(compile_events)
    # One program for each number of requests and, for prompts, of rows.
    made.drafting = DraftPasses(made, model, DraftTree((1,) * DRAFTS))
    warm_up([made.prefill, made.extend, made.decode, *made.drafting.all], made.state, pool, progress=False)
    assert len(compile_events) - begin == 3 * len(BATCHES) * len(ROWS) + 4 * len(BATCHES)
    return made


def test_models_that_differ_in_their_arrays_alone_share_programs(passes):
    """Other weights are compiled for no second time; another implementation or size is."""
    model = DeepseekForCausalLM(small_config(32), dtype=jnp.float32, rngs=nnx.Rngs(1))
    other = Passes(model, passes.shapes)
    pools, begin = fresh_pools(other), len(compile_events)
    warm_up([other.prefill, other.decode], other.state, pools, progress=False)
    assert len(compile_events) == begin
    assert Passes(model, passes.shapes, implementation="reference").functions != passes.functions
    longer = dataclasses.replace(passes.shapes, max_len=passes.shapes.max_len - 1)
    assert Passes(model, longer).functions != passes.functions


def test_weights_are_a_plain_tuple_of_arrays(passes):
    """Every call flattens them, which takes Flax's own containers a millisecond of a large model's step."""
    assert type(passes.state) is tuple and all(isinstance(weight, jax.Array) for weight in passes.state)


def fresh_pools(passes, seed=0):
    """Pools of random rows."""
    model, rng = passes.functions.model(passes.state), np.random.default_rng(seed)
    pools = model.create_pools(num_pages=4 * W + 3, page_size=P)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32)), pools)


def bucket(passes, name):
    found = getattr(passes if hasattr(type(passes), name) else passes.drafting, name)
    return found[0] if isinstance(found, tuple) else found


def some_tokens(rng, *shape):
    return rng.integers(0, 32, shape).astype(np.int32)


def some_hidden(rng, *shape):
    return rng.standard_normal((*shape, 16), np.float32)


def random_call(passes, name, rng, q_lens=None, live=None):
    """Inputs of a pass on the host, and the positions that each request writes.

    Args:
        q_lens: of prompt passes, at most 4 each; random, of up to 4 requests, if None.
        live: 1 for each active request of other passes; random if None.
    """
    prompt = name in ("prefill", "extend", "draft_prefill")
    given = q_lens if prompt else live
    if given is None:
        given = rng.integers(0, 5 if prompt else 2, rng.integers(0, 5))
    given = np.array(given, np.int32)
    table = rng.permutation(4 * W + 3)[: len(given) * W].reshape(-1, W).astype(np.int32)
    call, written = (prompt_call if prompt else step_call)(name, rng, given)
    return {"page_table": table, **call}, written


def prompt_call(name, rng, q_lens):
    prefix = np.where(q_lens > 0, rng.integers(0, 4, len(q_lens)) * (name != "prefill"), 0).astype(np.int32)
    rows = q_lens.sum()
    call = {"seq_lens": prefix + q_lens, "q_lens": q_lens}
    if name == "draft_prefill":
        call |= {"next_tokens": some_tokens(rng, rows), "sampled": some_tokens(rng, len(q_lens))}
        call["prompt_hidden"] = some_hidden(rng, rows)
    else:
        call |= {"prompt_tokens": some_tokens(rng, rows), **zeros(SAMPLING, {"B": len(q_lens)}, None)}
    return call, [range(p, p + q) for p, q in zip(prefix, q_lens, strict=True)]


def step_call(name, rng, active):
    batch, count = len(active), active
    lens = rng.integers(0, W * P - 4, batch).astype(np.int32)
    call = {"lens": lens, "active": active}
    if name == "decode":
        call |= {"tokens": some_tokens(rng, batch), **zeros(SAMPLING, {"B": batch}, None)}
    elif name == "target_verify":
        call |= {"tokens": some_tokens(rng, batch), "drafts": some_tokens(rng, batch, DRAFTS)}
        call |= zeros(SAMPLING, {"B": batch}, None)
        count = active * (DRAFTS + 1)
    elif name == "draft_decode":
        call |= {"step": np.int32(0), "num_drafted": np.int32(0)}
        call |= {"drafts": some_tokens(rng, batch, DRAFTS), "hidden": some_hidden(rng, batch, 1)}
    else:
        count = active * rng.integers(1, DRAFTS + 2, batch).astype(np.int32)
        call |= {"emitted": some_tokens(rng, batch, DRAFTS + 1), "num_emitted": count, "lens": lens + count}
        call["emitted_hidden"] = some_hidden(rng, batch, DRAFTS + 1)
    return call, [range(n, n + c) for n, c in zip(lens, count, strict=True)]


def test_no_compile_after_warm_up(passes):
    rng, pools = np.random.default_rng(0), fresh_pools(passes)
    begin, counted, empty = len(compile_events), backend_compiles(), 0
    for _ in range(300):
        name = rng.choice(PASSES)
        call, _ = random_call(passes, name, rng)
        outputs, pools = bucket(passes, name)(passes.state, pools, call)
        batch = len(call["page_table"])
        first = outputs["drafts" if name.startswith("draft") else "tokens"]
        assert len(first) == next(b for b in BATCHES if b >= batch) or name in ("prefill", "extend", "draft_prefill")
        assert len(first) in BATCHES
        empty += batch == 0
    assert empty > 20
    assert len(compile_events) == begin
    assert backend_compiles() == counted
    assert sum(bucket(passes, name).cold_compiles for name in PASSES) == 0


@pytest.mark.parametrize("name", PASSES)
def test_padding_writes_nothing(passes, name):
    """Three requests in a bucket of four, one of them without rows: what changes are the rows of the other two."""
    rng, before = np.random.default_rng(1), fresh_pools(passes)
    call, written = random_call(passes, name, rng, q_lens=[3, 0, 4], live=[1, 0, 1])
    rows = np.array(before[GROUP].data).reshape(2, -1, before[GROUP].data.shape[-1])
    _, after = bucket(passes, name)(passes.state, before, call)
    changed = (np.asarray(after[GROUP].data).reshape(rows.shape) != rows).any(axis=-1)
    want = np.zeros_like(changed)
    layer = int(name.startswith("draft"))
    for b, positions in enumerate(written):
        assert (len(positions) > 0) == (b != 1)
        for position in positions:
            want[layer, call["page_table"][b, position // P] * P + position % P] = True
    np.testing.assert_array_equal(changed, want)


@pytest.mark.parametrize("requests", [0, 4])
@pytest.mark.parametrize("name", PASSES)
def test_a_bucket_of_padding_alone(passes, name, requests):
    """An engine without work for this pass: nothing fails, is written, emitted or compiled."""
    rng, pools = np.random.default_rng(2), fresh_pools(passes)
    call, written = random_call(passes, name, rng, q_lens=[0] * requests, live=[0] * requests)
    assert not any(map(len, written))
    if name == "draft_extend":
        assert not call["num_emitted"].any()
    before, begin = np.array(pools[GROUP].data), len(compile_events)
    outputs, pools = bucket(passes, name)(passes.state, pools, call)
    np.testing.assert_array_equal(pools[GROUP].data, before)
    assert len(compile_events) == begin
    for value in outputs.values():
        assert np.isfinite(np.asarray(value, np.float32)).all()
    if name == "target_verify":
        assert (np.asarray(outputs["emitted"]) == -1).all()
        assert (np.asarray(outputs["num_emitted"]) == 0).all()
        np.testing.assert_array_equal(outputs["lens"][:requests], call["lens"])
