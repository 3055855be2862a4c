"""The table of fields: every input and output of a pass, with its shape, its dtype, and whether it is kept.

Axes: B requests of the call, T packed prompt rows, W columns of all page tables side by side, ``windows`` the number of
windowed page tables, L the most tokens of a request, ``dim`` the model's hidden size; for a draft tree ``nodes`` its
drafts, ``path`` the most tokens emitted, and ``width`` the nodes of the level that is expanded.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = dict[str, Any]
Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Field:
    """One input or output of passes.

    Attributes:
        name: key in the dict of arrays.
        axes: names of its axes, as in jaxtyping's annotations; empty for a scalar.
        dtype: dtype of the array; None for the model's.
        kept: whether it is state of a request: an output of one pass and input of the next, which may stay on device.
    """

    name: str
    axes: str
    dtype: Any = jnp.int32
    kept: bool = False

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape for these sizes of the axes."""
        return tuple(sizes[axis] for axis in self.axes.split())

    def struct(self, sizes: Sizes, dtype: Any) -> jax.ShapeDtypeStruct:
        """The abstract array for these sizes; ``dtype`` is the model's."""
        return jax.ShapeDtypeStruct(self.shape(sizes), dtype if self.dtype is None else self.dtype)


FIELDS = {
    field.name: field
    for field in (
        # Requests and their cache rows.
        Field("page_table", "B W"),  # the page tables of all cache groups, side by side
        Field("kv_offsets", "B windows"),  # position of the first key in each windowed page table
        Field("slots", "B"),  # index of each request's state on the device
        Field("active", "B"),  # 1, or 0 for padding
        Field("lens", "B", kept=True),  # cached rows of each request
        # Prompts.
        Field("prompt_tokens", "T"),
        Field("seq_lens", "B"),  # tokens up to the end of this prefill chunk
        Field("q_lens", "B"),  # tokens of this prefill chunk; 0 for padding
        Field("next_tokens", "T"),  # token after each row; -1 after a prompt's last row: take it from ``sampled``
        Field("sampled", "B"),
        Field("prompt_hidden", "T dim", None),
        # Tokens.
        Field("tokens", "B", kept=True),  # last token of each request, whose row is not cached yet
        Field("temperature", "B", jnp.float32, kept=True),
        Field("top_k", "B", kept=True),
        Field("top_p", "B", jnp.float32, kept=True),
        Field("seed", "B", jnp.uint32, kept=True),
        # Drafts.
        Field("text", "B L", kept=True),  # all tokens of each request, for drafts from n-grams
        Field("drafts", "B nodes", kept=True),
        Field("hidden", "B width dim", None, kept=True),  # draft layer's states, from which the next drafts follow
        Field("step", ""),
        Field("num_drafted", ""),
        Field("emitted", "B path"),
        Field("num_emitted", "B"),
        Field("emitted_hidden", "B path dim", None),
    )
}
SAMPLING = ("temperature", "top_k", "top_p", "seed")  # options of ``sampling.sample``
INVALID_TOKEN = -2  # token id for logits that are not all finite; in ``emitted``, -1 means no token
KEPT = tuple(name for name, field in FIELDS.items() if field.kept)


def structs(names: Iterable[str], sizes: Sizes, dtype: Any) -> Arrays:
    """Abstract arrays of fields; ``dtype`` is the model's."""
    return {name: FIELDS[name].struct(sizes, dtype) for name in names}


def zeros(names: Iterable[str], sizes: Sizes, dtype: Any) -> Arrays:
    """Host arrays of zeros for these fields, which mean padding requests and greedy sampling."""
    return {name: np.zeros(s.shape, s.dtype) for name, s in structs(names, sizes, dtype).items()}
