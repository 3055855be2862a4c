"""``mla-attn demo``."""

import argparse
import sys

import jax
import jax.numpy as jnp

from mla_attn.cli.generate import Printer, summary
from mla_attn.generation import generate
from mla_attn.models import open_checkpoint
from mla_attn.models.tokenizer import load_tokenizer

PROMPTS = ("This program is free software", "Permission is hereby granted", "There is NO WARRANTY")
_DRAFTS = 3


def main(options: argparse.Namespace) -> int:
    """Generates plain, then with drafts. Exit status: 1 if the tokens differ, else 0."""
    tokenizer = load_tokenizer(options.checkpoint)
    checkpoint = open_checkpoint(options.checkpoint, dtype=jnp.float32)
    if not checkpoint.model.can_draft:
        raise ValueError(f"{options.checkpoint}: {checkpoint.model.draft_refusal}; demo needs one")
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    model = checkpoint.load()
    print(f"{options.checkpoint}: {model.config.num_hidden_layers} layers, float32, on {jax.devices()[0].device_kind}")
    results = {}
    for title, drafts in (("plain", 0), (f"speculative, K = {_DRAFTS}", _DRAFTS)):
        print(f"\n{title}: {len(prompts)} prompts as one batch, the first shown as it comes (programs compile first)")
        show = Printer(tokenizer, prefix=f"  [0] {PROMPTS[0]}")
        result = generate(
            model,
            prompts,
            max_new_tokens=96,
            num_drafts=drafts,
            on_tokens=show,
            progress=sys.stderr.isatty(),
        )
        show.finish()
        for number, tokens in enumerate(result.tokens):
            if number:
                print(f"\n  [{number}] {PROMPTS[number]}{tokenizer.decode(tokens)}", end="")
        seconds = result.statistics.prefill_seconds + result.statistics.decode_seconds
        print(f"\n{summary(result.statistics, seconds)}")
        results[title] = result
    plain, speculative = results.values()
    same = plain.tokens == speculative.tokens
    print(f"\nsame tokens from both: {'yes' if same else 'NO'}")
    print(f"target steps: {plain.statistics.target_steps} plain, {speculative.statistics.target_steps} speculative")
    return 0 if same else 1
