"""Whole-model passes, one a mode, over padded arrays: what is compiled ahead of time and run by the generation loop.

Every pass is ``(state, pools, inputs) -> (outputs, pools)`` with ``pools`` by cache group, ``inputs`` and ``outputs``
dicts of arrays, metadata built inside. Requests with ``q_lens`` (or ``active``) 0 are padding. B requests, T packed
rows, W pages per request.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mla_attn import metadata as md
from mla_attn.buckets import Buckets
from mla_attn.cache import move_rows
from mla_attn.models.base import CausalLM, Metadata, Pools
from mla_attn.sampling import sample
from mla_attn.speculative import DraftTree, accept_tree, path_moves, top_drafts

Arrays = dict[str, Any]
Pass = Callable[[Any, Any, Arrays], tuple[Arrays, Any]]

SAMPLING = {"temperature": jnp.float32, "top_k": jnp.int32, "top_p": jnp.float32, "seed": jnp.uint32}


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Ladders and static sizes that the passes are compiled for.

    Attributes:
        batches: ladder of request counts B.
        prompt_rows: ladder of prompt tokens T in one prefill or extend call, all requests together.
        table_width: pages per request W.
        page_size: tokens per page P.
        max_len: most tokens of a request.
        tree: drafts per verify step; a chain of K drafts is a tree of K widths of 1. None for plain decoding.
        chunked: whether prompts come in several parts, so that ``extend`` is needed.
        sampling: whether tokens may be drawn: passes then take the arrays [B] of ``sampling.sample`` too.
    """

    batches: tuple[int, ...]
    prompt_rows: tuple[int, ...]
    table_width: int
    page_size: int
    max_len: int
    tree: DraftTree | None = None
    chunked: bool = False
    sampling: bool = False


