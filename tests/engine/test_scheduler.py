"""The scheduler by itself: no device, no model, whole traffic in milliseconds."""

import hashlib

import numpy as np
import pytest

from mla_attn.cache import prefix
from mla_attn.engine import SamplingParams
from mla_attn.engine.scheduler import CacheSizes, Limits, Request, Scheduler
from mla_attn.engine.statistics import Counters
from mla_attn.speculative import DraftTree

CHAIN = DraftTree.chain(2)


def make(num_pages=18, page_size=4, prefix_cache=True, **limits):
    defaults = {"max_batch": 4, "max_len": 48, "max_waiting": 10, "prompt_tokens": 16, "prompts_per_pass": 4}
    limits = {"prompt_chunk": limits.get("prompt_tokens", 16), **defaults, **limits}
    cache = CacheSizes(num_pages=num_pages, page_size=page_size, prefix_cache=prefix_cache)
    return Scheduler(Limits(**limits), cache, Counters())


def add(scheduler, id, prompt, new=4, **params):
    request = Request(id, prompt, SamplingParams(max_new_tokens=new, **params), None, 0.0)
    scheduler.waiting.append(request)
    return request


def prompts(scheduler):
    """A pass over prompts, read at once; returns who was in it and up to where."""
    scheduler.admit()
    parts = scheduler.next_prompts()
    for request, part in parts:
        request.num_computed = part.stop
        request.num_accounted = part.stop
        scheduler.keep_prefix(request, all_pages=False)
        if part.stop == request.prompt_rows:
            token(scheduler, request)
    return [(request.id, part.start, part.stop) for request, part in parts]


def tokens(scheduler, kind=None, read=lambda: False):
    """A decode pass, read at once; returns who was in it."""
    ready = scheduler.next_tokens(kind, read)
    for request in ready:
        request.num_decoded_rows += 1
        token(scheduler, request)
    return [request.id for request in ready]


def token(scheduler, request):
    request.tokens[request.num_tokens] = 7
    request.num_tokens += 1
    if request.num_new == request.params.max_new_tokens:
        request.finished = True
        scheduler.remove(request, keep=True)


def test_prompts_come_in_parts_oldest_first_within_the_budget():
    scheduler = make()
    add(scheduler, 0, range(20))
    add(scheduler, 1, [9] * 10)
    assert prompts(scheduler) == [(0, 0, 16)]
    assert prompts(scheduler) == [(0, 16, 20), (1, 0, 10)]
    assert tokens(scheduler) == [0, 1]


def test_a_chunk_bounds_each_request_and_a_pass_holds_all():
    scheduler = make(prompt_tokens=21, prompt_chunk=7, prefix_cache=False)
    for id, length in enumerate((20, 5, 9)):
        add(scheduler, id, range(length))
    assert prompts(scheduler) == [(0, 0, 7), (1, 0, 5), (2, 0, 7)]
    assert prompts(scheduler) == [(0, 7, 14), (2, 7, 9)]
    assert prompts(scheduler) == [(0, 14, 20)]


def test_a_pass_over_prompts_is_of_one_kind_of_speculation():
    scheduler = make(prompt_tokens=40)
    add(scheduler, 0, range(8))
    add(scheduler, 1, range(8), speculation=CHAIN)
    add(scheduler, 2, range(8))
    assert [id for id, *_ in prompts(scheduler)] == [0, 2]
    assert [id for id, *_ in prompts(scheduler)] == [1]


def test_only_what_was_accounted_for_is_found_by_others():
    """A pass that is launched but not read may be lost: its pages are not the prefix cache's."""
    scheduler = make()
    first = add(scheduler, 0, range(12))
    scheduler.admit()
    ((_, part),) = scheduler.next_prompts()
    first.num_computed = part.stop
    add(scheduler, 1, range(12))
    scheduler.admit()
    scheduler.keep_prefix(first)
    assert scheduler.prefixes.num_pages == 0 and scheduler.running[1].num_computed == 0
    first.num_accounted = part.stop
    scheduler.keep_prefix(first)
    assert scheduler.prefixes.num_pages == 3
    add(scheduler, 2, range(12))
    scheduler.next_prompts()[0][0].num_computed = 12
    scheduler.admit()
    assert scheduler.running[2].num_computed == 8  # its last row is always computed: the next token comes of it


@pytest.mark.parametrize("keep", [False, True])
def test_pages_of_a_request_that_must_not_be_reused_are_not(keep):
    scheduler = make()
    request = add(scheduler, 0, range(8), new=5)
    prompts(scheduler)
    scheduler.prefixes.clear()
    scheduler.remove(request, keep=keep)
    assert scheduler.prefixes.num_pages == (2 if keep else 0)
    assert scheduler.pages.num_used == scheduler.prefixes.num_pages


