"""Who drafts: the model's own draft layer, another model, or nobody but the request's text."""

import dataclasses
from collections.abc import Callable, Sequence

from mla_attn.checks import check_integer
from mla_attn.models.base import CacheGroup, CausalLM, Pools
from mla_attn.speculative import DraftTree
from mla_attn.text import shown

DRAFT = "draft."  # before the names of a draft model's cache groups


@dataclasses.dataclass(frozen=True, eq=False)
class DraftModel:
    """A smaller model of the same vocabulary that drafts, with a cache of its own.

    Its cache groups stand beside those of the target under names that begin with ``draft.``.

    Attributes:
        model: a loaded checkpoint. Its own draft layer, if there is one, has no part in this.
    """

    model: CausalLM

    def __post_init__(self):
        if not isinstance(self.model, CausalLM):
            raise ValueError(
                f"model={shown(self.model)} is a {type(self.model).__name__}, must be a model: load_checkpoint(path) "
                "loads one"
            )


@dataclasses.dataclass(frozen=True)
class NgramDrafts:
    """Drafts that cost no model: what followed the request's last tokens where they stood before, in its prompt or in
    what it generated (``speculative.ngram_drafts``).

    Attributes:
        n: most tokens that are matched, at least 1.
    """

    n: int = 3

    def __post_init__(self):
        object.__setattr__(self, "n", check_integer("n", self.n, 1))


Drafts = DraftModel | NgramDrafts | None  # None: the model's own draft layer


def check_drafts(draft: Drafts, model: CausalLM, trees: Sequence[DraftTree]) -> None:
    """ValueError unless the drafter can draft these trees, at least one, for the model."""
    if not isinstance(draft, Drafts):
        raise ValueError(f"draft={shown(draft)} must be a DraftModel, NgramDrafts, or None for the model's draft layer")
    if isinstance(draft, DraftModel) and draft.model.vocab_size != model.vocab_size:
        raise ValueError(
            f"draft has a model of vocab_size={draft.model.vocab_size}, must be the model's: {model.vocab_size}"
        )
    if not trees:
        raise ValueError(
            f"draft={shown(draft)} without speculation: must be None, or speculation at least one DraftTree"
        )
    if draft is None and not model.can_draft:
        raise ValueError(
            f"speculation of widths {trees[0].widths} must be None: {model.draft_refusal}; or draft must be a "
            "DraftModel or NgramDrafts"
        )


def most_positions(model: CausalLM, draft: Drafts) -> int:
    """Most tokens of a request that the model, and its draft model, have positions for."""
    others = [draft.model] if isinstance(draft, DraftModel) else []
    return min(each.max_position_embeddings for each in (model, *others))


def all_pools(model: CausalLM, draft: Drafts, num_pages: Callable[[int | None], int], page_size: int) -> Pools:
    """All-zero pools of ``all_groups``; ``num_pages`` says how many pages the groups of a window have."""

    def pools(each: CausalLM) -> Pools:
        sizes = {group.name: num_pages(group.window) for group in each.cache_groups}
        return each.create_pools(num_pages=sizes, page_size=page_size)

    drafting = pools(draft.model) if isinstance(draft, DraftModel) else {}
    return pools(model) | {DRAFT + name: pool for name, pool in drafting.items()}


def all_groups(model: CausalLM, draft: Drafts) -> tuple[CacheGroup, ...]:
    """The cache groups of a model and of its draft model, under names that differ."""
    own = model.cache_groups
    if not isinstance(draft, DraftModel):
        return own
    return (*own, *(dataclasses.replace(group, name=DRAFT + group.name) for group in draft.model.cache_groups))
