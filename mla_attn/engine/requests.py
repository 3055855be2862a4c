"""What goes into an engine and what comes out: parameters of a request, its outputs, statistics."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from mla_attn.checks import INT32_MAX, check_integer, check_integers, check_number
from mla_attn.speculative import DraftTree


class QueueFull(RuntimeError):
    """The engine holds as many waiting requests as it was made for; the new one was not taken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when they end.

    Attributes:
        max_new_tokens: most tokens to generate, at least 1.
        stop_tokens: ids that end the request, any sequence of them; the one that does is its last token.
        temperature: 0 is greedy; otherwise what logits are divided by.
        top_k: draw from the k likeliest tokens; 0 from all.
        top_p: draw from the fewest likeliest tokens whose probability reaches p, 0 < p <= 1.
        seed: of this request's draws, 0 to 2**32 - 1. They depend on nothing else in the batch.
        speculation: one of the engine's draft trees, or None for one token at a time. It changes how fast tokens come,
            never which.
    """

    max_new_tokens: int = 64
    stop_tokens: Sequence[int] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    speculation: DraftTree | None = None

    def __post_init__(self):
        stop_tokens = tuple(self.stop_tokens) if isinstance(self.stop_tokens, Iterable) else self.stop_tokens
        fields = {
            "max_new_tokens": check_integer("max_new_tokens", self.max_new_tokens, 1),
            "stop_tokens": tuple(check_integers("stop_tokens", stop_tokens)),
            "temperature": check_number("temperature", self.temperature, least=0),
            "top_k": check_integer("top_k", self.top_k, 0, INT32_MAX),
            "top_p": check_number("top_p", self.top_p, above=0, most=1),
            "seed": check_integer("seed", self.seed, 0, 2**32 - 1),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        if not isinstance(self.speculation, DraftTree | None):
            raise ValueError(f"speculation={self.speculation!r} must be a DraftTree or None")


@dataclasses.dataclass(frozen=True)
class Output:
    """Next tokens of a request.

    Attributes:
        request_id: what ``add_request`` returned.
        tokens: those that are new; none when a request ends otherwise than by a token.
        finish_reason: "stop" (a stop token), "length", "cancelled", or "error" (its callback raised); None if more
            will come.
        error: what the callback raised.
    """

    request_id: int
    tokens: list[int]
    finish_reason: str | None = None
    error: BaseException | None = None


OnOutput = Callable[[Output], object]


@dataclasses.dataclass(frozen=True)
class EngineStatistics:
    """What an engine has done since it was made, and holds now. Times in seconds.

    Attributes:
        finished: requests that ended by a stop token or their length.
        cancelled: requests that were cancelled.
        failed: requests whose callback raised.
        preemptions: times a running request had to give its pages back; it is computed again later.
        waiting: requests that are queued, preempted ones included.
        running: requests that hold pages: up to ``max_batch``, and those whose last tokens are on the way.
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
        pages_used: pages that running requests hold, each counted once.
        pages_shared: those of them that several hold.
        pages_idle: pages that the prefix cache alone holds, until somebody needs them.
        warm_up_seconds: spent compiling ahead of time.
        programs: programs compiled.
        compiles_after_warm_up: programs XLA compiled in this process since ``warm_up``; 0 unless something is wrong.
    """

    finished: int
    cancelled: int
    failed: int
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