class Passes:
    """The passes of one model as ``Buckets``: attributes ``prefill``, ``extend``, ``decode`` and, with drafts,
    ``draft_prefill``, ``draft_decode`` (one for each step after the first draft), ``target_verify``,
    ``draft_extend``; and ``state``, the model's arrays.

    Programs: one for each pass in ``buckets`` and batch size; of passes over prompts, for each number of rows too.
    """

    def __init__(self, model: CausalLM, shapes: Shapes, *, implementation: str | None = None):
        tree = shapes.tree
        if tree and not model.can_draft:
            raise ValueError(f"tree of widths {tree.widths} must be None: {model.draft_refusal}")
        if tree and max(tree.widths) > model.vocab_size:
            raise ValueError(f"tree of widths {tree.widths}: each must be at most vocab_size={model.vocab_size}")
        self.shapes = shapes
        self.graphdef, state = nnx.split(model)
        # A plain tuple: flattening an ``nnx.State`` of 400 arrays takes 0.9 ms of a call, a tuple 0.1.
        leaves, self._structure = jax.tree.flatten(state)
        self.state = tuple(leaves)
        self._implementation = implementation
        self._sizes: dict[str, Any] = {"page_size": shapes.page_size, "max_len": shapes.max_len}
        self._dim, self._dtype = model.hidden_size, model.dtype
        self._groups = [group.name for group in model.cache_groups]
        self.prefill = self._buckets("prefill", self._prompt("prefill"), self._prompt_rungs())
        self.extend = self._buckets("extend", self._prompt("extend"), self._prompt_rungs())
        self.decode = self._buckets("decode", self._decode, self._rungs(tokens=(), **self._sampling()))
        if tree:
            drafts, path = (tree.size - 1,), tree.depth + 1
            self.draft_prefill = self._buckets("draft_prefill", self._draft_prefill, self._prompt_rungs(drafting=True))
            self.target_verify = self._buckets(
                "target_verify", self._target_verify, self._rungs(tokens=(), drafts=drafts, **self._sampling())
            )
            self.draft_extend = self._buckets(
                "draft_extend",
                self._draft_extend,
                self._rungs(emitted=(path,), num_emitted=(), hidden=(path, self._dim)),
            )
            # Steps that differ in nothing but their number, as those of a chain, share a program.
            made: dict[tuple[int, int, int], Buckets] = {}
            self.draft_decode = []
            for level in range(1, tree.depth):
                key = (tree.level_sizes[level], tree.widths[level - 1], tree.widths[level])
                if not tree.is_chain or key not in made:
                    made[key] = self._draft_decode_buckets(level)
                self.draft_decode.append(made[key])

    def _buckets(self, name: str, fn: Pass, rungs: list[Arrays]) -> Buckets:
        return Buckets(name, fn, rungs)

    @property
    def buckets(self) -> list[Buckets]:
        """The ones a generation loop with these shapes calls."""
        prompt = [self.prefill, *([self.extend] if self.shapes.chunked else [])]
        if self.shapes.tree is None:
            return [*prompt, self.decode]
        return [*prompt, self.draft_prefill, *dict.fromkeys(self.draft_decode), self.target_verify, self.draft_extend]

    def _model(self, state: Any) -> CausalLM:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self._structure, state))

    def _run(self, model, tokens, pools: Pools, m: md.AttentionMetadata, **options):
        return model(tokens, pools, self._by_group(m), **options, implementation=self._implementation)

    def _run_draft(self, model, hidden, tokens, pools: Pools, m: md.AttentionMetadata, **options):
        return model.draft(hidden, tokens, pools, self._by_group(m), **options, implementation=self._implementation)

    def _by_group(self, m: md.AttentionMetadata) -> Metadata:
        """All cache groups share one page table."""
        return dict.fromkeys(self._groups, m)

    def _prompt(self, mode: str):
        def prompt(state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
            """Prompt parts: the token after each request's last row, and all hidden states."""
            model, m = self._model(state), self._prompt_metadata(x)
            hidden, pools = self._run(model, x["tokens"], pools, m, mode=mode)
            tokens = self._pick(model.logits(_last(hidden, m)), x["seq_lens"] - 1, x)
            return {"hidden": hidden, "tokens": tokens, "lens": x["seq_lens"]}, pools

        return prompt

    def _draft_prefill(self, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """Prompt parts through the draft layer: the first draft. A last row takes the token sampled after it if its
        ``next_tokens`` is -1, as it is in the last part of a prompt."""
        model, m = self._model(state), self._prompt_metadata(x)
        owner, _ = md.row_owners(m.q_starts, m.q_lens, m.slots.shape[0])
        tokens = jnp.where(x["next_tokens"] < 0, x["sampled"][owner], x["next_tokens"])
        hidden, pools = self._run_draft(model, x["hidden"], tokens, pools, m, mode="draft_extend")
        return self._first_drafts(model, _last(hidden, m)), pools

    def _decode(self, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """One token per active request; ``lens`` counts the cached tokens before and after."""
        model, lens = self._model(state), x["lens"] + x["active"]
        m = md.for_decode(x["page_table"], lens * x["active"], **self._sizes)
        hidden, pools = self._run(model, x["tokens"], pools, m, mode="decode")
        return {"tokens": self._pick(model.logits(hidden), m.positions, x), "lens": lens}, pools

    def _target_verify(self, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """The last emitted token and its drafts: what is accepted and emitted, and the hidden states of those rows."""
        model, tree = self._model(state), self._tree
        m = md.for_target_verify(
            x["page_table"],
            x["lens"],
            num_tokens=tree.size,
            q_lens=tree.size * x["active"],
            depths=None if tree.is_chain else jnp.asarray(tree.depths),
            **self._sizes,
        )
        tokens = jnp.concatenate([x["tokens"][:, None], x["drafts"]], axis=1)
        mask = self._mask(tokens.shape[0], slice(None), slice(None))
        hidden, pools = self._run(model, tokens.reshape(-1), pools, m, mode="target_verify", tree_mask=mask)
        logits = model.logits(hidden).reshape(*tokens.shape, -1)
        targets = self._pick(logits, m.positions.reshape(tokens.shape), x)
        parents = jnp.broadcast_to(jnp.asarray(tree.parents), tokens.shape)
        result, path = accept_tree(tokens, parents, targets, m.q_lens, max_depth=tree.depth)
        if not tree.is_chain:
            pools = {
                name: move_rows(pool, *path_moves(m.slots.reshape(tokens.shape), path)) for name, pool in pools.items()
            }
        hidden = hidden.reshape(*tokens.shape, -1)
        return {
            "emitted": result.emitted,
            "num_emitted": result.num_emitted,
            "tokens": result.next_tokens,
            "lens": x["lens"] + result.num_emitted,
            "hidden": jnp.take_along_axis(hidden, jnp.maximum(path, 0)[:, :, None], axis=1),
        }, pools

    def _draft_extend(self, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """The emitted tokens through the draft layer, with the target's hidden states: the first drafts."""
        model, rows = self._model(state), self._tree.depth + 1
        q_lens = x["num_emitted"] * x["active"]
        m = md.for_draft_extend(x["page_table"], x["lens"], q_lens, max_q_len=rows, **self._sizes)
        hidden, tokens = x["hidden"].reshape(-1, self._dim), x["emitted"].reshape(-1)
        hidden, pools = self._run_draft(model, hidden, tokens, pools, m, mode="draft_extend")
        return self._first_drafts(model, _last(hidden, m)), pools

    def _draft_decode_buckets(self, level: int) -> Buckets:
        """Drafts of depth ``level`` through the draft layer: the drafts after them, ``widths[level]`` each."""
        tree = self._tree
        nodes, spread, width = tree.level_sizes[level], tree.widths[level - 1], tree.widths[level]
        drafted = slice(1, tree.level_starts[level] + nodes)
        level_nodes = slice(tree.level_starts[level], tree.level_starts[level] + nodes)

        def draft_decode(state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
            model, batch, step = self._model(state), x["lens"].shape[0], x["step"]
            m = md.for_draft_decode(
                x["page_table"],
                x["lens"],
                step,
                num_tokens=nodes,
                num_drafted=x["num_drafted"],
                q_lens=nodes * x["active"],
                **self._sizes,
            )
            tokens = jax.lax.dynamic_slice_in_dim(x["drafts"], x["num_drafted"], nodes, axis=1)
            hidden = jnp.repeat(x["hidden"], spread, axis=1).reshape(-1, self._dim)
            mask = self._mask(batch, level_nodes, drafted)
            hidden, pools = self._run_draft(
                model, hidden, tokens.reshape(-1), pools, m, mode="draft_decode", tree_mask=mask
            )
            hidden = hidden.reshape(batch, nodes, -1)
            new = top_drafts(model.draft_logits(hidden), width)
            drafts = jax.lax.dynamic_update_slice_in_dim(x["drafts"], new, x["num_drafted"] + nodes, axis=1)
            return {"drafts": drafts, "hidden": hidden}, pools

        rungs = self._rungs(
            drafts=(tree.size - 1,), step=None, num_drafted=None, hidden=(tree.level_sizes[level - 1], self._dim)
        )
        return self._buckets("draft_decode", draft_decode, rungs)

    def _first_drafts(self, model, hidden) -> Arrays:
        hidden = hidden[:, None]
        first = top_drafts(model.draft_logits(hidden), self._tree.widths[0])
        drafts = jnp.pad(first, ((0, 0), (0, self._tree.size - 1 - first.shape[1])), constant_values=-1)
        return {"drafts": drafts, "hidden": hidden}

    @property
    def _tree(self) -> DraftTree:
        assert self.shapes.tree is not None  # these passes exist with a tree only
        return self.shapes.tree

    def _mask(self, batch: int, rows: slice, columns: slice):
        """The tree's mask for every request; None for a chain, where causal says it all."""
        if self._tree.is_chain:
            return None
        mask = jnp.asarray(self._tree.mask[rows, columns])
        return jnp.broadcast_to(mask, (batch, *mask.shape))

    def _pick(self, logits, positions, x: Arrays):
        """The token after each row: int32 [B], or [B, S] for logits [B, S, vocab]."""
        if not self.shapes.sampling:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        options = {name: x[name] for name in SAMPLING}
        if logits.ndim == 3:
            return sample(logits, positions, **options)
        return sample(logits[:, None], positions[:, None], **options)[:, 0]

    def _sampling(self) -> dict[str, tuple[()]]:
        return dict.fromkeys(SAMPLING, ()) if self.shapes.sampling else {}

    def _prompt_metadata(self, x: Arrays) -> md.AttentionMetadata:
        rows = x["tokens" if "tokens" in x else "next_tokens"].shape[0]
        return md.for_extend(x["page_table"], x["seq_lens"], x["q_lens"], max_q_len=rows, num_rows=rows, **self._sizes)

    def _rungs(self, **per_request: tuple[int, ...] | None) -> list[Arrays]:
        """Input shapes for each batch: what every pass takes, and arrays [B, ...] (None: a scalar) of its own."""
        return [
            {
                "page_table": _ints(batch, self.shapes.table_width),
                "lens": _ints(batch),
                "active": _ints(batch),
                **{name: self._array(name, batch, tail) for name, tail in per_request.items()},
            }
            for batch in self.shapes.batches
        ]

    def _array(self, name: str, batch: int, tail: tuple[int, ...] | None) -> jax.ShapeDtypeStruct:
        dtype = self._dtype if name == "hidden" else SAMPLING.get(name, jnp.int32)
        return jax.ShapeDtypeStruct(() if tail is None else (batch, *tail), dtype)

    def _prompt_rungs(self, *, drafting: bool = False) -> list[Arrays]:
        return [
            {
                "page_table": _ints(batch, self.shapes.table_width),
                "seq_lens": _ints(batch),
                "q_lens": _ints(batch),
                **(
                    {
                        "next_tokens": _ints(rows),
                        "sampled": _ints(batch),
                        "hidden": jax.ShapeDtypeStruct((rows, self._dim), self._dtype),
                    }
                    if drafting
                    else {"tokens": _ints(rows)} | {name: self._array(name, batch, ()) for name in self._sampling()}
                ),
            }
            for batch in self.shapes.batches
            for rows in self.shapes.prompt_rows
        ]


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _last(hidden, metadata: md.AttentionMetadata):
    """The last row of each request; an arbitrary one where it has none."""
    rows = jnp.clip(metadata.q_starts + metadata.q_lens - 1, 0, hidden.shape[0] - 1)
    return hidden[rows]
