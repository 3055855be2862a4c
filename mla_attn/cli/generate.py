"""``mla-attn generate``."""

import argparse
import dataclasses
import json
import re
import secrets
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from mla_attn.cli.devices import parallelism_of, sharded_drafts
from mla_attn.cli.drafts import open_drafts
from mla_attn.engine import Engine, SamplingParams
from mla_attn.engine.sizes import check_engine_fits, draft_limits
from mla_attn.models import open_checkpoint
from mla_attn.models.files import read_json
from mla_attn.models.tokenizer import IdTokenizer, load_tokenizer
from mla_attn.speculative import DraftTree
from mla_attn.text import shown


def main(options: argparse.Namespace) -> int:
    """Prints generated texts to stdout and their prompts to stderr, or JSON. Exit status 0."""
    tokenizer = open_tokenizer(options.checkpoint)
    prompts = read_prompts(options, tokenizer)
    if isinstance(tokenizer, IdTokenizer):
        print(f"mla-attn: warning: no text, token ids alone: {tokenizer.reason}", file=sys.stderr)
    options.seed = secrets.randbits(32) if options.seed is None else options.seed
    engine, parameters = _engine(options, prompts)
    engine.warm_up(progress=sys.stderr.isatty())
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    show = None if options.json or len(prompts) > 1 else Printer(tokenizer)
    if show is not None:
        print(f"prompt: {texts[0]}", file=sys.stderr, flush=True)
    tokens = {engine.add_request(*request): [] for request in zip(prompts, parameters, strict=True)}
    for output in engine.run():
        tokens[output.request_id] += output.tokens
        if show is not None:
            show(0, output.tokens)
    if show is not None:
        show.finish()
        print()
    elif options.json:
        _print_json(options, prompts, list(tokens.values()), tokenizer, engine)
        return 0
    else:
        for number, (prompt, new) in enumerate(zip(texts, tokens.values(), strict=True)):
            print(f"[{number}] prompt: {prompt}", file=sys.stderr, flush=True)
            print(f"[{number}] {tokenizer.decode(new)}", flush=True)
    drawn = f", seed {options.seed}" if options.temperature else ""
    print(summary(engine.statistics, engine.statistics.step_seconds) + drawn, file=sys.stderr)
    return 0


def _print_json(options: argparse.Namespace, prompts, tokens, tokenizer, engine: Engine) -> None:
    requests = [
        {
            "prompt_ids": prompt,
            "tokens": new,
            "text": None if isinstance(tokenizer, IdTokenizer) else tokenizer.decode(new),
        }
        for prompt, new in zip(prompts, tokens, strict=True)
    ]
    stats = dataclasses.asdict(engine.statistics)
    print(json.dumps({"requests": requests, "seed": options.seed, "stats": stats}))


