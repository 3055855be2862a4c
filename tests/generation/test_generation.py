"""Generation of both fixtures in float32, against what PyTorch and transformers compute (tests/fixtures).

Every run is recorded with the logits of every row of every pass, over a cache of NaN. Compiling takes most of the time,
so runs are shared between tests, and page sizes, chunks and batches are paired rather than crossed.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import helpers
from checkpoints import QWEN3, V2, V3
from mla_attn import metadata as build
from mla_attn.generation import generate
from mla_attn.models import load_checkpoint
from mla_attn.models.deepseek import GROUP
from mla_attn.xla import blockwise
from recorder import Recording, programs_kept, record

LOGITS = 1e-3  # float32 against float32; a float64 model differs from the expected logits by 2.5e-4
TIE = 2e-3  # tokens whose logits lie this close to the top may change places
NEW = 64
TOTAL = 300 + NEW  # the longest prompt and what follows: runs of this length share their programs
BATCH = range(4)

# Page size and chunk of the speculative runs, by K.
SPECULATIVE = {1: (64, None), 2: (16, 7), 3: (64, None), 4: (1, None), 5: (16, None)}
slow = pytest.mark.slow  # and compiles what no other test needs


@pytest.fixture(scope="module", autouse=True)
def shared_programs(tmp_path_factory):
    with programs_kept(tmp_path_factory.getbasetemp() / "programs"):
        yield


@functools.cache
def model(name):
    return load_checkpoint({"v3": V3, "v2": V2}[name], dtype=jnp.float32)


@functools.cache
def expected(name):
    """Of each prompt: ``prompt``, the ``greedy`` tokens after it, ``sequence`` (both), and logits at every position of
    it: ``logits``, and ``mtp_logits`` of the draft layer.

    For the prompt they are the fixture's. After it they come from one prefill of everything: no chunk, no decode step,
    no page that was read back. ``hidden`` comes from there too.
    """
    stored = np.load({"v3": V3, "v2": V2}[name] / "expected.npz")
    prompts = [types.SimpleNamespace(prompt=stored[f"prompt_{i}"], greedy=stored[f"greedy_{i}"]) for i in BATCH]
    for p in prompts:
        p.sequence = np.concatenate([p.prompt, p.greedy])
    lengths = [len(p.sequence) for p in prompts]
    hidden, logits, mtp_logits = prefill_all(model(name), prompts, lengths)
    for i, (p, end) in enumerate(zip(prompts, np.cumsum(lengths), strict=True)):
        own, given = np.s_[end - lengths[i] : end], len(p.prompt)
        p.hidden, p.logits, p.mtp_logits = hidden[own], logits[own], mtp_logits[own][:-1]
        np.testing.assert_allclose(p.logits[:given], stored[f"logits_{i}"], rtol=0, atol=LOGITS)
        p.logits = np.concatenate([stored[f"logits_{i}"], p.logits[given:]])
        before = p.logits[given - 1 : -1]
        assert (before.max(axis=-1) - before[np.arange(NEW), p.greedy] < TIE).all()
        if f"mtp_logits_{i}" in stored:
            want = stored[f"mtp_logits_{i}"]
            np.testing.assert_allclose(p.mtp_logits[: given - 1], want, rtol=0, atol=LOGITS)
            p.mtp_logits = np.concatenate([want, p.mtp_logits[given - 1 :]])
    return prompts


def prefill_all(model, prompts, lengths):
    @nnx.jit
    def run(model, tokens, following, lengths):
        rows = tokens.shape[0]
        pools = model.create_pools(num_pages=1, page_size=1)  # nothing is kept
        metadata = build.for_extend(
            jnp.zeros((len(prompts), rows), jnp.int32), lengths, lengths, max_q_len=TOTAL, num_rows=rows, page_size=1
        )
        hidden, pools = model(tokens, pools, {GROUP: metadata}, mode="prefill")
        drafted = hidden
        if model.can_draft:
            drafted = model.draft_logits(model.draft(hidden, following, pools, {GROUP: metadata}, mode="prefill")[0])
        return hidden, model.logits(hidden), drafted

    tokens = np.concatenate([p.sequence for p in prompts])
    following = np.concatenate([np.append(p.sequence[1:], 0) for p in prompts])  # no last row is used
    return jax.tree.map(np.asarray, run(model, *map(jnp.asarray, (tokens, following, np.array(lengths, np.int32)))))


@functools.cache
def run(name, page_size, chunk, *, num_drafts=0, prompts=tuple(BATCH), new=NEW, stop_token_ids=()) -> Recording:
    ids = [expected(name)[i].prompt.tolist() for i in prompts]
    options = {
        "page_size": page_size,
        "prefill_chunk": chunk,
        "num_drafts": num_drafts,
        "stop_token_ids": stop_token_ids,
    }
    return record(model(name), ids, max_new_tokens=new, **options)


def speculative(num_drafts, **options) -> Recording:
    return run("v3", *SPECULATIVE[num_drafts], num_drafts=num_drafts, **options)


def tokens_agree(got, want, logits):
    """How many tokens agree: all, or those before one whose logits say that it is a tie, after which texts may part.

    Args:
        got, want: tokens.
        logits: the row of logits that each token of ``got`` was taken from.
    """
    assert len(got) >= len(want)
    for step, (mine, theirs) in enumerate(zip(got, want, strict=False)):
        if mine != theirs:
            gap = logits[step].max() - logits[step][[mine, theirs]]
            assert (gap < TIE).all(), f"token {step} is {mine}, not {theirs}; {gap} below the top logit"
            return step
    return len(want)


def check(name, recording, prompts=BATCH):
    """Tokens and logits of a run. Returns for each prompt the positions whose logits were compared, by pass."""
    checked = []
    for request, i in enumerate(prompts):
        p = expected(name)[i]
        agreed = tokens_agree(recording.tokens[request], p.greedy, p.logits[len(p.prompt) - 1 :])
        known = p.sequence[: len(p.prompt) + agreed]
        positions = {}
        for call in recording.calls:
            if call.name == "draft_decode":  # hidden states of the draft layer itself: see test_drafts_...
                continue
            ahead = int(call.name.startswith("draft"))  # the draft layer's tokens are those that follow
            want = p.mtp_logits if ahead else p.logits
            at, tokens = call.of(request, "positions"), call.of(request, "tokens")
            right = at + ahead < len(known)
            right[right] &= known[at[right] + ahead] == tokens[right]
            count = np.cumprod(right).sum()  # rows after a wrong draft mean nothing
            np.testing.assert_allclose(call.of(request)[:count], want[at[:count]], rtol=0, atol=LOGITS)
            positions.setdefault(call.name, []).extend(at[:count].tolist())
        checked.append(positions)
    assert recording.statistics.compiles_after_warm_up == 0
    return checked


def check_plain(name, recording, prompts=BATCH):
    for i, positions in zip(prompts, check(name, recording, prompts), strict=True):
        begin = len(expected(name)[i].prompt)
        assert positions.get("prefill", []) + positions.get("extend", []) == list(range(begin))
        assert positions["decode"][: NEW - 1] == list(range(begin, begin + NEW - 1))


@pytest.mark.parametrize(
    ("name", "page_size", "chunk"),
    [("v3", 16, 7), ("v3", 1, None), ("v2", 16, None), pytest.param("v2", 1, 7, marks=slow)],
)
def test_prompts_in_one_batch(name, page_size, chunk):
    recording = run(name, page_size, chunk)
    check_plain(name, recording)
    assert recording.statistics.target_steps == len(recording.named("decode")) == NEW - 1
    assert recording.statistics.acceptance_length is None
    assert len(recording.named("prefill")) == 1
    assert len(recording.named("extend")) == (0 if chunk is None else -(-300 // 7) - 1)


@pytest.fixture
def one_row_is_written_in_place(monkeypatch):
    """Programs that are compiled as conftest.py has it copy the whole pool where they write a single row."""

    compile_ = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered: compile_(lowered, helpers.FUSED))


@slow
@pytest.mark.parametrize(("name", "page_size", "chunk"), [("v3", 64, 7), ("v2", 64, None)])
def test_prompts_alone(name, page_size, chunk, one_row_is_written_in_place):
    for i in BATCH:
        new = TOTAL - len(expected(name)[i].prompt)
        check_plain(name, run(name, page_size, chunk, prompts=(i,), new=new), prompts=(i,))


@pytest.mark.parametrize("name", ["v3", "v2"])
def test_decode_steps_over_the_prompts(name):
    """The fixture's own logits, all of them, from one decode step a token."""
    call = run(name, 16, {"v3": 7, "v2": None}[name]).named("decode")[0]
    prompts, pools = expected(name), nan_like(run(name, 16, {"v3": 7, "v2": None}[name]).pools)
    for t in range(300):
        active = np.array([t < len(p.prompt) for p in prompts], np.int32)
        tokens = np.array([p.prompt[min(t, len(p.prompt) - 1)] for p in prompts], np.int32)
        lens = np.minimum(t, [len(p.prompt) for p in prompts]).astype(np.int32)
        inputs = {"page_table": call.inputs["page_table"], "tokens": tokens, "lens": lens, "active": active}
        outputs, pools = call.bucket(call.state, pools, inputs)
        for i in np.flatnonzero(active):
            np.testing.assert_allclose(outputs["rows"]["logits"][i], prompts[i].logits[t], rtol=0, atol=LOGITS)


