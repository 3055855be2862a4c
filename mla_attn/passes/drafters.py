"""The passes of one draft tree as pure functions, for each kind of drafter.

All kinds have the same rounds: the first drafts exist, one pass per further level drafts the next level, the target
verifies, and the drafter runs the emitted tokens and makes the next first drafts. They differ in what they cache: the
row of a draft layer at position t holds the token at t + 1, so it has as many rows as the target; a draft model also
has the anchor's row, one more.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from mla_attn import metadata as md
from mla_attn.models.base import CausalLM, Metadata, Pools
from mla_attn.passes.fields import Arrays
from mla_attn.passes.functions import Functions, last_rows, of_rows
from mla_attn.speculative import DraftTree, accept_tree, ngram_drafts, path_moves, top_drafts


@dataclasses.dataclass(frozen=True)
class DraftFunctions:
    """The passes that all drafters share, in particular ``target_verify``.

    Attributes:
        base: the passes of the model.
        tree: drafts per verify step.
        prefill_inputs: fields that ``draft_prefill`` takes in addition to page tables.
        given: fields among them that are kept afterwards.
        verified: outputs of ``target_verify`` that ``draft_extend`` takes.
        extend_inputs: fields that ``draft_extend`` takes in addition to page tables, ``lens`` and ``active``.
        decode_inputs: fields that each ``draft_decode`` takes in addition to tables, drafts and their number, and
            outputs for the next; None if there is no such pass.
    """

    base: Functions
    tree: DraftTree
    prefill_inputs: ClassVar[tuple[str, ...]]
    given: ClassVar[tuple[str, ...]] = ()
    verified: ClassVar[tuple[str, ...]] = ("emitted", "num_emitted")
    extend_inputs: ClassVar[tuple[str, ...]] = verified
    decode_inputs: ClassVar[tuple[str, ...] | None] = ()

    def target_verify(self, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        passes, tree = self.base, self.tree
        model, batch = passes.model(state), x["lens"].shape[0]
        depths = None if tree.is_chain else jnp.asarray(tree.depths)
        options = {"num_tokens": tree.size, "q_lens": tree.size * x["active"], "depths": depths}
        m = passes.metadata(md.for_target_verify, x, x["lens"], **options)
        rows = of_rows(m)
        tokens = jnp.concatenate([x["tokens"][:, None], x["drafts"]], axis=1)
        mask = self._mask(batch, slice(None), slice(None))
        hidden, pools = passes.run(model, tokens.reshape(-1), pools, m, mode="target_verify", tree_mask=mask)
        logits = model.logits(hidden).reshape(*tokens.shape, -1)
        targets = passes.targets(state, logits, rows.positions.reshape(tokens.shape), x, tree)
        parents = jnp.broadcast_to(jnp.asarray(tree.parents), tokens.shape)
        result, path = accept_tree(tokens, parents, targets, rows.q_lens, max_depth=tree.depth)
        if not tree.is_chain:
            moves = {name: path_moves(m[name].slots.reshape(tokens.shape), path) for name in m}
            pools = pools | {name: passes.move_rows(pools[name], *moves[name]) for name in m}
        hidden = hidden.reshape(*tokens.shape, -1)
        outputs = {
            "emitted": result.emitted,
            "num_emitted": result.num_emitted,
            "tokens": result.next_tokens,
            "lens": x["lens"] + result.num_emitted,
        }
        if "emitted_hidden" in self.verified:
            outputs["emitted_hidden"] = jnp.take_along_axis(hidden, jnp.maximum(path, 0)[:, :, None], axis=1)
        return outputs, pools

    def _pad(self, first):
        """The first drafts, padded with -1 to all drafts of the tree."""
        return jnp.pad(first, ((0, 0), (0, self.tree.size - 1 - first.shape[1])), constant_values=-1)

    def _mask(self, batch: int, rows: slice, columns: slice):
        """The tree mask for every request; None for a chain, which needs only the causal mask."""
        if self.tree.is_chain:
            return None
        mask = jnp.asarray(self.tree.mask[rows, columns])
        return jnp.broadcast_to(mask, (batch, *mask.shape))

    def _level(self, passes: Functions, level: int, x: Arrays, lens) -> tuple[jax.Array, Metadata, jax.Array | None]:
        """Tokens, metadata and mask of the drafts of depth ``level``, after ``lens`` cached rows of the drafter."""
        tree = self.tree
        nodes, begin = tree.level_sizes[level], tree.level_starts[level]
        counts = {"num_tokens": nodes, "num_drafted": x["num_drafted"], "q_lens": nodes * x["active"]}
        m = passes.metadata(md.for_draft_decode, x, lens, x["step"], **counts)
        tokens = jax.lax.dynamic_slice_in_dim(x["drafts"], x["num_drafted"], nodes, axis=1)
        mask = self._mask(x["lens"].shape[0], slice(begin, begin + nodes), slice(1, begin + nodes))
        return tokens.reshape(-1), m, mask

    def _next_level(self, level: int, x: Arrays, logits):
        """All drafts, with the children of those of depth ``level`` filled in."""
        nodes = self.tree.level_sizes[level]
        new = top_drafts(logits.reshape(x["lens"].shape[0], nodes, -1), self.tree.widths[level])
        return jax.lax.dynamic_update_slice_in_dim(x["drafts"], new, x["num_drafted"] + nodes, axis=1)


@dataclasses.dataclass(frozen=True)
class LayerFunctions(DraftFunctions):
    """The passes of the model's draft layer, which uses cache groups of the model.

    Attributes:
        hidden_size: width of the draft layer's hidden states.
    """

    hidden_size: int
    prefill_inputs: ClassVar = ("seq_lens", "q_lens", "next_tokens", "sampled", "prompt_hidden")
    verified: ClassVar = ("emitted", "num_emitted", "emitted_hidden")
    extend_inputs: ClassVar = verified
    decode_inputs: ClassVar = ("hidden",)

    def draft_prefill(self, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """Runs prefill chunks. Row t takes the token after t: ``next_tokens``, or the sampled token if that is -1."""
        passes, rows = self.base, x["next_tokens"].shape[0]
        model, m = passes.model(state), passes.prompt_metadata(x, rows)
        owner, _ = md.row_owners(of_rows(m).q_starts, of_rows(m).q_lens, rows)
        tokens = jnp.where(x["next_tokens"] < 0, x["sampled"][owner], x["next_tokens"])
        hidden, pools = passes.run_draft(model, x["prompt_hidden"], tokens, pools, m, mode="draft_extend")
        return self._first_drafts(model, last_rows(hidden, m)), pools

    def draft_extend(self, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        passes, rows = self.base, self.tree.depth + 1
        model, q_lens = passes.model(state), x["num_emitted"] * x["active"]
        m = passes.metadata(md.for_draft_extend, x, x["lens"], q_lens, max_q_len=rows)
        hidden, tokens = x["emitted_hidden"].reshape(-1, self.hidden_size), x["emitted"].reshape(-1)
        hidden, pools = passes.run_draft(model, hidden, tokens, pools, m, mode="draft_extend")
        return self._first_drafts(model, last_rows(hidden, m)), pools

    def draft_decode(self, level: int, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """Runs the drafts of depth ``level``, and drafts ``widths[level]`` children of each."""
        passes, batch = self.base, x["lens"].shape[0]
        model, (tokens, m, mask) = passes.model(state), self._level(passes, level, x, x["lens"])
        hidden = jnp.repeat(x["hidden"], self.tree.widths[level - 1], axis=1).reshape(-1, self.hidden_size)
        hidden, pools = passes.run_draft(model, hidden, tokens, pools, m, mode="draft_decode", tree_mask=mask)
        drafts = self._next_level(level, x, model.draft_logits(hidden))
        return {"drafts": drafts, "hidden": hidden.reshape(batch, -1, self.hidden_size)}, pools

    def _first_drafts(self, model, hidden) -> Arrays:
        hidden = hidden[:, None]
        first = top_drafts(model.draft_logits(hidden), self.tree.widths[0])
        return {"drafts": self._pad(first), "hidden": hidden}


@dataclasses.dataclass(frozen=True)
class ModelFunctions(DraftFunctions):
    """The passes of another model that drafts, with its own cache groups.

    Attributes:
        draft: passes of the draft model.
    """

    draft: Functions
    prefill_inputs: ClassVar = ("seq_lens", "q_lens", "prompt_tokens", "sampled")

    def draft_prefill(self, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """Runs the chunk, then the sampled token, whose row the next chunk overwrites if the prompt continues."""
        passes, model = self.draft, self.draft.model(state)
        m = passes.prompt_metadata(x, x["prompt_tokens"].shape[0])
        _, pools = passes.run(model, x["prompt_tokens"], pools, m, mode="extend")
        m = passes.metadata(md.for_decode, x, x["seq_lens"] + 1, active=x["q_lens"] > 0)
        hidden, pools = passes.run(model, x["sampled"], pools, m, mode="decode")
        return self._first_drafts(model, hidden), pools

    def draft_extend(self, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        passes, model = self.draft, self.draft.model(state)
        options = {"q_lens": x["num_emitted"] * x["active"], "max_q_len": self.tree.depth + 1}
        m = passes.metadata(md.for_draft_extend, x, x["lens"] + 1, **options)
        hidden, pools = passes.run(model, x["emitted"].reshape(-1), pools, m, mode="draft_extend")
        return self._first_drafts(model, last_rows(hidden, m)), pools

    def draft_decode(self, level: int, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """Runs the drafts of depth ``level``, and drafts ``widths[level]`` children of each."""
        passes, model = self.draft, self.draft.model(state)
        tokens, m, mask = self._level(passes, level, x, x["lens"] + 1)
        hidden, pools = passes.run(model, tokens, pools, m, mode="draft_decode", tree_mask=mask)
        return {"drafts": self._next_level(level, x, model.logits(hidden))}, pools

    def _first_drafts(self, model: CausalLM, hidden) -> Arrays:
        return {"drafts": self._pad(top_drafts(model.logits(hidden)[:, None], self.tree.widths[0]))}


@dataclasses.dataclass(frozen=True)
class NgramFunctions(DraftFunctions):
    """The passes of n-gram drafting from the request's own text: no model, no cached rows, all drafts in one pass.

    Attributes:
        n: most tokens to match.
    """

    n: int
    prefill_inputs: ClassVar = ("seq_lens", "q_lens", "sampled", "text")
    given: ClassVar = ("text",)
    extend_inputs: ClassVar = ("emitted", "num_emitted", "text")
    decode_inputs: ClassVar = None

    def draft_prefill(self, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        """Appends the sampled token to ``text``, all tokens of the request up to this chunk's end, and drafts."""
        ones = jnp.ones_like(x["seq_lens"])
        return self._drafts(x["text"], x["seq_lens"], x["sampled"][:, None], ones), pools

    def draft_extend(self, state, pools: Pools, x: Arrays) -> tuple[Arrays, Pools]:
        first = x["lens"] + 1 - x["num_emitted"]
        return self._drafts(x["text"], first, x["emitted"], x["num_emitted"]), pools

    def _drafts(self, text, first, tokens, count) -> Arrays:
        """Writes ``count`` tokens to ``text`` from position ``first`` on, and drafts from the result."""
        column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        place = jnp.where(column < count[:, None], first[:, None] + column, text.shape[1])
        text = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(text, place, tokens)
        return {"text": text, "drafts": ngram_drafts(text, first + count, self.tree, n=self.n)}
