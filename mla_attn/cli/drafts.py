"""The drafter that the options of a command name."""

import argparse
from collections.abc import Callable, Sequence

from mla_attn.models.base import CausalLM
from mla_attn.passes import Drafts, check_drafts, open_draft
from mla_attn.speculative import DraftTree


def open_drafts(
    options: argparse.Namespace, model: CausalLM, trees: Sequence[DraftTree]
) -> tuple[Drafts, Callable[[], Drafts]]:
    """The drafter of ``--draft``, without arrays and in the model's dtype, and the function that creates it with them.

    Raises:
        ValueError: it cannot draft these trees for the model; the message begins with its name, or the checkpoint's.
    """
    draft, load = open_draft(options.draft, dtype=model.dtype)
    if trees:
        try:
            check_drafts(draft, model, trees)
        except ValueError as reason:
            raise ValueError(f"{options.draft or options.checkpoint}: {reason}") from None
    return draft, load
