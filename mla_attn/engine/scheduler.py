"""Which requests run, on which pages and with which prefix: host state alone, without a device.

Nothing here is needed to know a request's tokens, so that after a fault all of it is made anew (``reset``).
"""

import collections
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mla_attn.cache.allocator import OutOfPages, PageAllocator
from mla_attn.cache.prefix import PrefixCache
from mla_attn.engine.pages import CacheSizes, Limits, Tables
from mla_attn.engine.requests import OnOutput, SamplingParams, check_length, check_prompt
from mla_attn.engine.statistics import Counters
from mla_attn.speculative import DraftTree

PROMPTS_PER_PASS = 4  # more cost memory in ``extend`` whether they are there or not


class Request:
    """A request, and how far it is.

    Attributes:
        id: unique in its engine.
        stops: ids that end it.
        tokens: int32, the prompt and room for what is generated, of which ``num_tokens`` are there. The only part that
            a fault leaves as it is.
        slot: index of its state on the device, while it runs.
        prompt_rows: rows that passes over prompts compute: after a preemption, of what was generated too.
        num_computed: those of them that are launched, or were found in the cache.
        num_accounted: those of them whose pass was read, or were found.
        num_kept_pages: of those, full pages that others can find.
        num_decoded_rows: rows of decode and verify passes that were read, on top of ``prompt_rows``.
        num_rows_in_flight: most rows that launched decode and verify passes will add to them.
        num_passes_in_flight: launched passes that will bring at least a token each.
        num_faults: faults since its last token.
        fault: what the last of them raised.
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
        self.digests: list[bytes] = []  # of its full pages so far
        self.last_token = now  # when it came
        self.cancelled = self.finished = False
        self.num_faults = 0
        self.fault: BaseException | None = None
        self.rewind()

    def rewind(self) -> None:
        """Forget the device: nothing of the request is cached or launched."""
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
        """Whether another decode or verify pass has something to do, as far as is known."""
        return not self.wants_prompt_pass and self.num_new + self.num_passes_in_flight < self.params.max_new_tokens

    @property
    def all_launched(self) -> bool:
        """Whether the request ends with what is launched."""
        return not self.wants_prompt_pass and not self.wants_token

    @property
    def num_final_rows(self) -> int:
        """Rows that are cached for good: their passes were read, and their tokens are the request's."""
        return min(self.num_accounted + self.num_decoded_rows, self.num_tokens)