def test_verify_steps_over_the_prompts():
    """The same from verify steps whose drafts are all right: three rows a step."""
    call, prompts = speculative(2).named("target_verify")[0], expected("v3")
    pools = nan_like(speculative(2).pools)
    padded = np.stack([np.resize(p.prompt, 303) for p in prompts])
    for t in range(0, 300, 3):
        active = np.array([t < len(p.prompt) for p in prompts], np.int32)
        rows = padded[:, t : t + 3]
        lens = np.full(4, t, np.int32)
        inputs = {"page_table": call.inputs["page_table"], "lens": lens, "active": active}
        outputs, pools = call.bucket(call.state, pools, {**inputs, "tokens": rows[:, 0], "drafts": rows[:, 1:]})
        logits = np.asarray(outputs["rows"]["logits"]).reshape(4, 3, -1)
        for i in np.flatnonzero(active):
            want = prompts[i].logits[t : min(t + 3, len(prompts[i].prompt))]
            np.testing.assert_allclose(logits[i, : len(want)], want, rtol=0, atol=LOGITS)


def nan_like(pools):
    return jax.tree.map(lambda data: jnp.full_like(data, jnp.nan), pools)


@pytest.mark.parametrize("num_drafts", [k if k in (2, 3) else pytest.param(k, marks=slow) for k in SPECULATIVE])
def test_speculation(num_drafts, capsys):
    """The text of plain decoding, from verify calls of K + 1 rows, in as many fewer steps as drafts were right."""
    recording = speculative(num_drafts)
    for i, positions in zip(BATCH, check("v3", recording), strict=True):
        begin = len(expected("v3")[i].prompt)
        assert positions.get("prefill", []) + positions.get("extend", []) == list(range(begin))
        assert positions["draft_prefill"] == list(range(begin))
        # What is verified is the text, each token once; the draft layer gets the target's hidden states of all of it.
        assert positions["target_verify"][: NEW - 1] == list(range(begin, begin + NEW - 1))
        assert positions["draft_extend"][: NEW - 2] == list(range(begin, begin + NEW - 2))

    kept = [[] for _ in BATCH]
    for call in recording.named("target_verify"):
        drafts = np.asarray(call.inputs["drafts"])
        assert drafts.shape == (4, num_drafts)
        assert len(call.rows["logits"]) == 4 * (num_drafts + 1)
        for i, counts in enumerate(kept):
            done = 1 + sum(counts)
            assert call.inputs["active"][i] == (done < NEW)
            if done == NEW:
                assert len(call.of(i)) == call.outputs["num_emitted"][i] == 0
                assert (call.outputs["emitted"][i] == -1).all()
                continue
            assert len(call.of(i)) == num_drafts + 1
            assert (drafts[i] >= 0).all()
            to_come = recording.tokens[i][done:]
            right = np.cumprod([d == t for d, t in zip(drafts[i], to_come, strict=False)], dtype=int).sum()
            emitted = call.outputs["emitted"][i]
            assert call.outputs["num_emitted"][i] == (emitted >= 0).sum()
            if right < len(to_come):
                assert emitted.tolist() == to_come[: right + 1] + [-1] * (num_drafts - right)
            counts.append(min(right + 1, len(to_come)))

    steps, statistics = [len(counts) for counts in kept], recording.statistics
    assert all(1 + sum(counts) == NEW for counts in kept)
    assert statistics.target_steps == len(recording.named("target_verify")) == max(steps) < NEW - 1
    assert len(recording.named("draft_decode")) == (num_drafts - 1) * max(steps)
    assert not recording.named("decode")
    assert statistics.acceptance_length == pytest.approx(sum(map(sum, kept)) / sum(steps))
    each = [sum(counts) / len(counts) for counts in kept]
    assert all(1 <= length <= num_drafts + 1 for length in each)
    if num_drafts >= 3:
        assert min(each[0], each[1], each[3]) > 2  # the text after prompt 2 is gibberish, which nobody can foresee
    with capsys.disabled():
        lengths = ", ".join(f"{length:.2f}" for length in each)
        print(f"\nK = {num_drafts}: acceptance length {statistics.acceptance_length:.2f} ({lengths}), steps {steps}")


