"""The drafters: the model's own draft layer, another model, or n-grams of the request's text."""

import dataclasses
from collections.abc import Callable, Sequence

from jax.typing import DTypeLike

from mla_attn.checks import check_integer
from mla_attn.models import open_checkpoint
from mla_attn.models.base import CacheGroup, CausalLM
from mla_attn.speculative import DraftTree
from mla_attn.text import shown

DRAFT = "draft."  # prefix of the names of a draft model's cache groups


@dataclasses.dataclass(frozen=True, eq=False)
class DraftModel:
    """A smaller model with the same vocabulary that drafts, with its own cache.

    The names of its cache groups begin with ``draft.``.

    Attributes:
        model: a loaded checkpoint. Its own draft layer, if it has one, is not used.
    """

    model: CausalLM = dataclasses.field(repr=False)

    def __post_init__(self):
        if not isinstance(self.model, CausalLM):
            raise ValueError(
                f"model={shown(self.model)} is a {type(self.model).__name__}, must be a model: load_checkpoint(path) "
                "loads one"
            )


@dataclasses.dataclass(frozen=True)
class NgramDrafts:
    """Drafting without a model: the tokens that followed earlier occurrences of the request's last tokens, in its
    prompt or its generated tokens (``speculative.ngram_drafts``).

    Attributes:
        n: most tokens to match, at least 1.
    """

    n: int = 3

    def __post_init__(self):
        object.__setattr__(self, "n", check_integer("n", self.n, 1))


Drafts = DraftModel | NgramDrafts | None  # None: the model's own draft layer


def check_drafts(draft: Drafts, model: CausalLM, trees: Sequence[DraftTree]) -> None:
    """Raises ValueError unless the drafter can draft these trees for the model, and there is at least one."""
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


def open_draft(draft: str | int | None, *, dtype: DTypeLike | None) -> tuple[Drafts, Callable[[], Drafts]]:
    """The drafter that a command names, without arrays, and the function that creates it with them.

    Args:
        draft: a checkpoint's folder, the ``n`` of ``NgramDrafts``, or None for the model's own draft layer.
        dtype: of the checkpoint, as in ``open_checkpoint``.

    Raises:
        ValueError: as in ``open_checkpoint``.
    """
    if isinstance(draft, str):
        opened = open_checkpoint(draft, dtype=dtype)
        return DraftModel(opened.model), lambda: DraftModel(opened.load())
    made = None if draft is None else NgramDrafts(draft)
    return made, lambda: made


def most_positions(model: CausalLM, draft: Drafts) -> int:
    """Most tokens of a request for which the model and its draft model have positions."""
    others = [draft.model] if isinstance(draft, DraftModel) else []
    return min(each.max_position_embeddings for each in (model, *others))


def all_groups(model: CausalLM, draft: Drafts) -> tuple[CacheGroup, ...]:
    """The cache groups of a model and of its draft model, with distinct names."""
    own = model.cache_groups
    if not isinstance(draft, DraftModel):
        return own
    return (
        *own,
        *(
            dataclasses.replace(group, name=DRAFT + group.name, draft_layers=group.num_layers)
            for group in draft.model.cache_groups
        ),
    )
