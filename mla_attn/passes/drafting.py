"""The passes that draft a tree, verify it, and run accepted tokens through the drafter, as programs."""

import functools
from typing import Any

from mla_attn.buckets import Buckets
from mla_attn.models.base import CausalLM
from mla_attn.passes.drafters import DraftFunctions, LayerFunctions, ModelFunctions, NgramFunctions
from mla_attn.passes.drafts import DraftModel, Drafts, NgramDrafts, check_drafts
from mla_attn.passes.fields import SAMPLING
from mla_attn.passes.functions import Method
from mla_attn.passes.passes import Passes
from mla_attn.speculative import DraftTree


class DraftPasses:
    """The passes of one draft tree as ``Buckets``, each built at its first use: ``draft_prefill``, ``draft_decode``
    (one for each step after the first draft, none for n-grams), ``target_verify`` and ``draft_extend``.

    Args:
        passes: passes of the model, and of the draft model if there is one.
        model: the model that ``passes`` was built from.
        tree: drafts per verify step; a chain of K drafts is a tree with K widths of 1.
        draft: the drafter; None for the model's draft layer.

    Raises:
        ValueError: the drafter does not fit the model, a node of the tree has more children than there are tokens,
            or a tree other than a chain has more nodes than a window of the models.
    """

    def __init__(self, passes: Passes, model: CausalLM, tree: DraftTree, draft: Drafts = None):
        check_drafts(draft, model, [tree])
        if max(tree.widths) > model.vocab_size:
            raise ValueError(f"tree of widths {tree.widths}: each must be at most vocab_size={model.vocab_size}")
        windows = [window for window, _ in passes.shapes.windows]
        if not tree.is_chain and tree.size > min(windows, default=tree.size):
            raise ValueError(
                f"tree of widths {tree.widths} has {tree.size} nodes, must be at most window={min(windows)}"
            )
        self._passes, self.tree = passes, tree
        if isinstance(draft, DraftModel):
            assert passes.draft_functions is not None
            self.functions: DraftFunctions = ModelFunctions(passes.functions, tree, passes.draft_functions)
        elif isinstance(draft, NgramDrafts):
            self.functions = NgramFunctions(passes.functions, tree, draft.n)
        else:
            self.functions = LayerFunctions(passes.functions, tree, model.hidden_size)
        self._sizes: dict[str, Any] = {"nodes": tree.size - 1, "path": tree.depth + 1, "L": passes.shapes.max_len}

    @functools.cached_property
    def draft_prefill(self) -> Buckets:
        """Runs prefill chunks through the drafter, which gives each request's first drafts."""
        options = {"prompts": True, "given": self.functions.given, **self._sizes}
        return self._buckets("draft_prefill", self.functions.prefill_inputs, **options)

    @functools.cached_property
    def target_verify(self) -> Buckets:
        """Runs the anchor (the last emitted token) and its drafts through the model, and accepts drafts."""
        return self._buckets("target_verify", ("lens", "active", "tokens", "drafts", *SAMPLING), **self._sizes)

    @functools.cached_property
    def draft_extend(self) -> Buckets:
        """Runs the emitted tokens through the drafter, which gives the next first drafts (n-grams: all drafts)."""
        return self._buckets("draft_extend", ("lens", "active", *self.functions.extend_inputs), **self._sizes)

    @functools.cached_property
    def draft_decode(self) -> tuple[Buckets, ...]:
        """One pass for each depth but the last, which runs the drafts of that depth to get those of the next.

        Steps that differ only in their number, as in a chain, share a program.
        """
        tree, made, steps = self.tree, {}, []
        for level in range(1, 1 if self.functions.decode_inputs is None else tree.depth):
            key = "chain" if tree.is_chain else level
            made[key] = made.get(key) or self._draft_decode(level)
            steps.append(made[key])
        return tuple(steps)

    @property
    def all(self) -> list[Buckets]:
        """The distinct ``Buckets`` of all passes."""
        return [self.draft_prefill, *dict.fromkeys(self.each_step)]

    @property
    def each_step(self) -> list[Buckets]:
        """The ``Buckets`` of a round of drafting and verifying, in the order in which they run."""
        return [*self.draft_decode, self.target_verify, self.draft_extend]

    def _draft_decode(self, level: int) -> Buckets:
        inputs = ("lens", "active", "drafts", "step", "num_drafted", *(self.functions.decode_inputs or ()))
        sizes = {"width": self.tree.level_sizes[level - 1], **self._sizes}
        return self._buckets("draft_decode", inputs, arguments=(level,), **sizes)

    def _buckets(
        self, name: str, inputs: tuple[str, ...], *, arguments: tuple[int, ...] = (), **options: Any
    ) -> Buckets:
        method = Method(self.functions, name, arguments)
        return self._passes.buckets(name, method, (*self._passes.tables, *inputs), **options)
