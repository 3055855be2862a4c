"""The launch of an engine's passes, and reading of their tokens. A launch does not block unless pages run out."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mla_attn.buckets import Buckets, best
from mla_attn.engine import inputs
from mla_attn.engine.outputs import Launch
from mla_attn.engine.scheduler import Request
from mla_attn.speculative import DraftTree

if TYPE_CHECKING:
    from mla_attn.engine.engine import Engine


def launch(engine: "Engine") -> None:
    """Launches a pass over prompts, and one for the next tokens of each kind of request."""
    engine._scheduler.admit()
    if parts := engine._scheduler.next_prompts():
        launch_prompts(engine, parts)
        if engine._limits.prompts_first:
            return
    for kind in (None, *engine.speculation):
        if engine._unread and any(bucket.cold for bucket in _next_passes(engine, kind)):
            continue  # what is computed already is not held up by programs that are still compiled
        if ready := engine._scheduler.next_tokens(kind, lambda: read_all(engine)):
            launch_tokens(engine, kind, ready)


def _next_passes(engine: "Engine", kind: DraftTree | None) -> Sequence[Buckets]:
    """The passes over the next tokens of requests of a kind."""
    return [engine._passes.decode] if kind is None else engine._drafting[kind].each_step


def launch_prompts(engine: "Engine", parts: list[tuple[Request, slice]]) -> None:
    """Launches a pass over prefill chunks of requests of one kind of speculation."""
    engine._involved = requests = [request for request, _ in parts]
    shared = _shared(engine, requests) | inputs.prompt_lengths(parts)
    bucket = engine._passes.extend if any(part.start for _, part in parts) else engine._passes.prefill
    tokens = inputs.prompt_tokens(parts)
    out = engine._run(bucket, **tokens, **shared)
    if kind := requests[0].params.speculation:
        passes = engine._drafting[kind]
        there = {"sampled": out["tokens"], "prompt_hidden": out["prompt_hidden"], **tokens, **shared}
        if "next_tokens" in passes.functions.prefill_inputs:
            there |= inputs.next_tokens(parts)
        if "text" in passes.functions.prefill_inputs:
            there |= inputs.texts(parts, engine.max_len)
        wanted = ("slots", *engine._passes.tables, *passes.functions.prefill_inputs)
        engine._run(passes.draft_prefill, **{name: there[name] for name in wanted})
    for request, part in parts:
        request.num_computed = part.stop
        request.num_passes_in_flight += not request.wants_prompt_pass
        engine._counters.prompt_tokens += part.stop - part.start
    _expect(engine, requests, out["tokens"], stops=tuple(part.stop for _, part in parts))


def launch_tokens(engine: "Engine", kind: DraftTree | None, requests: list[Request]) -> None:
    """Launches the next tokens of requests of one kind: a decode pass, or drafting and verifying."""
    engine._involved = requests
    shared = _shared(engine, requests) | {"active": np.ones(len(requests), np.int32)}
    if kind is None:
        tokens, rows = engine._run(engine._passes.decode, **shared)["tokens"], 1
    else:
        passes = engine._drafting[kind]
        placed = inputs.placed(shared, _rows(engine, len(requests), passes.each_step))
        for bucket, step in zip(passes.draft_decode, engine._draft_steps[kind], strict=True):
            engine._run(bucket, **step, **placed)
        out = engine._run(passes.target_verify, **placed)
        verified = {name: out[name] for name in passes.functions.verified}
        engine._run(passes.draft_extend, **verified, **placed)
        tokens, rows = out["emitted"], kind.depth + 1
    for request in requests:
        request.num_passes_in_flight += 1
        request.num_rows_in_flight += rows
    engine._counters.target_steps += 1
    _expect(engine, requests, tokens, rows=rows)


def _rows(engine: "Engine", requests: int, passes: Sequence[Buckets]) -> int:
    """Requests to pad to for several passes over the same arrays: the least that holds these; while programs are
    still compiled, the least for which all of them are there."""
    fitting = [index for index, size in enumerate(engine._batches) if size >= requests]
    if any(bucket.awaits(fitting[0]) for bucket in passes):
        there = [index for index in fitting if not any(bucket.awaits(index) for bucket in passes)]
        return engine._batches[best(fitting, there=there)]
    return engine._batches[fitting[0]]


def _shared(engine: "Engine", requests: list[Request]) -> dict[str, np.ndarray]:
    slots = np.array([r.slot for r in requests], np.int32)
    return {**engine._scheduler.tables.arrays([r.id for r in requests]), "slots": slots}


def _expect(
    engine: "Engine", requests: Sequence[Request], tokens: Any, *, rows: int = 0, stops: tuple[int, ...] = ()
) -> None:
    """Records a launch whose tokens a later step will read."""
    tokens.copy_to_host_async()
    engine._unread.append(Launch(engine._counters.launches, list(enumerate(requests)), tokens, rows, stops))
    engine._counters.launches += 1
    engine._involved = ()


def read_all(engine: "Engine") -> bool:
    """Reads all launches; returns whether there were any."""
    there = bool(engine._unread)
    read(engine, engine._counters.launches)
    return there


def read(engine: "Engine", before: int) -> None:
    """Waits for all launches with a number below ``before``, and delivers their tokens."""
    while engine._unread and engine._unread[0].number < before:
        launched, begin = engine._unread[0], time.perf_counter()
        engine._involved = [request for _, request in launched.requests]
        tokens = np.asarray(launched.tokens)
        engine._counters.wait_seconds += time.perf_counter() - begin
        each = tokens.reshape(len(tokens), -1).tolist()
        engine._unread.popleft()
        for index, (row, request) in enumerate(launched.requests):
            if request.finished:
                continue
            if launched.stops:
                engine._outbox.account_prompt(request, launched.stops[index], each[row][0])
            else:
                engine._outbox.account_tokens(request, launched.rows, each[row])
        engine._involved = ()
