"""Continuous batching over the passes: requests in, token streams out.

A step of the engine admits requests, launches a pass over prompts and, for each kind of speculation among the running
requests, a decode pass or a round of drafting and verifying; then it reads the tokens of the step *before*. So the
device has work while the host hands out tokens: what a step needs of the one before it is in the requests' state on the
device. The host plans with what it knows, the most tokens a request can have by now.
"""

import asyncio
import collections
import itertools
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from jax.typing import DTypeLike

from mla_attn.buckets import Buckets, backend_compiles, ladder, warm_up
from mla_attn.checks import check_integer, check_integers
from mla_attn.engine import batch, faults, inputs, launching, streaming
from mla_attn.engine.batch import Prompt, Result
from mla_attn.engine.names import with_hints
from mla_attn.engine.outputs import Launch, Outbox
from mla_attn.engine.pages import CacheSizes, Limits
from mla_attn.engine.requests import EngineDead, OnOutput, Output, QueueFull, SamplingParams, check_model, check_params
from mla_attn.engine.scheduler import Request, Scheduler
from mla_attn.engine.sizes import choose_sizes, most_limits
from mla_attn.engine.state import create_states, on_states
from mla_attn.engine.statistics import Counters, EngineStatistics, statistics
from mla_attn.models import load_checkpoint
from mla_attn.models.base import CausalLM
from mla_attn.models.tokenizer import IdTokenizer, Tokenizer, load_tokenizer
from mla_attn.passes import (
    DraftModel,
    DraftPasses,
    Drafts,
    NgramDrafts,
    Passes,
    Shapes,
    all_groups,
    all_pools,
    most_positions,
)
from mla_attn.speculative import DraftTree
from mla_attn.text import shown


