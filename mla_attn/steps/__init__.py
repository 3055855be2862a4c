"""The jitted entry points, one per mode."""

from mla_attn.steps.gqa import (
    gqa_decode,
    gqa_draft_decode,
    gqa_draft_extend,
    gqa_extend,
    gqa_prefill,
    gqa_target_verify,
)
from mla_attn.steps.mla import (
    PREFIX_CHUNK,
    absorbed_extend,
    decode,
    draft_decode,
    draft_extend,
    extend,
    prefill,
    target_verify,
)
from mla_attn.steps.scaling import QueryScaling

__all__ = [
    "PREFIX_CHUNK",
    "QueryScaling",
    "absorbed_extend",
    "decode",
    "draft_decode",
    "draft_extend",
    "extend",
    "gqa_decode",
    "gqa_draft_decode",
    "gqa_draft_extend",
    "gqa_extend",
    "gqa_prefill",
    "gqa_target_verify",
    "prefill",
    "target_verify",
]
