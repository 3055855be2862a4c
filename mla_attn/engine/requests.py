"""The parameters of a request, its outputs, and their checks."""

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
    """Returns the tokens of a prompt; raises ValueError if it is empty or holds an id outside the vocabulary."""
    tokens = check_integers(name, prompt)
    if len(tokens) == 0:
        raise ValueError(f"{name} is empty, must hold at least one token")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ValueError(f"{name} holds token {wrong}, must be 0 to {vocab_size - 1}")
    return tokens


def check_length(name: str, prompt_len: int, max_new_tokens: int, **most: int) -> None:
    """Raises ValueError if a prompt is too long for ``most``, one keyword argument, whose name the message gives."""
    ((limit, value),) = most.items()
    if prompt_len + max_new_tokens > value:
        raise ValueError(
            f"{name} has {prompt_len} tokens and max_new_tokens={max_new_tokens}: together they must be at most "
            f"{limit}={value}"
        )


def check_model(model: Any) -> None:
    """Raises ValueError, which says how to load a model, unless ``model`` is one."""
    if not isinstance(model, CausalLM):
        is_path = isinstance(model, str | os.PathLike)
        way = "Engine.from_checkpoint(path)" if is_path else "load_checkpoint(path)"
        raise ValueError(f"model={shown(model)} is a {type(model).__name__}, must be a model: {way} loads one")


def check_params(params: Any) -> None:
    """Raises ValueError unless ``params`` is a ``SamplingParams``."""
    if not isinstance(params, SamplingParams):
        way = "SamplingParams(**params)" if isinstance(params, dict) else "SamplingParams"
        raise ValueError(f"params={shown(params)} is a {type(params).__name__}, must be {way}")


class QueueFull(RuntimeError):
    """The queue already holds ``max_waiting`` requests; the new one was not added."""


class EngineDead(RuntimeError):
    """The engine could not allocate its cache again after a fault, so it cannot continue. Each ``step()`` retries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when they end.

    Attributes:
        max_new_tokens: most tokens to generate, at least 1.
        stop_token_ids: ids that end the request, in addition to the model's ``eos_token_ids``; any sequence. The stop
            token is the request's last token.
        ignore_eos: whether to continue after one of the model's ``eos_token_ids``.
        temperature: divisor of the logits; 0 is greedy.
        top_k: sample from the k likeliest tokens; 0 for all.
        top_p: sample from the smallest set of likeliest tokens whose total probability reaches p, 0 < p <= 1.
        seed: random seed of this request, 0 to 2**32 - 1. Its tokens do not depend on other requests in the batch. If
            None, each request gets a random seed, which its outputs report.
        speculation: one of the engine's draft trees, or None for one token at a time. It changes only how fast tokens
            are generated.
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
        """These parameters, with a random seed if they have none and are not greedy."""
        if self.seed is not None or not self.temperature:
            return self
        return dataclasses.replace(self, seed=secrets.randbits(32))


SamplingParams.__init__ = with_hints(SamplingParams.__init__)  # the constructor made by ``dataclass``


@dataclasses.dataclass(frozen=True)
class Output:
    """The next tokens of a request.

    Attributes:
        request_id: the id that ``add_request`` returned.
        tokens: the new tokens; empty if the request ended without a new token.
        finish_reason: "stop" (a stop token or an end token), "length", "cancelled", or "error"; None if more will come.
        error: the exception that ended the request: raised by its callback, a FloatingPointError for logits that are
            not finite, or raised by steps in which it ran.
        seed: the request's random seed, given or chosen; None for a greedy request without one.
    """

    request_id: int
    tokens: list[int]
    finish_reason: str | None = None
    error: BaseException | None = None
    seed: int | None = None


OnOutput = Callable[[Output], object]
