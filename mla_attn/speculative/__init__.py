"""Speculative decoding: draft trees, and acceptance of drafts by the target model."""

from mla_attn.speculative.acceptance import Acceptance, accept_greedy, accept_sampled
from mla_attn.speculative.ngrams import ngram_drafts
from mla_attn.speculative.tree import (
    DraftTree,
    PrunedTree,
    accept_tree,
    mask_of_parents,
    path_moves,
    prune,
    top_drafts,
)

__all__ = [
    "Acceptance",
    "DraftTree",
    "PrunedTree",
    "accept_greedy",
    "accept_sampled",
    "accept_tree",
    "mask_of_parents",
    "ngram_drafts",
    "path_moves",
    "prune",
    "top_drafts",
]
