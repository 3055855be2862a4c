"""Paged attention for serving LLMs in JAX: multi-head latent attention on NVIDIA GPUs and everywhere XLA runs.

Ops are pure functions of arrays, a paged cache pytree and metadata, for use inside ``jax.jit``. ``mla_attn.steps`` has
the jitted entry point of each serving mode, ``mla_attn.buckets`` compiles whole-model passes ahead of time,
``mla_attn.models`` holds DeepSeek-V2/V3 in Flax NNX, ``mla_attn.generation`` runs it over one batch, and
``mla_attn.engine`` serves it to many requests.
"""

from mla_attn.cache import LatentPool, move_rows, read_latent, write_latent
from mla_attn.metadata import (
    AttentionMetadata,
    RaggedMetadata,
    check_metadata,
    for_decode,
    for_draft_decode,
    for_draft_extend,
    for_extend,
    for_mixed,
    for_target_verify,
    page_table_from_tokens,
)
from mla_attn.ops import merge_states, mla_attention, plan_mla, ragged_attention
from mla_attn.specs import MLASpec
from mla_attn.support import supports

__all__ = [
    "AttentionMetadata",
    "LatentPool",
    "MLASpec",
    "RaggedMetadata",
    "check_metadata",
    "for_decode",
    "for_draft_decode",
    "for_draft_extend",
    "for_extend",
    "for_mixed",
    "for_target_verify",
    "merge_states",
    "mla_attention",
    "move_rows",
    "page_table_from_tokens",
    "plan_mla",
    "ragged_attention",
    "read_latent",
    "supports",
    "write_latent",
]
