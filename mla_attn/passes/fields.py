"""The table of fields: every input and output of a pass, with its shape, its dtype, and who keeps it between passes.

B requests of the call, T packed prompt rows, W pages per request; of the draft tree, ``nodes`` drafts, ``path`` emitted
tokens at most and ``width`` nodes of the level that drafts come from; ``dim`` the model's hidden size.
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
    """An input or output of passes.

    Attributes:
        name: its key.
        axes: names of its axes, as in jaxtyping's annotations; empty for a scalar.
        dtype: None is the model's.
        kept: it belongs to a request and goes from pass to pass, on the device if something keeps it there.
    """

    name: str
    axes: str
    dtype: Any = jnp.int32
    kept: bool = False

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes[axis] for axis in self.axes.split())

    def struct(self, sizes: Sizes, dtype: Any) -> jax.ShapeDtypeStruct:
        """The abstract array; ``dtype`` is the model's."""
        return jax.ShapeDtypeStruct(self.shape(sizes), dtype if self.dtype is None else self.dtype)


FIELDS = {
    field.name: field
    for field in (
        # Which requests, and where their rows are.
        Field("page_table", "B W"),
        Field("slots", "B"),  # index of each request's state, where the device keeps it
        Field("active", "B"),  # 0 is padding
        Field("lens", "B", kept=True),  # rows cached
        # Prompts.
        Field("prompt_tokens", "T"),
        Field("seq_lens", "B"),  # tokens up to the end of this part
        Field("q_lens", "B"),  # of this part; 0 is padding
        Field("next_tokens", "T"),  # after each row; -1 after the last of a prompt, which is ``sampled``
        Field("sampled", "B"),
        Field("prompt_hidden", "T dim", None),
        # Tokens.
        Field("tokens", "B", kept=True),  # the last of each request, whose row is not cached yet
        Field("temperature", "B", jnp.float32, kept=True),
        Field("top_k", "B", kept=True),
        Field("top_p", "B", jnp.float32, kept=True),
        Field("seed", "B", jnp.uint32, kept=True),
        # Drafts.
        Field("drafts", "B nodes", kept=True),
        Field("hidden", "B width dim", None, kept=True),  # of the draft layer, which the next drafts come from
        Field("step", ""),
        Field("num_drafted", ""),
        Field("emitted", "B path"),
        Field("num_emitted", "B"),
        Field("emitted_hidden", "B path dim", None),
    )
}
SAMPLING = ("temperature", "top_k", "top_p", "seed")  # options of ``sampling.sample``
INVALID_TOKEN = -2  # in place of the token after a row whose logits are not all finite; in ``emitted``, -1 is none
KEPT = tuple(name for name, field in FIELDS.items() if field.kept)


def structs(names: Iterable[str], sizes: Sizes, dtype: Any) -> Arrays:
    """Abstract arrays of fields; ``dtype`` is the model's."""
    return {name: FIELDS[name].struct(sizes, dtype) for name in names}


def zeros(names: Iterable[str], sizes: Sizes, dtype: Any) -> Arrays:
    """Arrays of fields on the host: padding, and greedy sampling."""
    return {name: np.zeros(s.shape, s.dtype) for name, s in structs(names, sizes, dtype).items()}
