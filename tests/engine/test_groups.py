"""Cache groups with windows: a pool of the last pages serves as well as one of all, and holds no more than it must."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import GEMMA2, GPT_OSS
from helpers import OPTIMIZED
from mla_attn import metadata as build
from mla_attn.cache import PageAllocator, PrefixCache
from mla_attn.engine import DraftModel, Engine, NgramDrafts, SamplingParams, sizes
from mla_attn.engine.pages import CacheSizes, Limits, WindowSizes
from mla_attn.engine.scheduler import Request, Scheduler
from mla_attn.engine.statistics import Counters
from mla_attn.models import load_checkpoint
from mla_attn.speculative import DraftTree
from traffic import CHAIN, assert_idle, check_tokens, collect, serve, small_engine, some_prompt
from windows import whole, windowed_model

WINDOW, STEPS, REQUESTS = 20, 200, 3
CHAIN4 = DraftTree.chain(3)


# A windowed pool against a full one, call by call.


@functools.cache
def _verify(rows: int, page_size: int):
    model = windowed_model((WINDOW,), invariant=True)

    def call(tokens, pools, table, lens, offsets):
        options = {"num_tokens": rows, "page_size": page_size, "max_len": STEPS * rows + 1}
        m = build.for_target_verify(table, lens, **options, kv_offsets=offsets)
        hidden, pools = model(tokens, pools, {f"window{WINDOW}": m}, mode="target_verify")
        return model.logits(hidden), pools

    return jax.jit(call, donate_argnums=1, compiler_options=OPTIMIZED)


@pytest.mark.parametrize("reuse", [False, True], ids=["alone", "prefixes"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_windowed_pool_gives_the_bits_of_a_full_one(page_size, rows, reuse):
    """Through 200 decode and verify calls whose drafts are rejected now and then; what was released holds NaN.

    With ``reuse``, requests end and others that begin with their texts take their places, and the pages that both
    pools have cached of these texts.
    """
    rng, model = np.random.default_rng(page_size + rows), windowed_model((WINDOW,), invariant=True)
    full_width, width = -(-STEPS * rows // page_size), -(-(WINDOW + rows + page_size - 2) // page_size)
    allocators = [PageAllocator(2 * REQUESTS * wide, page_size, table_width=wide) for wide in (full_width, width)]
    prefixes = [PrefixCache(allocators[0]), PrefixCache(allocators[1], window=WINDOW)]
    texts, reused = rng.integers(13, size=(REQUESTS, (STEPS + 1) * rows)), []
    pools = [
        jax.tree.map(
            lambda x: jnp.full_like(x, jnp.nan), model.create_pools(num_pages=pages.num_pages, page_size=page_size)
        )
        for pages in allocators
    ]
    lens, ids, most = np.zeros(REQUESTS, np.int32), list(range(REQUESTS)), 0
    for pages in allocators:
        for request in ids:
            pages.create(request)
    for step in range(STEPS):
        if reuse and step % 30 == 29:  # texts of more than a page of 64, in the end
            request = step // 30 % REQUESTS
            cut = int(lens[request]) - int(rng.integers(3))
            texts[request, cut:] = rng.integers(13, size=texts.shape[1] - cut)
            few = int(rng.integers(2 * (WINDOW // page_size + 2)))  # often not all pages of the window
            lens[request] = _begin_anew(request, texts[request, :cut], prefixes, allocators, few)
            reused.append(lens[request])
        accepted, got = rng.integers(1, rows, size=REQUESTS, endpoint=True), []
        tokens = rng.integers(13, size=(REQUESTS, rows))
        for request in ids:
            tokens[request, : accepted[request]] = texts[request, lens[request] :][: accepted[request]]
        tokens = tokens.reshape(-1).astype(np.int32)
        for index, pages in enumerate(allocators):
            before = pages.holders.copy()
            for request in ids:
                pages.truncate(request, int(lens[request]))
                if reuse:
                    _keep(request, texts[request, : lens[request]], prefixes[index])
                if index:
                    pages.release(request, int(lens[request]) - WINDOW + 1)
                prefixes[index].evict(-(-rows // page_size) + 1)
                pages.grow(request, int(lens[request]) + rows)
            if index:
                held = [(row >= 0).sum() for row in pages.table(ids)]
                most = max(most, *held)
                gone = np.flatnonzero((before > 0) & (pages.holders == 0))
                pools[index] = _poison(pools[index], gone, pages.num_pages)
            table, offsets = pages.table(ids), pages.offsets(ids)
            logits, pools[index] = _verify(rows, page_size)(tokens, pools[index], table, lens, offsets)
            got.append(np.asarray(logits))
        np.testing.assert_array_equal(got[0].view(np.int32), got[1].view(np.int32))
        assert np.isfinite(got[0]).all()
        lens += accepted.astype(np.int32)
    assert most == min(width, full_width)
    assert sum(n > WINDOW for n in reused) >= 2 * reuse
    for pages, cached in zip(allocators, prefixes, strict=True):
        for request in ids:
            pages.free(request)
        cached.clear()
        assert pages.num_free == pages.num_pages


def _keep(request, text, cached):
    digests: list[bytes] = []
    cached.extend_digests(digests, text)
    cached.keep(request, digests)


def _begin_anew(request, text, prefixes, allocators, few):
    """Ends a request and begins another with this text; returns how many of its tokens both pools have cached, after
    the windowed one has evicted all idle pages but a few."""
    digests: list[bytes] = []
    prefixes[0].extend_digests(digests, text)
    for pages in allocators:
        pages.free(request)
    gone = max(prefixes[1].num_idle_pages - few, 0)
    prefixes[1].evict(allocators[1].num_free + gone)
    found = None
    while found != (found := [len(cached.find(digests)) for cached in prefixes]) or len(set(found)) > 1:
        digests = digests[: min(found)]
    lens = {cached.fork(request, digests) for cached in prefixes}
    assert len(lens) == 1
    return lens.pop()


def _poison(pools, pages, num_pages):
    """NaN in some pages; as many indices at each call, so that one program does for all."""
    where = np.full(num_pages, num_pages, np.int32)
    where[: len(pages)] = pages
    return _poisoned(pools, where)


@functools.partial(jax.jit, donate_argnums=0)
def _poisoned(pools, where):
    return jax.tree.map(lambda x: x.at[where].set(jnp.nan, mode="drop"), pools)


# Engines.


@functools.cache
def model(windows=(None, 6)):
    return windowed_model(windows, invariant=True)


def windowed_engine(windows=(None, 6), **options):
    options = {"speculation": (), "prompt_tokens": 8, "num_pages": 24} | options
    return small_engine(model=model(windows), **options)


@pytest.mark.parametrize("windows", [(None, 6), (9,)], ids=str)
def test_tokens_are_those_of_an_engine_that_keeps_all(windows):
    """Traffic with shared beginnings, next turns, preemptions; the pages held are within the formula at each step."""
    rng, whole_model = np.random.default_rng(1), whole(model(windows))
    engine, other = windowed_engine(windows), small_engine(model=whole_model, speculation=(), prompt_tokens=8)
    beginning = some_prompt(rng, 17, 17)
    prompts = [[*beginning, *some_prompt(rng, 1, 8)] if rng.random() < 0.6 else some_prompt(rng) for _ in range(24)]
    params = [SamplingParams(max_new_tokens=int(rng.integers(1, 20)), temperature=0.7, seed=i) for i in range(24)]
    names = [engine.add_request(*each) for each in zip(prompts, params, strict=True)]
    found = {}
    while engine.busy:
        collect(engine.step(), found)
        check_pages(engine)
    others = [other.add_request(*each) for each in zip(prompts, params, strict=True)]
    wanted = collect(other.run())
    for name, its, prompt, each in zip(names, others, prompts, params, strict=True):
        assert found[name] == wanted[its]
        check_tokens(engine.model, prompt, found[name][0], each)
    assert engine.statistics.reused_tokens > 0
    assert_idle(engine)
    assert all(table.pages.num_used == 0 for table in engine._scheduler.tables.all)


def check_pages(engine):
    """What windowed tables hold for running requests: what the next row sees, and no more than the formula says."""
    scheduler, limits = engine._scheduler, engine._limits
    for table in scheduler.tables.windowed:
        held = table.pages.holders - table.prefixes.held
        assert np.count_nonzero(held) <= table.sizes.pages_for(max(len(scheduler.running), 1))
        page_size = table.pages.page_size
        rows = 2 * (limits.verify_rows + limits.rows_ahead) + page_size - 1  # with prefixes, and two steps under way
        steady = -(-(table.window + rows + page_size - 2) // page_size)
        widest = -(-(table.window + rows + 2 * limits.prompt_rows + page_size - 2) // page_size)
        for request in scheduler.running.values():
            pages = int((table.pages.table([request.id])[0] >= 0).sum())
            # Once two later passes were read, the prompt's rows are final.
            assert pages <= (steady if request.num_decoded_rows > limits.verify_rows else widest)
            offset, final = table.pages.offset(request.id), request.num_final_rows
            assert offset <= max(final - table.window + 1, 0) // table.pages.page_size * table.pages.page_size
    counts = engine.statistics.pages
    assert all(c.used + c.idle <= c.total for c in counts.values())


def test_a_prefix_is_found_though_its_pages_were_released():
    """A beginning in common, the end of a text, both, a part of what was generated; not where the windowed pool forgot
    what a row there would see."""
    engine = windowed_engine(num_pages={"full": 24, "window6": 24})
    beginning = np.random.default_rng(0).integers(13, size=24).tolist()

    def reused(prompt, new=4):
        before = engine.statistics.reused_tokens
        params = SamplingParams(max_new_tokens=new)
        tokens = serve(engine, prompt, max_new_tokens=new)
        check_tokens(engine.model, prompt, tokens, params)
        return engine.statistics.reused_tokens - before, tokens

    assert reused([*beginning, 1])[0] == 0
    assert reused([*beginning, 2])[0] == 24
    _, tokens = reused([*beginning, 3], 14)  # 25 + 13 rows are cached
    assert reused([*beginning, 3, *tokens[:6], (tokens[6] + 1) % 13])[0] == 28  # the window has passed
    assert reused([*beginning, 3, *tokens, 7])[0] == 36
    windowed = engine._scheduler.tables.windowed[0]
    windowed.prefixes.clear()
    assert reused([*beginning, 4])[0] == 0
    assert reused([*beginning, 4])[0] == 24
    assert_idle(engine)


def test_as_many_run_as_the_windowed_pool_holds():
    """No request is preempted for pages of a window: it is admitted when there are enough."""
    engine = windowed_engine(num_pages={"full": 48, "window6": 16})
    names = [engine.add_request([n] * 9, SamplingParams(max_new_tokens=30)) for n in range(4)]
    most, found = 0, {}
    while engine.busy:
        collect(engine.step(), found)
        most = max(most, engine.statistics.running)
        check_pages(engine)
    assert 1 < most < 4 and engine.statistics.preemptions == 0
    for n, name in enumerate(names):
        check_tokens(engine.model, [n] * 9, found[name][0], SamplingParams(max_new_tokens=30))


def test_page_counts_that_do_not_fit():
    for pages, message in (
        ({"full": 24}, r"num_pages has the cache groups \['full'\], must be a dict with 'full', 'window6'"),
        ({"full": 24, "window6": 3}, "num_pages=3 of the groups with window=6: a request needs 8"),
        ({"full": 0, "window6": 12}, r"num_pages\['full'\]=0 must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            windowed_engine(num_pages=pages)


def test_sizes_of_windows():
    """By hand: window 128, pages of 64, chunks of 512; the rows of two steps lie between final and last."""
    limits = Limits(
        max_batch=64,
        max_len=10**6,
        max_waiting=1,
        prompt_tokens=512,
        prompts_per_pass=4,
        prompt_chunk=512,
        verify_rows=4,
    )
    sizes = WindowSizes.of(128, limits, page_size=64, prefix_cache=False)
    assert sizes == WindowSizes(width=-(-(128 + 2 * 516 + 62) // 64), steady=4, prompts=16 + 8)
    assert sizes.pages_for(64) == 64 * 4 + 24 and sizes.pages_for(1) == sizes.width
    assert sizes.has_room(280, [10**6] * 64) and not sizes.has_room(279, [10**6] * 64)
    assert sizes.has_room(64, [1] * 64) and sizes.has_room(sizes.width, [10**6])


def test_a_model_its_drafter_and_their_windows_must_fit(monkeypatch):
    """Weights of both, windowed groups with the pages that they will have: to the byte."""
    drafter = DraftModel(windowed_model((None, 5), seed=1))
    given = {"num_pages": 500, "page_size": 4, "max_len": 400, "max_batch": 2, "prompt_tokens": 8}
    engine = Engine(model(), draft=drafter, speculation=(CHAIN4,), cache_dir="", **given)
    arrays = [engine._passes.state, engine._device[0]]
    needed = sum(x.nbytes for x in jax.tree.leaves(arrays))
    assert needed < sizes.tree_bytes(engine._passes.state) + 500 * sizes.page_bytes(engine._groups, 4) * 3 / 4
    monkeypatch.setattr("mla_attn.memory.free_bytes", lambda: needed)
    sizes.check_engine_fits(model(), drafter, (CHAIN4,), **given)
    monkeypatch.setattr("mla_attn.memory.free_bytes", lambda: needed - 1)
    with pytest.raises(MemoryError, match=r"500 pages of 4 tokens, \d+ pages of 4 tokens for window 5, .* need"):
        sizes.check_engine_fits(model(), drafter, (CHAIN4,), **given)


def test_free_memory_is_split(monkeypatch):
    """Windows get what two requests need, twice for prefixes, if they can fill it; the rest goes to the others."""
    full, windowed = (sizes.page_bytes([group], 4) for group in model().cache_groups)
    limits = windowed_engine(max_batch=2)._limits
    wanted = 2 * WindowSizes.of(6, limits, page_size=4, prefix_cache=True).pages_for(2)
    monkeypatch.setattr(sizes, "free_bytes", lambda: 4 * (20 * full + min(wanted, 24) * windowed))
    cache = windowed_engine(num_pages=None, max_batch=2)._cache
    assert (cache.num_pages, cache.windows) == (20, ((6, min(wanted, 24)),))


# The scheduler alone.


@pytest.mark.parametrize("seed", range(12))
def test_any_traffic_of_windows_ends_with_all_pages_free(seed):
    """Rows that a call may see are there at each launch, whatever was rejected; pools are as small as they may be."""
    rng = np.random.default_rng(seed)
    limits = Limits(
        max_batch=4, max_len=64, max_waiting=99, prompt_tokens=16, prompts_per_pass=4, prompt_chunk=12, verify_rows=4
    )
    windows, prefix = (5, 17), bool(seed % 2)
    sizes = {w: WindowSizes.of(w, limits, page_size=4, prefix_cache=prefix) for w in windows}
    pages = tuple((w, int(rng.integers(sizes[w].width, sizes[w].pages_for(4) + 1))) for w in windows)
    cache = CacheSizes(num_pages=0 if seed % 3 == 0 else 24, page_size=4, prefix_cache=prefix, windows=pages)
    scheduler, requests = Scheduler(limits, cache, Counters()), []
    for id in range(30):
        prompt = np.resize([1, 2, 3, 4, 5], rng.integers(1, 30)).tolist()
        params = SamplingParams(max_new_tokens=int(rng.integers(1, 25)), speculation=(None, CHAIN4)[id % 2])
        requests.append(Request(id, prompt, params, None, 0.0))
    scheduler.waiting.extend(requests)
    unread: list = []
    for _ in range(3000):
        before = len(unread)
        scheduler.admit()
        parts = scheduler.next_prompts()
        for request, part in parts:
            check_rows(scheduler, request, part.start, part.stop)
            request.num_computed = part.stop
            request.num_passes_in_flight += not request.wants_prompt_pass
            unread.append((request, part.stop, 0))
        for kind in (None, CHAIN4):
            for request in scheduler.next_tokens(kind, lambda: read(scheduler, unread, len(unread), rng)):
                rows = kind.size if kind else 1
                most = request.prompt_rows + request.num_decoded_rows + request.num_rows_in_flight
                least = (
                    request.prompt_rows
                    + request.num_decoded_rows
                    + request.num_passes_in_flight
                    - (request.num_accounted < request.prompt_rows)
                )
                stop = min(most + rows, scheduler.most_rows(request.prompt_len, request.params))
                check_rows(scheduler, request, min(least, most), stop)
                request.num_passes_in_flight += 1
                request.num_rows_in_flight += rows
                unread.append((request, 0, rows))
        read(scheduler, unread, before, rng)
        if rng.random() < 0.01:
            unread.clear()
            scheduler.reset([r for r in requests if not r.finished])
        if all(request.finished for request in requests):
            break
    assert all(request.num_new == request.params.max_new_tokens for request in requests)
    scheduler.tables.clear_prefixes()
    assert all(table.pages.num_used == 0 for table in scheduler.tables.all)


def check_rows(scheduler, request, first, stop):
    """What rows from ``first`` on see, and these rows, have pages in every table."""
    for table in scheduler.tables.all:
        offset, length = table.pages.offset(request.id), table.pages.length(request.id)
        seen = 0 if table.window is None else max(first - table.window + 1, 0)
        assert offset <= seen and length >= stop
        row = table.pages.table([request.id])[0]
        assert (row[: -(-(length - offset) // 4)] >= 0).all()


def read(scheduler, unread, count, rng):
    """The first launches are read: some drafts are rejected, some requests end. Returns whether there were any."""
    there = count > 0 and bool(unread)
    for _ in range(min(count, len(unread))):
        request, stop, rows = unread.pop(0)
        if request.finished or request.id not in scheduler.running:
            continue
        if stop:
            request.num_accounted = stop
            scheduler.keep_prefix(request, all_pages=False)
            new = int(stop == request.prompt_rows)
            request.num_passes_in_flight -= new
        else:
            new = int(rng.integers(1, rows, endpoint=True))
            request.num_passes_in_flight -= 1
            request.num_rows_in_flight -= rows
            request.num_decoded_rows += new
        for _ in range(min(new, request.params.max_new_tokens - request.num_new)):
            request.tokens[request.num_tokens] = 7
            request.num_tokens += 1
        if request.num_new == request.params.max_new_tokens:
            request.finished = True
            scheduler.remove(request, keep=True)
    return there


def test_speculation_over_windows(unchecked):
    """The chain of another small model: tokens are right, windows crossed, pages in both models' tables."""
    engine = windowed_engine(draft=DraftModel(windowed_model((5,), seed=1)), speculation=(CHAIN,))
    params = SamplingParams(max_new_tokens=30, speculation=CHAIN)
    names = [engine.add_request([n, 3, 5], params) for n in range(3)]
    found = {}
    while engine.busy:
        collect(engine.step(), found)
        check_pages(engine)
    for n, name in enumerate(names):
        check_tokens(engine.model, [n, 3, 5], found[name][0], params)
    assert set(engine.statistics.pages) == {"full", "window6", "draft.window5"}
    assert_idle(engine)


