"""The engine: continuous batching over the passes of a model.

A step admits requests, launches a pass over prompts and, for each kind of speculation among the running requests, a
decode pass or a round of drafting and verifying; then it reads the tokens of the *previous* step. So the device has
work while the host processes outputs: the tokens that a step needs from the previous one are in the requests' state on
the device. The host plans with the largest number of tokens that each request can have by then.
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

from mla_attn.buckets import Buckets, backend_compiles
from mla_attn.checks import check_integer, check_skip_threshold
from mla_attn.engine import batch, faults, inputs, launching, streaming, warming
from mla_attn.engine.batch import Prompt, Result
from mla_attn.engine.names import with_hints
from mla_attn.engine.outputs import Launch, Outbox
from mla_attn.engine.pages import CacheSizes, Limits
from mla_attn.engine.requests import EngineDead, OnOutput, Output, QueueFull, SamplingParams, check_model, check_params
from mla_attn.engine.scheduler import Request, Scheduler
from mla_attn.engine.sharding import check_sharding, groups_on_device, page_parts, wrapper
from mla_attn.engine.sizes import batch_ladder, choose_sizes, most_limits, pass_shapes, row_ladder
from mla_attn.engine.state import create_device
from mla_attn.engine.statistics import Counters, EngineStatistics, statistics
from mla_attn.models import load_checkpoint
from mla_attn.models.base import CacheGroup, CausalLM, stored_as
from mla_attn.models.tokenizer import Tokenizer, encode, tokenizer_or_ids
from mla_attn.parallel import Parallelism
from mla_attn.passes import DraftModel, DraftPasses, Drafts, Passes, all_groups, most_positions
from mla_attn.programs import open_folder
from mla_attn.speculative import DraftTree

# Most new requests that a step takes over, which is more than it can admit: each takes 0.5 us, and a step's own time
# must not depend on how many arrive at once.
_ARRIVALS = 64


class Engine:
    """Serves one model to many requests.

    ``step()`` advances all requests. The caller decides how it is driven: by a loop, by ``run()``, or by ``stream()``
    under asyncio. ``add_request``, ``cancel`` and ``statistics`` may be called from other threads while a step runs.

    **After a fault.** *Host and device agree, or the request ends with "error".* Whatever a step raises (in a launch,
    a device error while waiting, Ctrl-C at any point), tokens that were returned are neither lost nor repeated, and
    unreturned work is undone: the next step drops all launches, allocates an empty cache, and computes the running
    requests again, as after a preemption. A round of drafts counts as one launch. Nothing is recompiled. A request
    whose launches met ``faults.MAX_FAULTS`` faults since its last token ends with "error". Logits that are not finite
    end their request with "error", and its pages are not reused. If the cache cannot be allocated, ``step()``,
    ``add_request`` and ``stream`` raise ``EngineDead`` until a later step succeeds.

    **Weights.** The engine keeps the model's arrays from its construction. Replacing a parameter of the model has no
    effect until ``update_weights(model)``.

    Args:
        model: a loaded checkpoint.
        max_batch: most requests that run at the same time.
        num_pages: pages of the cache. None for as many as fit in memory; on a CPU at most the pages that ``max_batch``
            of the longest requests need. A dict has a number for each cache group, equal for groups with equal windows.
            A single number is for the groups without a window; the others get the pages that ``max_batch`` requests
            need, twice that with a prefix cache, but at most this number.
        page_size: tokens per page.
        max_len: most tokens of a request, prompt and new ones together. None for the model's positions, or the tokens
            that all pages hold if that is less; the choice is logged.
        memory_fraction: share of the free memory for the cache, above 0 and at most 1, if ``num_pages`` is None. None
            for 0.9 on a GPU (of the memory that JAX may allocate), 0.25 on a CPU.
        speculation: draft trees that requests may use; each adds programs to compile.
        draft: the drafter: a ``DraftModel``, ``NgramDrafts``, or None for the model's own draft layer.
        prompt_tokens: most prompt tokens per step, summed over requests; longer prompts are split into prefill chunks,
            between which other requests get tokens.
        batches: batch sizes to compile passes for, the largest at least ``max_batch``; None for powers of two up to it.
        max_waiting: most waiting requests; ``add_request`` refuses more.
        prefix_cache: whether full pages are shared by content, and kept while there is room.
        implementation: attention implementation; None for the default choice.
        skip_threshold: as in ``mla_attention``, for all passes.
        tokenizer: tokenizer for prompts as text, and for texts of ``generate``.
        cache_dir: folder that keeps programs for other processes, as in ``programs.open_folder``; "" for none, None for
            the user's.
        kv_dtype: format of the cache rows: bfloat16, float16, float32, float8_e4m3fn, float8_e5m2, or
            float8_e4m3fn:blocks for latent rows; None for the model's dtype.
        kv_scale: scales of float8 numbers: a number, or a dict that has for each cache group, by name, a dict with
            "scale" (latent rows) or "k_scale" and "v_scale". None for those of the checkpoint, or 1 if it has none.
        draft_kv_dtype: format of the rows of a draft model, or of the model's draft layer, which is then a cache group
            of its own, "mtp"; None for ``kv_dtype``.
        parallelism: mesh and layout that the models are sharded over; None for one device. Over contexts a page has
            ``page_size`` tokens of all devices.

    Raises:
        ValueError: ``model`` is not a model, a size is not an integer or below 1, ``max_len`` exceeds the model's
            positions, a group has too few pages, memory is too small, the drafter cannot draft the trees, or the
            implementation is unknown.
        TypeError: an unknown argument; the message suggests a name.
        NotImplementedError: the implementation does not support this model here; the message has the reason.
    """

    passes_class = Passes  # replaced by benchmarks

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
        skip_threshold: float | None = None,
        tokenizer: Tokenizer | None = None,
        cache_dir: str | os.PathLike | None = None,
        kv_dtype: DTypeLike | None = None,
        kv_scale: Any = None,
        draft_kv_dtype: DTypeLike | None = None,
        parallelism: Parallelism | None = None,
    ):
        check_model(model)
        check_sharding(model, draft, parallelism, page_size)
        limits = most_limits(
            model, draft, speculation, max_batch=max_batch, max_waiting=max_waiting, prompt_tokens=prompt_tokens
        )
        pages: dict[str, Any] = {"num_pages": num_pages, "page_size": page_size, "prefix_cache": prefix_cache}
        groups = stored_as(all_groups(model, draft), kv_dtype, kv_scale, draft_kv_dtype)
        pages |= {"max_len": max_len, "memory_fraction": memory_fraction, "page_parts": page_parts(parallelism)}
        cache, limits = choose_sizes(groups_on_device(groups, parallelism), limits, **pages)
        ladders = batch_ladder(batches, max_batch), row_ladder(prompt_tokens)
        rest: dict[str, Any] = {"draft": draft, "cache_dir": cache_dir, "groups": groups, "parallelism": parallelism}
        rest |= {"implementation": implementation, "skip_threshold": check_skip_threshold(skip_threshold)}
        self._build(model, limits, cache, speculation, *ladders, **rest)
        self.tokenizer = tokenizer

    @classmethod
    def from_checkpoint(cls, path: str | os.PathLike, *, dtype: DTypeLike | None = None, **options: Any) -> "Engine":
        """Creates an engine for a checkpoint folder, with its tokenizer.

        Args:
            path: folder of the checkpoint.
            dtype: ``dtype`` of ``load_checkpoint``; None for that of the checkpoint.
            options: further arguments of the constructor.

        Raises:
            ValueError: as in ``load_checkpoint`` and the constructor. If the tokenizer cannot be used, prompts as text
                raise the reason.
        """
        engine = cls(load_checkpoint(path, dtype=dtype, parallelism=options.get("parallelism")), **options)
        engine.tokenizer = engine.tokenizer or tokenizer_or_ids(path)
        return engine

    @classmethod
    def of(cls, model, limits: Limits, cache: CacheSizes, **rest: Any) -> "Engine":
        """Creates an engine with limits that the constructor does not offer; ``rest`` as in ``_build``."""
        check_sharding(model, rest.get("draft"), rest.get("parallelism"), cache.page_size)
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
        cache_dir: str | os.PathLike | None = None,
        groups: tuple[CacheGroup, ...] | None = None,
        parallelism: Parallelism | None = None,
        skip_threshold: float | None = None,
    ) -> None:
        if limits.max_len > (positions := most_positions(model, draft)):
            raise ValueError(f"max_len={limits.max_len} must be at most max_position_embeddings={positions}")
        self._groups = groups or all_groups(model, draft)
        self._parallelism, part = parallelism, cache.page_size // page_parts(parallelism)
        for group in groups_on_device(self._groups, parallelism):
            group.check_supported(page_size=part, implementation=implementation)
        self.tokenizer: Tokenizer | None = None
        self.model, self.speculation, self.max_len = model, tuple(dict.fromkeys(speculation)), limits.max_len
        self.max_batch, self.max_waiting = limits.max_batch, limits.max_waiting
        self._limits, self._cache, self._batches = limits, cache, batches
        self._counters, self._draft = Counters(), draft
        self._scheduler = Scheduler(limits, cache, self._counters)
        shapes = pass_shapes(limits, cache, self._scheduler.tables.widths, batches, prompt_rows)
        other = draft.model if isinstance(draft, DraftModel) else None
        self.folder = open_folder(cache_dir) if parallelism is None else None  # names do not tell meshes apart
        options = {
            "implementation": implementation,
            "skip_threshold": skip_threshold,
            "wrap": wrapper(parallelism, model, other),
            "folder": self.folder,
        }
        self._passes = self.passes_class(model, shapes, draft=other, groups=self._groups, **options)
        self._drafting = {tree: DraftPasses(self._passes, model, tree, draft) for tree in self.speculation}
        self._draft_steps = {
            tree: inputs.draft_steps(tree) if passes.draft_decode else [] for tree, passes in self._drafting.items()
        }
        self._device = self._create_device()

        self._lock = threading.RLock()  # held by everything except adding and cancelling
        self._adding = threading.Lock()
        self._ids = itertools.count()
        self._live: dict[int, Request] = {}  # requests that have not ended
        self._new: collections.deque[Request] = collections.deque()  # added by any thread, not seen by a step yet
        self._cancels: collections.deque[Request] = collections.deque()
        self._unread: collections.deque[Launch] = collections.deque()
        self._outbox = Outbox(self._scheduler, self._live, self._counters)
        self._drivers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task] = weakref.WeakKeyDictionary()
        self._in_doubt = False  # whether host and device may disagree, as while a step runs
        self._fault: BaseException | None = None  # exception of the last step, until it is handled
        self._involved: Sequence[Request] = ()  # requests of the launch that is being run or read
        self._dead: EngineDead | None = None  # why the last step could not allocate the cache
        self._compiles_at_warm_up = backend_compiles()

    def _create_device(self) -> tuple[Any, Any]:
        """Creates empty pools of all cache groups, and the states of requests."""
        facts = self.speculation, self._limits, self._cache
        return create_device(self.model, self._draft, self._groups, *facts, self._parallelism)

    def warm_up(self, *, progress: bool = True, background: bool = False) -> float:
        """Compiles every program ahead of time, with a progress bar; returns the seconds it took.

        Args:
            progress: whether to show the bar.
            background: whether to return at once and compile in a thread, in order of use. Steps then use the programs
                that are compiled, of larger batches if need be, and wait if none fits. The thread does not have the
                caller's JAX contexts, and ends with the engine; a ``warm_up()`` waits for all programs.

        Raises:
            RuntimeError: called from a callback of a step.
        """
        with self._lock:
            self._refuse_in_callback("warm_up")
            faults.settle(self)
            return warming.warm_up(self, progress=progress, background=background)

    def _programs(self) -> list[Buckets]:
        """The ``Buckets`` of all programs, in order of use."""
        drafting = [bucket for passes in self._drafting.values() for bucket in passes.all]
        extend = [] if self._limits.whole_prompts else [self._passes.extend]
        decode = [] if self._limits.all_drafted else [self._passes.decode]
        return [self._passes.prefill, *drafting, *decode, *extend]

    # Requests.

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Result]:
        """Serves prompts to the end in this thread, after compiling the programs that are not compiled yet.

        Other live requests run at the same time; the next ``step()`` or ``run()`` returns their outputs. If this call
        is interrupted, its requests are cancelled.

        Args:
            prompts: any number of prompts, each as in ``add_request``.
            params: parameters of all prompts, or a sequence with those of each; greedy by default.
            progress: whether to show progress bars.

        Returns:
            One result per prompt, in order. If a request failed, its result has ``error``.

        Raises:
            ValueError: as in ``add_request``, for any prompt, before any is computed.
            RuntimeError: called from a callback of a step.
            EngineDead, KeyboardInterrupt: as in ``step``.
        """
        return batch.generate(self, prompts, params, progress)

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, on_output: OnOutput | None = None
    ) -> int:
        """Adds a request to the queue.

        Args:
            prompt: token ids, at least one, used unchanged; or text for the engine's tokenizer.
            params: sampling parameters; greedy by default.
            on_output: function called with each ``Output`` of this request, in the thread that steps, which waits for
                it. If it raises, the request ends with "error"; others are not affected.

        Returns:
            An id, unique in this engine.

        Raises:
            ValueError: as in ``check_request``.
            QueueFull: ``max_waiting`` requests are waiting already.
            EngineDead: the engine could not recover from a fault.
        """
        request = self._request(prompt, params, on_output)
        try:
            self._add(request)
            return request.id
        except BaseException:  # an interrupt: the caller never gets the id
            self._leave(request)
            raise

    def _request(self, prompt: Prompt, params: SamplingParams | None, on_output: OnOutput | None) -> Request:
        """Creates a request for ``_add``. These are two methods so that the caller has the request before it is added,
        and can remove it after an interrupt."""
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
            self._live[request.id] = request  # first, because new requests must be live
            self._new.append(request)

    def _leave(self, request: Request) -> None:
        """Ends an abandoned request, if it was added; its outputs are dropped."""
        request.on_output = None
        self.cancel(request.id)

    def check_request(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Returns a prompt's token ids, or raises if this engine could not run the request even when idle.

        Raises:
            ValueError: the prompt is empty, not a sequence of integers, has an id outside the vocabulary, or is too
                long with ``max_new_tokens`` for ``max_len`` or for all pages; it is text and the engine has no
                tokenizer; or the draft tree is not among ``speculation``.
        """
        check_params(params)
        if isinstance(prompt, str):
            prompt = encode(prompt, self.tokenizer)
        sizes = {"vocab_size": self.model.vocab_size, "trees": self.speculation}
        return self._scheduler.check_request(prompt, params, **sizes)

    def cancel(self, request_id: int) -> bool:
        """Ends a request at the next step; returns whether it was live."""
        request = self._live.get(request_id)
        if request is None:
            return False
        request.cancelled = True
        self._cancels.append(request)
        return True

    @property
    def busy(self) -> bool:
        """Whether ``step()`` has work to do or outputs to return."""
        return bool(self._new or self._live or self._unread or self._outbox.outputs)

    @property
    def max_running(self) -> int:
        """Most requests that run at the same time from now on; may be set from 1 to ``max_batch``."""
        return self._scheduler.max_running

    @max_running.setter
    def max_running(self, value: int) -> None:
        check_integer("max_running", value, 1, self.max_batch)
        self._scheduler.max_running = value

    # Steps.

    def step(self) -> list[Output]:
        """Advances every request and returns all new outputs. On an idle engine it does nothing.

        Raises:
            RuntimeError: called from a callback of a step.
            EngineDead: the cache could not be allocated after a fault.
            KeyboardInterrupt, SystemExit: a callback raised it; its request has ended, and the engine can continue.
            BaseException: any other interruption; the engine can continue (see the class docstring). The next step
                returns the outputs that were not returned.
        """
        self._advance()
        outbox = self._outbox
        # No calls between taking the outputs and returning them, because interrupts are raised at calls.
        outputs, outbox.outputs = outbox.outputs, []
        return outputs

    def run(self) -> Iterator[Output]:
        """Steps until all requests have ended, and yields all new outputs. If the iteration is left early, the next
        ``run()`` or ``step()`` returns the remaining outputs."""
        outbox = self._outbox
        while self.busy:
            if not outbox.outputs:
                self._advance()
            while outbox.outputs:
                output = outbox.outputs[0]
                del outbox.outputs[0]
                yield output

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Output]:
        """Adds a request and returns an async iterator over its outputs; steps run in a thread while there is work.

        It must be called while an event loop runs. One task per loop steps for all streams; other requests of the
        engine then need an ``on_output``. Leaving the iteration early cancels the request at the next step. A fault
        from which the engine recovers is logged and does not end streams.

        Raises:
            ValueError, QueueFull, EngineDead: as in ``add_request``; EngineDead also during iteration.
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
                self._take_new(_ARRIVALS)
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
        """Drops the cached pages of requests that have ended; running requests keep theirs.

        Raises:
            RuntimeError: called from a callback of a step.
        """
        with self._lock:
            self._refuse_in_callback("clear_prefix_cache")
            if not self._in_doubt:  # otherwise the next step empties the cache anyway
                self._in_doubt = True
                self._scheduler.tables.clear_prefixes()
                self._in_doubt = False

    def update_weights(self, model_or_state: Any) -> None:
        """Replaces the weights from the next step on, without recompilation.

        Tokens that were returned stay valid. Running requests are computed again, prompt and tokens so far, with the
        new weights, as after a preemption; the prefix cache is cleared. A ``DraftModel`` keeps its weights: tokens stay
        those of the new model, but fewer drafts may be accepted.

        Args:
            model_or_state: a model like the engine's, or its ``nnx.State``. The arrays are kept, not copied.

        Raises:
            ValueError: a parameter is missing or has another shape or dtype (the message names it), or the config
                differs.
            RuntimeError: called from a callback of a step.
        """
        with self._lock:
            self._refuse_in_callback("update_weights")
            model, state = self._passes.replacement(model_or_state)
            self._in_doubt = True  # cached rows are of the old weights, so the next step resets
            self.model, self._passes.state = model, state

    @property
    def statistics(self) -> EngineStatistics:
        """Counts and mean times so far; called from another thread, it waits for the running step."""
        with self._lock:
            scheduler = self._scheduler
            return statistics(
                self._counters,
                waiting=len(self._new) + len(scheduler.waiting),
                running=len(scheduler.running),
                pages=scheduler.tables.counts(self._groups),
                programs=sum(bucket.compiles for bucket in self._programs()),
                programs_read=self.folder.read if self.folder else 0,
                compiles_after_warm_up=backend_compiles() - self._compiles_at_warm_up,
            )

    def _take_new(self, most: int) -> None:
        with self._adding:
            for _ in range(min(most, len(self._new))):
                self._scheduler.waiting.append(self._new[0])
                self._new.popleft()

    def _end_cancelled(self) -> None:
        while self._cancels:
            request = self._cancels[0]
            if request in self._new:  # added and cancelled since the last ``_take_new``
                self._take_new(len(self._new))
            if not request.finished:
                self._outbox.hand_out(request, (), "cancelled")
            self._cancels.popleft()

    def _run(self, bucket: Buckets, **arrays: Any) -> dict[str, Any]:
        outputs, self._device = bucket(self._passes.state, self._device, arrays)
        return outputs