class Scheduler:
    """Admission, prefix reuse, reservation of pages and preemption.

    Args:
        limits: of what runs.
        cache: pages.
        counters: preemptions and reused tokens are added to these.
    """

    def __init__(self, limits: Limits, cache: CacheSizes, counters: Counters):
        self.limits, self.cache, self.max_running = limits, cache, limits.max_batch
        self._counters = counters
        self.reset(())

    def reset(self, requests: Iterable[Request]) -> None:
        """Begin anew with empty pages; ``requests`` wait in this order, to be computed again."""
        self.tables = Tables(self.limits, self.cache)
        self.running: dict[int, Request] = {}  # by id: those that hold pages
        self.slots: list[Request | None] = [None] * self.limits.max_batch
        self._num_releases = 0  # of pages and slots
        self._blocked: tuple[Request, int] | None = None  # who did not get pages, after how many releases
        waiting = list(requests)
        for request in waiting:
            request.rewind()
        self.waiting = collections.deque(waiting)  # oldest first

    @property
    def pages(self) -> PageAllocator:
        """Of the first table."""
        return self.tables.all[0].pages

    @property
    def prefixes(self) -> PrefixCache:
        """Of the first table."""
        return self.tables.all[0].prefixes

    def most_rows(self, prompt_len: int, params: SamplingParams) -> int:
        """Rows a request may need in all: of its tokens and the drafts of its last verify pass."""
        drafts = params.speculation.size - 1 + self.limits.rows_ahead if params.speculation else 0
        return min(prompt_len + params.max_new_tokens + drafts, self.limits.max_len)

    def check_request(
        self, prompt: Sequence[int], params: SamplingParams, *, vocab_size: int, trees: Sequence[DraftTree]
    ) -> list[int]:
        """The tokens of a prompt; ValueError where a request could never run, as ``Engine.check_request``."""
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

    # Who runs.

    def admit(self) -> None:
        """Give waiting requests slots and pages, oldest first, while there are some and this step can begin with their
        prompts. Who waits a step longer may find more of its prompt in the cache."""
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
            self.tables.fork(request.id, digests[: len(there[0])])
            if self.tables.full is not None:
                # Pages found may have been idle: they are held before others are dropped.
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
        """Rows that a request has room for from its beginning on, where all rows are kept: its prompt's."""
        most = self.most_rows(request.prompt_len, request.params)
        return min(request.num_tokens + (self.limits.rows_ahead if request.params.speculation else 0), most)

    def _has_room(self, request: Request, there: Sequence[int]) -> bool:
        """Whether there are pages for a waiting request, of which those ``there`` hold the beginning."""
        if self.tables.windowed:
            most = [self.most_rows(r.prompt_len, r.params) for r in (*self.running.values(), request)]
            if not self.tables.have_room([self.cache.pages(rows) for rows in most]):
                return False
        if self.tables.full is None:
            return True
        # A page for each running request that may want one: to admit one and preempt it next would be wasted work.
        growing = sum(self._may_grow(r) for r in self.running.values())
        needed = self.cache.pages(self._begin_rows(request)) - len(there) + growing
        return needed <= self.tables.full.prefixes.num_available(there)

    def preempt(self, request: Request) -> None:
        """Free a running request's pages; it waits to be computed again, before all others."""
        self.keep_prefix(request)  # may still be there when it comes back
        self._release(request)
        self.waiting.appendleft(request)  # all that run are older than all that wait
        self._counters.preemptions += 1

    def remove(self, request: Request, *, keep: bool) -> None:
        """Let go of a request that has ended; ``keep`` is whether its full pages may be found by others."""
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
        """Prompt rows of a request in its next pass, if there is room for all."""
        return min(request.prompt_rows - request.num_computed, self.limits.prompt_chunk)

    def _free_slot(self) -> int | None:
        """A slot that nobody needs: of a request that ends with what is launched too, for passes run in order."""
        slots = enumerate(self.slots[: self.max_running])
        return next((slot for slot, r in slots if r is None or r.all_launched), None)

    # Prefixes.

    def keep_prefix(self, request: Request, *, all_pages: bool = True) -> None:
        """Let others find the full pages of a running request's final rows: all of them, or those since the last call
        alone."""
        if self.cache.prefix_cache:
            digests = self.digest(request)[: request.num_final_rows // self.cache.page_size]
            self.tables.keep(request.id, digests, begin=0 if all_pages else request.num_kept_pages)
            request.num_kept_pages = len(digests)

    def digest(self, request: Request) -> list[bytes]:
        """Names of the full pages among a request's tokens, each computed once; none without a prefix cache. Whoever
        adds a request calls this, so that no step has to do it for a long prompt.

        Speculative requests also need the drafter's rows, which plain requests never write, so the two do not share
        prefixes. (The draft layer's row of a page's last token depends on the token that followed it in the request
        that wrote it. After sharing, a draft may be rejected because of that; emitted tokens are not affected.)
        """
        if self.cache.prefix_cache and len(request.digests) < request.num_tokens // self.cache.page_size:
            kind = self.limits.drafts_cached and request.params.speculation is not None
            self.prefixes.extend_digests(request.digests, request.tokens[: request.num_tokens], kind=kind)
        return request.digests

    # What runs next.

    def next_prompts(self) -> list[tuple[Request, slice]]:
        """The requests whose prompts go on in this step, oldest first, and which part of each: of one kind of
        speculation."""
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
        """The requests of a kind that get further tokens in this step, oldest first, with room for their rows.

        Args:
            kind: of speculation.
            read: reads all launched passes, which may end requests; False if there are none.
        """
        mine = [r for r in self.running.values() if r.params.speculation == kind and r.wants_token]
        ready = [r for r in sorted(mine, key=lambda r: r.id) if self._reserve(r, read)]
        return [r for r in ready if r.id in self.running]

    def _reserve(self, request: Request, read: Callable[[], bool]) -> bool:
        """Make room for the rows of the request's next pass. If pages run out, those of the youngest requests are
        freed: False if that ended or stopped this one."""
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
