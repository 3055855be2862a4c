"""What a step needs to know about its batch, and one builder per serving mode."""

from mla_attn.metadata.builders import (
    AttentionMetadata,
    check_metadata,
    for_decode,
    for_draft_decode,
    for_draft_extend,
    for_extend,
    for_mixed,
    for_target_verify,
    page_table_from_tokens,
    row_owners,
)

__all__ = [
    "AttentionMetadata",
    "check_metadata",
    "for_decode",
    "for_draft_decode",
    "for_draft_extend",
    "for_extend",
    "for_mixed",
    "for_target_verify",
    "page_table_from_tokens",
    "row_owners",
]
