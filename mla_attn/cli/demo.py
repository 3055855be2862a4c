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
    """Generates by each checkpoint. Exit status: 1 if the tokens with and without drafts differ, else 0."""
    same = [_show(checkpoint) for checkpoint in options.checkpoints]
    return 0 if all(same) else 1


def _show(folder: str) -> bool:
    """Generates plain and, if the model has an MTP layer, with its drafts; returns whether the tokens are the same."""
    tokenizer = load_tokenizer(folder)
    model = open_checkpoint(folder, dtype=jnp.float32).load()
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    print(f"{folder}: {model.config.num_hidden_layers} layers, float32, on {jax.devices()[0].device_kind}")
    results = []
    for title, drafts in (("plain", 0), (f"speculative, K = {_DRAFTS}", _DRAFTS))[: 1 + model.can_draft]:
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
        results.append(result)
    same = results[0].tokens == results[-1].tokens
    if len(results) > 1:
        steps = [result.statistics.target_steps for result in results]
        print(f"\nsame tokens from both: {'yes' if same else 'NO'}")
        print(f"target steps: {steps[0]} plain, {steps[1]} speculative")
    print()
    return same