def _engine(options: argparse.Namespace, prompts: list[list[int]]) -> tuple[Engine, list[SamplingParams]]:
    """An engine for these prompts, and each one's parameters; sizes are checked before weights are read."""
    parallelism = parallelism_of(options)
    where: dict[str, Any] = {} if parallelism is None else {"parallelism": parallelism}
    checkpoint = open_checkpoint(options.checkpoint, dtype=jnp.dtype(options.dtype), **where)
    model = checkpoint.model
    scales = None if options.kv_scales is None else read_json(Path(options.kv_scales))
    _check_prompts(options, prompts, model)
    widths = options.tree or (1,) * options.speculate
    trees, page_size = (DraftTree(widths),) if widths else (), options.page_size
    draft, load_draft = open_drafts(options, model, trees)
    limits = draft_limits(draft, trees)
    drafts = limits["verify_rows"] - 1 + limits["rows_ahead"]
    lengths = [len(prompt) + options.max_new_tokens for prompt in prompts]
    pages = [-(-(length + drafts) // page_size) for length in lengths]
    if options.num_pages is not None and options.num_pages < max(pages):
        raise ValueError(
            f"--num-pages {options.num_pages} must be at least {max(pages)}: the longest prompt needs them"
        )
    sizes = {
        "max_batch": min(options.max_batch or len(prompts), len(prompts)),
        "num_pages": options.num_pages or sum(pages),
        "page_size": page_size,
        "max_len": max(lengths),
        "prompt_tokens": min(options.prefill_chunk or 2048, sum(map(len, prompts))),
        "kv_dtype": options.kv_dtype,
        "draft_kv_dtype": options.draft_kv_dtype,
    }
    if parallelism is None:  # of several devices none has the whole model
        check_engine_fits(model, draft, trees, **sizes)
    parameters = [
        SamplingParams(
            max_new_tokens=options.max_new_tokens,
            ignore_eos=options.ignore_eos,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=(options.seed + number) % 2**32,  # equal prompts get different texts
            speculation=trees[0] if trees else None,
        )
        for number in range(len(prompts))
    ]
    engine = Engine(
        checkpoint.load(),
        **sizes,
        speculation=trees,
        draft=sharded_drafts(load_draft, parallelism),
        max_waiting=len(prompts),
        batches=(
            sizes["max_batch"],
        ),  # one program of each kind, because a short run spends most of its time compiling
        implementation=options.implementation,
        skip_threshold=options.skip_threshold,
        cache_dir=options.cache_dir,
        kv_scale=scales,
        **where,
    )
    return engine, parameters


def _check_prompts(options: argparse.Namespace, prompts: list[list[int]], model) -> None:
    longest, positions = max(map(len, prompts)), model.max_position_embeddings
    if longest + options.max_new_tokens > positions:
        raise ValueError(
            f"the longest prompt has {longest} tokens and --max-new-tokens is {options.max_new_tokens}: together they "
            f"must be at most max_position_embeddings={positions}"
        )
    check_ids(prompts, model)


def check_ids(prompts: list[list[int]], model) -> None:
    """Raises ValueError for an empty prompt, or a token outside the vocabulary."""
    for prompt in prompts:
        if not prompt:
            raise ValueError("a prompt is empty, must have at least one token")
        if max(prompt) >= model.vocab_size:
            raise ValueError(f"a prompt holds token {max(prompt)}, must be 0 to {model.vocab_size - 1}")


def open_tokenizer(checkpoint: str):
    """The checkpoint's tokenizer; if there is no usable one, a tokenizer for ids, which refuses prompts as text."""
    try:
        return load_tokenizer(checkpoint)
    except (ValueError, ImportError) as error:
        return IdTokenizer(error)


def read_prompts(options: argparse.Namespace, tokenizer) -> list[list[int]]:
    """Token ids of the prompts that the options give."""
    if options.prompt is not None:
        return [tokenizer.encode(options.prompt)]
    if options.prompt_ids is not None:
        if not re.fullmatch(r"\s*[0-9]+\s*(,\s*[0-9]+\s*)*", options.prompt_ids):
            raise ValueError(f"--prompt-ids {shown(options.prompt_ids)} must be comma-separated token ids, as 1,2,3")
        return [_ids("--prompt-ids", options.prompt_ids)]
    return read_prompts_file(options.prompts_file, tokenizer)


def read_prompts_file(name: str, tokenizer) -> list[list[int]]:
    """Token ids of the prompts in a file, one a line; "-" is standard input."""
    try:
        # ``closefd=False`` leaves stdin open.
        with open(0 if name == "-" else name, encoding="utf-8-sig", closefd=name != "-") as file:
            lines = [line.rstrip("\n") for line in file if line.strip()]  # splitlines() would split at form feeds too
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts-file {shown(name)} must be text in UTF-8: {error}") from None
    if not lines:
        raise ValueError(f"--prompts-file {shown(name)} holds no prompt, must hold one a line")
    # A number alone may be a question, so it is text; a number with a comma is a token id.
    ids = re.compile(r"\s*[0-9]+\s*,(\s*[0-9]+\s*,)*(\s*[0-9]+)?\s*")
    return [_ids("--prompts-file", line) if ids.fullmatch(line) else tokenizer.encode(line) for line in lines]


def _ids(option: str, text: str) -> list[int]:
    parts = [part for part in text.split(",") if part.strip()]
    if too_long := [part for part in parts if len(part.strip()) > 10]:
        raise ValueError(f"{option} holds token {shown(too_long[0].strip())}, must be less than 2**31")
    return [int(part) for part in parts]


class Printer:
    """Prints ``prefix``, then the first request's text while it is generated."""

    def __init__(self, tokenizer, *, prefix: str = ""):
        self._stream, self._prefix = tokenizer.stream(), prefix

    def __call__(self, request: int, tokens: list[int]) -> None:
        if request == 0:
            print(self._prefix, self._stream(tokens), sep="", end="", flush=True)
            self._prefix = ""

    def finish(self) -> None:
        """Prints text that was held back for further tokens."""
        print(self._stream.finish(), end="")


def summary(statistics, seconds: float) -> str:
    """One line with the figures of a run."""
    s = statistics
    length = "" if s.acceptance_length is None else f", acceptance length {s.acceptance_length:.2f}"
    return (
        f"{s.new_tokens} tokens in {seconds:.2f} s ({s.tokens_per_second:.0f} tokens/s), "
        f"{s.target_steps} target steps{length}; compiling took {s.warm_up_seconds:.1f} s before"
    )
