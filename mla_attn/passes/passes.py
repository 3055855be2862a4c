"""The passes of a model: one for each mode, compiled ahead of time and run by the engine.

Every pass is a pure function ``(state, pools, inputs) -> (outputs, pools)`` of the model's arrays, the pools of its
cache groups and a dict of fields (``mla_attn.passes.fields``); metadata is built inside. Requests with ``q_lens`` (or
``active``) 0 are padding.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_attn import metadata as md
from mla_attn.buckets import Buckets
from mla_attn.models.base import CausalLM, Metadata, Pools
from mla_attn.passes.fields import INVALID_TOKEN, SAMPLING, Arrays, structs
from mla_attn.sampling import sample
from mla_attn.speculative import DraftTree


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Ladders of shapes, and static sizes, that the passes are compiled for.

    Attributes:
        batches: ladder of request counts B.
        prompt_rows: ladder of prompt tokens T of one pass, all requests together.
        table_width: pages per request W.
        page_size: tokens per page P.
        max_len: most tokens of a request.
        prompt_batches: ladder of request counts in passes over prompts; ``batches`` if None.
    """

    batches: tuple[int, ...]
    prompt_rows: tuple[int, ...]
    table_width: int
    page_size: int
    max_len: int
    prompt_batches: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass before it is compiled.

    Attributes:
        name: its mode, shown in progress, warnings and profiles.
        fn: the pure function.
        inputs: names of the fields it takes.
        sizes: sizes of their axes, but for B and T.
        given: kept fields among the inputs that the host gives, because the request begins with this pass.
    """

    name: str
    fn: Callable[[Any, Any, Arrays], tuple[Arrays, Any]]
    inputs: tuple[str, ...]
    sizes: Mapping[str, int]
    given: tuple[str, ...] = ()


class Passes:
    """The passes of one model as ``Buckets``, each built when it is first asked for. ``DraftPasses`` adds those that
    draft and verify.

    There is a program for each pass and batch size, and in passes over prompts for each number of rows too.

    Args:
        model: the model; its arrays become ``state``, which every pass takes.
        shapes: shapes to compile for.
        implementation: implementation of the attention ops; None picks.
        wrap: applied to every pass before it is compiled.
    """

    buckets_class = Buckets  # of which benchmarks make variants

    def __init__(
        self,
        model: CausalLM,
        shapes: Shapes,
        *,
        implementation: str | None = None,
        wrap: Callable[[Pass], Pass] = lambda inner: inner,
    ):
        self.shapes, self.dtype = shapes, model.dtype
        self._graphdef, state = nnx.split(model)
        leaves, self._structure = jax.tree.flatten(state)
        # A plain tuple: flattening an ``nnx.State`` of 400 arrays takes 0.9 ms of a call, a tuple 0.1.
        self.state = tuple(leaves)
        self.layout: dict[str, Any] = {"page_size": shapes.page_size, "max_len": shapes.max_len}
        self.sizes = {"W": shapes.table_width, "dim": model.hidden_size}
        self._groups = [group.name for group in model.cache_groups]
        self._implementation, self._wrap = implementation, wrap

    def replacement(self, model_or_state: Any) -> tuple[Any, tuple[Any, ...]]:
        """Checks another model's arrays; returns that model, and what ``state`` becomes with its arrays.

        Raises:
            ValueError: parameters, shapes or dtypes differ, by name, or the model is built otherwise.
        """
        graphdef, state = (self._graphdef, model_or_state)
        if isinstance(model_or_state, nnx.Module):
            graphdef, state = nnx.split(model_or_state)
        if not isinstance(state, nnx.State):
            raise ValueError(f"model_or_state is a {type(state).__name__}, must be a model or an nnx.State")
        # What is held, not what the model of old has now: its parameters may have been replaced since.
        held = jax.tree.unflatten(self._structure, self.state[: self._structure.num_leaves])
        old, new = (dict(nnx.to_flat_state(s)) for s in (held, state))
        for path in [*old, *new]:
            _check_parameter(".".join(map(str, path)), old.get(path), new.get(path))
        if graphdef != self._graphdef:
            raise ValueError("model_or_state is built otherwise than the engine's model: its config must be the same")
        leaves = jax.device_put(jax.tree.leaves(state), [leaf.sharding for leaf in jax.tree.leaves(held)])
        return nnx.merge(graphdef, jax.tree.unflatten(self._structure, leaves)), tuple(leaves)

    @functools.cached_property
    def prefill(self) -> Buckets:
        """Prompts of which nothing is cached."""
        return self._prompt("prefill")

    @functools.cached_property
    def extend(self) -> Buckets:
        """Prefill chunks, after what is cached of their prompts."""
        return self._prompt("extend")

    @functools.cached_property
    def decode(self) -> Buckets:
        """One token per active request."""
        return self.buckets("decode", self._decode, ("page_table", "lens", "active", "tokens", *SAMPLING))

    def buckets(
        self,
        name: str,
        fn: Callable[[Any, Any, Arrays], tuple[Arrays, Any]],
        inputs: tuple[str, ...],
        *,
        prompts: bool = False,
        given: tuple[str, ...] = (),
        **sizes: int,
    ) -> Buckets:
        """The ``Buckets`` of a pass: every batch size and, over prompts, every number of rows."""
        made = self._wrap(Pass(name, fn, inputs, {**self.sizes, **sizes}, given))
        shapes = self.shapes
        ladder = [{"B": batch} for batch in shapes.batches]
        if prompts:
            ladder = [{"B": b, "T": t} for b in shapes.prompt_batches or shapes.batches for t in shapes.prompt_rows]
        rungs = [structs(made.inputs, {**made.sizes, **rung}, self.dtype) for rung in ladder]
        return self.buckets_class(name, made.fn, rungs)

    def model(self, state: Any) -> Any:
        """The model with the arrays of ``state``."""
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._structure, state))

    def run(self, model: CausalLM, tokens, pools: Pools, m: md.AttentionMetadata, **options):
        """Runs the model over all its cache groups, which share one page table."""
        return model(tokens, pools, self.by_group(m), **options, implementation=self._implementation)

    def run_draft(self, model: CausalLM, hidden, tokens, pools: Pools, m: md.AttentionMetadata, **options):
        """Runs the draft layer likewise."""
        return model.draft(hidden, tokens, pools, self.by_group(m), **options, implementation=self._implementation)

    def by_group(self, m: md.AttentionMetadata) -> Metadata:
        """The same metadata for every cache group."""
        return dict.fromkeys(self._groups, m)

    def pick(self, logits, positions, x: Arrays):
        """The token after each row, or INVALID_TOKEN: int32 [B], or [B, S] for logits [B, S, vocab]."""
        options = {name: x[name] for name in SAMPLING}
        if logits.ndim == 3:
            tokens = sample(logits, positions, **options)
        else:
            tokens = sample(logits[:, None], positions[:, None], **options)[:, 0]
        return jnp.where(jnp.isfinite(logits).all(axis=-1), tokens, INVALID_TOKEN)

    def targets(self, state: Any, logits, positions, x: Arrays, tree: DraftTree):
        """The target's own token after each row of a verify pass, int32 [B, S]: a draft is accepted if it equals it."""
        return self.pick(logits, positions, x)

    def prompt_metadata(self, x: Arrays, rows: int) -> md.AttentionMetadata:
        """Metadata of prefill chunks packed in ``rows`` rows."""
        lens = x["seq_lens"], x["q_lens"]
        return md.for_extend(x["page_table"], *lens, max_q_len=rows, num_rows=rows, **self.layout)

    def _prompt(self, mode: str) -> Buckets:
        def prompt(state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
            """Runs prefill chunks: the token after each request's last row, and all hidden states."""
            model, m = self.model(state), self.prompt_metadata(x, x["prompt_tokens"].shape[0])
            hidden, pools = self.run(model, x["prompt_tokens"], pools, m, mode=mode)
            tokens = self.pick(model.logits(last_rows(hidden, m)), x["seq_lens"] - 1, x)
            return {"prompt_hidden": hidden, "tokens": tokens, "lens": x["seq_lens"]}, pools

        inputs = ("page_table", "seq_lens", "q_lens", "prompt_tokens", *SAMPLING)
        return self.buckets(mode, prompt, inputs, prompts=True, given=SAMPLING)

    def _decode(self, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """Runs one token per request; ``lens`` counts cached rows, as input before this call and as output after it."""
        model, lens = self.model(state), x["lens"] + x["active"]
        m = md.for_decode(x["page_table"], lens * x["active"], **self.layout)
        hidden, pools = self.run(model, x["tokens"], pools, m, mode="decode")
        return {"tokens": self.pick(model.logits(hidden), m.positions, x), "lens": lens}, pools


def _check_parameter(name: str, old: Any, new: Any) -> None:
    """Raises ValueError unless parameter ``new`` can take the place of ``old``; either may be absent."""
    kinds = [_kind(parameter) for parameter in (new, old)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"model_or_state has {kinds[0]} at {name!r}, must be {kinds[1]}")


def _kind(parameter: Any) -> str:
    if parameter is None:
        return "no parameter"
    array = parameter.get_value() if isinstance(parameter, nnx.Variable) else parameter
    if not isinstance(array, jax.Array | np.ndarray):
        return f"a {type(array).__name__}"
    return f"{array.dtype}{list(array.shape)}"


def last_rows(hidden, metadata: md.AttentionMetadata):
    """The last row of each request; some other row where it has none."""
    rows = jnp.clip(metadata.q_starts + metadata.q_lens - 1, 0, hidden.shape[0] - 1)
    return hidden[rows]
