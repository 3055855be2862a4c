"""Greedy generation for one batch of prompts, plain or speculative: a readable loop over the passes.

The loop keeps its state (last tokens, lengths, drafts, hidden states) on the device; what comes back to the host each
step is the emitted tokens, to stream them and to see who is finished.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from mla_attn.buckets import backend_compiles, ladder, warm_up
from mla_attn.cache.allocator import PageAllocator
from mla_attn.models.base import CausalLM
from mla_attn.passes import Passes, Shapes
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
        ValueError: an empty prompt, an id outside the vocabulary, or more tokens than the model's positions.
    """
    _check(model, prompts, max_new_tokens, num_drafts, page_size, prefill_chunk)
    if num_drafts:
        if tree is not None:
            raise ValueError(f"num_drafts={num_drafts} with tree={tree}: must be one or the other")
        tree = DraftTree.chain(num_drafts)
    backend_compiles()
    run = _Run(model, prompts, max_new_tokens, tree, page_size, prefill_chunk, stop_tokens, implementation, on_tokens)
    warm_up_seconds = warm_up(run.passes.buckets, run.passes.state, run.pools, progress=progress)
    compiled = backend_compiles()

    begin = time.perf_counter()
    run.prefill()
    prefilled = time.perf_counter()
    while run.active.any():
        run.speculate() if tree else run.decode()
    end = time.perf_counter()

    new_tokens = sum(map(len, run.tokens))
    statistics = Statistics(
        prompt_tokens=sum(map(len, prompts)),
        new_tokens=new_tokens,
        target_steps=run.target_steps,
        acceptance_length=run.verified_tokens / run.verified_requests if run.verified_requests else None,
        warm_up_seconds=warm_up_seconds,
        prefill_seconds=prefilled - begin,
        decode_seconds=end - prefilled,
        tokens_per_second=new_tokens / (end - begin),
        programs=sum(b.compiles for b in run.passes.buckets),
        compiles_after_warm_up=backend_compiles() - compiled,
    )
    return Generation(run.tokens, statistics)


