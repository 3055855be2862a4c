"""Greedy generation for one batch of prompts, plain or speculative: a batch that the engine runs from begin to end."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from mla_attn.buckets import ladder
from mla_attn.checks import check_integer
from mla_attn.engine import Engine, Output, SamplingParams
from mla_attn.engine.scheduler import CacheSizes, Limits
from mla_attn.models.base import CausalLM
from mla_attn.speculative import DraftTree

OnTokens = Callable[[int, list[int]], None]


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What a generation took.

    Attributes:
        prompt_tokens: tokens of all prompts.
        new_tokens: tokens generated, all requests together.
        target_steps: passes of the target model after the prompts: decode or verify calls.
        acceptance_length: tokens emitted per request and verify step, the correction or bonus included (1 to K + 1; the
            token that follows the prompt is not counted, nor are tokens past a stop or the length limit); None without
            speculation or before the first verify step.
        warm_up_seconds: compiling, before the first prompt token.
        prefill_seconds: from the first prompt token to the first new one.
        decode_seconds: from then to the end.
        tokens_per_second: new tokens over prefill and decode seconds.
        programs: programs compiled ahead of time.
        compiles_after_warm_up: programs XLA compiled after that; 0 unless something is wrong.
    """

    prompt_tokens: int
    new_tokens: int
    target_steps: int
    acceptance_length: float | None
    warm_up_seconds: float
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    programs: int
    compiles_after_warm_up: int


@dataclasses.dataclass(frozen=True)
class Generation:
    """New tokens of each prompt, in order, and statistics. A stop token ends a request and is its last token."""

    tokens: list[list[int]]
    statistics: Statistics


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_drafts: int = 0,
    tree: DraftTree | None = None,
    page_size: int = 64,
    prefill_chunk: int | None = None,
    stop_tokens: Sequence[int] = (),
    implementation: str | None = None,
    on_tokens: OnTokens | None = None,
    progress: bool = False,
) -> Generation:
    """Generate greedily for all ``prompts`` as one batch.

    Args:
        model: a loaded checkpoint.
        prompts: token ids of each prompt, at least one each; used as they are.
        max_new_tokens: most tokens to generate per prompt.
        num_drafts: drafts K per verify step, one after the other, made by the model's MTP layer; 0 decodes one token at
            a time.
        tree: drafts as a tree instead.
        page_size: tokens per cache page.
        prefill_chunk: prompt tokens per request and pass; None takes whole prompts.
        stop_tokens: ids that end a request.
        implementation: of the attention ops; None picks.
        on_tokens: called with a prompt's index and its next tokens as they come.
        progress: show a progress bar while compiling.

    Raises:
        ValueError: a size that is no integer or too small, an empty prompt, an id outside the vocabulary, more tokens
            than the model's positions, or drafts of a model that cannot draft.
        FloatingPointError: logits that are not all finite.
    """
    _check(model, prompts, max_new_tokens, num_drafts, page_size, prefill_chunk)
    if num_drafts:
        if tree is not None:
            raise ValueError(f"num_drafts={num_drafts} with tree={tree}: must be one or the other")
        tree = DraftTree.chain(num_drafts)
    engine = _engine(model, prompts, max_new_tokens, tree, page_size, prefill_chunk, implementation)
    engine.warm_up(progress=progress)
    params = SamplingParams(max_new_tokens=max_new_tokens, stop_tokens=stop_tokens, speculation=tree)
    indices = {engine.add_request(prompt, params): index for index, prompt in enumerate(prompts)}
    tokens: list[list[int]] = [[] for _ in prompts]

    def emit(outputs: list[Output]) -> None:
        for output in sorted(outputs, key=lambda output: output.request_id):
            if output.error is not None:
                raise output.error
            index = indices[output.request_id]
            tokens[index] += output.tokens
            if on_tokens is not None:
                on_tokens(index, output.tokens)

    begin, first = time.perf_counter(), []
    while len(first) < len(prompts):  # prompts come first, and each gives one token
        first += engine.step()
    prefilled = time.perf_counter()
    emit(first)
    while engine.busy:
        emit(engine.step())
    end, done = time.perf_counter(), engine.statistics
    statistics = Statistics(
        prompt_tokens=sum(map(len, prompts)),
        new_tokens=done.new_tokens,
        target_steps=done.target_steps,
        acceptance_length=done.acceptance_length,
        warm_up_seconds=done.warm_up_seconds,
        prefill_seconds=prefilled - begin,
        decode_seconds=end - prefilled,
        tokens_per_second=done.new_tokens / (end - begin),
        programs=done.programs,
        compiles_after_warm_up=done.compiles_after_warm_up,
    )
    return Generation(tokens, statistics)


def _engine(model, prompts, max_new_tokens, tree, page_size, prefill_chunk, implementation) -> Engine:
    """An engine that computes all prompts side by side, chunk by chunk, and then all new tokens, with pages for all."""
    longest, drafts = max(map(len, prompts)), tree.size - 1 if tree else 0
    chunk = longest if prefill_chunk is None else min(prefill_chunk, longest)
    # Room for the drafts of the last verify step too: their rows are written before they are judged.
    lengths = [min(len(p) + max_new_tokens + drafts, model.max_position_embeddings) for p in prompts]
    # Every pass over the prompts takes the rows of the first: padding costs less than compiling more programs.
    rows, batch = sum(min(len(p), chunk) for p in prompts), ladder(len(prompts))[-1]
    limits = Limits(
        max_batch=batch,
        max_len=max(lengths),
        max_waiting=len(prompts),
        prompt_tokens=rows,
        prompts_per_pass=batch,
        prompt_chunk=chunk,
        whole_prompts=chunk == longest,
        prompts_first=True,
        overlap=False,
    )
    num_pages = sum(-(-length // page_size) for length in lengths)
    return Engine.of(
        model,
        limits,
        CacheSizes(num_pages=num_pages, page_size=page_size, prefix_cache=False),
        speculation=() if tree is None else (tree,),
        batches=(batch,),
        prompt_rows=ladder(rows, smallest=8)[-1:],
        implementation=implementation,
    )


def _check(model, prompts, max_new_tokens, num_drafts, page_size, prefill_chunk) -> None:
    if not prompts:
        raise ValueError("prompts is empty, must hold at least one prompt")
    check_integer("max_new_tokens", max_new_tokens, 1)
    check_integer("num_drafts", num_drafts, 0)
    check_integer("page_size", page_size, 1)
    if prefill_chunk is not None:
        check_integer("prefill_chunk", prefill_chunk, 1)
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompts[{i}] is empty, must hold at least one token")
        wrong = [t for t in prompt if not 0 <= t < model.vocab_size]
        if wrong:
            raise ValueError(f"prompts[{i}] holds token {wrong[0]}, must be 0 to {model.vocab_size - 1}")
        if len(prompt) + max_new_tokens > model.max_position_embeddings:
            raise ValueError(
                f"prompts[{i}] has {len(prompt)} tokens and max_new_tokens={max_new_tokens}: together they must be at "
                f"most max_position_embeddings={model.max_position_embeddings}"
            )
