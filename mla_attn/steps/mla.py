"""The jitted entry points of MLA, one per mode, for one layer of any model.

Each writes this call's rows into the cache, attends, and returns ``(out, pool)``. Specs are static and the pool is
donated; inside an outer ``jit`` they are inlined, and the outer ``jit`` must donate.

Absorbed steps attend over the paged cache: ``decode``, ``target_verify``, ``draft_extend``, ``draft_decode``, and
``absorbed_extend`` for prefill chunks. ``prefill`` and ``extend`` compute prompts in the expanded form, over per-head
keys and values, which costs fewer operations for many rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mla_attn.cache import LatentPool, write_latent
from mla_attn.checks import check_integer, check_shape, check_type
from mla_attn.dispatch import Order
from mla_attn.metadata import AttentionMetadata
from mla_attn.ops.checks import check_paged_metadata, check_pool
from mla_attn.ops.expanded import add_prefix, attend_fresh, check_operand_scales
from mla_attn.ops.mla import mla_attention
from mla_attn.ops.ragged import check_heads
from mla_attn.specs import MLASpec
from mla_attn.steps.entry import entry_point
from mla_attn.steps.scaling import QueryScaling, scaled

PREFIX_CHUNK = 1024


_STATIC = ("spec", "query_scaling", "return_lse", "skip_threshold")


def _absorbed_step(name: str, summary: str):
    """Makes a jitted step over the paged cache. The modes differ only in their metadata, but each mode is a compiled
    program with its own name, which buckets and profiles show."""

    def step(
        q_latent: Float[Array, "T H R"],
        q_rope: Float[Array, "T H E"],
        latent: Float[Array, "T R"],
        rope: Float[Array, "T E"],
        pool: LatentPool,
        metadata: AttentionMetadata,
        spec: MLASpec,
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
    ) -> tuple[Float[Array, "T H R"], LatentPool] | tuple[Float[Array, "T H R"], Float[Array, "T H"], LatentPool]:
        pool = write_latent(pool, latent, rope, metadata.slots, layer=layer)
        q_latent, q_rope = (scaled(q, metadata, query_scaling) for q in (q_latent, q_rope))
        result = mla_attention(
            q_latent,
            q_rope,
            pool,
            metadata,
            spec,
            layer=layer,
            tree_mask=tree_mask,
            sinks=sinks,
            q_scale=q_scale,
            return_lse=return_lse,
            out_dtype=out_dtype,
            implementation=implementation,
            batch_invariant=batch_invariant,
            skip_threshold=skip_threshold,
        )
        return (*result, pool) if isinstance(result, tuple) else (result, pool)

    step.__name__ = step.__qualname__ = name
    step.__doc__ = f"{summary}\n{_ABSORBED_DOC}"
    return entry_point(*_STATIC, "out_dtype", "batch_invariant")(step)


_ABSORBED_DOC = """
    Args:
        q_latent: absorbed queries, ``q_nope @ W_UK``; [T, H, R].
        q_rope: rotated queries; [T, H, E].
        latent: this call's compressed rows, after their norm; [T, R].
        rope: this call's rope keys, after rotation; [T, E].
        pool: the cache; donated.
        metadata: from the mode's builder; its ``slots`` say where the rows go.
        spec: static facts of the attention.
        layer: layer of the pool, a Python int or an int32 scalar. A traced value out of range cannot raise: nothing is
            written and the output is undefined.
        tree_mask: as in ``mla_attention``, for verifying or drafting trees.
        sinks: as in ``mla_attention``.
        q_scale: as in ``mla_attention``.
        query_scaling: position-dependent scaling of the queries; must be None for float8 queries.
        return_lse: also return the log-sum-exp of the scores.
        out_dtype: as in ``mla_attention``.
        implementation: as in ``mla_attention``.
        batch_invariant: as in ``mla_attention``.
        skip_threshold: as in ``mla_attention``.

    Returns:
        ``(out [T, H, R], pool)``; with ``return_lse`` ``(out, lse [T, H], pool)``. ``out`` is in latent space.

    Raises:
        ValueError, NotImplementedError: as in ``write_latent`` and ``mla_attention``.
    """

decode = _absorbed_step("decode", "Runs one token per request; metadata from ``for_decode`` or ``for_mixed``.")
target_verify = _absorbed_step("target_verify", "Runs the anchor and its drafts; metadata from ``for_target_verify``.")
draft_extend = _absorbed_step(
    "draft_extend", "Runs the accepted tokens through the draft model; metadata from ``for_draft_extend``."
)
draft_decode = _absorbed_step("draft_decode", "Runs one step of drafting; metadata from ``for_draft_decode``.")
absorbed_extend = _absorbed_step(
    "absorbed_extend", "Runs new tokens of prompts after their cached tokens, if any; metadata from ``for_extend``."
)


@entry_point(*_STATIC, "operand_dtype")
def prefill(
    q: Float[Array, "T H D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H V"],
    latent: Float[Array, "T R"],
    rope: Float[Array, "T E"],
    pool: LatentPool,
    metadata: AttentionMetadata,
    spec: MLASpec,
    *,
    layer: int | Int[Array, ""] = 0,
    query_scaling: QueryScaling | None = None,
    operand_dtype: DTypeLike | None = None,
    operand_scales: tuple[Any, Any, Any] | None = None,
    return_lse: bool = False,
    implementation: Order = None,
    skip_threshold: float | None = None,
) -> tuple[Float[Array, "T H V"], LatentPool] | tuple[Float[Array, "T H V"], Float[Array, "T H"], LatentPool]:
    """Runs whole prompts in the expanded form. It attends to this call's keys only and reads nothing from the cache.

    They are attended to as given; absorbed steps attend to what the cache stores, which float8 rounds.

    Metadata comes from ``for_extend`` with ``seq_lens = q_lens``; a request with a cached prefix needs ``extend``. The
    result does not depend on ``kv_offsets`` or ``kv_stride``.

    Args:
        q: queries ``[nope | rope]``, rotated; [T, H, D].
        k: fresh keys ``[nope | rope]``, the rope part repeated over heads; [T, H, D].
        v: fresh values; [T, H, V].
        latent: this call's compressed rows, for the cache.
        rope: this call's rope keys, for the cache.
        pool: the cache; donated.
        metadata: rows and slots.
        spec: static facts of the attention.
        layer: layer of the pool. A traced value out of range cannot raise: nothing is written.
        query_scaling: position-dependent scaling of the queries.
        operand_dtype: float8_e4m3fn casts queries, keys and values to it for their products; None leaves them.
        operand_scales: float32 [] for queries, keys and values: they are divided by them, and clipped to 448, before
            they are cast; 1 if None.
        return_lse: also return the log-sum-exp of the scores.
        implementation: as in ``ragged_attention``.
        skip_threshold: as in ``ragged_attention``.

    Returns:
        ``(out [T, H, V], pool)``; with ``return_lse`` ``(out, lse [T, H], pool)``.

    Raises:
        ValueError, NotImplementedError: as in ``write_latent`` and ``ragged_attention``.
    """
    metadata = _check_expanded(q, k, v, pool, metadata, spec)
    options = {"scales": check_operand_scales(operand_dtype, operand_scales), "implementation": implementation}
    options["skip_threshold"] = skip_threshold
    pool = write_latent(pool, latent, rope, metadata.slots, layer=layer)
    out, lse = attend_fresh(scaled(q, metadata, query_scaling), k, v, metadata, spec, **options)
    out = out.astype(q.dtype)
    return (out, lse, pool) if return_lse else (out, pool)


@entry_point(*_STATIC, "chunk_size", "num_chunks", "operand_dtype", "context_axes")
def extend(
    q: Float[Array, "T H D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H V"],
    latent: Float[Array, "T R"],
    rope: Float[Array, "T E"],
    w_uk: Float[Array, "H N R"],
    w_uv: Float[Array, "H V R"],
    pool: LatentPool,
    metadata: AttentionMetadata,
    spec: MLASpec,
    *,
    layer: int | Int[Array, ""] = 0,
    chunk_size: int = PREFIX_CHUNK,
    num_chunks: int | None = None,
    query_scaling: QueryScaling | None = None,
    operand_dtype: DTypeLike | None = None,
    operand_scales: tuple[Any, Any, Any] | None = None,
    return_lse: bool = False,
    context_axes: tuple[str, ...] = (),
    implementation: Order = None,
    skip_threshold: float | None = None,
) -> tuple[Float[Array, "T H V"], LatentPool] | tuple[Float[Array, "T H V"], Float[Array, "T H"], LatentPool]:
    """Runs new tokens after a cached prefix, in the expanded form.

    The new tokens attend to each other, then to the prefix chunk by chunk: ``chunk_size`` cached rows of each request
    are read, expanded through ``w_uk`` and ``w_uv``, attended to, and merged by log-sum-exp. Memory is that of one
    chunk, ``B * chunk_size * H * (D + V)`` elements; time is proportional to the longest prefix. Visible prefix keys
    are those in the table, at positions from ``metadata.kv_offsets`` on.

    The prefix is read from the cache, in the dtype of q. The new tokens' keys and values are used as given, whereas
    absorbed steps read them from the cache, which may have rounded them.

    Args:
        q: queries ``[nope | rope]``, rotated; [T, H, D].
        k: fresh keys; [T, H, D].
        v: fresh values; [T, H, V].
        latent: this call's compressed rows, for the cache.
        rope: this call's rope keys, for the cache.
        w_uk: key half of ``kv_b_proj``, [H, D - E, R].
        w_uv: value half of ``kv_b_proj``, [H, V, R].
        pool: the cache; donated.
        metadata: from ``for_extend``.
        spec: static facts of the attention.
        layer: layer of the pool. A traced value out of range cannot raise: nothing is written and the output is
            undefined.
        chunk_size: cached tokens per request expanded at a time.
        num_chunks: chunks that hold the longest prefix, which the caller knows: the program then has no loop over
            chunks, whose end the host would have to wait for. Rows of requests with a longer prefix become NaN. None
            for as many as the longest prefix has, by such a loop.
        query_scaling: position-dependent scaling of the queries.
        operand_dtype: float8_e4m3fn to cast queries, keys and values, including those of the expanded prefix, for their
            products; None for no cast.
        operand_scales: divisors of queries, keys and values before they are clipped to 448 and cast, float32 []; None
            for 1.
        return_lse: also return the log-sum-exp of the scores.
        context_axes: axes of the enclosing ``jax.shard_map`` over which the cached tokens are sharded, position p on
            rank ``p % kv_stride`` (``context`` of the builders). Each chunk is gathered from all of them.
        implementation: as in ``ragged_attention``.
        skip_threshold: as in ``ragged_attention``.

    Returns:
        ``(out [T, H, V], pool)``; with ``return_lse`` ``(out, lse [T, H], pool)``.

    Raises:
        ValueError: as in ``write_latent`` and ``ragged_attention``.
        NotImplementedError: a spec with a window, or metadata whose ``kv_stride`` is not the size of ``context_axes``.
    """
    if spec.window is not None:
        raise NotImplementedError(f"extend with window={spec.window} is not supported: use absorbed_extend")
    ranks = jax.lax.axis_size(context_axes)
    if metadata.kv_stride != ranks:
        raise NotImplementedError(
            f"extend with kv_stride={metadata.kv_stride} is not supported over {ranks} context rank(s): use "
            "absorbed_extend"
        )
    chunk_size = check_integer("chunk_size", chunk_size, 1)
    num_chunks = None if num_chunks is None else check_integer("num_chunks", num_chunks, 0)
    metadata = _check_expanded(q, k, v, pool, metadata, spec)
    check_shape("w_uk", w_uk, (spec.num_heads, q.shape[2] - rope.shape[1], spec.kv_lora_rank), "[H, D - E, R]")
    check_shape("w_uv", w_uv, (spec.num_heads, v.shape[2], spec.kv_lora_rank), "[H, V, R]")
    for name, array in (("w_uk", w_uk), ("w_uv", w_uv)):
        check_type(name, array, jnp.floating)
    options = {"scales": check_operand_scales(operand_dtype, operand_scales), "implementation": implementation}
    options["skip_threshold"] = skip_threshold
    pool = write_latent(pool, latent, rope, metadata.slots, layer=layer)
    q = scaled(q, metadata, query_scaling)
    out, lse = add_prefix(
        attend_fresh(q, k, v, metadata, spec, **options),
        q,
        w_uk,
        w_uv,
        pool,
        metadata,
        spec,
        layer=layer,
        chunk_size=chunk_size,
        num_chunks=num_chunks,
        context_axes=context_axes,
        **options,
    )
    out = out.astype(q.dtype)
    return (out, lse, pool) if return_lse else (out, pool)


def _check_expanded(q, k, v, pool, metadata, spec) -> AttentionMetadata:
    """Checks arguments; returns the metadata with its static fields as Python integers."""
    for name, array, axes in (("q", q, "[T, H, D]"), ("k", k, "[T, H, D]"), ("v", v, "[T, H, V]")):
        check_heads(name, array, axes)
        check_type(name, array, jnp.floating)
    rows = (metadata.slots.shape[0], spec.num_heads)
    check_shape("q", q, (*rows, q.shape[2]), "T of metadata.slots, spec's H")
    check_shape("k", k, (*rows, q.shape[2]), "as q")
    check_shape("v", v, (*rows, v.shape[2]), "rows and heads of q")
    check_pool(pool, spec, metadata, LatentPool)
    return check_paged_metadata(metadata)
