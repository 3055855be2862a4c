"""The replay of a trace on an engine, with times of every request, and the profile of the device."""

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Sequence

from tqdm import tqdm

from mla_attn.bench import timing
from mla_attn.bench.serve.trace import Load, Request, make_trace
from mla_attn.engine import Engine, EngineStatistics, Output, SamplingParams

_PROFILED_STEPS = 32
_LONGEST_NAP = 0.01  # seconds; sleep() is accurate to about 0.1 ms, so short naps lose no time


@dataclasses.dataclass
class Record:
    """The times and counts of one request; times in seconds after the start of the replay.

    Attributes:
        arrival: arrival in the trace, so that the time until it is added to the engine counts as waiting.
        prompt_tokens: tokens of its prompt.
        max_new_tokens: tokens to generate.
        new_tokens: tokens received.
        outputs: number of ``Output`` objects with tokens.
        first: time of the first token.
        last: time of the last token.
        finish_reason: ``finish_reason`` of its last ``Output``.
    """

    arrival: float
    prompt_tokens: int
    max_new_tokens: int
    new_tokens: int = 0
    outputs: int = 0
    first: float | None = None
    last: float | None = None
    finish_reason: str | None = None

    @property
    def served(self) -> bool:
        """Whether it received all tokens."""
        return self.new_tokens == self.max_new_tokens

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first is None else self.first - self.arrival

    @property
    def time_per_token(self) -> float | None:
        """Mean time between its tokens; None if there are fewer than two."""
        if self.first is None or self.last is None or self.new_tokens < 2:
            return None
        return (self.last - self.first) / (self.new_tokens - 1)

    @property
    def latency(self) -> float | None:
        return None if self.last is None else self.last - self.arrival

    def add(self, output: Output, now: float) -> None:
        if output.tokens:
            self.first = now if self.first is None else self.first
            self.last = now
            self.new_tokens += len(output.tokens)
            self.outputs += 1
        self.finish_reason = output.finish_reason


@dataclasses.dataclass(frozen=True)
class Replay:
    """Figures of a replayed trace.

    Attributes:
        records: one record per request, ordered by arrival.
        duration: seconds from the first arrival to the last token.
        timeline: after every step: seconds, running and waiting requests.
        most_pages: largest number of pages that requests held after a step.
        prompt_rows: prompt rows computed; those of preempted requests count again.
        reused_rows: prompt rows found in the prefix cache instead; those of preempted requests count again.
        preemptions: number of times that a running request's pages were freed for others.
        steps: steps of the engine.
        step_seconds: seconds inside steps.
        wait_seconds: seconds of ``step_seconds`` spent waiting for the device.
        statistics: the engine's statistics at the end, which include earlier replays.
    """

    records: list[Record]
    duration: float
    timeline: list[tuple[float, int, int]]
    most_pages: int
    prompt_rows: int
    reused_rows: int
    preemptions: int
    steps: int
    step_seconds: float
    wait_seconds: float
    statistics: EngineStatistics


def replay(engine: Engine, trace: Sequence[Request], params: SamplingParams, *, progress: bool = True) -> Replay:
    """Replays a trace on an idle, warm engine. A request is added between steps, once its arrival time has passed.

    Args:
        engine: engine with room for requests as long as the trace's, and for as many waiting ones.
        trace: requests, ordered by arrival.
        params: parameters of all requests except ``max_new_tokens``; request n has the seed plus n.
        progress: whether to show a progress bar of finished requests.
    """
    ahead, records, timeline, most_pages = collections.deque(enumerate(trace)), [], [], 0
    before, begin = engine.statistics, time.perf_counter()

    def note(record: Record, output: Output) -> None:
        record.add(output, time.perf_counter() - begin)

    with tqdm(total=len(trace), desc="serving", unit="request", disable=not progress, leave=False) as bar:
        while ahead or engine.busy:
            while ahead and ahead[0][1].arrival <= time.perf_counter() - begin:
                number, request = ahead.popleft()
                record = Record(request.arrival, len(request.prompt), request.new_tokens)
                seed = ((params.seed or 0) + number) % 2**32
                own = dataclasses.replace(params, max_new_tokens=request.new_tokens, seed=seed)
                engine.add_request(request.prompt, own, on_output=functools.partial(note, record))
                records.append(record)
            if not engine.busy:  # the next arrival is in the future
                time.sleep(max(0.0, min(ahead[0][1].arrival - (time.perf_counter() - begin), _LONGEST_NAP)))
                continue
            outputs = engine.step()
            now, statistics = time.perf_counter() - begin, engine.statistics
            timeline.append((now, statistics.running, statistics.waiting))
            most_pages = max(most_pages, statistics.pages_used)
            bar.update(sum(output.finish_reason is not None for output in outputs))
    duration = max((record.last for record in records if record.last is not None), default=0.0)
    after = engine.statistics
    return Replay(
        records,
        duration,
        timeline,
        most_pages,
        prompt_rows=after.prompt_tokens - before.prompt_tokens,
        reused_rows=after.reused_tokens - before.reused_tokens,
        preemptions=after.preemptions - before.preemptions,
        steps=after.steps - before.steps,
        step_seconds=after.step_seconds - before.step_seconds,
        wait_seconds=after.wait_seconds - before.wait_seconds,
        statistics=after,
    )


def rehearse(engine: Engine, load: Load, params: SamplingParams) -> None:
    """Runs requests like the load's with other tokens, because the first run of a program takes longer."""
    replay(engine, _twice_the_batch(engine, load, min(load.new_tokens, 16)), params, progress=False)


def watch(engine: Engine, load: Load, params: SamplingParams) -> dict[str, int | float]:
    """Profiles steps of an engine with a full batch and waiting requests, as far as pages and tokens allow.

    Returns:
        ``steps`` profiled, mean ``step_time`` in seconds, and shares of the time: ``busy`` (a kernel ran) and
        ``waited`` (for the host, in gaps longer than ``timing.LONG_GAP``). Profiling slows the host, because XLA then
        launches every kernel without command buffers: steps take longer than usual, and ``waited`` is an upper bound.

    Raises:
        RuntimeError: the profile has no kernels.
    """
    trace = _twice_the_batch(engine, load, load.new_tokens)
    ids = [
        engine.add_request(request.prompt, dataclasses.replace(params, max_new_tokens=request.new_tokens))
        for request in trace
    ]
    while (before := engine.statistics).waiting > len(ids) // 2:
        engine.step()
    try:
        profile = timing.occupancy(lambda: [engine.step() for _ in range(_PROFILED_STEPS)])
        steps = engine.statistics.steps - before.steps
    finally:
        for name in ids:
            engine.cancel(name)
        list(engine.run())
    shares = {"busy": profile.busy / profile.span, "waited": profile.waited / profile.span}
    return {"steps": steps, "step_time": profile.span / max(steps, 1), **shares}


def _twice_the_batch(engine: Engine, load: Load, new_tokens: int) -> tuple[Request, ...]:
    few = {"requests": 2 * engine.max_running, "rate": math.inf, "new_tokens": new_tokens, "long_prompt": 0}
    load = dataclasses.replace(load, **few, seed=load.seed + 1)
    return make_trace(load, vocab_size=engine.model.vocab_size, max_len=engine.max_len)
