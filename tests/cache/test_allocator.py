"""The page allocator, against a model that knows only what requests should read back."""

import contextlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mla_attn.cache.allocator import OutOfPages, PageAllocator

NUM_PAGES, TABLE_WIDTH, MAX_REQUESTS = 9, 6, 5


class PageMachine(RuleBasedStateMachine):
    """Random calls on an allocator and on a pool in which every token ever written is a different number.

    The model is ``tokens``: what each request wrote, or shares, in order. As soon as a page has two owners that should
    not share it, or is written while shared, some request reads back a number that is not its own.
    """

    @initialize(page_size=st.integers(1, 4))
    def build(self, page_size):
        self.page_size, self.capacity = page_size, TABLE_WIDTH * page_size
        self.pages = PageAllocator(NUM_PAGES, page_size, table_width=TABLE_WIDTH)
        self.pool = np.full((NUM_PAGES, page_size), -1)
        self.tokens: dict[int, list[int]] = {}
        self.written = 0

    def held(self, request):
        """Pages of a request, as its table tells."""
        return self.pages.table([request])[0, : -(-len(self.tokens[request]) // self.page_size)].tolist()

    def owners(self):
        """Requests that hold each page, as their tables tell."""
        held = {request: self.held(request) for request in self.tokens}
        return [[request for request in held if page in held[request]] for page in range(NUM_PAGES)]

    def snapshot(self):
        ids = list(self.tokens)
        lengths = [self.pages.length(request) for request in ids]
        return self.pages.table(ids).tolist(), lengths, self.pages.num_free, self.pages.num_used, self.pages.num_shared

    @contextlib.contextmanager
    def unchanged(self, error):
        before = self.snapshot()
        with pytest.raises(error):
            yield
        assert self.snapshot() == before

    def take(self, request, num_tokens, call):
        """Runs ``call``, which should give ``request`` room for ``num_tokens``, and writes the new rows."""
        tokens = self.tokens.get(request, [])
        held = self.held(request) if tokens else []
        needed = -(-num_tokens // self.page_size) - len(held)
        free = [page for page, owners in enumerate(self.owners()) if not owners]
        if needed > len(free):
            with self.unchanged(OutOfPages):
                call()
            return
        call()
        new = list(range(self.written, self.written + num_tokens - len(tokens)))
        self.written += len(new)
        self.tokens[request] = tokens + new
        assert self.held(request) == held + free[:needed]  # nothing moves; lowest free page first
        table, owners = self.pages.table([request])[0], self.owners()
        for position in range(len(tokens), num_tokens):
            page, row = table[position // self.page_size], position % self.page_size
            assert owners[page] == [request]  # no write to a shared page
            self.pool[page, row] = self.tokens[request][position]

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.tokens)))

    @precondition(lambda self: len(self.tokens) < MAX_REQUESTS)
    @rule(data=st.data())
    def create(self, data):
        request = min(set(range(MAX_REQUESTS)) - set(self.tokens))
        num_tokens = data.draw(st.integers(0, self.capacity))
        self.take(request, num_tokens, lambda: self.pages.create(request, num_tokens))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def grow(self, data):
        request = self.pick(data)
        num_tokens = data.draw(st.integers(len(self.tokens[request]), self.capacity))
        self.take(request, num_tokens, lambda: self.pages.grow(request, num_tokens))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data):
        request = self.pick(data)
        expected = num_tokens = data.draw(st.integers(0, len(self.tokens[request])))
        full, partial = divmod(num_tokens, self.page_size)
        if partial and len(self.owners()[self.held(request)[full]]) > 1:
            expected = full * self.page_size
        assert self.pages.truncate(request, num_tokens) == expected
        del self.tokens[request][expected:]

    @precondition(lambda self: 0 < len(self.tokens) < MAX_REQUESTS)
    @rule(data=st.data())
    def fork(self, data):
        parent, child = self.pick(data), min(set(range(MAX_REQUESTS)) - set(self.tokens))
        num_tokens = data.draw(st.integers(0, len(self.tokens[parent])))
        free = self.pages.num_free
        shared = self.pages.fork(parent, child, num_tokens)
        assert shared == num_tokens - num_tokens % self.page_size
        self.tokens[child] = self.tokens[parent][:shared]
        assert self.held(child) == self.held(parent)[: shared // self.page_size]
        assert self.pages.num_free == free

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        request = self.pick(data)
        self.pages.free(request)
        del self.tokens[request]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def refuse(self, data):
        live, dead = self.pick(data), MAX_REQUESTS
        length = self.pages.length(live)
        calls = [
            lambda: self.pages.create(live, 1),
            lambda: self.pages.create(dead, -1),
            lambda: self.pages.create(dead, self.capacity + 1),
            lambda: self.pages.grow(dead, 1),
            lambda: self.pages.grow(live, length - 1),
            lambda: self.pages.grow(live, self.capacity + 1),
            lambda: self.pages.truncate(dead, 0),
            lambda: self.pages.truncate(live, -1),
            lambda: self.pages.truncate(live, length + 1),
            lambda: self.pages.fork(dead, dead + 1, 0),
            lambda: self.pages.fork(live, live, 0),
            lambda: self.pages.fork(live, dead, -1),
            lambda: self.pages.fork(live, dead, length + 1),
            lambda: self.pages.free(dead),
            lambda: self.pages.length(dead),
            lambda: self.pages.table([live, dead]),
            lambda: self.pages.table([live], batch=0),
        ]
        with self.unchanged(ValueError):
            data.draw(st.sampled_from(calls))()
        with pytest.raises(ValueError):
            self.pages.length(dead)

    @invariant()
    def every_request_reads_its_own_tokens(self):
        for request, tokens in getattr(self, "tokens", {}).items():
            assert self.pages.length(request) == len(tokens)
            held = self.held(request)
            assert self.pool[held].ravel()[: len(tokens)].tolist() == tokens
            assert self.pages.table([request]).tolist() == [held + [-1] * (TABLE_WIDTH - len(held))]

    @invariant()
    def pages_are_counted_once_and_shared_only_when_full(self):
        if not hasattr(self, "tokens"):
            return
        owners = self.owners()
        assert self.pages.num_used == sum(len(o) > 0 for o in owners)
        assert self.pages.num_free + self.pages.num_used == NUM_PAGES
        assert self.pages.num_shared == sum(len(o) > 1 for o in owners)
        for request, tokens in self.tokens.items():
            for i, page in enumerate(self.held(request)):
                assert len(owners[page]) == 1 or (i + 1) * self.page_size <= len(tokens)

    def teardown(self):
        if hasattr(self, "tokens"):
            for request in self.tokens:
                self.pages.free(request)
            assert (self.pages.num_free, self.pages.num_used, self.pages.num_shared) == (NUM_PAGES, 0, 0)
            for page in range(NUM_PAGES):  # each page is there, and once
                self.pages.create(page, 1)
            assert self.pages.table(range(NUM_PAGES))[:, 0].tolist() == list(range(NUM_PAGES))


TestPageMachine = PageMachine.TestCase
TestPageMachine.settings = hypothesis.settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,  # the same calls in every run
)


