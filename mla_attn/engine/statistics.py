"""What an engine counts, and what it tells of it."""

import dataclasses

from mla_attn.engine.pages import PageCounts


@dataclasses.dataclass
class Counters:
    """Counts and seconds that only grow. Plain attributes: adding to one calls nothing, so no interrupt splits it."""

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
    """What an engine has done since it was made, and holds now. Times in seconds.

    Attributes:
        finished: requests that ended by a stop token or their length.
        cancelled: requests that were cancelled.
        failed: requests that ended with "error".
        invalid_logits: those of them whose logits were not all finite.
        faults: steps and resets that an exception cut short: launches lost, and what ran computed again.
        preemptions: times a running request's pages were freed for another; it is computed again later.
        waiting: requests that are queued, preempted ones included.
        running: requests that hold pages: up to ``max_running``, and those whose last tokens are on the way.
        prompt_tokens: prompt rows computed, those of requests computed again included.
        reused_tokens: prompt rows found in the cache instead.
        new_tokens: tokens generated.
        steps: steps that launched something.
        target_steps: decode and verify passes of the target model.
        acceptance_length: tokens emitted per request and verify pass, the correction or bonus included, without those
            past a request's end; None before the first.
        step_seconds: time inside ``step()``.
        wait_seconds: of it, waiting for the device; the rest is the host's own work, which the device does not wait for
            as long as there is some waiting here.
        tokens_per_second: new tokens over the time inside ``step()``.
        time_to_first_token: mean, from ``add_request`` to a request's first token.
        inter_token_time: mean, between tokens of a request after the first.
        pages_used: pages that running requests hold, each counted once; of all page tables together.
        pages_shared: those of them that several hold.
        pages_idle: pages that the prefix cache alone holds, until somebody needs them.
        warm_up_seconds: spent compiling ahead of time.
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
    compiles_after_warm_up: int
    pages: dict[str, PageCounts] = dataclasses.field(default_factory=dict)


def statistics(counters: Counters, pages: dict[str, PageCounts], **now: int) -> EngineStatistics:
    """The counters with means made of them, and what is ``now``."""
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
