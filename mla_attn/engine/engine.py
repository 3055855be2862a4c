"""Continuous batching over the passes: requests in, token streams out.

A step of the engine admits requests, launches a pass over prompts and, for each kind of speculation among the running
requests, a decode pass or a round of drafting and verifying; then it reads the tokens of the step *before*. So the
device has work while the host hands out tokens: what a step needs of the one before it is in the requests' state on the
device. The host plans with what it knows, the most tokens a request can have by now.
"""

import asyncio
import collections
import copy
import itertools
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mla_attn.buckets import Buckets, backend_compiles, ladder, warm_up
from mla_attn.checks import check_integer, check_integers
from mla_attn.engine import inputs, streaming
from mla_attn.engine.outputs import Launch, Outbox
from mla_attn.engine.requests import EngineDead, OnOutput, Output, QueueFull, SamplingParams
from mla_attn.engine.scheduler import PROMPTS_PER_PASS, CacheSizes, Limits, Request, Scheduler
from mla_attn.engine.state import create_states, on_states
from mla_attn.engine.statistics import Counters, EngineStatistics, statistics
from mla_attn.models.base import CausalLM
from mla_attn.passes import DraftPasses, Passes, Shapes
from mla_attn.speculative import DraftTree

MAX_FAULTS = 3  # that a request is computed again after, without a token between them