def test_table_has_a_static_width_and_tails_no_page_has():
    pages = PageAllocator(8, 4, table_width=3)
    pages.create("a", 5)
    pages.create("b", 0)
    pages.create("c", 12)
    table = pages.table(["c", "a", "b"], batch=4)
    assert table.dtype == np.int32
    assert table.tolist() == [[2, 3, 4], [0, 1, -1], [-1, -1, -1], [-1, -1, -1]]
    pages.table(["a"])[:] = 99  # the caller's own copy
    assert pages.table(["a"]).tolist() == [[0, 1, -1]]
    assert pages.table([], batch=2).tolist() == [[-1, -1, -1]] * 2
    assert pages.table([]).shape == (0, 3)


def test_lowest_free_page_first_whatever_the_history():
    for order in ("ab", "ba"):
        pages = PageAllocator(6, 2, table_width=4)
        for request, num_tokens in (("a", 4), ("b", 2), ("c", 2)):
            pages.create(request, num_tokens)
        for request in order:
            pages.free(request)
        pages.create("d", 8)
        assert pages.table(["d"]).tolist() == [[0, 1, 2, 4]]


def test_fork_shares_full_pages_only_and_growing_writes_none_of_them():
    pages = PageAllocator(8, 4, table_width=4)
    pages.create("parent", 10)
    assert pages.fork("parent", "child", 10) == 8
    assert (pages.length("child"), pages.num_used, pages.num_shared) == (8, 3, 2)
    pages.grow("child", 10)  # rows 8 and 9 are the child's to compute
    pages.grow("parent", 12)
    assert pages.table(["parent", "child"]).tolist() == [[0, 1, 2, -1], [0, 1, 3, -1]]
    pages.free("parent")
    assert (pages.num_used, pages.num_shared) == (3, 0)
    assert pages.table(["child"]).tolist() == [[0, 1, 3, -1]]


@pytest.mark.parametrize("who", ["parent", "child"])
def test_truncating_into_a_shared_page_gives_it_back(who):
    pages = PageAllocator(8, 4, table_width=4)
    pages.create("parent", 10)
    pages.fork("parent", "child", 10)
    assert pages.truncate(who, 6) == 4  # page 1 belongs to both: tokens 4 and 5 are to be computed again
    pages.grow(who, 8)
    other = {"parent": "child", "child": "parent"}[who]
    assert pages.table([other])[0, :2].tolist() == [0, 1]
    assert pages.table([who])[0, :2].tolist() == [0, {"parent": 2, "child": 3}[who]]