@pytest.mark.parametrize("path", [GEMMA2, GPT_OSS], ids=lambda path: path.name)
def test_checkpoints_with_windows(path, unchecked):
    """Their greedy tokens, windows of 16 crossed: plain, then drafted from the text after prefixes that are found."""
    with np.load(path / "expected.npz") as file:
        prompts = [file[name].tolist() for name in sorted(file.files) if name.startswith("prompt_")]
        wanted = [file[name].tolist() for name in sorted(file.files) if name.startswith("greedy_")]
    sizes = {"max_batch": 4, "batches": (4,), "num_pages": 100, "page_size": 8, "max_len": 304, "prompt_tokens": 32}
    model = load_checkpoint(path, dtype=jnp.float32)
    engine = Engine(model, **sizes, speculation=(CHAIN,), draft=NgramDrafts(3))
    assert prompts and len(engine._scheduler.tables.all) == 2
    for kind in (None, CHAIN):
        names = [
            engine.add_request(prompt, SamplingParams(max_new_tokens=len(new), speculation=kind, ignore_eos=True))
            for prompt, new in zip(prompts, wanted, strict=True)
        ]
        found = {}
        while engine.busy:
            collect(engine.step(), found)
            check_pages(engine)
        assert [found[name][0] for name in names] == wanted
    assert engine.statistics.reused_tokens > 0
    assert engine.statistics.acceptance_length > 1
