"""The scheduler, which decides what requests run, on which pages and with which cached prefix. It is host code only.

A request's tokens do not depend on the scheduler's state, so all of it can be reset after a fault (``reset``).
"""

import collections
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Int32

from mla_attn.cache.allocator import OutOfPages, PageAllocator
from mla_attn.cache.prefix import PrefixCache
from mla_attn.engine.pages import CacheSizes, Limits, Tables
from mla_attn.engine.requests import OnOutput, SamplingParams, check_length, check_prompt
from mla_attn.engine.statistics import Counters
from mla_attn.speculative import DraftTree

PROMPTS_PER_PASS = 4  # ``extend`` needs memory for each of them, even if unused


class Request:
    """A request and its progress.

    Attributes:
        id: id, unique in its engine.
        stops: token ids that end it.
        tokens: int32, the prompt and room for generated tokens, of which the first ``num_tokens`` are valid. It is the
            only part that a fault does not reset.
        slot: index of its state on the device, while it runs.
        prompt_rows: rows that passes over prompts compute; after a preemption this includes generated tokens.
        num_computed: number of prompt rows that are launched or were found in the cache.
        num_accounted: number of prompt rows whose pass was read, or that were found in the cache.
        num_kept_pages: number of its full pages in the prefix cache.
        num_decoded_rows: rows of decode and verify passes that were read, in addition to ``prompt_rows``.
        num_rows_in_flight: most rows that launched decode and verify passes will add.
        num_passes_in_flight: launched passes that will give at least one token each.
        num_faults: faults since its last token.
        fault: exception of the last fault.
    """

    def __init__(
        self,
        id: int,
        prompt: Sequence[int],
        params: SamplingParams,
        on_output: OnOutput | None,
        now: float,
        *,
        eos_token_ids: Iterable[int] = (),
    ):
        self.id, self.params, self.on_output, self.arrived = id, params.with_seed(), on_output, now
        self.stops = frozenset([*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)])
        self.prompt_len = self.num_tokens = len(prompt)
        self.tokens = np.empty(len(prompt) + params.max_new_tokens, np.int32)
        self.tokens[: len(prompt)] = prompt
        self.digests: list[bytes] = []  # digests of its full pages so far
        self.last_token = now  # time of its last token
        self.cancelled = self.finished = False
        self.num_faults = 0
        self.fault: BaseException | None = None
        self.rewind()

    def rewind(self) -> None:
        """Resets progress: no row of the request is cached or launched."""
        self.slot = -1
        self.prompt_rows = self.num_computed = self.num_accounted = self.num_kept_pages = 0
        self.num_decoded_rows = self.num_rows_in_flight = self.num_passes_in_flight = 0

    @property
    def num_new(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def wants_prompt_pass(self) -> bool:
        return self.num_computed < self.prompt_rows

    @property
    def wants_token(self) -> bool:
        """Whether the request needs another decode or verify pass, as far as is known."""
        return not self.wants_prompt_pass and self.num_new + self.num_passes_in_flight < self.params.max_new_tokens

    @property
    def all_launched(self) -> bool:
        """Whether the launched passes will certainly end the request."""
        return not self.wants_prompt_pass and not self.wants_token

    @property
    def num_final_rows(self) -> int:
        """Number of final cached rows: their passes were read, and their tokens belong to the request."""
        return min(self.num_accounted + self.num_decoded_rows, self.num_tokens)


class Scheduler:
    """Admission, prefix reuse, reservation of pages and preemption.

    Args:
        limits: limits of requests and tokens.
        cache: sizes of the cache.
        counters: counters for preemptions and reused tokens.
    """

    def __init__(self, limits: Limits, cache: CacheSizes, counters: Counters):
        self.limits, self.cache, self.max_running = limits, cache, limits.max_batch
        self._counters = counters
        self.reset(())

    def reset(self, requests: Iterable[Request]) -> None:
        """Resets all state, with empty pages; ``requests`` wait in this order to be computed again."""
        self.tables = Tables(self.limits, self.cache)
        self.running: dict[int, Request] = {}  # requests that hold pages, by id
        self.slots: list[Request | None] = [None] * self.limits.max_batch
        self._num_releases = 0  # number of releases of pages and slots
        self._blocked: tuple[Request, int] | None = None  # request that got no pages, and ``_num_releases`` then
        waiting = list(requests)
        for request in waiting:
            request.rewind()
        self.waiting = collections.deque(waiting)  # oldest first

    @property
    def pages(self) -> PageAllocator:
        """The allocator of the first page table."""
        return self.tables.all[0].pages

    @property
    def prefixes(self) -> PrefixCache:
        """The prefix cache of the first page table."""
        return self.tables.all[0].prefixes

    def most_rows(self, prompt_len: int, params: SamplingParams) -> int:
        """Most rows of a request: those of its tokens and of the drafts of its last verify pass."""
        drafts = params.speculation.size - 1 + self.limits.rows_ahead if params.speculation else 0
        return min(prompt_len + params.max_new_tokens + drafts, self.limits.max_len)

    def check_request(
        self, prompt: Sequence[int], params: SamplingParams, *, vocab_size: int, trees: Sequence[DraftTree]
    ) -> list[int]:
        """Returns the tokens of a prompt; raises ValueError if it could never run, as ``Engine.check_request``."""
        prompt = check_prompt("prompt", prompt, vocab_size=vocab_size)
        check_length("prompt", len(prompt), params.max_new_tokens, max_len=self.limits.max_len)
        if params.speculation is not None and params.speculation not in trees:
            made = ", ".join(str(tree.widths) for tree in trees) or "none"
            raise ValueError(f"speculation of widths {params.speculation.widths} must be one of the engine's: {made}")
        needed = self.cache.pages(self.most_rows(len(prompt), params))
        if self.tables.full is not None and needed > self.cache.num_pages:
            raise ValueError(
                f"prompt has {len(prompt)} tokens and max_new_tokens={params.max_new_tokens}: they need {needed} "
                f"pages, must be at most num_pages={self.cache.num_pages}"
            )
        return prompt

    # Admission and preemption.

    def admit(self) -> None:
        """Admits waiting requests, oldest first, while slots and pages suffice and this step can start their prompts.
        (A request that waits for a later step may find more of its prompt in the cache.)"""
        while self.waiting and self._has_prompt_room():
            request, slot = self.waiting[0], self._free_slot()
            if slot is None or self._blocked == (request, self._num_releases):
                return
            digests = self.digest(request)[: (request.num_tokens - 1) // self.cache.page_size]
            there = self.tables.find(digests)
            if not self._has_room(request, there[0]):
                self._blocked = request, self._num_releases
                return
            found = len(there[0]) * self.cache.page_size
            self.tables.share(request.id, there)
            if self.tables.full is not None:
                # Cached pages may be held by the cache only, so the request holds them before others are evicted.
                rows = self._begin_rows(request)
                self.tables.full.make_free(self.cache.pages(rows) - len(there[0]))
                self.tables.full.pages.grow(request.id, rows)
            self.waiting.popleft()
            request.rewind()
            request.slot, request.prompt_rows = slot, request.num_tokens
            request.num_computed = request.num_accounted = found
            request.num_kept_pages = self.cache.pages(found)
            self.running[request.id] = self.slots[slot] = request
            self._counters.reused_tokens += found

    def _begin_rows(self, request: Request) -> int:
        """Rows for which a request gets pages at admission in a table without a window: those of its prompt."""
        most = self.most_rows(request.prompt_len, request.params)
        return min(request.num_tokens + (self.limits.rows_ahead if request.params.speculation else 0), most)

    def _has_room(self, request: Request, there: Int32[np.ndarray, "n"]) -> bool:
        """Whether there are pages for a waiting request, whose cached prefix is in the pages ``there``."""
        if self.tables.windowed:
            most = [self.most_rows(r.prompt_len, r.params) for r in (*self.running.values(), request)]
            if not self.tables.have_room([self.cache.pages(rows) for rows in most]):
                return False
        if self.tables.full is None:
            return True
        # Keep a page for each running request that may need one, to avoid preempting the admitted request at once.
        growing = sum(self._may_grow(r) for r in self.running.values())
        needed = self.cache.pages(self._begin_rows(request)) - len(there) + growing
        return needed <= self.tables.full.prefixes.num_available(there)

    def preempt(self, request: Request) -> None:
        """Frees a running request's pages and puts it at the front of the queue, to be computed again."""
        self.keep_prefix(request)  # it may find these pages when it is admitted again
        self._release(request)
        self.waiting.appendleft(request)  # running requests are older than waiting ones
        self._counters.preemptions += 1

    def remove(self, request: Request, *, keep: bool) -> None:
        """Removes a request that has ended; ``keep`` says whether its full pages stay in the prefix cache."""
        if request.id in self.running:
            if keep:
                self.keep_prefix(request)
            self._release(request)
        else:
            self.waiting.remove(request)

    def _release(self, request: Request) -> None:
        self._num_releases += 1
        self.tables.free(request.id)
        del self.running[request.id]
        if self.slots[request.slot] is request:
            self.slots[request.slot] = None

    def _may_grow(self, request: Request) -> bool:
        most = self.most_rows(request.prompt_len, request.params)
        return self.cache.pages(self.pages.length(request.id)) < self.cache.pages(most)

    def _has_prompt_room(self) -> bool:
        left = [self._part(r) for r in self.running.values() if r.wants_prompt_pass]
        return len(left) < self.limits.prompts_per_pass and sum(left) < self.limits.prompt_tokens

    def _part(self, request: Request) -> int:
        """Prompt rows of a request in its next pass, if the step has room for all of them."""
        return min(request.prompt_rows - request.num_computed, self.limits.prompt_chunk)

    def _free_slot(self) -> int | None:
        """A free slot. That of a request with ``all_launched`` is free too, because passes run in order."""
        slots = enumerate(self.slots[: self.max_running])
        return next((slot for slot, r in slots if r is None or r.all_launched), None)

    # Prefixes.

    def keep_prefix(self, request: Request, *, all_pages: bool = True) -> None:
        """Adds the full pages of a running request's final rows to the prefix cache: all of them, or only those since
        the last call."""
        if self.cache.prefix_cache:
            digests = self.digest(request)[: request.num_final_rows // self.cache.page_size]
            self.tables.keep(request.id, digests, begin=0 if all_pages else request.num_kept_pages)
            request.num_kept_pages = len(digests)

    def keep_new_pages(self, request: Request) -> None:
        """Adds a page that decoding has filled to the prefix cache before the next one is full, when this one may leave
        a window. Requests that began together do so at different steps, because each takes 0.03 ms."""
        pages, rows = divmod(request.num_final_rows, self.cache.page_size)
        new = pages - request.num_kept_pages
        if new > 1 or (new == 1 and rows >= request.id % self.cache.page_size):
            self.keep_prefix(request, all_pages=False)

    def digest(self, request: Request) -> list[bytes]:
        """Digests of the full pages of a request's tokens, each computed once; none without a prefix cache. The thread
        that adds a request calls this, so that no step is delayed by a long prompt.

        Speculative requests also need the drafter's rows, which plain requests never write, so the two do not share
        prefixes. (The draft layer's row of a page's last token depends on the token that followed it in the request
        that wrote it. After sharing, a draft may be rejected because of that; emitted tokens are not affected.)
        """
        if self.cache.prefix_cache and len(request.digests) < request.num_tokens // self.cache.page_size:
            kind = self.limits.drafts_cached and request.params.speculation is not None
            self.prefixes.extend_digests(request.digests, request.tokens[: request.num_tokens], kind=kind)
        return request.digests

    # Rows of the next passes.

    def next_prompts(self) -> list[tuple[Request, slice]]:
        """The prefill chunks of this step, oldest request first, all of one kind of speculation: (request, rows)."""
        wanting = sorted((r for r in self.running.values() if r.wants_prompt_pass), key=lambda r: r.id)
        wanting = [r for r in wanting if r.params.speculation == wanting[0].params.speculation]
        parts, left = [], self.limits.prompt_tokens
        for request in wanting[: self.limits.prompts_per_pass]:
            rows = min(self._part(request), left)
            if rows:
                stop = request.num_computed + rows
                parts.append((request, slice(request.num_computed, stop)))
                ahead = self._begin_rows(request) - request.prompt_rows
                self.tables.reserve(request.id, stop + ahead, final=request.num_final_rows)
            left -= rows
        return parts

    def next_tokens(self, kind: DraftTree | None, read: Callable[[], bool]) -> list[Request]:
        """The requests of a kind that decode or verify in this step, oldest first, after reserving pages for them.

        Args:
            kind: draft tree of the requests, or None.
            read: function that reads all launched passes, which may end requests; returns False if there are none.
        """
        mine = [r for r in self.running.values() if r.params.speculation == kind and r.wants_token]
        ready = [r for r in sorted(mine, key=lambda r: r.id) if self._reserve(r, read)]
        return [r for r in ready if r.id in self.running]

    def _reserve(self, request: Request, read: Callable[[], bool]) -> bool:
        """Reserves pages for the rows of the request's next pass. If pages run out, the youngest requests are
        preempted. Returns False if that ended or preempted this request."""
        tree, most = request.params.speculation, self.most_rows(request.prompt_len, request.params)
        more, full = tree.size + self.limits.rows_ahead if tree else 1, self.tables.full
        while request.id in self.running and request.wants_token:
            rows = request.prompt_rows + request.num_decoded_rows + request.num_rows_in_flight
            rows = min(rows + more, most)
            if full is None or rows <= full.pages.length(request.id):
                self.tables.reserve(request.id, rows, final=request.num_final_rows)
                return True
            try:
                full.pages.grow(request.id, self.cache.pages(rows) * self.cache.page_size)
            except OutOfPages as error:
                if not (full.make_free(error.needed) or read()):
                    self.preempt(max(self.running.values(), key=lambda r: r.id))
        return False