def test_truncating_into_a_page_no_longer_shared_keeps_it():
    pages = PageAllocator(8, 4, table_width=4)
    pages.create("parent", 10)
    pages.fork("parent", "child", 8)
    pages.free("parent")
    assert pages.truncate("child", 6) == 6
    assert pages.truncate("child", 6) == 6


def test_rejected_drafts_keep_the_page_of_the_last_token():
    pages = PageAllocator(8, 4, table_width=4)
    pages.create("a", 7)
    pages.grow("a", 11)  # committed 7, three drafts and a bonus
    assert pages.truncate("a", 8) == 8
    assert pages.table(["a"]).tolist() == [[0, 1, -1, -1]]
    assert pages.truncate("a", 0) == 0
    assert pages.num_free == 8


def test_a_page_that_is_held_outlives_its_request_and_begins_another():
    pages = PageAllocator(8, 4, table_width=4)
    pages.create("a", 10)
    pages.hold([1])
    pages.hold([0])
    pages.free("a")
    assert (pages.num_used, pages.num_free) == (2, 6)
    pages.adopt("b", [0, 1])
    assert (pages.length("b"), pages.num_used, pages.num_shared) == (8, 2, 2)
    pages.grow("b", 9)
    assert pages.table(["b"]).tolist() == [[0, 1, 2, -1]]
    pages.unhold([1])
    pages.free("b")
    pages.unhold([0])
    pages.create("c", 16)
    assert pages.table(["c"]).tolist() == [[0, 1, 2, 3]]


def test_out_of_pages_has_numbers_and_changes_nothing():
    pages = PageAllocator(3, 4, table_width=4)
    pages.create("a", 8)
    with pytest.raises(OutOfPages, match="2 pages needed, 1 of 3 free") as caught:
        pages.grow("a", 16)
    assert (caught.value.needed, caught.value.free, caught.value.num_pages) == (2, 1, 3)
    with pytest.raises(OutOfPages):
        pages.create("b", 5)
    assert isinstance(caught.value, RuntimeError)
    assert (pages.length("a"), pages.num_free) == (8, 1)
    pages.create("b", 4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda p: p.create("a", 1), "request='a' must not be one of the 1 live requests"),
        (lambda p: p.create("b", -1), "num_tokens=-1 must be an integer from 0 to 12"),
        (lambda p: p.create("b", 13), "num_tokens=13 must be an integer from 0 to 12"),
        (lambda p: p.create("b", 1.5), "num_tokens=1.5 must be an integer from 0 to 12"),
        (lambda p: p.grow("a", 4), "num_tokens=4 must be an integer from 5 to 12"),
        (lambda p: p.grow("b", 4), "request='b' must be one of the 1 live requests"),
        (lambda p: p.truncate("a", 6), "num_tokens=6 must be an integer from 0 to 5"),
        (lambda p: p.fork("b", "c", 0), "parent='b' must be one of"),
        (lambda p: p.fork("a", "a", 0), "child='a' must not be one of"),
        (lambda p: p.fork("a", "b", 6), "num_tokens=6 must be an integer from 0 to 5"),
        (lambda p: p.free("b"), "request='b' must be one of"),
        (lambda p: p.adopt("a", []), "request='a' must not be one of"),
        (lambda p: p.adopt("b", [0, 2]), "page=2 must be one that is held"),
        (lambda p: p.adopt("b", [0] * 4), r"len\(pages\)=4 must be an integer from 0 to 3"),
        (lambda p: p.hold([3]), "page=3 must be one that is held"),
        (lambda p: p.hold([4]), "page=4 must be an integer from 0 to 3"),
        (lambda p: p.unhold([2]), "page=2 must be one that is held"),
        (lambda p: p.table(["a", "b"]), "request_ids='b' must be one of"),
        (lambda p: p.table(["a"], batch=0), "batch=0 must be an integer of at least 1"),
        (lambda p: PageAllocator(0, 4, table_width=3), "num_pages=0 must be an integer of at least 1"),
        (lambda p: PageAllocator(1, 4, table_width=True), "table_width=True must be an integer of at least 1"),
    ],
)
def test_errors_name_argument_value_and_what_is_allowed(call, message, unchecked):
    pages = PageAllocator(4, 4, table_width=3)
    pages.create("a", 5)
    with pytest.raises(ValueError, match=message):
        call(pages)
    assert (pages.length("a"), pages.num_free) == (5, 2)
    assert pages.table(["a"]).tolist() == [[0, 1, -1]]
