"""The passes that draft a tree with the model's draft layer, verify it, and run accepted tokens through that layer."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mla_attn import metadata as md
from mla_attn.buckets import Buckets
from mla_attn.cache import move_rows
from mla_attn.models.base import CausalLM, Pools
from mla_attn.passes.fields import SAMPLING, Arrays
from mla_attn.passes.functions import Functions, Method, last_rows
from mla_attn.passes.passes import Passes
from mla_attn.speculative import DraftTree, accept_tree, path_moves, top_drafts


class DraftPasses:
    """The passes of one draft tree as ``Buckets``, each built at its first use: ``draft_prefill``, ``draft_decode``
    (one for each step after the first draft), ``target_verify`` and ``draft_extend``.

    Args:
        passes: passes of the model.
        model: the model that ``passes`` was built from.
        tree: drafts per verify step; a chain of K drafts is a tree with K widths of 1.

    Raises:
        ValueError: the model cannot draft, or a node of the tree has more children than there are tokens.
    """

    def __init__(self, passes: Passes, model: CausalLM, tree: DraftTree):
        if not model.can_draft:
            raise ValueError(f"tree of widths {tree.widths} must be None: {model.draft_refusal}")
        if max(tree.widths) > model.vocab_size:
            raise ValueError(f"tree of widths {tree.widths}: each must be at most vocab_size={model.vocab_size}")
        self._passes, self.tree = passes, tree
        self.functions = DraftFunctions(passes.functions, tree, model.hidden_size)
        self._sizes: dict[str, Any] = {"nodes": tree.size - 1, "path": tree.depth + 1}

    @functools.cached_property
    def draft_prefill(self) -> Buckets:
        """Runs prefill chunks through the draft layer, which gives each request's first drafts."""
        inputs = ("page_table", "seq_lens", "q_lens", "next_tokens", "sampled", "prompt_hidden")
        return self._passes.buckets("draft_prefill", Method(self.functions, "draft_prefill"), inputs, prompts=True)

    @functools.cached_property
    def target_verify(self) -> Buckets:
        """Runs the anchor (the last emitted token) and its drafts through the model, and accepts drafts."""
        inputs = ("page_table", "lens", "active", "tokens", "drafts", *SAMPLING)
        return self._passes.buckets("target_verify", Method(self.functions, "target_verify"), inputs, **self._sizes)

    @functools.cached_property
    def draft_extend(self) -> Buckets:
        """Runs the emitted tokens through the draft layer, with the target's hidden states: the next first drafts."""
        inputs = ("page_table", "lens", "active", "emitted", "num_emitted", "emitted_hidden")
        return self._passes.buckets("draft_extend", Method(self.functions, "draft_extend"), inputs, **self._sizes)

    @functools.cached_property
    def draft_decode(self) -> tuple[Buckets, ...]:
        """One pass for each depth but the last, which runs the drafts of that depth to get those of the next.

        Steps that differ only in their number, as in a chain, share a program.
        """
        tree, made, steps = self.tree, {}, []
        for level in range(1, tree.depth):
            key = "chain" if tree.is_chain else level
            made[key] = made.get(key) or self._draft_decode(level)
            steps.append(made[key])
        return tuple(steps)

    @property
    def all(self) -> list[Buckets]:
        """The distinct ``Buckets`` of all passes."""
        return [self.draft_prefill, *dict.fromkeys(self.draft_decode), self.target_verify, self.draft_extend]

    def _draft_decode(self, level: int) -> Buckets:
        inputs = ("page_table", "lens", "active", "drafts", "hidden", "step", "num_drafted")
        sizes = {"width": self.tree.level_sizes[level - 1], **self._sizes}
        return self._passes.buckets("draft_decode", Method(self.functions, "draft_decode", (level,)), inputs, **sizes)


