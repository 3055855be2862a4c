"""What goes into an engine and what comes out: parameters of a request, and its outputs."""

import dataclasses
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mla_attn.checks import INT32_MAX, check_flag, check_integer, check_integers, check_number
from mla_attn.engine.names import with_hints
from mla_attn.models.base import CausalLM
from mla_attn.speculative import DraftTree
from mla_attn.text import shown


def check_prompt(name: str, prompt: Any, *, vocab_size: int) -> list[int]:
    """The tokens of a prompt; ValueError if there are none, or if one is no token."""
    tokens = check_integers(name, prompt)
    if len(tokens) == 0:
        raise ValueError(f"{name} is empty, must hold at least one token")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ValueError(f"{name} holds token {wrong}, must be 0 to {vocab_size - 1}")
    return tokens


def check_length(name: str, prompt_len: int, max_new_tokens: int, **most: int) -> None:
    """ValueError if a prompt is too long for ``most``, which has one value, under its name."""
    ((limit, value),) = most.items()
    if prompt_len + max_new_tokens > value:
        raise ValueError(
            f"{name} has {prompt_len} tokens and max_new_tokens={max_new_tokens}: together they must be at most "
            f"{limit}={value}"
        )


def check_model(model: Any) -> None:
    """ValueError, with the way to get one, unless ``model`` is a model."""
    if not isinstance(model, CausalLM):
        is_path = isinstance(model, str | os.PathLike)
        way = "Engine.from_checkpoint(path)" if is_path else "load_checkpoint(path)"
        raise ValueError(f"model={shown(model)} is a {type(model).__name__}, must be a model: {way} loads one")


def check_params(params: Any) -> None:
    """ValueError unless ``params`` are parameters of a request."""
    if not isinstance(params, SamplingParams):
        way = "SamplingParams(**params)" if isinstance(params, dict) else "SamplingParams"
        raise ValueError(f"params={shown(params)} is a {type(params).__name__}, must be {way}")


class QueueFull(RuntimeError):
    """The engine holds as many waiting requests as it was made for; the new one was not taken."""


class EngineDead(RuntimeError):
    """After a fault the engine could not make its cache anew, so that it cannot go on. Each ``step()`` tries again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when they end.

    Attributes:
        max_new_tokens: most tokens to generate, at least 1.
        stop_token_ids: ids that end the request beside the model's ``eos_token_ids``, any sequence of them; the one
            that does is its last token.
        ignore_eos: whether to go on after one of the model's ``eos_token_ids``.
        temperature: 0 is greedy; otherwise what logits are divided by.
        top_k: draw from the k likeliest tokens; 0 from all.
        top_p: draw from the fewest likeliest tokens whose probability reaches p, 0 < p <= 1.
        seed: of this request's draws, 0 to 2**32 - 1. They depend on nothing else in the batch. If None, one is drawn
            for each request, and its outputs tell which.
        speculation: one of the engine's draft trees, or None for one token at a time. It changes how fast tokens come,
            never which.
    """

    max_new_tokens: int = 64
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    speculation: DraftTree | None = None

    def __post_init__(self):
        stops = tuple(self.stop_token_ids) if isinstance(self.stop_token_ids, Iterable) else self.stop_token_ids
        fields = {
            "max_new_tokens": check_integer("max_new_tokens", self.max_new_tokens, 1),
            "stop_token_ids": tuple(check_integers("stop_token_ids", stops)),
            "ignore_eos": check_flag("ignore_eos", self.ignore_eos),
            "temperature": check_number("temperature", self.temperature, least=0),
            "top_k": check_integer("top_k", self.top_k, 0, INT32_MAX),
            "top_p": check_number("top_p", self.top_p, above=0, most=1),
            "seed": None if self.seed is None else check_integer("seed", self.seed, 0, 2**32 - 1),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        if not isinstance(self.speculation, DraftTree | None):
            raise ValueError(f"speculation={self.speculation!r} must be a DraftTree or None")

    def with_seed(self) -> "SamplingParams":
        """These, with a seed drawn if there is none and something is drawn from it."""
        if self.seed is not None or not self.temperature:
            return self
        return dataclasses.replace(self, seed=secrets.randbits(32))


SamplingParams.__init__ = with_hints(SamplingParams.__init__)  # which dataclass has made


@dataclasses.dataclass(frozen=True)
class Output:
    """Next tokens of a request.

    Attributes:
        request_id: what ``add_request`` returned.
        tokens: those that are new; none when a request ends otherwise than by a token.
        finish_reason: "stop" (a stop token or an end token), "length", "cancelled", or "error"; None if more will come.
        error: what ended it: what its callback raised, a FloatingPointError for logits that are not finite, or what the
            steps raised that it was part of.
        seed: of the request's draws, given or drawn; None if it was greedy without one.
    """

    request_id: int
    tokens: list[int]
    finish_reason: str | None = None
    error: BaseException | None = None
    seed: int | None = None


OnOutput = Callable[[Output], object]