class Engine:
    """Serves one model to many requests.

    ``step()`` moves all of them on. Who drives it is up to the caller: a loop, ``run()``, or ``stream()`` under
    asyncio. ``add_request``, ``cancel`` and ``statistics`` may be called from other threads while a step runs.

    **After a fault.** *Host and device agree, or the request ends with "error".* Whatever a step raises, wherever (a
    launch, a device error met while waiting, Ctrl-C at any point), nothing that was handed out is lost or repeated, and
    what was not is undone: the next step drops all launches, makes the cache anew, empty, and computes the running
    requests again, as after a preemption. A round of drafts counts as one launch. Programs are never compiled again. A
    request whose launches met ``faults.MAX_FAULTS`` faults since its last token ends with "error". Logits that are not
    finite end their request with "error", and its pages are not reused. If the cache cannot be made anew, ``step()``,
    ``add_request`` and ``stream`` raise ``EngineDead`` until a step could.

    **Weights.** The engine holds the model's arrays as they were when it was made. A parameter that is replaced in the
    model later has no effect until ``update_weights(model)``.

    Args:
        model: a loaded checkpoint.
        max_batch: most requests running at a time.
        num_pages: pages of the cache. If None, as many as there is room for; on a CPU no more than ``max_batch`` of the
            longest requests need.
        page_size: tokens per page.
        max_len: most tokens of a request, prompt and new ones together. If None, the model's positions, or what all
            pages hold if that is less. What was chosen is logged.
        memory_fraction: of the memory that is free which the cache may take, above 0 and at most 1, if ``num_pages`` is
            None. If None, 0.9 on a GPU (of what JAX may allocate there), a quarter on a CPU.
        speculation: draft trees that requests may ask for; each adds programs to compile.
        prompt_tokens: most prompt tokens computed in one step, all requests together; longer prompts come in parts,
            with tokens of other requests between them.
        batches: batch sizes to compile passes for, the largest at least ``max_batch``; powers of two up to it if None.
        max_waiting: most requests waiting; ``add_request`` refuses more.
        prefix_cache: whether full pages are found by their content, and kept while there is room.
        implementation: of the attention ops; None picks.
        tokenizer: for prompts as text, and texts of ``generate``.

    Raises:
        ValueError: a model that is none, a size that is no integer or below 1, ``max_len`` above the model's positions,
            too little memory, trees for a model that cannot draft, or an implementation that does not exist.
        TypeError: an argument that there is not; the message names the one that was meant.
        NotImplementedError: the implementation does not support this model here, with the reason.
    """

    passes_class = Passes  # of which benchmarks make variants

    @with_hints
    def __init__(
        self,
        model: CausalLM,
        *,
        max_batch: int = 8,
        num_pages: int | Mapping[str, int] | None = None,
        page_size: int = 64,
        max_len: int | None = None,
        memory_fraction: float | None = None,
        speculation: Sequence[DraftTree] = (),
        draft: Drafts = None,
        prompt_tokens: int = 512,
        batches: Sequence[int] | None = None,
        max_waiting: int = 1024,
        prefix_cache: bool = True,
        implementation: str | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        check_model(model)
        limits = most_limits(
            model, draft, speculation, max_batch=max_batch, max_waiting=max_waiting, prompt_tokens=prompt_tokens
        )
        pages = {"num_pages": num_pages, "page_size": page_size, "prefix_cache": prefix_cache}
        groups = all_groups(model, draft)
        cache, limits = choose_sizes(groups, limits, **pages, max_len=max_len, memory_fraction=memory_fraction)
        batches = () if batches is None else batches
        check_integers("batches", batches)
        if len(batches) and (min(batches) < 1 or max(batches) < max_batch):
            raise ValueError(f"batches={tuple(batches)} must be at least 1, the largest at least max_batch={max_batch}")
        # Every second power of two: most passes are full, and programs take long to compile.
        rows = ladder(prompt_tokens, smallest=min(64, prompt_tokens))[::-2][::-1]
        batches = tuple(sorted(batches)) if len(batches) else ladder(max_batch)
        self._build(model, limits, cache, speculation, batches, rows, implementation, draft)
        self.tokenizer = tokenizer

    @classmethod
    def from_checkpoint(cls, path: str | os.PathLike, *, dtype: DTypeLike | None = None, **options: Any) -> "Engine":
        """An engine for a checkpoint folder, with its tokenizer.

        Args:
            path: folder of the checkpoint.
            dtype: of ``load_checkpoint``: that of the checkpoint if None.
            options: of the constructor.

        Raises:
            ValueError: as ``load_checkpoint`` and the constructor. Where the tokenizer cannot be used, prompts as text
                raise the reason.
        """
        engine = cls(load_checkpoint(path, dtype=dtype), **options)
        if engine.tokenizer is None:
            try:
                engine.tokenizer = load_tokenizer(path)
            except (ValueError, ImportError) as reason:
                engine.tokenizer = IdTokenizer(reason)
        return engine

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
        draft: Drafts = None,
    ) -> None:
        if limits.max_len > (positions := most_positions(model, draft)):
            raise ValueError(f"max_len={limits.max_len} must be at most max_position_embeddings={positions}")
        for group in all_groups(model, draft):
            group.check_supported(page_size=cache.page_size, implementation=implementation)
        self.tokenizer: Tokenizer | None = None
        self.model, self.speculation, self.max_len = model, tuple(dict.fromkeys(speculation)), limits.max_len
        self.max_batch, self.max_waiting = limits.max_batch, limits.max_waiting
        self._limits, self._cache, self._batches = limits, cache, batches
        self._counters, self._draft = Counters(), draft
        self._scheduler = Scheduler(limits, cache, self._counters)
        widths = self._scheduler.tables.widths
        shapes = Shapes(
            batches=batches,
            prompt_rows=prompt_rows,
            table_width=dict(widths).get(None, 0),
            windows=tuple((window, width) for window, width in widths if window is not None),
            page_size=cache.page_size,
            max_len=limits.max_len,
            prompt_batches=(min(limits.prompts_per_pass, limits.max_batch),),
        )
        other = draft.model if isinstance(draft, DraftModel) else None
        self._passes = self.passes_class(model, shapes, draft=other, implementation=implementation, wrap=on_states)
        self._drafting = {tree: DraftPasses(self._passes, model, tree, draft) for tree in self.speculation}
        self._draft_steps = {tree: inputs.draft_steps(tree) for tree in self.speculation}
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
        cache, limits = self._cache, self._limits
        pools = all_pools(self.model, self._draft, cache.pages_of, cache.page_size)
        sizes = {"hidden_size": self.model.hidden_size if self._draft is None else 0, "dtype": self.model.dtype}
        sizes["text_len"] = limits.max_len if isinstance(self._draft, NgramDrafts) else 0
        return pools, create_states(limits.max_batch, self.speculation, **sizes)

    def warm_up(self, *, progress: bool = True) -> float:
        """Compile every program ahead of time, with a progress bar; returns the seconds it took.

        Raises:
            RuntimeError: called from a callback of a step.
        """
        with self._lock:
            self._refuse_in_callback("warm_up")
            faults.settle(self)
            seconds = warm_up(self._programs(), self._passes.state, self._device, progress=progress)
            self._counters.warm_up_seconds += seconds
            self._compiles_at_warm_up = backend_compiles()
        return seconds

    def _programs(self) -> list[Buckets]:
        prompts = [self._passes.prefill, *([] if self._limits.whole_prompts else [self._passes.extend])]
        return [*prompts, self._passes.decode, *(b for passes in self._drafting.values() for b in passes.all)]

    # Requests.

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Result]:
        """Serve prompts from begin to end, in this thread; compiles first what is not compiled yet.

        Requests that are there already go on beside them; what those get is for the next ``step()`` or ``run()``. If it
        is interrupted, its requests are cancelled.

        Args:
            prompts: of any number, each as ``add_request`` takes it.
            params: of all prompts, or of each; greedy by default.
            progress: show bars.

        Returns:
            What each prompt got, in their order. One that failed has ``error``; the others have their tokens.

        Raises:
            ValueError: as ``add_request``, for any of them, before anything is served.
            RuntimeError: called from a callback of a step.
            EngineDead, KeyboardInterrupt: as ``step``.
        """
        return batch.generate(self, prompts, params, progress)

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, on_output: OnOutput | None = None
    ) -> int:
        """Queue a request.

        Args:
            prompt: token ids, at least one, used as they are; or text for the engine's tokenizer.
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

    def _request(self, prompt: Prompt, params: SamplingParams | None, on_output: OnOutput | None) -> Request:
        """A request that ``_add`` puts in. Its caller has it before, so that an interrupt leaves none that nobody
        knows."""
        params = SamplingParams() if params is None else params
        tokens, ends = self.check_request(prompt, params), self.model.eos_token_ids
        request = Request(next(self._ids), tokens, params, on_output, time.perf_counter(), eos_token_ids=ends)
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

    def check_request(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The token ids of a prompt that this engine can serve, however busy it is.

        Raises:
            ValueError: the prompt is empty, no sequence of integers, holds an id outside the vocabulary, or is too long
                with ``max_new_tokens`` for ``max_len`` or for all pages; it is text, and the engine has no tokenizer;
                a draft tree the engine was not made with.
        """
        check_params(params)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    f"prompt={shown(prompt)} is text, must be token ids: the engine has no tokenizer, give it one "
                    "(tokenizer=load_tokenizer(path)) or make it by Engine.from_checkpoint(path)"
                )
            prompt = self.tokenizer.encode(prompt)
        sizes = {"vocab_size": self.model.vocab_size, "trees": self.speculation}
        return self._scheduler.check_request(prompt, params, **sizes)

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

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Output]:
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
                faults.settle(self)
                self._in_doubt = True
                before = self._counters.launches
                self._take_new()
                self._end_cancelled()
                launching.launch(self)
                launching.read(self, before if self._limits.overlap else self._counters.launches)
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

    def clear_prefix_cache(self) -> None:
        """Forget the pages of requests that have ended; what runs keeps its own.

        Raises:
            RuntimeError: called from a callback of a step.
        """
        with self._lock:
            self._refuse_in_callback("clear_prefix_cache")
            if not self._in_doubt:  # else the cache is made anew
                self._in_doubt = True
                self._scheduler.tables.clear_prefixes()
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
            return statistics(
                self._counters,
                waiting=len(self._new) + len(scheduler.waiting),
                running=len(scheduler.running),
                pages=scheduler.tables.counts(all_groups(self.model, self._draft)),
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

    def _run(self, bucket: Buckets, **arrays: Any) -> dict[str, Any]:
        outputs, self._device = bucket(self._passes.state, self._device, arrays)
        return outputs
