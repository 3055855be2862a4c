"""The passes of a model as pure functions ``(state, pools, inputs) -> (outputs, pools)``, before they are compiled.

Apart from arrays, a trace depends only on data that is compared by value. So engines of one model with equal sizes
share traces and compiled programs: the second one in a process compiles nothing.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mla_attn import metadata as md
from mla_attn.dispatch import Order, requested
from mla_attn.models.base import CausalLM, Metadata, Pools
from mla_attn.passes.fields import INVALID_TOKEN, SAMPLING, Arrays
from mla_attn.sampling import sample
from mla_attn.speculative import DraftTree


@dataclasses.dataclass(frozen=True)
class Method:
    """A bound method that is compared by value, as its owner is; ``arguments`` precede the arguments of the call."""

    owner: Hashable
    name: str
    arguments: tuple[Hashable, ...] = ()

    def __call__(self, *arguments: Any) -> Any:
        return getattr(self.owner, self.name)(*self.arguments, *arguments)


@dataclasses.dataclass(frozen=True)
class Functions:
    """The passes of a model; ``DraftFunctions`` has the passes that draft and verify.

    Attributes:
        graphdef: the model without its arrays.
        structure: tree structure of the model's arrays, which ``state`` holds as a flat tuple.
        groups: names of the cache groups.
        page_size: tokens per page.
        max_len: most tokens of a request.
        implementation: names of attention implementations in the order to try them; None for the default choice.
    """

    graphdef: Any
    structure: Any
    groups: tuple[str, ...]
    page_size: int
    max_len: int
    implementation: tuple[str, ...] | None

    @classmethod
    def of(
        cls, model: CausalLM, *, page_size: int, max_len: int, implementation: Order
    ) -> "tuple[Functions, tuple[Any, ...]]":
        """Splits a model into its passes and its arrays, which are the first argument of each pass."""
        graphdef, state = nnx.split(model)
        leaves, structure = jax.tree.flatten(state)
        groups = tuple(group.name for group in model.cache_groups)
        # A plain tuple, because each call flattens it: 0.9 ms for an ``nnx.State`` of 400 arrays, 0.1 ms for a tuple.
        return cls(graphdef, structure, groups, page_size, max_len, requested(implementation)), tuple(leaves)

    @property
    def layout(self) -> dict[str, Any]:
        """Keyword arguments that every metadata builder takes."""
        return {"page_size": self.page_size, "max_len": self.max_len}

    def model(self, state: Any) -> Any:
        """The model with the arrays of ``state``."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.structure, state))

    def run(self, model: CausalLM, tokens, pools: Pools, m: md.AttentionMetadata, **options):
        """Runs the model over all its cache groups, which share one page table."""
        return model(tokens, pools, self.by_group(m), **options, implementation=self.implementation)

    def run_draft(self, model: CausalLM, hidden, tokens, pools: Pools, m: md.AttentionMetadata, **options):
        """Runs the draft layer over all its cache groups, which share one page table."""
        return model.draft(hidden, tokens, pools, self.by_group(m), **options, implementation=self.implementation)

    def by_group(self, m: md.AttentionMetadata) -> Metadata:
        """The same metadata for every cache group."""
        return dict.fromkeys(self.groups, m)

    def pick(self, logits, positions, x: Arrays):
        """Samples the token after each row, or gives INVALID_TOKEN: int32 [B], or [B, S] for logits [B, S, vocab]."""
        options = {name: x[name] for name in SAMPLING}
        if logits.ndim == 3:
            tokens = sample(logits, positions, **options)
        else:
            tokens = sample(logits[:, None], positions[:, None], **options)[:, 0]
        return jnp.where(jnp.isfinite(logits).all(axis=-1), tokens, INVALID_TOKEN)

    def targets(self, state: Any, logits, positions, x: Arrays, tree: DraftTree):
        """The target's token after each row of a verify pass, int32 [B, S]; drafts are accepted if equal to it."""
        return self.pick(logits, positions, x)

    def prompt_metadata(self, x: Arrays, rows: int) -> md.AttentionMetadata:
        """Metadata of prefill chunks packed in ``rows`` rows."""
        lens = x["seq_lens"], x["q_lens"]
        return md.for_extend(x["page_table"], *lens, max_q_len=rows, num_rows=rows, **self.layout)

    def prompt(self, mode: str, state: Any, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """Runs prefill chunks. Its outputs are the token after each request's last row, and all hidden states."""
        model, m = self.model(state), self.prompt_metadata(x, x["prompt_tokens"].shape[0])
        hidden, pools = self.run(model, x["prompt_tokens"], pools, m, mode=mode)
        tokens = self.pick(model.logits(last_rows(hidden, m)), x["seq_lens"] - 1, x)
        return {"prompt_hidden": hidden, "tokens": tokens, "lens": x["seq_lens"]}, pools

    def decode(self, state: Any, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """Runs one token per request; ``lens`` counts cached rows: as input before this call, as output after it."""
        model, lens = self.model(state), x["lens"] + x["active"]
        m = md.for_decode(x["page_table"], lens * x["active"], **self.layout)
        hidden, pools = self.run(model, x["tokens"], pools, m, mode="decode")
        return {"tokens": self.pick(model.logits(hidden), m.positions, x), "lens": lens}, pools


def last_rows(hidden, metadata: md.AttentionMetadata):
    """The last row of each request; an arbitrary row for a request without rows."""
    rows = jnp.clip(metadata.q_starts + metadata.q_lens - 1, 0, hidden.shape[0] - 1)
    return hidden[rows]
