"""The counters of an engine, and the statistics made from them."""

import dataclasses

from mla_attn.engine.pages import PageCounts


@dataclasses.dataclass
class Counters:
    """Counts and seconds that only grow. They are plain attributes, because an interrupt cannot split an addition."""

    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    invalid_logits: int = 0
    faults: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    first_tokens: int = 0
    steps: int = 0
    launches: int = 0
    target_steps: int = 0
    verified_tokens: int = 0
    verified_requests: int = 0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    first_token_seconds: float = 0.0
    later_token_seconds: float = 0.0
    warm_up_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class EngineStatistics:
    """Totals since the engine was created, and its present state. Times are in seconds.

    Attributes:
        finished: requests that ended by a stop token or their length.
        cancelled: requests that were cancelled.
        failed: requests that ended with "error".
        invalid_logits: requests that failed because their logits were not all finite.
        faults: steps and resets interrupted by an exception; running requests were then computed again.
        preemptions: number of times that a running request's pages were freed for another.
        waiting: queued requests, including preempted ones.
        running: requests that hold pages: up to ``max_running``, and those whose last tokens are in flight.
        prompt_tokens: prompt rows computed, including those of requests that were computed again.
        reused_tokens: prompt rows found in the prefix cache.
        new_tokens: tokens generated.
        steps: steps that launched something.
        target_steps: decode and verify passes of the target model.
        acceptance_length: mean tokens emitted per request and verify pass, including the correction or bonus token,
            excluding tokens past a request's end; None before the first verify pass.
        step_seconds: time inside ``step()``.
        wait_seconds: part of ``step_seconds`` in which the host waited for the device. While it is above 0, the device
            does not wait for the host.
        tokens_per_second: new tokens over the time inside ``step()``.
        time_to_first_token: mean time from ``add_request`` to a request's first token.
        inter_token_time: mean time between tokens of a request.
        pages_used: pages that running requests hold, each counted once; of all page tables together.
        pages_shared: pages that more than one running request holds.
        pages_idle: pages that only the prefix cache holds, which can be evicted.
        warm_up_seconds: time spent compiling ahead of time.
        programs_read: number of programs that were read from the folder of programs instead of lowered.
        programs: programs compiled.
        compiles_after_warm_up: programs XLA compiled in this process since ``warm_up``; 0 unless something is wrong.
        pages: counts of each cache group, by its name; those of a draft model begin with "draft.".
    """

    finished: int
    cancelled: int
    failed: int
    invalid_logits: int
    faults: int
    preemptions: int
    waiting: int
    running: int
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    steps: int
    target_steps: int
    acceptance_length: float | None
    step_seconds: float
    wait_seconds: float
    tokens_per_second: float
    time_to_first_token: float | None
    inter_token_time: float | None
    pages_used: int
    pages_shared: int
    pages_idle: int
    warm_up_seconds: float
    programs: int
    programs_read: int
    compiles_after_warm_up: int
    pages: dict[str, PageCounts] = dataclasses.field(default_factory=dict)


def statistics(counters: Counters, pages: dict[str, PageCounts], **now: int) -> EngineStatistics:
    """Builds the statistics: the counters, means computed from them, and the present state ``now``."""
    tables = {counts.window: counts for counts in pages.values()}.values()
    totals = {f"pages_{name}": sum(getattr(table, name) for table in tables) for name in ("used", "shared", "idle")}
    c = dataclasses.asdict(counters)
    means = {
        "acceptance_length": _mean(c["verified_tokens"], c["verified_requests"]),
        "tokens_per_second": _mean(c["new_tokens"], c["step_seconds"]) or 0.0,
        "time_to_first_token": _mean(c["first_token_seconds"], c["first_tokens"]),
        "inter_token_time": _mean(c["later_token_seconds"], c["new_tokens"] - c["first_tokens"]),
    }
    names = {field.name for field in dataclasses.fields(EngineStatistics)}
    return EngineStatistics(
        **{name: value for name, value in c.items() if name in names}, **means, **totals, pages=pages, **now
    )


def _mean(total: float | int, count: float | int) -> float | None:
    return total / count if count else None
