"""Synthetic traces: arrivals, lengths and shared prefixes of requests."""

import dataclasses
import math

import numpy as np
from jaxtyping import Int

COMMON_PREFIXES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The distributions that a trace is drawn from.

    Attributes:
        requests: number of requests.
        rate: arrivals per second, a Poisson process; inf for all at once.
        prompt_tokens: mean length of the prompts without their prefixes; log-normal.
        new_tokens: mean number of tokens to generate; log-normal.
        spread: standard deviation of the logarithms of both; 0 makes all lengths equal.
        shared_prefix: tokens of each of ``COMMON_PREFIXES`` prefixes; 0 for none.
        shared_share: share of requests that begin with one of these prefixes, 0 to 1.
        long_prompt: prompt tokens of one more request, which arrives after all others; 0 for none.
        seed: seed of all random draws. Prompts and lengths do not depend on the rate.
    """

    requests: int
    rate: float = math.inf
    prompt_tokens: int
    new_tokens: int
    spread: float = 0.5
    shared_prefix: int = 0
    shared_share: float = 0.5
    long_prompt: int = 0
    seed: int = 0

    def __post_init__(self):
        for name, right, allowed in (
            ("requests", self.requests >= 1, "at least 1"),
            ("rate", self.rate > 0, "above 0"),
            ("prompt_tokens", self.prompt_tokens >= 1, "at least 1"),
            ("new_tokens", self.new_tokens >= 1, "at least 1"),
            ("spread", 0 <= self.spread < math.inf, "at least 0 and finite"),
            ("shared_prefix", self.shared_prefix >= 0, "at least 0"),
            ("shared_share", 0 <= self.shared_share <= 1, "0 to 1"),
            ("long_prompt", self.long_prompt >= 0, "at least 0"),
            ("seed", self.seed >= 0, "at least 0"),
        ):
            if not right:
                raise ValueError(f"{name}={getattr(self, name)} must be {allowed}")

    @property
    def mean_tokens(self) -> int:
        """Mean tokens of a request with a prefix, including new tokens."""
        return self.shared_prefix + self.prompt_tokens + self.new_tokens


@dataclasses.dataclass(frozen=True)
class Request:
    """One request of a trace.

    Attributes:
        arrival: seconds after the first request.
        prompt: token ids, a common prefix included.
        new_tokens: tokens to generate.
        prefix: index of the common prefix that the prompt begins with, or None.
    """

    arrival: float
    prompt: tuple[int, ...]
    new_tokens: int
    prefix: int | None


def make_trace(load: Load, *, vocab_size: int, max_len: int) -> tuple[Request, ...]:
    """Draws requests of at most ``max_len`` tokens, including new ones, sorted by arrival. It is deterministic.

    Long prompts are cut so that the mean number of new tokens fits; then new tokens are cut to the remaining room.
    """
    if load.mean_tokens > max_len:
        raise ValueError(
            f"shared_prefix={load.shared_prefix}, prompt_tokens={load.prompt_tokens} and new_tokens={load.new_tokens} "
            f"are {load.mean_tokens} together, must be at most max_len={max_len}"
        )
    if load.long_prompt + load.new_tokens > max_len:
        raise ValueError(
            f"long_prompt={load.long_prompt} and new_tokens={load.new_tokens} are {load.long_prompt + load.new_tokens} "
            f"together, must be at most max_len={max_len}"
        )
    # One generator for each quantity, so that changing one leaves the others unchanged.
    arriving, sizing, sharing, drawing = np.random.default_rng(load.seed).spawn(4)
    gaps = arriving.exponential(1 / load.rate, load.requests)
    own = _lengths(sizing, load.prompt_tokens, load, max_len - load.shared_prefix - load.new_tokens)
    new = _lengths(sizing, load.new_tokens, load, max_len)
    shared = (sharing.random(load.requests) < load.shared_share) & (load.shared_prefix > 0)
    which = sharing.integers(COMMON_PREFIXES, size=load.requests)
    prefixes = drawing.integers(vocab_size, size=(COMMON_PREFIXES, load.shared_prefix)).tolist()
    requests = []
    for i, arrival in enumerate((np.cumsum(gaps) - gaps[0]).tolist()):
        prefix = int(which[i]) if shared[i] else None
        prompt = [] if prefix is None else prefixes[prefix]
        prompt = (*prompt, *drawing.integers(vocab_size, size=own[i]).tolist())
        requests.append(Request(arrival, prompt, min(int(new[i]), max_len - len(prompt)), prefix))
    if load.long_prompt:
        prompt = tuple(drawing.integers(vocab_size, size=load.long_prompt).tolist())
        requests.append(Request(requests[-1].arrival, prompt, load.new_tokens, None))
    return tuple(requests)


def _lengths(draw: np.random.Generator, mean: int, load: Load, most: int) -> Int[np.ndarray, "N"]:
    # The mean of a log-normal distribution is exp(mu + sigma**2 / 2).
    drawn = draw.lognormal(math.log(mean) - load.spread**2 / 2, load.spread, load.requests)
    return np.clip(np.rint(drawn), 1, most).astype(np.int64)
