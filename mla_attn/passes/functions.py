"""The passes of a model as pure functions ``(state, pools, inputs) -> (outputs, pools)``, before they are compiled.

Apart from arrays, a trace depends only on data that is compared by value. So engines of one model with equal sizes
share traces and compiled programs: the second one in a process compiles nothing.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mla_attn import metadata as md
from mla_attn.cache import move_rows
from mla_attn.dispatch import Order, requested
from mla_attn.models.base import CacheGroup, CausalLM, Metadata, Pools, layout_of
from mla_attn.parallel import Layout, in_shard
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
        first: index of the model's first array in ``state``.
        prefix: prefix of the names of its cache groups in the dict of pools.
        groups: name and window of each cache group.
        tables: window and number of columns of each page table, in order; groups with equal windows share a table.
        page_size: tokens per page.
        max_len: most tokens of a request.
        implementation: names of attention implementations in the order to try them; None for the default choice.
        skip_threshold: as in ``mla_attention``.
        layout: layout of a sharded model, whose passes run inside ``jax.shard_map``; None for one device.
    """

    graphdef: Any
    structure: Any
    first: int
    prefix: str
    groups: tuple[tuple[str, int | None], ...]
    tables: tuple[tuple[int | None, int], ...]
    page_size: int
    max_len: int
    implementation: tuple[str, ...] | None
    skip_threshold: float | None = None
    layout: Layout | None = None

    @classmethod
    def of(
        cls, model: CausalLM, *, groups: Iterable[CacheGroup], implementation: Order, **facts: Any
    ) -> "tuple[Functions, tuple[Any, ...]]":
        """Splits a model into its passes and its arrays, which are the first argument of each pass.

        ``groups`` are the cache groups that the model's rows are stored in, and ``facts`` the attributes that do not
        depend on the model.
        """
        graphdef, state = nnx.split(model)
        leaves, structure = jax.tree.flatten(state)
        names = tuple((group.name, group.window) for group in groups)
        facts |= {"graphdef": graphdef, "structure": structure, "groups": names, "layout": layout_of(model)}
        # A plain tuple, because each call flattens it: 0.9 ms for an ``nnx.State`` of 400 arrays, 0.1 ms for a tuple.
        return cls(**facts, implementation=requested(implementation)), tuple(leaves)

    def own(self, state: Any) -> Any:
        """The model's arrays among those of ``state``."""
        return state[self.first : self.first + self.structure.num_leaves]

    def model(self, state: Any) -> Any:
        """The model with the arrays of ``state``."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.structure, self.own(state)))

    def run(self, model: CausalLM, tokens, pools: Pools, m: Metadata, **options):
        """Runs the model over its cache groups; returns hidden states, and the pools of all."""
        return self._over(pools, model, tokens, m=m, **options)

    def run_draft(self, model: CausalLM, hidden, tokens, pools: Pools, m: Metadata, **options):
        """Runs the draft layer over the model's cache groups; returns the same as ``run``."""
        return self._over(pools, model.draft, hidden, tokens, m=m, **options)

    def _over(self, pools: Pools, call: Callable[..., tuple[Any, Pools]], *arguments, m: Metadata, **options):
        mine = {name: pools[self.prefix + name] for name, _ in self.groups}
        if self.skip_threshold is not None:
            options["skip_threshold"] = self.skip_threshold
        hidden, mine = call(*arguments, mine, m, **options, implementation=self.implementation)
        return hidden, {**pools, **{self.prefix + name: pool for name, pool in mine.items()}}

    def metadata(self, build: Callable[..., md.AttentionMetadata], x: Arrays, *lens: Any, **options: Any) -> Metadata:
        """Builds the metadata of each cache group. They have equal lengths and positions but different pages."""
        windows, made, begin = {window for _, window in self.groups}, {}, 0
        offset, paging = iter(range(len(self.tables))), self._paging()
        for window, width in self.tables:
            layout = {**paging, "max_len": self.max_len}
            if window is not None:
                layout["kv_offsets"] = x["kv_offsets"][:, next(offset)]
            if window in windows:
                table = x["page_table"][:, begin : begin + width]
                made[window] = build(table, *lens, **options, **layout)
            begin += width
        return {name: made[window] for name, window in self.groups}

    def _paging(self) -> dict[str, Any]:
        """Tokens of a page on this device, and which of a request's tokens it has."""
        ranks = 1 if self.layout is None else jax.lax.axis_size(self.layout.context)
        if self.layout is None or ranks == 1:
            return {"page_size": self.page_size}
        return {"page_size": self.page_size // ranks, "context": (jax.lax.axis_index(self.layout.context), ranks)}

    def move_rows(self, pool: Any, src: Any, dst: Any) -> Any:
        """``mla_attn.cache.move_rows``, between the devices that have parts of the cached tokens."""
        return move_rows(pool, src, dst) if self.layout is None else in_shard(move_rows, self.layout)(pool, src, dst)

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

    def prompt_metadata(self, x: Arrays, rows: int) -> Metadata:
        """Metadata of prefill chunks packed in ``rows`` rows."""
        return self.metadata(md.for_extend, x, x["seq_lens"], x["q_lens"], max_q_len=rows, num_rows=rows)

    def prompt(self, mode: str, state: Any, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """Runs prefill chunks. Its outputs are the token after each request's last row, and all hidden states."""
        model, m = self.model(state), self.prompt_metadata(x, x["prompt_tokens"].shape[0])
        hidden, pools = self.run(model, x["prompt_tokens"], pools, m, mode=mode)
        tokens = self.pick(model.logits(last_rows(hidden, m)), x["seq_lens"] - 1, x)
        return {"prompt_hidden": hidden, "tokens": tokens, "lens": x["seq_lens"]}, pools

    def decode(self, state: Any, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """Runs one token per request; ``lens`` counts cached rows: as input before this call, as output after it."""
        model, lens = self.model(state), x["lens"] + x["active"]
        m = self.metadata(md.for_decode, x, lens * x["active"])
        hidden, pools = self.run(model, x["tokens"], pools, m, mode="decode")
        return {"tokens": self.pick(model.logits(hidden), of_rows(m).positions, x), "lens": lens}, pools


def of_rows(m: Metadata) -> md.AttentionMetadata:
    """Metadata of any one cache group, for rows, lengths and positions, which are equal in all groups."""
    return next(iter(m.values()))


def last_rows(hidden, m: Metadata):
    """The last row of each request; an arbitrary row for a request without rows."""
    metadata = of_rows(m)
    rows = jnp.clip(metadata.q_starts + metadata.q_lens - 1, 0, hidden.shape[0] - 1)
    return hidden[rows]