class Engine:
    """Serves one model to many requests.

    ``step()`` moves all of them on. Who drives it is up to the caller: a loop, ``run()``, or ``stream()`` under
    asyncio. ``add_request``, ``cancel`` and ``statistics`` may be called from other threads while a step runs.

    **After a fault.** *Host and device agree, or the request ends with "error".* Whatever a step raises, wherever (a
    launch, a device error met while waiting, Ctrl-C at any point), nothing that was handed out is lost or repeated, and
    what was not is undone: the next step drops all launches, makes the cache anew, empty, and computes the running
    requests again, as after a preemption. A round of drafts counts as one launch. Programs are never compiled again. A
    request whose launches met ``MAX_FAULTS`` faults since its last token ends with "error". Logits that are not
    finite end their request with "error", and its pages are not reused. If the cache cannot be made anew, ``step()``,
    ``add_request`` and ``stream`` raise ``EngineDead`` until a step could.

    **Weights.** The engine holds the model's arrays as they were when it was made. A parameter that is replaced in the
    model later has no effect until ``update_weights(model)``.

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
        NotImplementedError: the implementation does not support this model here, with the reason.
    """

    passes_class = Passes  # of which benchmarks make variants

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
        limits = Limits(
            max_batch=max_batch,
            max_len=max_len,
            max_waiting=max_waiting,
            prompt_tokens=prompt_tokens,
            prompts_per_pass=PROMPTS_PER_PASS,
            prompt_chunk=prompt_tokens,
        )
        cache = CacheSizes(num_pages=num_pages, page_size=page_size, prefix_cache=prefix_cache)
        batches = () if batches is None else batches
        check_integers("batches", batches)
        if len(batches) and (min(batches) < 1 or max(batches) < max_batch):
            raise ValueError(f"batches={tuple(batches)} must be at least 1, the largest at least max_batch={max_batch}")
        if not isinstance(speculation, Sequence) or not all(isinstance(tree, DraftTree) for tree in speculation):
            raise ValueError(f"speculation={speculation!r} must be a sequence of DraftTree")
        # Every second power of two: most passes are full, and programs take long to compile.
        rows = ladder(prompt_tokens, smallest=min(64, prompt_tokens))[::-2][::-1]
        batches = tuple(sorted(batches)) if len(batches) else ladder(max_batch)
        self._build(model, limits, cache, speculation, batches, rows, implementation)

    @classmethod
    def of(cls, model, limits: Limits, cache: CacheSizes, **rest: Any) -> "Engine":
        """An engine with limits that its constructor does not offer; ``rest`` as ``_build``."""
        engine = cls.__new__(cls)
        engine._build(model, limits, cache, **rest)
        return engine

    def _build(
        self,
        model: CausalLM,
        limits: Limits,
        cache: CacheSizes,
        speculation: Sequence[DraftTree],
        batches: tuple[int, ...],
        prompt_rows: tuple[int, ...],
        implementation: str | None,
    ) -> None:
        if limits.max_len > model.max_position_embeddings:
            positions = model.max_position_embeddings
            raise ValueError(f"max_len={limits.max_len} must be at most max_position_embeddings={positions}")
        for group in model.cache_groups:
            group.check_supported(page_size=cache.page_size, implementation=implementation)
        self.model, self.speculation, self.max_len = model, tuple(dict.fromkeys(speculation)), limits.max_len
        self.max_batch, self.max_waiting = limits.max_batch, limits.max_waiting
        self._limits, self._cache, self._batches = limits, cache, batches
        shapes = Shapes(
            batches=batches,
            prompt_rows=prompt_rows,
            table_width=cache.pages(limits.max_len),
            page_size=cache.page_size,
            max_len=limits.max_len,
            prompt_batches=(min(limits.prompts_per_pass, limits.max_batch),),
        )
        self._passes = self.passes_class(model, shapes, implementation=implementation, wrap=on_states)
        self._drafting = {tree: DraftPasses(self._passes, model, tree) for tree in self.speculation}
        self._draft_steps = {tree: inputs.draft_steps(tree) for tree in self.speculation}
        self._counters = Counters()
        self._scheduler = Scheduler(limits, cache, self._counters)
        self._device = self._create_device()

        self._lock = threading.RLock()  # of everything but adding and cancelling
        self._adding = threading.Lock()
        self._ids = itertools.count()
        self._live: dict[int, Request] = {}  # those that have not ended
        self._new: collections.deque[Request] = collections.deque()  # put in by any thread
        self._cancels: collections.deque[Request] = collections.deque()
        self._unread: collections.deque[Launch] = collections.deque()
        self._outbox = Outbox(self._scheduler, self._live, self._counters)
        self._drivers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task] = weakref.WeakKeyDictionary()
        self._in_doubt = False  # whether host and device may disagree: always while a step runs
        self._fault: BaseException | None = None  # what left the last step, until it is dealt with
        self._involved: Sequence[Request] = ()  # requests of the launch that is being run or read
        self._dead: EngineDead | None = None  # why the last step could not make the cache anew
        self._compiles_at_warm_up = backend_compiles()

    def _create_device(self) -> tuple[Any, Any]:
        """Empty pools of all cache groups, and the states of requests."""
        pools = self.model.create_pools(num_pages=self._cache.num_pages, page_size=self._cache.page_size)
        sizes = {"hidden_size": self.model.hidden_size, "dtype": self.model.dtype}
        return pools, create_states(self._limits.max_batch, self.speculation, **sizes)

    def warm_up(self, *, progress: bool = True) -> float:
        """Compile every program ahead of time, with a progress bar; returns the seconds it took.

        Raises:
            RuntimeError: called from a callback of a step.
        """
        with self._lock:
            self._refuse_in_callback("warm_up")
            self._settle()
            seconds = warm_up(self._programs(), self._passes.state, self._device, progress=progress)
            self._counters.warm_up_seconds += seconds
            self._compiles_at_warm_up = backend_compiles()
        return seconds

    def _programs(self) -> list[Buckets]:
        prompts = [self._passes.prefill, *([] if self._limits.whole_prompts else [self._passes.extend])]
        return [*prompts, self._passes.decode, *(b for passes in self._drafting.values() for b in passes.all)]

    # Requests.

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
            EngineDead: the engine cannot go on.
        """
        request = self._request(prompt, params, on_output)
        try:
            self._add(request)
            return request.id
        except BaseException:  # an interrupt: nobody learns its id
            self._leave(request)
            raise

    def _request(self, prompt: Sequence[int], params: SamplingParams | None, on_output: OnOutput | None) -> Request:
        """A request that ``_add`` puts in. Its caller has it before, so that an interrupt leaves none that nobody
        knows."""
        params = SamplingParams() if params is None else params
        tokens = self._scheduler.check_request(prompt, params, vocab_size=self.model.vocab_size, trees=self.speculation)
        request = Request(next(self._ids), tokens, params, on_output, time.perf_counter())
        self._scheduler.digest(request)
        return request

    def _add(self, request: Request) -> None:
        with self._adding:
            if self._dead is not None:
                raise EngineDead(str(self._dead)) from self._dead.__cause__
            if (waiting := len(self._new) + len(self._scheduler.waiting)) >= self.max_waiting:
                raise QueueFull(f"{waiting} requests wait, at most max_waiting={self.max_waiting} may")
            self._live[request.id] = request  # first: whoever is new is live
            self._new.append(request)

    def _leave(self, request: Request) -> None:
        """End a request, if it was added, whose outputs nobody wants any more."""
        request.on_output = None
        self.cancel(request.id)

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Whether this engine can serve a request, however busy it is.

        Raises:
            ValueError: the prompt is empty, no sequence of integers, holds an id outside the vocabulary, or is too long
                with ``max_new_tokens`` for ``max_len`` or for all pages; a draft tree the engine was not made with.
        """
        self._scheduler.check_request(prompt, params, vocab_size=self.model.vocab_size, trees=self.speculation)

    def cancel(self, request_id: int) -> bool:
        """End a request at the next step; returns whether it was live."""
        request = self._live.get(request_id)
        if request is None:
            return False
        request.cancelled = True
        self._cancels.append(request)
        return True

    @property
    def busy(self) -> bool:
        """Whether ``step()`` has something to do, or outputs to return."""
        return bool(self._new or self._live or self._unread or self._outbox.outputs)

    @property
    def max_running(self) -> int:
        """Most requests running at a time from now on: ``max_batch``, or fewer if it is set so."""
        return self._scheduler.max_running

    @max_running.setter
    def max_running(self, value: int) -> None:
        check_integer("max_running", value, 1, self.max_batch)
        self._scheduler.max_running = value

    # Steps.

    def step(self) -> list[Output]:
        """Move every request on, and return what is new of all of them. On an idle engine it does nothing.

        Raises:
            RuntimeError: called from a callback of a step.
            EngineDead: the cache could not be made anew after a fault.
            KeyboardInterrupt, SystemExit: a callback raised it; its request has ended, the engine can go on.
            BaseException: whatever cuts the step short; the engine can go on, as its docstring says. Outputs that were
                not returned are those of the next step.
        """
        self._advance()
        outbox = self._outbox
        # Between taking them and returning nothing is called: an interrupt is raised after a call.
        outputs, outbox.outputs = outbox.outputs, []
        return outputs

    def run(self) -> Iterator[Output]:
        """Step until all requests have ended; yields what is new of all of them. Whoever leaves the iteration early
        finds the rest in the next ``run()`` or ``step()``."""
        outbox = self._outbox
        while self.busy:
            if not outbox.outputs:
                self._advance()
            while outbox.outputs:
                output = outbox.outputs[0]
                del outbox.outputs[0]
                yield output

    def stream(self, prompt: Sequence[int], params: SamplingParams | None = None) -> AsyncIterator[Output]:
        """Add a request and return its outputs as they come, driving the engine in a thread while there is work.

        To be called where an event loop runs. One task a loop steps for all streams; requests beside them need an
        ``on_output``. Leaving the iteration early cancels the request, from the next step on. A fault that the engine
        survives is logged and ends no stream.

        Raises:
            ValueError, QueueFull, EngineDead: as ``add_request``; the last one while iterating too.
        """
        return streaming.stream(self, prompt, params)

    def _advance(self) -> None:
        with self._lock:
            self._refuse_in_callback("step")
            begin, outbox = time.perf_counter(), self._outbox
            try:
                self._settle()
                self._in_doubt = True
                before = self._counters.launches
                self._take_new()
                self._end_cancelled()
                self._launch()
                self._read(before if self._limits.overlap else self._counters.launches)
                self._in_doubt = False
                self._counters.steps += int(self._counters.launches > before)
            except BaseException as fault:
                self._counters.faults += 1
                self._fault, outbox.in_callback = fault, False
                interrupt, outbox.interrupt = outbox.interrupt, None
                if interrupt is not None and isinstance(fault, Exception):
                    raise interrupt from fault
                raise
            finally:
                self._counters.step_seconds += time.perf_counter() - begin
            interrupt, outbox.interrupt = outbox.interrupt, None
            if interrupt is not None:
                raise interrupt

    def _refuse_in_callback(self, method: str) -> None:
        if self._outbox.in_callback:
            raise RuntimeError(f"{method}() was called from a callback of step()")

    def _settle(self) -> None:
        """Make host and device agree again if they may not. Whatever cuts this short, it can be called again."""
        if not self._in_doubt:
            return
        self._charge()
        self._unread.clear()
        # Before the new one takes memory: frames of tracebacks, whoever keeps them, may hold the old one.
        for array in jax.tree.leaves(self._device):
            if not array.is_deleted():
                array.delete()
        self._device = None
        self._outbox.record_again()
        with self._adding:
            self._new.clear()
            live = sorted((r for r in self._live.values() if not r.finished), key=lambda r: r.id)
            self._scheduler.reset(live)
        self._cancels.extend(r for r in live if r.cancelled)
        self._outbox.tell_again()
        for request in live:
            if request.num_faults >= MAX_FAULTS and not request.finished:
                self._outbox.hand_out(request, (), "error", request.fault)
        try:
            self._device = self._create_device()
        except Exception as error:
            self._dead = EngineDead("the engine cannot go on: its cache could not be made anew")
            raise self._dead from error
        self._dead, self._in_doubt = None, False

    def _charge(self) -> None:
        """Count the last step's fault for the requests of the launch that met it; for the oldest request if none was at
        hand, so that what always fails comes to an end."""
        (fault, self._fault), (involved, self._involved) = (self._fault, None), (self._involved, ())
        if isinstance(fault, Exception) and not isinstance(fault, EngineDead):
            text = _without_traceback(fault)
            for request in involved or sorted(self._live.copy().values(), key=lambda r: r.id)[:1]:
                request.num_faults, request.fault = request.num_faults + 1, text

    def clear_prefix_cache(self) -> None:
        """Forget the pages of requests that have ended; what runs keeps its own.

        Raises:
            RuntimeError: called from a callback of a step.
        """
        with self._lock:
            self._refuse_in_callback("clear_prefix_cache")
            if not self._in_doubt:  # else the cache is made anew
                self._in_doubt = True
                self._scheduler.prefixes.clear()
                self._in_doubt = False

    def update_weights(self, model_or_state: Any) -> None:
        """Go on with other weights, from the next step on; nothing is compiled.

        Tokens that were handed out stay. Running requests are computed again, prompt and tokens so far, with the new
        weights, as after a preemption; the prefix cache is cleared.

        Args:
            model_or_state: a model like the engine's, or the ``nnx.State`` of one. Its arrays are held, not copied.

        Raises:
            ValueError: other parameters, shapes or dtypes than the engine's model has, by name, or another config.
            RuntimeError: called from a callback of a step.
        """
        with self._lock:
            self._refuse_in_callback("update_weights")
            model, state = self._passes.replacement(model_or_state)
            self._in_doubt = True  # all that is computed is of the old weights: the next step begins anew
            self.model, self._passes.state = model, state

    @property
    def statistics(self) -> EngineStatistics:
        """Counts and mean times so far; from another thread it waits for the step that runs."""
        with self._lock:
            scheduler = self._scheduler
            holders = scheduler.pages.holders - scheduler.prefixes.held  # running requests alone
            return statistics(
                self._counters,
                waiting=len(self._new) + len(scheduler.waiting),
                running=len(scheduler.running),
                pages_used=int(np.count_nonzero(holders)),
                pages_shared=int(np.count_nonzero(holders > 1)),
                pages_idle=scheduler.prefixes.num_idle_pages,
                programs=sum(bucket.compiles for bucket in self._programs()),
                compiles_after_warm_up=backend_compiles() - self._compiles_at_warm_up,
            )

    def _take_new(self) -> None:
        with self._adding:
            while self._new:
                self._scheduler.waiting.append(self._new[0])
                self._new.popleft()

    def _end_cancelled(self) -> None:
        while self._cancels:
            request = self._cancels[0]
            if request in self._new:  # added and cancelled since new ones were taken
                self._take_new()
            if not request.finished:
                self._outbox.hand_out(request, (), "cancelled")
            self._cancels.popleft()

    # Launching passes. Nothing here waits for the device, unless pages run out.

    def _launch(self) -> None:
        """A pass over prompts, and one for the next tokens of each kind of request."""
        self._scheduler.admit()
        if parts := self._scheduler.next_prompts():
            self._launch_prompts(parts)
            if self._limits.prompts_first:
                return
        for kind in (None, *self.speculation):
            if ready := self._scheduler.next_tokens(kind, self._read_all):
                self._launch_tokens(kind, ready)

    def _launch_prompts(self, parts: list[tuple[Request, slice]]) -> None:
        """One pass over parts of prompts, of requests of one kind of speculation."""
        self._involved = requests = [request for request, _ in parts]
        shared = self._inputs(requests) | inputs.prompt_lengths(parts)
        bucket = self._passes.extend if any(part.start for _, part in parts) else self._passes.prefill
        out = self._run(bucket, **inputs.prompt_tokens(parts), **shared)
        if kind := requests[0].params.speculation:
            drafting = {"sampled": out["tokens"], "prompt_hidden": out["prompt_hidden"], **shared}
            self._run(self._drafting[kind].draft_prefill, **inputs.next_tokens(parts), **drafting)
        for request, part in parts:
            request.num_computed = part.stop
            request.num_passes_in_flight += not request.wants_prompt_pass
            self._counters.prompt_tokens += part.stop - part.start
        self._expect(requests, out["tokens"], stops=tuple(part.stop for _, part in parts))

    def _launch_tokens(self, kind: DraftTree | None, requests: list[Request]) -> None:
        """The next tokens of requests of one kind: a decode pass, or drafting and verifying."""
        self._involved = requests
        shared = self._inputs(requests) | {"active": np.ones(len(requests), np.int32)}
        if kind is None:
            tokens, rows = self._run(self._passes.decode, **shared)["tokens"], 1
        else:
            passes, shared = self._drafting[kind], inputs.placed(shared, self._batches)
            for bucket, step in zip(passes.draft_decode, self._draft_steps[kind], strict=True):
                self._run(bucket, **step, **shared)
            out = self._run(passes.target_verify, **shared)
            verified = {name: out[name] for name in ("emitted", "num_emitted", "emitted_hidden")}
            self._run(passes.draft_extend, **verified, **shared)
            tokens, rows = out["emitted"], kind.depth + 1
        for request in requests:
            request.num_passes_in_flight += 1
            request.num_rows_in_flight += rows
        self._counters.target_steps += 1
        self._expect(requests, tokens, rows=rows)

    def _inputs(self, requests: list[Request]) -> dict[str, np.ndarray]:
        slots = np.array([r.slot for r in requests], np.int32)
        return {"page_table": self._scheduler.pages.table([r.id for r in requests]), "slots": slots}

    def _run(self, bucket: Buckets, **arrays: Any) -> dict[str, Any]:
        outputs, self._device = bucket(self._passes.state, self._device, arrays)
        return outputs

    def _expect(self, requests: list[Request], tokens: Any, *, rows: int = 0, stops: tuple[int, ...] = ()) -> None:
        """Tokens on their way, for a later step to read."""
        tokens.copy_to_host_async()
        self._unread.append(Launch(self._counters.launches, list(enumerate(requests)), tokens, rows, stops))
        self._counters.launches += 1
        self._involved = ()

    # Reading tokens, and handing them out.

    def _read_all(self) -> bool:
        """Read all launches; whether there were any."""
        there = bool(self._unread)
        self._read(self._counters.launches)
        return there

    def _read(self, before: int) -> None:
        """Wait for what was launched before the launch of that number, and hand out its tokens."""
        while self._unread and self._unread[0].number < before:
            launch, begin = self._unread[0], time.perf_counter()
            self._involved = [request for _, request in launch.requests]
            tokens = np.asarray(launch.tokens)
            self._counters.wait_seconds += time.perf_counter() - begin
            each = tokens.reshape(len(tokens), -1).tolist()
            self._unread.popleft()
            for index, (row, request) in enumerate(launch.requests):
                if request.finished:
                    continue
                if launch.stops:
                    self._outbox.account_prompt(request, launch.stops[index], each[row][0])
                else:
                    self._outbox.account_tokens(request, launch.rows, each[row])
            self._involved = ()


def _without_traceback(error: Exception) -> Exception:
    """The error alone: frames of its traceback, and of those before it, hold arrays."""
    try:
        return copy.copy(error)
    except Exception:  # its constructor takes other arguments
        return RuntimeError(f"{type(error).__name__}: {error}")
