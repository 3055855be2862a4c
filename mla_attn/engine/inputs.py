"""The inputs of passes, built on the host from the scheduler's plan."""

from collections.abc import Sequence

import jax
import numpy as np

from mla_attn.engine.scheduler import Request
from mla_attn.passes import FIELDS, SAMPLING
from mla_attn.speculative import DraftTree

HostArrays = dict[str, np.ndarray]


def prompt_lengths(parts: Sequence[tuple[Request, slice]]) -> HostArrays:
    """The lengths that all passes over prefill chunks take."""
    return {
        "seq_lens": np.array([part.stop for _, part in parts], np.int32),
        "q_lens": np.array([part.stop - part.start for _, part in parts], np.int32),
    }


def prompt_tokens(parts: Sequence[tuple[Request, slice]]) -> HostArrays:
    """The inputs of the target's pass over prefill chunks: their tokens and the sampling parameters."""
    options = {
        name: np.array([getattr(request.params, name) or 0 for request, _ in parts], FIELDS[name].dtype)
        for name in SAMPLING  # None only for the seed of a greedy request
    }
    return {"prompt_tokens": np.concatenate([request.tokens[part] for request, part in parts]), **options}


def next_tokens(parts: Sequence[tuple[Request, slice]]) -> HostArrays:
    """The inputs of the draft layer's pass: the token after each row; -1 after a prompt's last row, for the sampled
    token."""
    following = []
    for request, part in parts:
        known = request.tokens[part.start + 1 : min(part.stop + 1, request.num_tokens)]
        following.append(np.pad(known, (0, part.stop - part.start - len(known)), constant_values=-1))
    return {"next_tokens": np.concatenate(following)}


def texts(parts: Sequence[tuple[Request, slice]], max_len: int) -> HostArrays:
    """The inputs of n-gram drafting: all tokens of each request up to the chunk's end, including cached ones."""
    text = np.zeros((len(parts), max_len), np.int32)
    for row, (request, part) in zip(text, parts, strict=True):
        row[: part.stop] = request.tokens[: part.stop]
    return {"text": text}


def placed(inputs: HostArrays, rows: int) -> dict[str, jax.Array]:
    """Pads inputs to ``rows`` requests, and copies them to the device for a round of drafts."""
    requests = len(inputs["slots"])
    padded = {name: np.zeros((rows, *array.shape[1:]), array.dtype) for name, array in inputs.items()}
    for name, array in inputs.items():
        padded[name][:requests] = array
    return jax.device_put(padded)


def draft_steps(tree: DraftTree) -> list[dict[str, jax.Array]]:
    """The inputs of each ``draft_decode`` pass that depend only on the tree; they stay on the device."""
    return [
        jax.device_put({"step": np.int32(step), "num_drafted": np.int32(tree.level_starts[step + 1] - 1)})
        for step in range(tree.depth - 1)
    ]
