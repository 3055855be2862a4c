"""Paged attention for serving LLMs in JAX: multi-head latent and grouped-query, on GPUs and everywhere XLA runs.

Ops are pure functions of arrays, a paged cache pytree and metadata, for use inside ``jax.jit``. ``mla_attn.steps`` has
the jitted entry point of each serving mode, ``mla_attn.parallel`` runs them over several devices, ``mla_attn.buckets``
compiles whole-model passes ahead of time, ``mla_attn.models`` holds DeepSeek, Llama and other families in Flax NNX,
``mla_attn.generation`` runs one over a batch, and ``mla_attn.engine`` serves it to many requests.

Names, and JAX with them, are imported at their first use, so that the command line reports wrong arguments at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_attn.cache import KVPool, LatentPool, move_rows, read_kv, read_latent, write_kv, write_latent
    from mla_attn.metadata import (
        AttentionMetadata,
        RaggedMetadata,
        check_metadata,
        for_cross_attention,
        for_decode,
        for_draft_decode,
        for_draft_extend,
        for_encoder,
        for_extend,
        for_mixed,
        for_target_verify,
        page_map_from_tokens,
        page_table_from_indices,
        page_table_from_packed,
        page_table_from_tokens,
        tree_mask_from_flat,
    )
    from mla_attn.ops import (
        gqa_attention,
        merge_states,
        mla_attention,
        plan_gqa,
        plan_mla,
        quantize_queries,
        ragged_attention,
    )
    from mla_attn.specs import GQASpec, MLASpec
    from mla_attn.support import supports

    __version__: str

__all__ = [
    "AttentionMetadata",
    "GQASpec",
    "KVPool",
    "LatentPool",
    "MLASpec",
    "RaggedMetadata",
    "__version__",
    "check_metadata",
    "for_cross_attention",
    "for_decode",
    "for_draft_decode",
    "for_draft_extend",
    "for_encoder",
    "for_extend",
    "for_mixed",
    "for_target_verify",
    "gqa_attention",
    "merge_states",
    "mla_attention",
    "move_rows",
    "page_map_from_tokens",
    "page_table_from_indices",
    "page_table_from_packed",
    "page_table_from_tokens",
    "plan_gqa",
    "plan_mla",
    "quantize_queries",
    "ragged_attention",
    "read_kv",
    "read_latent",
    "supports",
    "tree_mask_from_flat",
    "write_kv",
    "write_latent",
]

_HOMES = {  # modules of the names above
    "cache": (
        "KVPool",
        "LatentPool",
        "move_rows",
        "read_kv",
        "read_latent",
        "write_kv",
        "write_latent",
    ),
    "metadata": (
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
        "tree_mask_from_flat",
    ),
    "ops": (
        "gqa_attention",
        "merge_states",
        "mla_attention",
        "plan_gqa",
        "plan_mla",
        "quantize_queries",
        "ragged_attention",
    ),
    "specs": (
        "GQASpec",
        "MLASpec",
    ),
    "support": ("supports",),
}
_MODULES = ("buckets", "engine", "generation", "models", "parallel", "sampling", "speculative", "steps", *_HOMES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__version__":
        from importlib.metadata import version  # takes 30 ms

        value = version("mla-attn")
    else:
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
