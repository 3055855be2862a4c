"""What goes into an engine and what comes out: parameters of a request, and its outputs."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from mla_attn.checks import INT32_MAX, check_integer, check_integers, check_number
from mla_attn.speculative import DraftTree


class QueueFull(RuntimeError):
    """The engine holds as many waiting requests as it was made for; the new one was not taken."""


class EngineDead(RuntimeError):
    """After a fault the engine could not make its cache anew, so that it cannot go on. Each ``step()`` tries again."""


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
        finish_reason: "stop" (a stop token), "length", "cancelled", or "error"; None if more will come.
        error: what ended it: what its callback raised, a FloatingPointError for logits that are not finite, or what the
            steps raised that it was part of.
    """

    request_id: int
    tokens: list[int]
    finish_reason: str | None = None
    error: BaseException | None = None


OnOutput = Callable[[Output], object]
