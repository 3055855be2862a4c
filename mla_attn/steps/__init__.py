"""The jitted entry points, one a mode."""

from mla_attn.steps.mla import (
    PREFIX_CHUNK,
    QueryScaling,
    absorbed_extend,
    decode,
    draft_decode,
    draft_extend,
    extend,
    prefill,
    target_verify,
)

__all__ = [
    "PREFIX_CHUNK",
    "QueryScaling",
    "absorbed_extend",
    "decode",
    "draft_decode",
    "draft_extend",
    "extend",
    "prefill",
    "target_verify",
]
