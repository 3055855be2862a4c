"""``mla-attn calibrate``."""

import argparse
import json
import sys

import jax.numpy as jnp

from mla_attn.cli.generate import check_ids, open_tokenizer, read_prompts_file
from mla_attn.models import check_model_fits, open_checkpoint
from mla_attn.models.calibration import measure_scales


def main(options: argparse.Namespace) -> int:
    """Writes the scales to the file, and prints where they are. Exit status 0."""
    checkpoint = open_checkpoint(options.checkpoint, dtype=jnp.dtype(options.dtype))
    prompts = read_prompts_file(options.prompts_file, open_tokenizer(options.checkpoint))
    longest, positions = max(map(len, prompts)), checkpoint.model.max_position_embeddings
    if longest > positions:
        raise ValueError(
            f"the longest prompt has {longest} tokens, must have at most max_position_embeddings={positions}"
        )
    check_ids(prompts, checkpoint.model)
    pages = -(-longest // options.page_size)
    check_model_fits(checkpoint.model, num_pages=pages, page_size=options.page_size)
    scales = measure_scales(
        checkpoint.load(),
        prompts,
        page_size=options.page_size,
        prefill_chunk=options.prefill_chunk,
        implementation=options.implementation,
        progress=sys.stderr.isatty(),
    )
    with open(options.output, "w", encoding="utf-8") as file:
        json.dump(scales, file, indent=1)
        file.write("\n")
    for group, found in scales.items():
        for name, values in found.items():
            print(f"{group}: {name} of {len(values)} layers, {min(values):.3g} to {max(values):.3g}")
    print(f"{len(prompts)} prompts, {sum(map(len, prompts))} tokens; scales are in {options.output}", file=sys.stderr)
    return 0
