"""Continuous batching over the passes: requests in, token streams out.

A step of the engine admits requests, launches a pass over prompt parts and, for each kind of speculation among the
running requests, a decode pass or a round of drafting and verifying; then it reads the tokens of the step *before*. So
the device has work while the host hands out tokens: what a step needs of the one before it lies in the requests' slots
on the device. The host plans with what it knows, the most tokens a request can have by now.
"""

import asyncio
import collections
import dataclasses
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mla_attn.buckets import backend_compiles, ladder, warm_up
from mla_attn.cache.allocator import OutOfPages, PageAllocator
from mla_attn.cache.prefix import PrefixCache
from mla_attn.checks import check_integer, check_integers
from mla_attn.engine.requests import EngineStatistics, OnOutput, Output, QueueFull, SamplingParams
from mla_attn.models.base import CausalLM
from mla_attn.passes import SAMPLING, Shapes
from mla_attn.passes.state import SlotPasses, create_slots
from mla_attn.speculative import DraftTree

logger = logging.getLogger(__name__)

PROMPTS_PER_PASS = 4  # more cost memory in ``extend`` whether they are there or not


@dataclasses.dataclass(eq=False)
class _Request:
    id: int
    tokens: list[int]  # the prompt, then what was generated
    prompt_len: int
    params: SamplingParams
    on_output: OnOutput | None
    arrived: float
    slot: int = -1  # where its state lies on the device, while it runs
    prompt_rows: int = 0  # rows that passes over prompts must make: after a preemption, of what was generated too
    computed: int = 0  # those of them that are launched, or were found
    rows: int = 0  # rows of decode and verify passes that were read, on top of prompt_rows
    ahead: int = 0  # most rows that launched passes will add to them
    unread: int = 0  # launched passes that will bring at least a token each
    last_token: float = 0.0  # when it came
    finished: bool = False

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def wants_prompt_pass(self) -> bool:
        return self.computed < self.prompt_rows

    @property
    def wants_token(self) -> bool:
        """Whether another decode or verify pass has something to do, as far as is known."""
        return not self.wants_prompt_pass and self.num_new + self.unread < self.params.max_new_tokens

    @property
    def all_launched(self) -> bool:
        """Whether the request ends with what is launched."""
        return not self.wants_prompt_pass and not self.wants_token

    @property
    def final_tokens(self) -> list[int]:
        """Tokens whose rows are cached, for good."""
        return self.tokens[: min(self.computed, len(self.tokens) - 1) if self.wants_prompt_pass else -1]


@dataclasses.dataclass(frozen=True)
class _Launch:
    number: int
    requests: list[tuple[int, _Request]]  # row and request, of those that get tokens
    tokens: Any  # [B] or, of verify passes, [B, depth + 1] with -1 after the emitted ones
    ahead: int  # most rows a request gains


class _Stream(AsyncIterator[Output]):
    """The outputs that a generator gives, and who to tell when they are left: the generator itself runs no code when it
    is left before it begins."""

    def __init__(self, outputs: AsyncGenerator[Output, None], leave: Callable[[], None]):
        self._outputs, self._leave = outputs, leave

    async def __anext__(self) -> Output:
        return await anext(self._outputs)

    async def aclose(self) -> None:
        await self._outputs.aclose()
        self._leave()

    def __del__(self):
        self._leave()