@slow
@pytest.mark.parametrize(("i", "number"), [(0, 4), (1, 0), (2, 30), (3, 11)])
def test_drafts_are_those_of_the_draft_layer_alone(i, number):
    """All five drafts of a step, from scratch: nothing cached, no pages, no other request, through prefill alone."""
    p, step = expected("v3")[i], speculative(5).named("target_verify")[number]
    cached = int(step.inputs["lens"][i])
    assert step.inputs["tokens"][i] == p.sequence[cached]
    hidden, following = np.zeros((TOTAL + 5, p.hidden.shape[1]), np.float32), np.zeros(TOTAL + 5, np.int32)
    hidden[:cached], following[:cached] = p.hidden[:cached], p.sequence[1 : cached + 1]
    drafts, last = [], []
    for length in range(cached, cached + 5):
        out, logits = map(np.asarray, draft_alone(model("v3"), hidden, following, np.int32(length)))
        last.append(logits[length - 1])
        drafts.append(logits[length - 1].argmax())
        hidden[length], following[length] = out[length - 1], drafts[-1]
    assert tokens_agree(np.asarray(step.inputs["drafts"])[i], drafts, last) == 5


@nnx.jit
def draft_alone(model, hidden, following, length):
    rows = len(following)
    table = jnp.zeros((1, rows), jnp.int32)
    metadata = build.for_extend(table, length[None], length[None], max_q_len=rows, num_rows=rows, page_size=1)
    out, _ = model.draft(
        hidden, following, model.create_pools(num_pages=1, page_size=1), {GROUP: metadata}, mode="prefill"
    )
    return out, model.draft_logits(out)


