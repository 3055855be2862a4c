"""Passes: whole-model programs over padded arrays, one for each mode, compiled ahead of time."""

from mla_attn.passes.drafting import DraftPasses
from mla_attn.passes.drafts import DraftModel, Drafts, NgramDrafts, all_groups, check_drafts, most_positions, open_draft
from mla_attn.passes.fields import FIELDS, INVALID_TOKEN, KEPT, SAMPLING, Arrays, Field, structs, zeros
from mla_attn.passes.functions import Functions, Method
from mla_attn.passes.passes import Pass, Passes, Shapes

__all__ = [
    "FIELDS",
    "INVALID_TOKEN",
    "KEPT",
    "SAMPLING",
    "Arrays",
    "DraftModel",
    "DraftPasses",
    "Drafts",
    "Field",
    "Functions",
    "Method",
    "NgramDrafts",
    "Pass",
    "Passes",
    "Shapes",
    "all_groups",
    "check_drafts",
    "most_positions",
    "open_draft",
    "structs",
    "zeros",
]
