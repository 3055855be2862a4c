"""``Engine.generate``: serves a list of prompts to the end and returns their results."""

import collections
import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tqdm import tqdm

from mla_attn.engine.requests import EngineDead, Output, QueueFull, SamplingParams
from mla_attn.engine.scheduler import Request
from mla_attn.models.tokenizer import IdTokenizer
from mla_attn.text import shown

if TYPE_CHECKING:
    from mla_attn.engine.engine import Engine

logger = logging.getLogger(__name__)
Prompt = str | Sequence[int]


@dataclasses.dataclass
class Result:
    """The result of one prompt.

    Attributes:
        prompt: the prompt's token ids.
        tokens: the generated tokens.
        text: the text of ``tokens``; None if the engine has no usable tokenizer.
        finish_reason: ``finish_reason`` of the last ``Output``.
        error: ``error`` of the last ``Output``.
        seed: ``seed`` of the last ``Output``.
    """

    prompt: Sequence[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str | None = None
    finish_reason: str | None = None
    error: BaseException | None = None
    seed: int | None = None


def generate(
    engine: "Engine",
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    progress: bool,
) -> list[Result]:
    """Implements ``Engine.generate``."""
    with engine._lock:
        engine._refuse_in_callback("generate")
    if isinstance(prompts, str):
        raise ValueError(f"prompts={shown(prompts)} must be a sequence of prompts: [{shown(prompts)}]")
    each = params if isinstance(params, Sequence) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise ValueError(f"params has {len(each)} elements, must have as many as prompts: {len(prompts)}")
    results: dict[int, Result] = {}  # by request id
    left: set[int] = set()

    def note(output: Output) -> None:
        result = results[output.request_id]
        result.tokens += output.tokens
        result.finish_reason, result.error, result.seed = output.finish_reason, output.error, output.seed
        if output.finish_reason is not None:
            left.discard(output.request_id)

    requests = []
    for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
        try:
            requests.append(engine._request(prompt, own, note))
        except ValueError as error:
            raise ValueError(f"prompts[{index}]: {error}") from None
    for request in requests:
        results[request.id] = Result(request.tokens[: request.prompt_len].tolist())
        left.add(request.id)
    if any(bucket.pending for bucket in engine._programs()):
        engine.warm_up(progress=progress)
    try:
        _serve(engine, collections.deque(requests), left, progress)
    except BaseException:
        for request in requests:
            engine._leave(request)
        raise
    for result in results.values():
        if engine.tokenizer is not None and not isinstance(engine.tokenizer, IdTokenizer):
            result.text = engine.tokenizer.decode(result.tokens)
    return list(results.values())


def _serve(engine: "Engine", waiting: collections.deque[Request], left: set[int], progress: bool) -> None:
    """Steps until all requests have ended, and adds waiting ones whenever the engine's queue has room."""
    mine = left.copy()
    with tqdm(total=len(left), desc="generating", unit="prompt", disable=not progress) as bar:
        while left:
            while waiting:
                try:
                    engine._add(waiting[0])
                except QueueFull:
                    break
                waiting.popleft()
            _step(engine, mine)
            bar.update(len(mine) - len(left) - bar.n)
        if not engine._live:  # only passes whose requests have all ended may be in flight
            _step(engine, mine)


def _step(engine: "Engine", mine: set[int]) -> None:
    """Runs a step. A fault is logged; the next step ends the affected requests with "error" or computes them again."""
    try:
        engine._advance()
    except EngineDead:
        raise
    except Exception:  # any, because the engine recovers from every fault; interrupts propagate
        logger.exception("a step was cut short; the next one computes its requests again")
    # Outputs of this call's requests went to callbacks; those of others stay for the next ``step()`` or ``run()``.
    engine._outbox.outputs = [output for output in engine._outbox.outputs if output.request_id not in mine]