@pytest.mark.parametrize("name", ["decode", "target_verify", "draft_extend", "draft_decode"])
def test_steps_read_the_cache_through_their_tables_alone(name):
    """What a request's pages hold decides its logits; what other pages hold does not, nor the slots past its end."""
    recording = run("v3", 16, 7) if name == "decode" else speculative(2)
    call = recording.named(name)[-1] if name == "decode" else recording.named(name)[20]
    table, pools = np.asarray(call.inputs["page_table"]), recording.pools
    once, pool = call.again(pools), pools[GROUP]
    assert len(once.of(1)) > 0

    layers, pages = pool.num_layers, pool.num_pages
    data = np.array(pool.data).reshape(layers, pages, 16, -1)
    spare = np.setdiff1d(np.arange(pages), table[table >= 0])
    assert np.isnan(data[:, spare]).all()
    assert np.isnan(data[0, table[0][table[0] >= 0][-1]]).any()  # its last page is not full
    zeros = call.again(replaced(pools, np.nan_to_num(data, nan=0.0)))
    huge = call.again(replaced(pools, np.nan_to_num(data, nan=3e38)))
    for i in BATCH:
        assert np.isfinite(once.of(i)).all()
        np.testing.assert_array_equal(zeros.of(i), once.of(i))
        np.testing.assert_array_equal(huge.of(i), once.of(i))

    # The third page of request 1, in the layers that this pass attends to.
    broken = data.copy()
    broken[:, table[1, 2]] *= -1
    after = call.again(replaced(pools, broken))
    assert np.abs(after.of(1) - once.of(1)).max() > 0.1
    for i in (0, 2, 3):
        np.testing.assert_array_equal(after.of(i), once.of(i))