class Engine:
    """Serves one model to many requests.

    ``step()`` moves all of them on. Who drives it is up to the caller: a loop, ``run()``, or ``stream()`` under
    asyncio. ``add_request``, ``cancel`` and ``statistics`` may be called from other threads while a step runs.

    Args:
        model: a loaded checkpoint.
        max_batch: most requests running at a time.
        num_pages: pages of the cache.
        page_size: tokens per page.
        max_len: most tokens of a request, prompt and new ones together.
        speculation: draft trees that requests may ask for; each adds programs to compile.
        prompt_tokens: most prompt tokens computed in one step, all requests together; longer prompts come in parts,
            with tokens of other requests between them.
        batches: batch sizes to compile passes for, the largest at least ``max_batch``; powers of two up to it if None.
        max_waiting: most requests waiting; ``add_request`` refuses more.
        prefix_cache: whether full pages are found by their content, and kept while there is room.
        implementation: of the attention ops; None picks.

    Raises:
        ValueError: a size that is no integer or below 1, ``max_len`` above the model's positions, trees for a model
            that cannot draft, or an implementation that does not exist.
        NotImplementedError: the implementation does not serve this model here, with the reason.
    """

    passes_class = SlotPasses  # of which benchmarks make variants

    def __init__(
        self,
        model: CausalLM,
        *,
        max_batch: int = 8,
        num_pages: int,
        page_size: int = 64,
        max_len: int,
        speculation: Sequence[DraftTree] = (),
        prompt_tokens: int = 512,
        batches: Sequence[int] | None = None,
        max_waiting: int = 1024,
        prefix_cache: bool = True,
        implementation: str | None = None,
    ):
        positions = model.max_position_embeddings
        for name, value in (
            ("max_batch", max_batch),
            ("num_pages", num_pages),
            ("page_size", page_size),
            ("max_len", max_len),
            ("prompt_tokens", prompt_tokens),
            ("max_waiting", max_waiting),
        ):
            check_integer(name, value, 1)
        if max_len > positions:
            raise ValueError(f"max_len={max_len} must be at most max_position_embeddings={positions}")
        batches = () if batches is None else batches
        check_integers("batches", batches)
        if len(batches) and (min(batches) < 1 or max(batches) < max_batch):
            raise ValueError(f"batches={tuple(batches)} must be at least 1, the largest at least max_batch={max_batch}")
        if not isinstance(speculation, Sequence) or not all(isinstance(tree, DraftTree) for tree in speculation):
            raise ValueError(f"speculation={speculation!r} must be a sequence of DraftTree")
        for group in model.cache_groups:
            group.check_supported(page_size=page_size, implementation=implementation)
        self.model, self.max_len, self.speculation = model, max_len, tuple(dict.fromkeys(speculation))
        self.max_batch, self.max_waiting, self._prompt_tokens = max_batch, max_waiting, prompt_tokens
        shapes = Shapes(
            batches=tuple(sorted(batches)) if len(batches) else ladder(max_batch),
            # Every second power of two: most passes are full, and programs take long to compile.
            prompt_rows=ladder(prompt_tokens, smallest=min(64, prompt_tokens))[::-2][::-1],
            table_width=-(-max_len // page_size),
            page_size=page_size,
            max_len=max_len,
            chunked=True,
            sampling=True,
        )
        prompts = dataclasses.replace(shapes, batches=(min(PROMPTS_PER_PASS, max_batch),))
        kinds = (None, *self.speculation)
        options = {"implementation": implementation}
        self._passes = {k: self.passes_class(model, dataclasses.replace(shapes, tree=k), **options) for k in kinds}
        self._prompt_passes = {
            k: self.passes_class(model, dataclasses.replace(prompts, tree=k), **options) for k in kinds
        }
        self._prompts_per_pass, self._batches = prompts.batches[0], shapes.batches
        self._draft_steps = {tree: _draft_steps(tree) for tree in self.speculation}

        self._pages = PageAllocator(num_pages, page_size, table_width=shapes.table_width)
        self._prefixes, self._keeps_prefixes = PrefixCache(self._pages), prefix_cache
        pools = model.create_pools(num_pages=num_pages, page_size=page_size)
        self._device = (pools, create_slots(model, max_batch, self.speculation))

        self._lock = threading.RLock()  # of step
        self._adding = threading.Lock()
        self._stepping = False
        self._names = itertools.count()
        self._live: dict[int, _Request] = {}
        self._new: collections.deque[_Request] = collections.deque()  # put in by any thread
        self._cancels: collections.deque[_Request] = collections.deque()
        self._waiting: collections.deque[_Request] = collections.deque()  # oldest first
        self._running: dict[int, _Request] = {}  # by id: those that hold pages
        self._slots: list[_Request | None] = [None] * max_batch
        self._unread: collections.deque[_Launch] = collections.deque()
        self._outputs: list[Output] = []
        self._drivers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task] = weakref.WeakKeyDictionary()
        self._interrupt: BaseException | None = None
        self._counts: collections.Counter[str] = collections.Counter()
        self._seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self._compiles_at_warm_up = backend_compiles()

    def warm_up(self, *, progress: bool = True) -> float:
        """Compile every program ahead of time, with a progress bar; returns the seconds it took."""
        seconds = warm_up(self._all_buckets(), self._state, self._device, progress=progress)
        self._seconds["warm_up"] += seconds
        self._compiles_at_warm_up = backend_compiles()
        return seconds

    def add_request(
        self, prompt: Sequence[int], params: SamplingParams | None = None, *, on_output: OnOutput | None = None
    ) -> int:
        """Queue a request.

        Args:
            prompt: token ids, at least one; used as they are.
            params: how to choose tokens; greedy by default.
            on_output: called with each ``Output`` of this request, in the thread that steps, while the others wait. If
                it raises, the request ends with "error"; others go on.

        Returns:
            An id, unique in this engine.

        Raises:
            ValueError: as ``check_request``.
            QueueFull: ``max_waiting`` requests wait already.
        """
        return self._add(prompt, SamplingParams() if params is None else params, on_output).id

    def _add(self, prompt: Sequence[int], params: SamplingParams, on_output: OnOutput | None) -> _Request:
        self.check_request(prompt, params)
        tokens = [int(token) for token in prompt]
        with self._adding:
            if (waiting := len(self._new) + len(self._waiting)) >= self.max_waiting:
                raise QueueFull(f"{waiting} requests wait, at most max_waiting={self.max_waiting} may")
            request = _Request(next(self._names), tokens, len(tokens), params, on_output, time.perf_counter())
            self._live[request.id] = request
            self._new.append(request)
        return request

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Whether this engine can serve a request, however busy it is.

        Raises:
            ValueError: the prompt is empty, no sequence of integers, holds an id outside the vocabulary, or is too long
                with ``max_new_tokens`` for ``max_len`` or for all pages; a draft tree the engine was not made with.
        """
        check_integers("prompt", prompt)
        vocab, total = self.model.vocab_size, len(prompt) + params.max_new_tokens
        if len(prompt) == 0:
            raise ValueError("prompt is empty, must hold at least one token")
        wrong = [t for t in prompt if not 0 <= t < vocab]
        if wrong:
            raise ValueError(f"prompt holds token {wrong[0]}, must be 0 to {vocab - 1}")
        lengths = f"prompt has {len(prompt)} tokens and max_new_tokens={params.max_new_tokens}"
        if total > self.max_len:
            raise ValueError(f"{lengths}: together they must be at most max_len={self.max_len}")
        if params.speculation is not None and params.speculation not in self.speculation:
            made = ", ".join(str(tree.widths) for tree in self.speculation) or "none"
            raise ValueError(f"speculation of widths {params.speculation.widths} must be one of the engine's: {made}")
        needed = self._num_pages(self._most_rows(len(prompt), params))
        if needed > self._pages.num_pages:
            raise ValueError(f"{lengths}: they need {needed} pages, must be at most num_pages={self._pages.num_pages}")

    def cancel(self, request_id: int) -> bool:
        """End a request at the next step; returns whether it was live."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self._cancels.append(request)
        return True

    @property
    def busy(self) -> bool:
        """Whether ``step()`` has something to do."""
        return bool(self._live or self._unread)

    def step(self) -> list[Output]:
        """Move every request on, and return what is new of all of them. On an idle engine it does nothing.

        Raises:
            RuntimeError: called from a callback of a step.
            KeyboardInterrupt, SystemExit: a callback raised it; its request has ended, the engine can go on.
        """
        with self._lock:
            if self._stepping:
                raise RuntimeError("step() was called from a callback of step()")
            self._stepping, begin = True, time.perf_counter()
            try:
                self._take_new()
                self._end_cancelled()
                before = self._counts["launches"]
                self._launch()
                self._read(before)
                self._counts["steps"] += int(self._counts["launches"] > before)
            finally:
                self._stepping = False
                self._seconds["step"] += time.perf_counter() - begin
            if self._interrupt is not None:
                interrupt, self._interrupt = self._interrupt, None
                raise interrupt
            outputs, self._outputs = self._outputs, []
        return outputs

    def run(self) -> Iterator[Output]:
        """Step until all requests have ended; yields what is new of all of them."""
        while self.busy:
            yield from self.step()

    def stream(self, prompt: Sequence[int], params: SamplingParams | None = None) -> AsyncIterator[Output]:
        """Add a request and return its outputs as they come, driving the engine in a thread while there is work.

        To be called where an event loop runs. One task a loop steps for all streams; requests beside them need an
        ``on_output``. Leaving the iteration early cancels the request, from the next step on.

        Raises:
            ValueError, QueueFull: as ``add_request``.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        params = SamplingParams() if params is None else params
        request = self._add(prompt, params, lambda output: loop.call_soon_threadsafe(queue.put_nowait, output))
        leave = functools.partial(self._leave, request)
        return _Stream(self._outputs_of(queue, leave), leave)

    def _leave(self, request: _Request) -> None:
        request.on_output = None  # the loop may be gone when the cancelled request ends
        self.cancel(request.id)

    async def _outputs_of(self, queue: asyncio.Queue, leave: Callable[[], None]) -> AsyncGenerator[Output, None]:
        try:
            while True:
                yield (output := await self._next(queue))
                if output.finish_reason is not None:
                    return
        finally:
            leave()

    async def _next(self, queue: asyncio.Queue) -> Output:
        while queue.empty():
            loop = asyncio.get_running_loop()
            driver = self._drivers.get(loop)
            if driver is None or driver.done():
                driver = self._drivers[loop] = asyncio.create_task(self._drive())
            waiting = asyncio.ensure_future(queue.get())
            try:
                await asyncio.wait((waiting, driver), return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    return waiting.result()
            finally:
                waiting.cancel()
            driver.result()  # raises what the step raised
        return queue.get_nowait()

    async def _drive(self) -> None:
        while self.busy:
            await asyncio.to_thread(self.step)

    @property
    def statistics(self) -> EngineStatistics:
        """Counts and mean times so far; from another thread it waits for the step that runs."""
        with self._lock:
            counts, seconds = self._counts, self._seconds
            holders = self._pages.holders - self._prefixes.held  # running requests alone
            copied = ("finished", "cancelled", "failed", "preemptions", "prompt_tokens", "reused_tokens", "new_tokens")
            return EngineStatistics(
                **{name: counts[name] for name in (*copied, "steps", "target_steps")},
                waiting=len(self._new) + len(self._waiting),
                running=len(self._running),
                acceptance_length=_mean(counts["verified_tokens"], counts["verified_requests"]),
                step_seconds=seconds["step"],
                wait_seconds=seconds["wait"],
                tokens_per_second=counts["new_tokens"] / seconds["step"] if seconds["step"] else 0.0,
                time_to_first_token=_mean(seconds["first_token"], counts["first_tokens"]),
                inter_token_time=_mean(seconds["later_tokens"], counts["new_tokens"] - counts["first_tokens"]),
                pages_used=int(np.count_nonzero(holders)),
                pages_shared=int(np.count_nonzero(holders > 1)),
                pages_idle=self._prefixes.num_idle_pages,
                warm_up_seconds=seconds["warm_up"],
                programs=sum(bucket.compiles for bucket in self._all_buckets()),
                compiles_after_warm_up=backend_compiles() - self._compiles_at_warm_up,
            )

    # Planning: who runs, and on which pages.

    def _take_new(self) -> None:
        while self._new:
            self._waiting.append(self._new.popleft())

    def _end_cancelled(self) -> None:
        while self._cancels:
            request = self._cancels.popleft()
            if request in self._new:  # added and cancelled since new ones were taken
                self._take_new()
            if not request.finished:
                self._finish(request, [], "cancelled")

    def _admit(self) -> None:
        """Give waiting requests slots and pages, oldest first, while there are some and this step can begin with their
        prompts. Who waits a step longer may find more of its prompt in the cache."""
        while self._waiting and self._has_prompt_room():
            request, slot = self._waiting[0], self._free_slot()
            if slot is None:
                return
            found = self._find_prefix(request)
            # A page for each running request that may want one: to admit one and preempt it next would be wasted work.
            needed = self._num_pages(len(request.tokens)) - self._num_pages(found)
            growing = sum(self._may_grow(r) for r in self._running.values())
            if not self._make_free(needed + growing):
                self._pages.free(request.id)
                return
            self._pages.grow(request.id, len(request.tokens))
            self._waiting.popleft()
            request.slot, request.prompt_rows, request.computed, request.rows = slot, len(request.tokens), found, 0
            self._running[request.id] = self._slots[slot] = request
            self._counts["reused_tokens"] += found

    def _may_grow(self, request: _Request) -> bool:
        most = self._most_rows(request.prompt_len, request.params)
        return self._num_pages(self._pages.length(request.id)) < self._num_pages(most)

    def _has_prompt_room(self) -> bool:
        left = [r.prompt_rows - r.computed for r in self._running.values() if r.wants_prompt_pass]
        return len(left) < self._prompts_per_pass and sum(left) < self._prompt_tokens

    def _free_slot(self) -> int | None:
        """A slot that nobody needs: of a request that ends with what is launched too, for passes run in order."""
        return next((slot for slot, r in enumerate(self._slots) if r is None or r.all_launched), None)

    def _find_prefix(self, request: _Request) -> int:
        """Adds the request to the page allocator; returns how many of its rows are there. The last token's row is
        always computed: the next token comes from it."""
        if not self._keeps_prefixes:
            self._pages.create(request.id)
            return 0
        return self._prefixes.fork(request.id, request.tokens[:-1], kind=self._prefix_kind(request))

    def _keep_prefix(self, request: _Request, tokens: list[int]) -> None:
        if self._keeps_prefixes:
            self._prefixes.keep(request.id, tokens, kind=self._prefix_kind(request))

    @staticmethod
    def _prefix_kind(request: _Request) -> bool:
        """Requests that draft need the draft layer's rows too, which others do not make. (Of a shared page's last token
        that row depends on the token after it, of whoever made it: it may cost a draft, never a token.)"""
        return request.params.speculation is not None

    def _make_free(self, num_pages: int) -> bool:
        return self._pages.num_free >= num_pages or self._prefixes.evict(num_pages)

    def _reserve(self, request: _Request) -> bool:
        """Make room for the rows of the request's next pass. If pages run out, the youngest requests give theirs back:
        False if that ended or stopped this one."""
        while request.id in self._running and request.wants_token:
            tree, most = request.params.speculation, self._most_rows(request.prompt_len, request.params)
            rows = request.prompt_rows + request.rows + request.ahead + (tree.size if tree else 1)
            rows = max(min(rows, most), self._pages.length(request.id))
            try:
                self._pages.grow(request.id, rows)
                return True
            except OutOfPages as error:
                if self._make_free(error.needed):
                    continue
            if self._unread:  # what the host does not know yet may have ended requests
                self._read(self._counts["launches"])
                continue
            self._preempt(max(self._running.values(), key=lambda r: r.id))
        return False

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pages.page_size)

    def _most_rows(self, prompt_len: int, params: SamplingParams) -> int:
        """Rows a request may need in all: of its tokens and the drafts of its last verify pass."""
        drafts = params.speculation.size - 1 if params.speculation else 0
        return min(prompt_len + params.max_new_tokens + drafts, self.max_len)

    def _preempt(self, request: _Request) -> None:
        self._keep_prefix(request, request.final_tokens)  # may still be there when it comes back
        self._release(request)
        self._waiting.appendleft(request)  # all that run are older than all that wait
        self._counts["preemptions"] += 1

    def _release(self, request: _Request) -> None:
        self._pages.free(request.id)
        del self._running[request.id]
        if self._slots[request.slot] is request:
            self._slots[request.slot] = None

    # Launching passes. Nothing here waits for the device, unless pages run out.

    def _launch(self) -> None:
        """A pass over prompts, and one for the next tokens of each kind of request."""
        self._admit()
        self._launch_prompts()
        for kind in (None, *self.speculation):
            mine = [r for r in self._running.values() if r.params.speculation == kind and r.wants_token]
            ready = [r for r in sorted(mine, key=lambda r: r.id) if self._reserve(r)]
            ready = [r for r in ready if r.id in self._running]
            if ready:
                self._launch_tokens(kind, ready)

    def _launch_prompts(self) -> None:
        """One pass over the next parts of prompts, of requests of one kind of speculation."""
        requests, parts = self._next_parts()
        if not requests:
            return
        kind = requests[0].params.speculation
        shared = self._inputs(requests) | {
            "seq_lens": np.array([part.stop for part in parts], np.int32),
            "q_lens": np.array([part.stop - part.start for part in parts], np.int32),
        }
        # -1 follows the prompt: the token that comes of this pass.
        tokens, following = (
            np.concatenate(
                [
                    np.array([*r.tokens, -1], np.int32)[p.start + n : p.stop + n]
                    for r, p in zip(requests, parts, strict=True)
                ]
            )
            for n in (0, 1)
        )
        options = {name: np.array([getattr(r.params, name) for r in requests], d) for name, d in SAMPLING.items()}
        # Without drafts the target's pass is the same for all.
        out = self._run(self._prompt_passes[None].extend, tokens=tokens, **options, **shared)
        if kind is not None:
            drafting = {"sampled": out["tokens"], "hidden": out["hidden"]}
            self._run(self._prompt_passes[kind].draft_prefill, next_tokens=following, **drafting, **shared)
        for request, part in zip(requests, parts, strict=True):
            request.computed = part.stop
            self._keep_prefix(request, request.tokens[: part.stop])
            self._counts["prompt_tokens"] += part.stop - part.start
        ended = [(row, r) for row, r in enumerate(requests) if not r.wants_prompt_pass]
        for _, request in ended:
            request.unread += 1
        self._expect(ended, out["tokens"], 0)

    def _next_parts(self) -> tuple[list[_Request], list[slice]]:
        """The requests whose prompts go on in this step, oldest first, and which part of each."""
        waiting = sorted((r for r in self._running.values() if r.wants_prompt_pass), key=lambda r: r.id)
        waiting = [r for r in waiting if r.params.speculation == waiting[0].params.speculation]
        parts, left = [], self._prompt_tokens
        for request in waiting[: self._prompts_per_pass]:
            if left:
                parts.append(slice(request.computed, min(request.computed + left, request.prompt_rows)))
                left -= parts[-1].stop - parts[-1].start
        return waiting[: len(parts)], parts

    def _launch_tokens(self, kind: DraftTree | None, requests: list[_Request]) -> None:
        """The next tokens of requests of one kind: a decode pass, or drafting and verifying."""
        passes = self._passes[kind]
        shared = self._inputs(requests) | {"active": np.ones(len(requests), np.int32)}
        if kind is None:
            tokens, ahead = self._run(passes.decode, **shared)["tokens"], 1
        else:
            shared = self._placed(shared)
            for bucket, step in zip(passes.draft_decode, self._draft_steps[kind], strict=True):
                self._run(bucket, **step, **shared)
            out = self._run(passes.target_verify, **shared)
            verified = {name: out[name] for name in ("emitted", "num_emitted", "hidden")}
            self._run(passes.draft_extend, **verified, **shared)
            tokens, ahead = out["emitted"], kind.depth + 1
        for request in requests:
            request.unread += 1
            request.ahead += ahead
        self._counts["target_steps"] += 1
        self._expect(list(enumerate(requests)), tokens, ahead)

    def _inputs(self, requests: list[_Request]) -> dict[str, np.ndarray]:
        slots = np.array([r.slot for r in requests], np.int32)
        return {"page_table": self._pages.table([r.id for r in requests]), "slots": slots}

    def _placed(self, inputs: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Padded and on the device, once for all passes of a round of drafts."""
        requests = len(inputs["slots"])
        rows = next(size for size in self._batches if size >= requests)
        padded = {name: np.zeros((rows, *array.shape[1:]), array.dtype) for name, array in inputs.items()}
        for name, array in inputs.items():
            padded[name][:requests] = array
        return jax.device_put(padded)

    def _run(self, bucket, **inputs):
        outputs, self._device = bucket(self._state, self._device, inputs)
        return outputs

    def _expect(self, requests: list[tuple[int, _Request]], tokens: Any, ahead: int) -> None:
        """Tokens on their way, for a later step to read."""
        tokens.copy_to_host_async()
        self._unread.append(_Launch(self._counts["launches"], requests, tokens, ahead))
        self._counts["launches"] += 1

    # Reading tokens, and handing them out.

    def _read(self, before: int) -> None:
        """Wait for what was launched before the launch of that number, and hand out its tokens."""
        while self._unread and self._unread[0].number < before:
            launch = self._unread.popleft()
            begin = time.perf_counter()
            tokens = np.asarray(launch.tokens)
            self._seconds["wait"] += time.perf_counter() - begin
            for row, request in launch.requests:
                if request.finished:
                    continue
                new = [int(token) for token in np.atleast_1d(tokens[row]) if token >= 0]
                request.unread -= 1
                if launch.ahead:
                    request.ahead -= launch.ahead
                    request.rows += len(new)
                kept = self._emit(request, new)
                if tokens.ndim == 2:
                    self._counts["verified_tokens"] += kept
                    self._counts["verified_requests"] += 1

    def _emit(self, request: _Request, new: list[int]) -> int:
        """Give a request its next tokens, up to a stop token or its length; returns how many those were."""
        new = new[: request.params.max_new_tokens - request.num_new]
        stop = next((i for i, token in enumerate(new) if token in request.params.stop_tokens), None)
        new = new if stop is None else new[: stop + 1]
        now = time.perf_counter()
        if request.num_new == 0:
            self._seconds["first_token"] += now - request.arrived
            self._counts["first_tokens"] += 1
        else:
            self._seconds["later_tokens"] += now - request.last_token
        request.last_token = now
        request.tokens += new
        self._counts["new_tokens"] += len(new)
        if stop is not None:
            self._finish(request, new, "stop")
        elif request.num_new == request.params.max_new_tokens:
            self._finish(request, new, "length")
        else:
            self._hand_out(request, Output(request.id, new))
        return len(new)

    def _finish(self, request: _Request, new: list[int], reason: str, error: BaseException | None = None) -> None:
        if request.id in self._running:
            self._keep_prefix(request, request.final_tokens)
            self._release(request)
        else:
            self._waiting.remove(request)
        request.finished = True
        del self._live[request.id]
        self._counts[{"cancelled": "cancelled", "error": "failed"}.get(reason, "finished")] += 1
        self._hand_out(request, Output(request.id, new, reason, error))

    def _hand_out(self, request: _Request, output: Output) -> None:
        self._outputs.append(output)
        tell = request.on_output  # once: a stream that is left, in whatever thread, takes it away
        if tell is None or output.error is not None:
            return
        try:
            tell(output)
        except BaseException as error:  # whatever it is, other requests' tokens must not be lost by it
            logger.exception("the callback of request %d raised", request.id)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                self._interrupt = error
            if not request.finished:
                self._finish(request, [], "error", error)

    @property
    def _state(self):
        return self._passes[None].state

    def _all_buckets(self):
        buckets = [self._prompt_passes[None].extend, self._passes[None].decode]
        for tree in self.speculation:
            passes = self._passes[tree]
            buckets.append(self._prompt_passes[tree].draft_prefill)
            buckets += [*dict.fromkeys(passes.draft_decode), passes.target_verify, passes.draft_extend]
        return buckets


def _draft_steps(tree: DraftTree) -> list[dict[str, jax.Array]]:
    """What each ``draft_decode`` pass takes besides, on the device for good."""
    return [
        jax.device_put({"step": np.int32(step), "num_drafted": np.int32(tree.level_starts[step + 1] - 1)})
        for step in range(tree.depth - 1)
    ]


def _mean(total: float | int, count: int) -> float | None:
    return total / count if count else None