class _Run:
    """State of one generation."""

    def __init__(
        self,
        model,
        prompts,
        max_new_tokens,
        tree,
        page_size,
        prefill_chunk,
        stop_tokens,
        implementation,
        on_tokens,
    ):
        self.prompts = [np.asarray(p, np.int32) for p in prompts]
        self.max_new_tokens, self.tree = max_new_tokens, tree
        self.stop_tokens, self.on_tokens = frozenset(stop_tokens), on_tokens
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.target_steps = self.verified_tokens = self.verified_requests = 0

        # Room for the drafts of the last verify step too: their rows are written before they are judged.
        lengths = [len(p) + max_new_tokens + (tree.size - 1 if tree else 0) for p in prompts]
        longest = max(len(p) for p in prompts)
        self.chunk = longest if prefill_chunk is None else min(prefill_chunk, longest)
        # Every pass over the prompts takes the rows of the largest: padding costs less than compiling more programs.
        rows = max(sum(map(len, parts)) for parts in self._parts(self.prompts))
        batch = ladder(len(prompts))[-1]
        shapes = Shapes(
            batches=(batch,),
            prompt_rows=ladder(rows, smallest=8)[-1:],
            table_width=-(-max(lengths) // page_size),
            page_size=page_size,
            max_len=max(lengths),
            tree=tree,
            chunked=longest > self.chunk,
        )
        num_pages = sum(-(-n // page_size) for n in lengths)
        pages = PageAllocator(num_pages, page_size, table_width=shapes.table_width)
        for request, length in enumerate(lengths):
            pages.create(request, length)
        self.table = jax.device_put(pages.table(range(len(prompts)), batch=batch))
        self.active = np.zeros(batch, np.int32)
        self.active[: len(prompts)] = 1
        self.passes = Passes(model, shapes, implementation=implementation)
        self.pools = model.create_pools(num_pages=num_pages, page_size=page_size)

    def _parts(self, sequences):
        """Sequences as long as the prompts, cut into chunks: for each pass, the part of each that goes into it."""
        for begin in range(0, max(map(len, self.prompts)), self.chunk):
            yield [s[begin : begin + self.chunk] for s in sequences]

    def _step(self, bucket, **inputs):
        outputs, self.pools = bucket(self.passes.state, self.pools, {"page_table": self.table, **inputs})
        return outputs

    def prefill(self) -> None:
        """Run the prompts, chunk by chunk; leaves the first token of each request, and its first draft, in place."""
        batch = len(self.active)
        first = np.zeros(batch, np.int32)
        done = np.zeros(len(self.prompts), np.int32)
        sampled, drafted = [], []
        following = [np.append(p[1:], np.int32(-1)) for p in self.prompts]  # -1: the token that the model samples
        both = zip(self._parts(self.prompts), self._parts(following), strict=True)
        for number, (parts, next_parts) in enumerate(both):
            q_lens = np.array([len(part) for part in parts], np.int32)
            done += q_lens
            lengths = {"seq_lens": _padded(done * (q_lens > 0), batch), "q_lens": _padded(q_lens, batch)}
            bucket = self.passes.extend if number else self.passes.prefill
            out = self._step(bucket, tokens=np.concatenate(parts), **lengths)
            sampled.append(out["tokens"])
            if self.tree:
                drafted.append(
                    self._step(
                        self.passes.draft_prefill,
                        next_tokens=np.concatenate(next_parts),
                        sampled=out["tokens"],
                        hidden=out["hidden"],
                        **lengths,
                    )
                )
        # The pass in which each prompt ended holds its first token and draft.
        last = np.array([-(-len(p) // self.chunk) - 1 for p in self.prompts])
        for request, number in enumerate(last):
            first[request] = np.asarray(sampled[number])[request]
        self.last_tokens = jax.device_put(first)
        self.lens = jax.device_put(_padded(np.array([len(p) for p in self.prompts], np.int32), batch))
        if self.tree:
            self.draft = {
                name: jax.device_put(
                    np.stack([np.asarray(drafted[n][name])[r] for r, n in enumerate(_padded(last, batch))])
                )
                for name in ("drafts", "hidden")
            }
        self._emit([[int(t)] for t in first[: len(self.prompts)]])

    def decode(self) -> None:
        """One token for every active request."""
        out = self._step(self.passes.decode, tokens=self.last_tokens, lens=self.lens, active=self.active)
        self.last_tokens, self.lens = out["tokens"], out["lens"]
        self.target_steps += 1
        self._emit([[int(t)] for t in np.asarray(out["tokens"])[: len(self.prompts)]])

    def speculate(self) -> None:
        """Draft, verify, accept, and bring the draft model up to date: one to K + 1 tokens for every active request."""
        state = {"lens": self.lens, "active": self.active}
        for step, bucket in enumerate(self.passes.draft_decode):
            drafted = self.tree.level_starts[step + 1] - 1
            steps = {"step": np.int32(step), "num_drafted": np.int32(drafted)}
            self.draft = self._step(bucket, **steps, **self.draft, **state)
        out = self._step(self.passes.target_verify, tokens=self.last_tokens, drafts=self.draft["drafts"], **state)
        self.last_tokens, self.lens = out["tokens"], out["lens"]
        self.draft = self._step(
            self.passes.draft_extend,
            lens=out["lens"],
            active=self.active,
            **{name: out[name] for name in ("emitted", "num_emitted", "hidden")},
        )
        self.target_steps += 1
        emitted = np.asarray(out["emitted"])[: len(self.prompts)]
        verified = int(self.active.sum())
        self.verified_tokens += self._emit([[int(t) for t in row if t >= 0] for row in emitted])
        self.verified_requests += verified

    def _emit(self, tokens: list[list[int]]) -> int:
        """Append each active request's new tokens, up to a stop token or the limit; returns how many were kept."""
        kept = 0
        self.active = self.active.copy()  # a step that still runs may read the old one
        for request, new in enumerate(tokens):
            if not self.active[request]:
                continue
            new = new[: self.max_new_tokens - len(self.tokens[request])]
            stop = next((i for i, token in enumerate(new) if token in self.stop_tokens), None)
            if stop is not None:
                new = new[: stop + 1]
            self.tokens[request] += new
            kept += len(new)
            if stop is not None or len(self.tokens[request]) == self.max_new_tokens:
                self.active[request] = 0
            if self.on_tokens is not None:
                self.on_tokens(request, new)
        return kept


def _padded(array: np.ndarray, length: int) -> np.ndarray:
    return np.pad(array, (0, length - len(array)))


def _check(model, prompts, max_new_tokens, num_drafts, page_size, prefill_chunk) -> None:
    if not prompts:
        raise ValueError("prompts is empty, must hold at least one prompt")
    for name, value, least in (
        ("max_new_tokens", max_new_tokens, 1),
        ("num_drafts", num_drafts, 0),
        ("page_size", page_size, 1),
        ("prefill_chunk", 1 if prefill_chunk is None else prefill_chunk, 1),
    ):
        if value < least:
            raise ValueError(f"{name}={value} must be an integer of at least {least}")
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