def replaced(pools, data):
    return jax.tree.map(lambda old: jnp.asarray(data).reshape(old.shape), pools)


def scopes_in(jaxpr):
    """The named scopes of all operations, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield str(equation.source_info.name_stack)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from scopes_in(inner)


@pytest.mark.parametrize(
    ("name", "layers", "absorbed", "rows"),
    [
        ("prefill", 3, False, 32),
        ("extend", 3, False, 32),
        ("draft_prefill", 1, True, 32),
        ("draft_decode", 1, True, 4),
        ("target_verify", 3, True, 12),
        ("draft_extend", 1, True, 12),
        ("decode", 3, True, 4),
    ],
)
def test_every_layer_of_a_pass_runs_its_step(name, layers, absorbed, rows):
    """In the traced program: a step a layer, and in it the MLA op over the pool, or for prompts the expanded form."""
    recording = run("v3", 16, 7) if name == "decode" else speculative(2)
    function, *arguments = recording.traced[name]
    traced = jax.make_jaxpr(function)(*arguments)
    step = {"draft_prefill": "draft_extend"}.get(name, name)
    calls = [e for e in traced.jaxpr.eqns if e.primitive.name == "jit"]
    within = [e.params["jaxpr"].jaxpr.eqns for e in calls if e.params["name"] == "layer"]
    assert len(within) == (layers if layers > 1 else 0)  # the draft layer is alone
    found = [e for e in sum(within, calls) if e.primitive.name == "jit" and e.params["name"] == step]
    assert len(found) == layers
    for equation in found:
        shapes = [v.aval.shape for v in equation.invars]
        assert recording.pools[GROUP].data.shape in shapes
        scopes = " ".join(scopes_in(equation.params["jaxpr"].jaxpr))
        assert ("mla_attention" in scopes) == absorbed
        assert ("ragged_attention" in scopes) == (not absorbed)
        assert ((rows, 4, 512) in shapes) == absorbed  # queries as wide as the latent


# Three prompts make a batch of four, in which one request is padding.
THREE = (2, 0, 1)


def cut(tokens, stop_token_ids):
    ends = [n + 1 for n, token in enumerate(tokens) if token in stop_token_ids]
    return tokens[: ends[0]] if ends else tokens


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_stop_tokens(num_drafts):
    """One request stops at the token that follows its prompt, one amid the tokens of a verify step, one elsewhere."""
    greedy = [expected("v3")[i].greedy.tolist() for i in THREE]
    stop_token_ids = (greedy[2][0], token_amid_a_step(speculative(3), 0))
    page_size, chunk = SPECULATIVE[3] if num_drafts else (16, 7)
    recording = run("v3", page_size, chunk, num_drafts=num_drafts, prompts=THREE, stop_token_ids=stop_token_ids)
    assert recording.tokens == [cut(tokens, stop_token_ids) for tokens in greedy]
    elsewhere, amid, first = map(len, recording.tokens)
    assert first == 1
    # Otherwise the prompts show nothing: these two must stop later than the first, each at a place of its own.
    assert amid > 1 and elsewhere > 1 and amid != elsewhere
    check_stream(recording, 3)
    statistics = recording.statistics
    assert (statistics.prompt_tokens, statistics.new_tokens) == (300 + 41 + 121, elsewhere + amid + first)
    steps = recording.named("target_verify", "decode")
    active = np.array([call.inputs["active"] for call in steps])
    assert active[0].tolist() == [1, 1, 0, 0]
    assert (np.diff(active, axis=0) <= 0).all()
    assert all(len(call.of(2)) == len(call.of(3)) == 0 for call in steps)
    if num_drafts:
        emitted = steps[active[:, 1].sum() - 1].outputs["emitted"][1].tolist()
        assert emitted[emitted.index(stop_token_ids[1]) + 1] >= 0
        assert statistics.acceptance_length == pytest.approx((elsewhere + amid - 2) / active.sum())


def token_amid_a_step(recording, request):
    """A token that a request emits first, with others behind it, in a verify step, and never before."""
    text = [recording.tokens[request][0]]
    for call in recording.named("target_verify"):
        first, second = call.outputs["emitted"][request][:2].tolist()
        if second >= 0 and first not in text:
            return first
        text += [token for token in call.outputs["emitted"][request].tolist() if token >= 0]
    raise AssertionError("no such token")


def check_stream(recording, count):
    """Tokens came in order, request by request within a step, and make up the result."""
    texts = [[] for _ in range(count)]
    for request, new in recording.stream:
        assert new
        texts[request] += new
    assert texts == recording.tokens
    requests = [request for request, _ in recording.stream]
    assert sorted(requests[:count]) == list(range(count))  # each as soon as its prompt is done
    assert [len(new) for _, new in recording.stream[:count]] == [1] * count
    assert 1 + np.count_nonzero(np.diff(requests[count:]) <= 0) == recording.statistics.target_steps


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_stream(num_drafts):
    check_stream(speculative(3) if num_drafts else run("v3", 16, 7), 4)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_one_new_token(num_drafts):
    """Comes from the prompt alone."""
    p = expected("v3")[2]
    prompts = [p.sequence[: TOTAL - 1].tolist(), expected("v3")[0].prompt.tolist(), expected("v3")[1].prompt.tolist()]
    recording = record(model("v3"), prompts, max_new_tokens=1, num_drafts=num_drafts, page_size=16, prefill_chunk=7)
    assert recording.tokens == [[p.greedy[-1]], [expected("v3")[0].greedy[0]], [expected("v3")[1].greedy[0]]]
    assert not recording.named("decode", "target_verify")
    assert recording.statistics.target_steps == 0
    assert recording.statistics.acceptance_length is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "prompts is empty, must hold at least one"),
        ({"prompts": [[1], []]}, r"prompts\[1\] is empty, must hold at least one token"),
        ({"prompts": [[1, 258]]}, r"prompts\[0\] holds token 258, must be 0 to 257"),
        ({"prompts": [[1], [2, -1]]}, r"prompts\[1\] holds token -1, must be 0 to 257"),
        ({"prompts": [[0] * 2000]}, r"prompts\[0\] has 2000 tokens and max_new_tokens=64: .* at most .*=2048"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be an integer of at least 1"),
        ({"num_drafts": -1}, "num_drafts=-1 must be an integer of at least 0"),
        ({"num_drafts": 3}, "must be None: the model has no MTP layer"),
        ({"page_size": 0}, "page_size=0 must be an integer of at least 1"),
        ({"prefill_chunk": 0}, "prefill_chunk=0 must be an integer of at least 1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be an integer of at least 1"),
        ({"prefill_chunk": 2.5}, "prefill_chunk=2.5 must be an integer of at least 1"),
        ({"skip_threshold": 0}, "skip_threshold=0 must be a finite number above 0"),
        ({"implementation": "cuda"}, "implementation='cuda' must be one of mosaic_gpu, triton, xla, reference"),
    ],
)
def test_wrong_calls(changes, message, unchecked):
    options = {"prompts": [[1, 2, 3]], "max_new_tokens": 64} | changes
    with pytest.raises(ValueError, match=message):
        generate(model("v2"), **options)


@pytest.mark.parametrize("checkpoint", [V2, QWEN3])
def test_skip_threshold_reaches_every_layer(checkpoint, monkeypatch):
    seen = []

    def least_ratio(skip_threshold, kv_lens):
        seen.append(skip_threshold)
        return original(skip_threshold, kv_lens)

    original = blockwise._least_ratio
    monkeypatch.setattr(blockwise, "_least_ratio", least_ratio)
    loaded = load_checkpoint(checkpoint, dtype=jnp.float32)
    done = generate(loaded, [[1, 2, 3]], max_new_tokens=2, skip_threshold=1e-3)
    assert set(seen) == {1e-3}
    assert len(seen) >= 2 * len(loaded.cache_groups)  # prompts and decoding
    assert done.tokens == generate(loaded, [[1, 2, 3]], max_new_tokens=2).tokens  # 5 keys are a tile, which stays
