"""Metadata of a batch: its rows, lengths and pages, and a builder for each serving mode."""

from mla_attn.metadata.builders import (
    for_cross_attention,
    for_decode,
    for_draft_decode,
    for_draft_extend,
    for_encoder,
    for_extend,
    for_mixed,
    for_target_verify,
)
from mla_attn.metadata.check import check_metadata
from mla_attn.metadata.ragged import RaggedMetadata
from mla_attn.metadata.structure import AttentionMetadata, row_owners
from mla_attn.metadata.tables import (
    page_map_from_tokens,
    page_table_from_indices,
    page_table_from_packed,
    page_table_from_tokens,
    tree_mask_from_flat,
)

__all__ = [
    "AttentionMetadata",
    "RaggedMetadata",
    "check_metadata",
    "for_cross_attention",
    "for_decode",
    "for_draft_decode",
    "for_draft_extend",
    "for_encoder",
    "for_extend",
    "for_mixed",
    "for_target_verify",
    "page_map_from_tokens",
    "page_table_from_indices",
    "page_table_from_packed",
    "page_table_from_tokens",
    "row_owners",
    "tree_mask_from_flat",
]
