"""Prints what sglang-jax with the ops of this library generates for a fixture, twice: [tokens, tokens found cached].

Arguments: a checkpoint, a page size, and JSON of other arguments of the engine. Run by ``test_sglang_jax.py`` as a
program of its own, because the engine takes over the process.
"""

# ruff: noqa: E402 -- where to import the library from is settled first
import json
import os
import sys
from pathlib import Path

import source_tree

sys.meta_path.insert(0, source_tree.PathFinder)

import numpy as np

from mla_attn.integrations.sglang_jax import install

NEW_TOKENS = 24

install()


def main(checkpoint: str, page_size: str, options: str) -> list:
    from sgl_jax.srt.entrypoints.engine import Engine

    engine = Engine(
        model_path=checkpoint,
        attention_backend="fa",
        device="cpu",
        dtype="float32",
        page_size=int(page_size),
        chunked_prefill_size=64,
        context_length=1024,
        max_total_tokens=4096,
        max_running_requests=8,
        mem_fraction_static=0.2,
        skip_tokenizer_init=True,
        disable_precompile=True,
        enable_single_process=True,
        **json.loads(options),
    )
    arrays = np.load(Path(checkpoint) / "expected.npz")
    prompts = [arrays[f"prompt_{i}"].tolist() for i in range(3)]
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    rounds = [engine.generate(input_ids=prompts, sampling_params=sampling) for _ in range(2)]
    return [[(each["output_ids"], each["meta_info"]["cached_tokens"]) for each in outputs] for outputs in rounds]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
    os._exit(0)  # the engine's threads still run, and would crash where the interpreter ends beneath them