def test_the_youngest_gives_way_and_comes_back_with_its_tokens():
    scheduler = make(num_pages=6, prefix_cache=False)
    old, young = add(scheduler, 0, range(8), new=14), add(scheduler, 1, range(8, 14), new=10)
    assert prompts(scheduler) == [(0, 0, 8), (1, 0, 6)]
    while young.id in scheduler.running:
        assert 0 in tokens(scheduler)
    made = young.num_new
    assert scheduler._counters.preemptions == 1 and list(scheduler.waiting) == [young]
    assert young.id not in scheduler.running and 0 < made < 10
    while not old.finished:
        prompts(scheduler)
        tokens(scheduler)
    assert prompts(scheduler) == [(1, 0, 6 + made)] and young.prompt_rows == 6 + made
    while not young.finished:
        assert tokens(scheduler) == [1]
    assert young.tokens[:6].tolist() == list(range(8, 14)) and young.num_new == 10
    assert scheduler.pages.num_used == 0


def test_launched_passes_are_read_before_anybody_gives_way():
    """They may end requests, whose pages are then enough."""
    scheduler = make(num_pages=4, prefix_cache=False)
    first, second = add(scheduler, 0, range(8), new=8), add(scheduler, 1, range(4), new=3)
    prompts(scheduler)

    def read():
        if second.finished:
            return False
        token(scheduler, second)
        token(scheduler, second)
        return True

    assert scheduler.pages.num_free == 1
    while not second.finished:
        if first.id not in [r.id for r in scheduler.next_tokens(None, read)]:
            break
        first.num_decoded_rows += 1
        token(scheduler, first)
    assert second.finished and scheduler._counters.preemptions == 0


def test_who_waits_costs_nothing_until_something_is_released(monkeypatch):
    scheduler = make(num_pages=12)
    add(scheduler, 0, range(30), new=10)
    while prompts(scheduler):
        pass
    add(scheduler, 1, range(40, 70), new=10)
    looked, find = [], scheduler.prefixes.find
    monkeypatch.setattr(scheduler.prefixes, "find", lambda *a: (looked.append(a), find(*a))[1])
    for _ in range(5):
        scheduler.admit()
        assert tokens(scheduler) == [0]
    assert len(looked) == 1
    while scheduler.running:
        tokens(scheduler)
    scheduler.admit()
    assert len(looked) == 2 and list(scheduler.running) == [1]


def test_pages_are_digested_once(monkeypatch):
    """However many parts a prompt has, and however often it is looked up."""
    digested = []
    monkeypatch.setattr(prefix, "hashlib", type("H", (), {"blake2b": lambda *a, **k: (
        digested.append(a), hashlib.blake2b(*a, **k))[1]}))  # fmt: skip
    scheduler = make(num_pages=40, max_len=120)
    request = add(scheduler, 0, range(100), new=8)
    while not request.finished:
        prompts(scheduler)
        tokens(scheduler)
    assert len(digested) == 108 // 4
    assert scheduler.prefixes.num_pages == 107 // 4


def test_slots_go_on_when_all_is_launched_and_as_few_as_may_run_do():
    scheduler = make(prefix_cache=False)
    scheduler.max_running = 2
    for id in range(4):
        add(scheduler, id, [id], new=2)
    assert [id for id, *_ in prompts(scheduler)] == [0, 1]
    assert prompts(scheduler) == []
    scheduler.running[0].num_passes_in_flight = 1  # its last token is on the way
    assert [id for id, *_ in prompts(scheduler)] == [2]
    assert scheduler.running[2].slot == 0 and len(scheduler.running) == 3


def test_everything_is_made_anew():
    scheduler = make(num_pages=8)
    running, waiting = add(scheduler, 0, range(12), new=9), add(scheduler, 1, range(30, 38))
    prompts(scheduler)
    tokens(scheduler)
    pages = scheduler.pages
    scheduler.reset([running, waiting])
    assert scheduler.pages is not pages and scheduler.pages.num_used == scheduler.prefixes.num_pages == 0
    assert list(scheduler.waiting) == [running, waiting] and not scheduler.running
    assert prompts(scheduler)[0] == (0, 0, 14)
    assert running.tokens[:14].tolist() == [*range(12), 7, 7]


@pytest.mark.parametrize("seed", range(20))
def test_any_traffic_ends_with_all_pages_free(seed):
    rng = np.random.default_rng(seed)
    scheduler = make(num_pages=int(rng.integers(12, 30)), prefix_cache=bool(seed % 2))
    kinds, requests = (None, CHAIN), []
    for id in range(40):
        prompt = np.resize([1, 2, 3, 4, 5], rng.integers(1, 30)).tolist()
        requests.append(add(scheduler, id, prompt, new=int(rng.integers(1, 16)), speculation=kinds[id % 2]))
    for _ in range(2000):
        prompts(scheduler)
        for kind in kinds:
            tokens(scheduler, kind)
        for request in list(scheduler.running.values()):
            assert scheduler.pages.length(request.id) >= request.num_tokens - 1
        if rng.random() < 0.01:
            scheduler.reset([r for r in requests if not r.finished])
        if all(request.finished for request in requests):
            break
    assert all(request.num_new == request.params.max_new_tokens for request in requests)
    scheduler.prefixes.clear()
    assert scheduler.pages.num_used == 0
