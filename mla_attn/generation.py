"""Greedy generation for one batch of prompts, plain or speculative, on an engine of its own."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from jax.typing import DTypeLike

from mla_attn.buckets import ladder
from mla_attn.checks import check_integer, check_skip_threshold
from mla_attn.engine import Engine, SamplingParams
from mla_attn.engine.names import with_hints
from mla_attn.engine.pages import CacheSizes, Limits
from mla_attn.engine.requests import check_length, check_prompt
from mla_attn.engine.sizes import draft_limits, window_pages
from mla_attn.models.base import CausalLM, stored_as
from mla_attn.passes import Drafts, all_groups, check_drafts, most_positions
from mla_attn.speculative import DraftTree

OnTokens = Callable[[int, list[int]], None]


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts and times of a generation.

    Attributes:
        prompt_tokens: tokens of all prompts.
        new_tokens: generated tokens of all requests.
        target_steps: decode or verify passes of the target model after the prompts.
        acceptance_length: mean tokens emitted per request and verify pass, including the correction or bonus token (1
            to K + 1), excluding the token after the prompt and tokens past a stop or the length limit; None without
            speculation or before the first verify pass.
        warm_up_seconds: time to compile, before the first prompt token.
        prefill_seconds: time from the first prompt token to the first new token.
        decode_seconds: time from then to the end.
        tokens_per_second: new tokens over prefill and decode seconds.
        programs: programs compiled ahead of time.
        compiles_after_warm_up: programs that XLA compiled after that; 0 unless something is wrong.
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
    """The new tokens of each prompt, in order, and statistics. A stop or end token is the last token of its request."""

    tokens: list[list[int]]
    statistics: Statistics


@with_hints
def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_drafts: int = 0,
    tree: DraftTree | None = None,
    draft: Drafts = None,
    page_size: int = 64,
    prefill_chunk: int | None = None,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    implementation: str | None = None,
    skip_threshold: float | None = None,
    kv_dtype: DTypeLike | None = None,
    kv_scale: Any = None,
    draft_kv_dtype: DTypeLike | None = None,
    on_tokens: OnTokens | None = None,
    progress: bool = False,
) -> Generation:
    """Generates greedily for all ``prompts`` as one batch.

    Args:
        model: a loaded checkpoint.
        prompts: token ids of each prompt, at least one each, used unchanged.
        max_new_tokens: most tokens to generate per prompt.
        num_drafts: drafts K per verify step, one after the other; 0 decodes one token at a time.
        tree: draft tree, instead of ``num_drafts``.
        draft: drafter for ``num_drafts`` or ``tree``: a ``DraftModel`` or ``NgramDrafts``; None for the model's MTP
            layer.
        page_size: tokens per cache page.
        prefill_chunk: prompt tokens per request and pass; None for whole prompts.
        stop_token_ids: ids that end a request, in addition to the model's ``eos_token_ids``.
        ignore_eos: whether to continue after one of the model's ``eos_token_ids``.
        implementation: attention implementation; None for the default choice.
        skip_threshold: as in ``mla_attention``, for all passes.
        kv_dtype, kv_scale, draft_kv_dtype: formats and scales of the cache rows, as in ``Engine``.
        on_tokens: function called with a prompt's index and its next tokens whenever there are some.
        progress: whether to show a progress bar while compiling.

    Raises:
        ValueError: a size is not an integer or too small, a prompt is empty or has an id outside the vocabulary or more
            tokens than the model's positions, or the model cannot draft.
        TypeError: an unknown argument; the message suggests a name.
        FloatingPointError: logits are not all finite.
    """
    if not prompts:
        raise ValueError("prompts is empty, must hold at least one prompt")
    check_integer("num_drafts", num_drafts, 0)
    check_integer("page_size", page_size, 1)
    if prefill_chunk is not None:
        check_integer("prefill_chunk", prefill_chunk, 1)
    if num_drafts:
        if tree is not None:
            raise ValueError(f"num_drafts={num_drafts} with tree={tree}: must be one or the other")
        tree = DraftTree.chain(num_drafts)
    params = SamplingParams(
        max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos, speculation=tree
    )
    prompts = [check_prompt(f"prompts[{i}]", prompt, vocab_size=model.vocab_size) for i, prompt in enumerate(prompts)]
    positions = most_positions(model, draft)
    if tree is not None or draft is not None:
        check_drafts(draft, model, [] if tree is None else [tree])
    for i, prompt in enumerate(prompts):
        check_length(f"prompts[{i}]", len(prompt), max_new_tokens, max_position_embeddings=positions)
    groups = stored_as(all_groups(model, draft), kv_dtype, kv_scale, draft_kv_dtype)
    attention = {"implementation": implementation, "skip_threshold": check_skip_threshold(skip_threshold)}
    engine = _engine(model, groups, prompts, max_new_tokens, tree, draft, page_size, prefill_chunk, attention)
    engine.warm_up(progress=progress)
    tokens: dict[int, list[int]] = {engine.add_request(prompt, params): [] for prompt in prompts}
    indices = {name: index for index, name in enumerate(tokens)}
    begin, begun = time.perf_counter(), set()
    prefilled = begin
    while engine.busy:
        for output in sorted(engine.step(), key=lambda output: output.request_id):
            if output.error is not None:
                raise output.error
            tokens[output.request_id] += output.tokens
            if on_tokens is not None:
                on_tokens(indices[output.request_id], output.tokens)
            if output.request_id not in begun:
                begun.add(output.request_id)
                prefilled = time.perf_counter()
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
    return Generation(list(tokens.values()), statistics)


def _engine(model, groups, prompts, max_new_tokens, tree, draft, page_size, prefill_chunk, attention) -> Engine:
    """An engine that computes all prompts in parallel, chunk by chunk, then all new tokens, with pages for all."""
    longest, trees = max(map(len, prompts)), () if tree is None else (tree,)
    drafting = draft_limits(draft, trees)
    chunk = longest if prefill_chunk is None else min(prefill_chunk, longest)
    # Include the drafts of the last verify pass, whose rows are written before they are accepted or rejected.
    drafts = drafting["verify_rows"] - 1 + drafting["rows_ahead"]
    lengths = [min(len(p) + max_new_tokens + drafts, most_positions(model, draft)) for p in prompts]
    # Every pass over prompts has as many rows as the first, because padding costs less than compiling more programs.
    rows, batch = sum(min(len(p), chunk) for p in prompts), ladder(len(prompts))[-1]
    limits = Limits(
        max_batch=batch,
        max_len=max(lengths),
        max_waiting=len(prompts),
        prompt_tokens=rows,
        prompts_per_pass=batch,
        prompt_chunk=chunk,
        whole_prompts=chunk == longest,
        all_drafted=bool(trees),
        prompts_first=True,
        overlap=False,
        **drafting,
    )
    facts = {"page_size": page_size, "prefix_cache": False}
    full = any(group.window is None for group in groups)
    num_pages = sum(-(-length // page_size) for length in lengths) if full else 0
    return Engine.of(
        model,
        limits,
        CacheSizes(num_pages=num_pages, windows=window_pages(groups, limits, **facts), **facts),
        speculation=trees,
        draft=draft,
        batches=(batch,),
        prompt_rows=ladder(rows, smallest=8)[-1:],
        groups=groups,
        **attention,
    )
