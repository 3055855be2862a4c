"""The prefix cache: what is found is what was kept, and pages are never lost."""

import sys

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mla_attn.cache.allocator import OutOfPages, PageAllocator
from mla_attn.cache.prefix import PrefixCache

P = 4


@pytest.fixture
def pages():
    return PageAllocator(12, P, table_width=6)


@pytest.fixture
def cache(pages):
    return PrefixCache(pages)


def names(cache, tokens, **kind):
    """Of the full pages of a text."""
    digests = []
    cache.extend_digests(digests, tokens, **kind)
    return digests


def served(pages, cache, name, tokens, **kind):
    """A request that has run: what it found, and the pages it had."""
    found = cache.fork(name, names(cache, tokens[:-1], **kind))
    pages.grow(name, len(tokens))
    row = pages.table([name])[0].tolist()
    cache.keep(name, names(cache, tokens, **kind))
    pages.free(name)
    return found, row[: -(-len(tokens) // P)]


def test_full_pages_are_found_by_their_tokens(pages, cache):
    tokens = list(range(10))
    assert served(pages, cache, "a", tokens)[0] == 0
    assert (pages.num_used, cache.num_pages) == (2, 2)
    found, row = served(pages, cache, "b", tokens)
    assert (found, row[:2]) == (8, [0, 1])
    assert served(pages, cache, "c", [*tokens[:7], 99, 8])[0] == 4  # the second page has another token
    assert served(pages, cache, "d", [99, *tokens[1:]])[0] == 0  # so has the first, and what follows is another text
    assert served(pages, cache, "e", tokens[:3])[0] == 0
    assert served(pages, cache, "f", tokens[:5])[0] == 4


def test_the_same_page_after_another_beginning_is_another(pages, cache):
    served(pages, cache, "a", [1] * P + [2] * P + [0])
    assert served(pages, cache, "b", [2] * P + [2] * P + [0])[0] == 0


def test_kinds_are_apart(pages, cache):
    tokens = list(range(9))
    served(pages, cache, "a", tokens, kind=True)
    assert served(pages, cache, "b", tokens, kind=False)[0] == 0
    assert served(pages, cache, "c", tokens, kind=True)[0] == 8


def test_kept_twice_is_held_once(pages, cache):
    tokens = list(range(9))
    for name in "abc":
        served(pages, cache, name, tokens)
    assert (pages.num_used, cache.num_pages) == (2, 2)
    # Computed by two requests at a time: one copy is let go when they end.
    for name in "de":
        pages.create(name, 17)
    for name in "de":
        cache.keep(name, names(cache, list(range(17))))
        pages.free(name)
    assert (pages.num_used, cache.num_pages) == (4, 4)


def test_a_running_request_is_shared(pages, cache):
    pages.create("runs", 9)
    cache.keep("runs", names(cache, list(range(9))))
    assert cache.fork("other", names(cache, list(range(12)))) == 8
    assert pages.num_shared == 2
    assert not cache.evict(12)  # both are in use
    assert (pages.num_free, cache.num_pages, cache.num_idle_pages) == (9, 2, 0)
    pages.free("runs")
    pages.free("other")
    assert cache.evict(12)


def test_the_least_recently_used_go_first_and_their_ends_before_their_beginnings(pages, cache):
    first, second, third = ([n] * 3 * P + [0] for n in (1, 2, 3))
    for name, tokens in zip("abc", (first, second, third), strict=True):
        served(pages, cache, name, tokens)
    assert (pages.num_free, cache.num_pages) == (3, 9)
    assert served(pages, cache, "d", first)[0] == 3 * P
    assert (cache.num_idle_pages, cache.evict(13)) == (9, False)
    assert cache.num_pages == 9  # for what cannot be had, nothing is given
    assert cache.evict(5)  # two of the second's
    assert pages.num_free == 5
    assert [cache.fork(("look", n), names(cache, t)) for n, t in enumerate((first, second, third))] == [3 * P, P, 3 * P]
    for n in range(3):
        pages.free(("look", n))
    assert cache.evict(12)
    assert (pages.num_free, cache.num_pages) == (12, 0)
    assert not cache.evict(13)


def test_a_common_beginning_outlives_what_follows_it(pages, cache):
    system = [7] * 2 * P
    for n, name in enumerate("abc"):
        served(pages, cache, name, [*system, *[n] * P, 0])
    assert (pages.num_used, cache.num_pages) == (5, 5)
    assert cache.evict(10)  # three of five: what follows
    assert served(pages, cache, "d", [*system, 9])[0] == 2 * P


def test_digests_of_evicted_pages_are_forgotten(pages, cache):
    """Else the memory of a server grows with all texts that it has ever seen."""
    for text in range(40):
        cache.evict(3)
        served(pages, cache, text, [text] * 2 * P + [0])
    assert len(cache._entries) <= pages.num_pages


def two_copies(pages, cache):
    """A beginning that two requests have computed side by side, and their texts; both run, both are kept."""
    system, texts = [7] * 2 * P, {n: [7] * 2 * P + [n] * P for n in (1, 2)}
    for n, tokens in texts.items():
        pages.create(n, len(tokens))
    for n, tokens in texts.items():
        cache.keep(n, names(cache, tokens))
    return system, texts


def test_of_two_copies_one_is_kept(pages, cache):
    """What follows either is found after it."""
    system, texts = two_copies(pages, cache)
    assert cache.num_pages == 4
    pages.free(1)
    pages.free(2)
    assert pages.num_used == 4
    for n in (1, 2):
        assert cache.fork("look", names(cache, texts[n])) == 3 * P
        pages.free("look")
    assert cache.evict(10)  # both ends, before the beginning that they share
    assert cache.fork("look", names(cache, system)) == 2 * P


def test_a_beginning_that_was_lost_is_found_again(pages, cache):
    """The copy that is kept is gone while what follows the other is in use."""
    system, texts = two_copies(pages, cache)
    pages.free(1)
    assert cache.evict(9)  # all of the first's that nobody uses: the second runs, on a copy of its own
    assert cache.fork("look", names(cache, system)) == 0
    pages.free("look")
    cache.keep(2, names(cache, texts[2]))
    assert cache.fork("look", names(cache, texts[2])) == 3 * P


def test_pages_are_kept_as_a_request_goes_on(pages, cache):
    """The names of its pages go on where they ended; what was kept is not looked at again."""
    tokens, digests = list(range(3 * P)), []
    pages.create("runs", 3 * P)
    for end in range(1, 3 * P + 1):
        kept = len(digests)
        cache.extend_digests(digests, tokens[:end])
        cache.keep("runs", digests, begin=kept)
        assert (len(digests), cache.num_pages) == (end // P, end // P)
    assert digests == names(cache, tokens)
    assert cache.fork("other", digests) == 3 * P


def lines_of(call) -> int:
    """Lines of Python that a call runs."""
    lines = []

    def trace(frame, event, argument):
        lines.append(event)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return len(lines)


def test_pages_are_not_looked_at_one_by_one():
    """However many a request holds, finds, marks as used or evicts, it takes as many steps of Python."""
    steps = []
    for held in (8, 4096):
        pages = PageAllocator(held + 4, P, table_width=held)
        cache = PrefixCache(pages)
        digests = names(cache, np.arange(held * P))
        pages.create("runs", held * P)
        cache.keep("runs", digests)
        served(pages, cache, "ended", -1 - np.arange(4 * P))
        steps.append([lines_of(lambda cache=cache: cache.evict(1))])
        assert (pages.num_free, cache.num_idle_pages) == (1, 3)
        found = cache.find(digests)
        steps[-1].append(lines_of(lambda cache=cache, found=found: cache.share("found", found)))
        steps[-1].append(lines_of(lambda cache=cache, digests=digests: cache.keep("found", digests)))
        pages.free("found")
        steps[-1].append(lines_of(lambda pages=pages: pages.free("runs")))
        steps[-1].append(lines_of(lambda cache=cache, held=held: cache.evict(held)))
        assert (pages.num_free, cache.num_idle_pages) == (held, 4)
    assert steps[0] == steps[1]


def test_clear(pages, cache):
    served(pages, cache, "a", list(range(20)))
    cache.clear()
    assert (pages.num_free, cache.num_pages) == (12, 0)
    assert served(pages, cache, "a", list(range(20)))[0] == 0


class Machine(RuleBasedStateMachine):
    """Any order of calls, with what each physical page holds written down: what is found holds the right text."""

    @initialize(num_pages=st.integers(4, 10))
    def begin(self, num_pages):
        self.pages = PageAllocator(num_pages, 2, table_width=5)
        self.cache = PrefixCache(self.pages)
        self.content = np.full((num_pages, 2), -1)
        self.live, self.names = {}, iter(range(10**6))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def start(self, tokens):
        name = next(self.names)
        found = self.cache.fork(name, names(self.cache, tokens[:-1]))
        assert found % 2 == 0
        assert found < len(tokens)
        row = self.pages.table([name])[0]
        for t in range(found):
            assert self.content[row[t // 2], t % 2] == tokens[t]
        try:
            if not self.cache.evict(-(-len(tokens) // 2) - found // 2):
                raise OutOfPages(0, 0, 0)
            self.pages.grow(name, len(tokens))
        except OutOfPages:
            self.pages.free(name)
            return
        row = self.pages.table([name])[0]
        for t in range(found, len(tokens)):
            self.content[row[t // 2], t % 2] = tokens[t]
        self.live[name] = tokens

    @rule(data=st.data(), share=st.floats(0, 1))
    def keep(self, data, share):
        if self.live:
            name = data.draw(st.sampled_from(sorted(self.live)))
            tokens = self.live[name][: round(share * len(self.live[name]))]
            self.cache.keep(name, names(self.cache, tokens))
            assert self.cache.fork("look", names(self.cache, tokens)) == len(tokens) // 2 * 2  # what is kept is found
            self.pages.free("look")

    @rule(data=st.data())
    def end(self, data):
        if self.live:
            name = data.draw(st.sampled_from(sorted(self.live)))
            self.pages.free(name)
            del self.live[name]

    @rule(wanted=st.integers(0, 10))
    def evict(self, wanted):
        before, idle = self.pages.num_free, self.cache.num_idle_pages
        assert self.cache.evict(wanted) == (before + idle >= wanted)
        assert self.pages.num_free == (max(before, wanted) if before + idle >= wanted else before)

    @invariant()
    def running_requests_keep_their_rows(self):
        for name, tokens in self.live.items():
            row = self.pages.table([name])[0]
            assert [self.content[row[t // 2], t % 2] for t in range(len(tokens))] == tokens

    @invariant()
    def counts_agree(self):
        own = {page for name in self.live for page in self.pages.table([name])[0] if page >= 0}
        assert max(len(own), self.cache.num_pages) <= self.pages.num_used <= self.pages.num_pages
        assert len(self.cache._entries) <= self.pages.num_pages  # digests of evicted pages do not accumulate

    def teardown(self):
        if hasattr(self, "pages"):
            for name in self.live:
                self.pages.free(name)
            self.cache.clear()
            assert self.pages.num_used == self.cache.num_pages == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_pages_that_are_found_are_not_available_beside(pages, cache):
    """A request that takes them keeps others from evicting them: idle ones are counted once."""
    served(pages, cache, "a", list(range(10)))
    served(pages, cache, "b", [7] * 5)
    found = cache.find(names(cache, list(range(9))))
    assert (len(found), cache.num_idle_pages, pages.num_free) == (2, 3, 9)
    assert (cache.num_available([]), cache.num_available(found)) == (12, 10)
    cache.fork("c", names(cache, list(range(9))))
    assert cache.num_available(found) == 10 and not cache.evict(11) and cache.evict(10)
    assert cache.find([]).size == cache.find([b"none"]).size == 0


@pytest.mark.parametrize("tokens", [[1.5] * 4, np.arange(4) + 2**32, ["a"] * 4, [2**70] * 4])
def test_what_is_no_token_is_found_as_none(pages, cache, tokens, unchecked):
    """Rounded or wrapped it would be taken for another."""
    with pytest.raises(ValueError, match=r"tokens=.* must be integers of at most"):
        names(cache, tokens)


def test_an_error_does_not_print_a_whole_prompt(pages, cache):
    with pytest.raises(ValueError, match=r"tokens=.* must be integers") as caught:
        names(cache, [2**40] * 5000)
    assert len(str(caught.value)) < 200
