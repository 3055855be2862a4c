"""The jitted entry points of grouped-query attention, one per mode, for one layer of any model.

Each writes this call's keys and values into the cache, attends, and returns ``(out, pool)``. Specs are static and the
pool is donated; inside an outer ``jit`` they are inlined, and the outer ``jit`` must donate. To attend without writing,
for example over a cache that a draft model shares, call ``gqa_attention``.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mla_attn.cache import KVPool, write_kv
from mla_attn.checks import check_shape, check_type
from mla_attn.dispatch import Order
from mla_attn.metadata import AttentionMetadata
from mla_attn.ops.checks import check_paged_metadata, check_pool
from mla_attn.ops.expanded import fresh_rows
from mla_attn.ops.gqa import gqa_attention
from mla_attn.ops.ragged import check_heads, ragged_attention
from mla_attn.specs import GQASpec
from mla_attn.steps.entry import entry_point
from mla_attn.steps.scaling import QueryScaling, scaled

_STATIC = ("spec", "query_scaling", "return_lse", "skip_threshold")


def _paged_step(name: str, summary: str):
    """Makes a jitted step over the paged cache. The modes differ only in their metadata, but each mode is a compiled
    program with its own name, which buckets and profiles show."""

    def step(
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"],
        v: Float[Array, "T K V"],
        pool: KVPool,
        metadata: AttentionMetadata,
        spec: GQASpec,
        *,
        layer: int | Int[Array, ""] = 0,
        tree_mask: Bool[Array, "B S M"] | None = None,
        sinks: Float[Array, "H"] | None = None,
        q_scale: float | Float[Array, "..."] | None = None,
        query_scaling: QueryScaling | None = None,
        return_lse: bool = False,
        out_dtype: DTypeLike | None = None,
        implementation: Order = None,
        batch_invariant: bool = False,
        skip_threshold: float | None = None,
    ) -> tuple[Float[Array, "T H V"], KVPool] | tuple[Float[Array, "T H V"], Float[Array, "T H"], KVPool]:
        pool = write_kv(pool, k, v, metadata.slots, layer=layer)
        result = gqa_attention(
            scaled(q, metadata, query_scaling),
            pool,
            metadata,
            spec,
            layer=layer,
            tree_mask=tree_mask,
            q_scale=q_scale,
            sinks=sinks,
            return_lse=return_lse,
            out_dtype=out_dtype,
            implementation=implementation,
            batch_invariant=batch_invariant,
            skip_threshold=skip_threshold,
        )
        return (*result, pool) if isinstance(result, tuple) else (result, pool)

    step.__name__ = step.__qualname__ = name
    step.__doc__ = f"{summary}\n{_PAGED_DOC}"
    return entry_point(*_STATIC, "out_dtype", "batch_invariant")(step)


_PAGED_DOC = """
    Args:
        q: rotated queries; [T, H, D].
        k: this call's keys, after rotation; [T, K, D].
        v: this call's values; [T, K, V].
        pool: the cache; donated.
        metadata: from the mode's builder; its ``slots`` say where the rows go.
        spec: static facts of the attention.
        layer: layer of the pool, a Python int or an int32 scalar. A traced value out of range cannot raise: nothing is
            written and the output is undefined.
        tree_mask: as in ``gqa_attention``, for verifying or drafting trees.
        sinks: as in ``gqa_attention``.
        q_scale: as in ``gqa_attention``.
        query_scaling: position-dependent scaling of the queries; must be None for float8 queries.
        return_lse: also return the log-sum-exp of the scores.
        out_dtype: as in ``gqa_attention``.
        implementation: as in ``gqa_attention``.
        batch_invariant: as in ``gqa_attention``.
        skip_threshold: as in ``gqa_attention``.

    Returns:
        ``(out [T, H, V], pool)``; with ``return_lse`` ``(out, lse [T, H], pool)``.

    Raises:
        ValueError, NotImplementedError: as in ``write_kv`` and ``gqa_attention``.
    """

gqa_decode = _paged_step("gqa_decode", "Runs one token per request; metadata from ``for_decode`` or ``for_mixed``.")
gqa_target_verify = _paged_step(
    "gqa_target_verify", "Runs the anchor token and its drafts; metadata from ``for_target_verify``."
)
gqa_draft_extend = _paged_step(
    "gqa_draft_extend", "Runs the accepted tokens through the draft model; metadata from ``for_draft_extend``."
)
gqa_draft_decode = _paged_step("gqa_draft_decode", "Runs one step of drafting; metadata from ``for_draft_decode``.")
gqa_extend = _paged_step(
    "gqa_extend", "Runs new tokens of prompts after their cached tokens, if any; metadata from ``for_extend``."
)


@entry_point(*_STATIC)
def gqa_prefill(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K V"],
    pool: KVPool,
    metadata: AttentionMetadata,
    spec: GQASpec,
    *,
    layer: int | Int[Array, ""] = 0,
    sinks: Float[Array, "H"] | None = None,
    query_scaling: QueryScaling | None = None,
    return_lse: bool = False,
    implementation: Order = None,
    skip_threshold: float | None = None,
) -> tuple[Float[Array, "T H V"], KVPool] | tuple[Float[Array, "T H V"], Float[Array, "T H"], KVPool]:
    """Runs whole prompts. It attends to this call's keys and values only and reads nothing from the cache.

    They are attended to as given; the other steps attend to what the cache stores, which float8 rounds.

    Metadata comes from ``for_extend`` with ``seq_lens = q_lens``; a request with a cached prefix needs ``gqa_extend``.
    If the table covers only the last keys (``kv_offsets``), the others are visible but not written.

    Args:
        q, k, v, pool, metadata, spec, layer, sinks, query_scaling, return_lse: as in ``gqa_extend``.
        implementation, skip_threshold: as in ``ragged_attention``.

    Returns:
        As ``gqa_extend``.

    Raises:
        ValueError, NotImplementedError: as in ``write_kv`` and ``ragged_attention``.
    """
    check_pool(pool, spec, metadata, KVPool)
    metadata = check_paged_metadata(metadata)
    check_heads("q", q, "[T, H, D]")
    check_type("q", q, jnp.floating)
    check_shape("q", q, (metadata.slots.shape[0], spec.num_heads, spec.head_dim), "T of metadata.slots, spec's H and D")
    pool = write_kv(pool, k, v, metadata.slots, layer=layer)
    result = ragged_attention(
        scaled(q, metadata, query_scaling),
        k,
        v,
        fresh_rows(metadata),
        scale=spec.scale,
        window=spec.window,
        soft_cap=spec.soft_cap,
        sinks=sinks,
        return_lse=return_lse,
        implementation=implementation,
        skip_threshold=skip_threshold,
    )
    return (*result, pool) if isinstance(result, tuple) else (result, pool)
