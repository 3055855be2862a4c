"""The ops: validate, then dispatch."""

from mla_attn.ops.gqa import gqa_attention, plan_gqa
from mla_attn.ops.merge import merge_states
from mla_attn.ops.mla import mla_attention, plan_mla
from mla_attn.ops.quantization import quantize_queries
from mla_attn.ops.ragged import plan_ragged, ragged_attention

__all__ = [
    "gqa_attention",
    "merge_states",
    "mla_attention",
    "plan_gqa",
    "plan_mla",
    "plan_ragged",
    "quantize_queries",
    "ragged_attention",
]