@dataclasses.dataclass(frozen=True)
class DraftFunctions:
    """The passes of one draft tree as pure functions.

    Attributes:
        base: the passes of the model.
        tree: drafts per verify step.
        hidden_size: width of the draft layer's hidden states.
    """

    base: Functions
    tree: DraftTree
    hidden_size: int

    def draft_prefill(self, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """Runs prefill chunks. Row t takes the token after t: ``next_tokens``, or the sampled token if that is -1."""
        passes, rows = self.base, x["next_tokens"].shape[0]
        model, m = passes.model(state), passes.prompt_metadata(x, rows)
        owner, _ = md.row_owners(m.q_starts, m.q_lens, rows)
        tokens = jnp.where(x["next_tokens"] < 0, x["sampled"][owner], x["next_tokens"])
        hidden, pools = passes.run_draft(model, x["prompt_hidden"], tokens, pools, m, mode="draft_extend")
        return self._first_drafts(model, last_rows(hidden, m)), pools

    def target_verify(self, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        passes, tree = self.base, self.tree
        model = passes.model(state)
        m = md.for_target_verify(
            x["page_table"],
            x["lens"],
            num_tokens=tree.size,
            q_lens=tree.size * x["active"],
            depths=None if tree.is_chain else jnp.asarray(tree.depths),
            **passes.layout,
        )
        tokens = jnp.concatenate([x["tokens"][:, None], x["drafts"]], axis=1)
        mask = self._mask(tokens.shape[0], slice(None), slice(None))
        hidden, pools = passes.run(model, tokens.reshape(-1), pools, m, mode="target_verify", tree_mask=mask)
        logits = model.logits(hidden).reshape(*tokens.shape, -1)
        targets = passes.targets(state, logits, m.positions.reshape(tokens.shape), x, tree)
        parents = jnp.broadcast_to(jnp.asarray(tree.parents), tokens.shape)
        result, path = accept_tree(tokens, parents, targets, m.q_lens, max_depth=tree.depth)
        if not tree.is_chain:
            moves = path_moves(m.slots.reshape(tokens.shape), path)
            pools = {group: move_rows(pool, *moves) for group, pool in pools.items()}
        hidden = hidden.reshape(*tokens.shape, -1)
        return {
            "emitted": result.emitted,
            "num_emitted": result.num_emitted,
            "tokens": result.next_tokens,
            "lens": x["lens"] + result.num_emitted,
            "emitted_hidden": jnp.take_along_axis(hidden, jnp.maximum(path, 0)[:, :, None], axis=1),
        }, pools

    def draft_extend(self, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        passes, rows = self.base, self.tree.depth + 1
        model, q_lens = passes.model(state), x["num_emitted"] * x["active"]
        m = md.for_draft_extend(x["page_table"], x["lens"], q_lens, max_q_len=rows, **passes.layout)
        hidden, tokens = x["emitted_hidden"].reshape(-1, self.hidden_size), x["emitted"].reshape(-1)
        hidden, pools = passes.run_draft(model, hidden, tokens, pools, m, mode="draft_extend")
        return self._first_drafts(model, last_rows(hidden, m)), pools

    def draft_decode(self, level: int, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """Runs the drafts of depth ``level``, and drafts ``widths[level]`` children of each."""
        passes, tree = self.base, self.tree
        nodes, spread, width = tree.level_sizes[level], tree.widths[level - 1], tree.widths[level]
        drafted = slice(1, tree.level_starts[level] + nodes)
        level_nodes = slice(tree.level_starts[level], tree.level_starts[level] + nodes)
        model, batch = passes.model(state), x["lens"].shape[0]
        counts = {"num_tokens": nodes, "num_drafted": x["num_drafted"], "q_lens": nodes * x["active"]}
        m = md.for_draft_decode(x["page_table"], x["lens"], x["step"], **counts, **passes.layout)
        tokens = jax.lax.dynamic_slice_in_dim(x["drafts"], x["num_drafted"], nodes, axis=1)
        hidden = jnp.repeat(x["hidden"], spread, axis=1).reshape(-1, self.hidden_size)
        options = {"mode": "draft_decode", "tree_mask": self._mask(batch, level_nodes, drafted)}
        hidden, pools = passes.run_draft(model, hidden, tokens.reshape(-1), pools, m, **options)
        hidden = hidden.reshape(batch, nodes, -1)
        new = top_drafts(model.draft_logits(hidden), width)
        drafts = jax.lax.dynamic_update_slice_in_dim(x["drafts"], new, x["num_drafted"] + nodes, axis=1)
        return {"drafts": drafts, "hidden": hidden}, pools

    def _first_drafts(self, model, hidden) -> Arrays:
        hidden = hidden[:, None]
        first = top_drafts(model.draft_logits(hidden), self.tree.widths[0])
        drafts = jnp.pad(first, ((0, 0), (0, self.tree.size - 1 - first.shape[1])), constant_values=-1)
        return {"drafts": drafts, "hidden": hidden}

    def _mask(self, batch: int, rows: slice, columns: slice):
        """The tree mask for every request; None for a chain, which needs only the causal mask."""
        if self.tree.is_chain:
            return None
        mask = jnp.asarray(self.tree.mask[rows, columns])
        return jnp.broadcast_to(mask, (batch, *mask.shape))
