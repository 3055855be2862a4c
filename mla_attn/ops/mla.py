"""The MLA op: one function for decode, verify, draft-extend, absorbed extend and mixed batches."""

import dataclasses
import functools

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mla_attn.cache import LatentPool
from mla_attn.checks import check_flag, check_operand, check_shape, check_skip_threshold
from mla_attn.dispatch import Implementation, Order, choose, compute
from mla_attn.metadata import AttentionMetadata
from mla_attn.mosaic_gpu import mla as mosaic_gpu
from mla_attn.ops.checks import (
    check_paged_metadata,
    check_pool,
    check_q_scale,
    check_sinks,
    check_tree_mask,
    result_dtype,
)
from mla_attn.ops.paged import PagedCall, facts_of, plan_calls, reference_supports, xla_supports
from mla_attn.reference.mla import mla_attention as reference_mla
from mla_attn.specs import MLASpec
from mla_attn.triton import mla as triton
from mla_attn.xla.mla import mla_attention as xla_mla


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLACall(PagedCall):
    """Static facts of a call, from which (with the device) the implementation is chosen; made by ``MLACall.of``."""

    row_width: int
    rope_offset: int

    @classmethod
    def of(
        cls,
        pool: LatentPool,
        spec: MLASpec,
        *,
        max_q_len: int = 1,
        causal: bool = True,
        tree: bool = False,
        sinks: bool = False,
        batch_invariant: bool = False,
        skip: bool = False,
        q_dtype: DTypeLike = jnp.bfloat16,
    ) -> "MLACall":
        """The facts of calls over ``pool``, which may be abstract (from ``jax.eval_shape``).

        Raises:
            ValueError: a value or combination of values is invalid.
        """
        flags = {"causal": causal, "tree": tree, "sinks": sinks, "batch_invariant": batch_invariant, "skip": skip}
        facts = facts_of(pool, spec, max_q_len=max_q_len, q_dtype=q_dtype, **flags)
        return cls(**facts, row_width=pool.row_width, rope_offset=pool.rope_offset)


IMPLEMENTATIONS = (
    Implementation("mosaic_gpu", mosaic_gpu.supports, mosaic_gpu.mla_attention, mosaic_gpu.plan_mla),
    Implementation("triton", triton.supports, triton.mla_attention, triton.plan_mla),
    Implementation("xla", xla_supports, xla_mla, derivative="reference"),
    Implementation("reference", reference_supports, reference_mla, derivative="own"),
)


def mla_attention(
    q_latent: Float[Array, "T H R"],
    q_rope: Float[Array, "T H E"],
    pool: LatentPool,
    metadata: AttentionMetadata,
    spec: MLASpec,
    *,
    layer: int | Int[Array, ""] = 0,
    causal: bool = True,
    tree_mask: Bool[Array, "B S M"] | None = None,
    sinks: Float[Array, "H"] | None = None,
    q_scale: float | Float[Array, "..."] | None = None,
    return_lse: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: Order = None,
    batch_invariant: bool = False,
    skip_threshold: float | None = None,
) -> Float[Array, "T H R"] | tuple[Float[Array, "T H R"], Float[Array, "T H"]]:
    """Absorbed multi-head latent attention over a paged cache (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

    The position of row j of a request is ``a = kv_len - q_len + j``; it sees the cached keys at ``p < kv_len`` with
    ``p <= a`` if causal and ``p > a - window`` if the spec has a window. Its score with the cached row ``[c | r]`` is
    ``scale * (q_latent . c + q_rope . r)``, and that row's value is c: the result is in latent space, to be multiplied
    by the value half of ``kv_b_proj``.

    Args:
        q_latent: packed query rows after absorption, ``q_nope @ W_UK``; [T, H, R]. Products run in the pool's dtype:
            with a bfloat16 pool, float32 queries are rounded to bfloat16. Products of float8
            rows are exact: they run in the dtype of the queries, or in bfloat16 if that is float8_e4m3fn, and the
            scale is applied to scores and results; with "blocks" they run in float32.
        q_rope: rotary part of the queries; [T, H, E].
        pool: cache of all layers; this call's rows must already be written.
        metadata: rows, lengths and page table, from a builder of ``mla_attn.metadata``.
        spec: heads, dims and scale.
        layer: layer of the pool, a Python int or an int32 scalar.
        causal: False lets every row of a request see all its ``kv_len`` keys.
        tree_mask: bool [B, S, M >= S], a mask of the last M keys for draft trees, in addition to the causal mask: row j
            sees the key at ``p`` if ``tree_mask[b, j, c]`` for ``c = p - (kv_len - q_len) + M - S``; keys with
            ``c < 0`` are visible. M = S covers the tokens of this call, M > S also those of earlier draft steps. A
            window must be at least M; it hides only keys with ``c < 0``, which are then visible if
            ``p > metadata.positions[row] - window`` (siblings share a position).
        sinks: one raw logit per head, neither scaled nor capped: ``exp(sink)`` is added to the softmax denominator.
            -inf means no sink; with inf, ``out`` is 0.
        q_scale: scale of float8_e4m3fn queries, float32 [] or [T, H], from ``quantize_queries``; None for 1.
        return_lse: also return the log-sum-exp; not allowed with ``sinks``: pass those to ``merge_states``.
        out_dtype: dtype of ``out``; None for that of ``q_latent``, or for bfloat16 if that is float8.
        implementation: "mosaic_gpu", "triton", "xla" or "reference", or names in the order to try them; None for the
            default choice.
        batch_invariant: the bits of a row depend only on its query, its visible keys and static arguments, not on its
            batch, bucket or mode: a decode row equals the same row of a verify call. Without it these may change
            rounding: a bfloat16 result by at most 2 units in the last place of its row's largest number.
        skip_threshold: positive number; a tile of keys may be left out if, for each of the rows that are computed
            together, its largest score lies more than ``ln(kv_len / skip_threshold)`` below the largest before
            (skip-softmax, arXiv:2512.12087). If it is a number f below 1, ``out`` differs by at most ``2 f / (1 + f)``
            times the largest visible value, and ``lse`` is lower by at most ``ln(1 + f)``, apart from rounding. Where
            ``kv_len`` is at most f, nothing is left out. Derivatives are exact. None for exact results.

    Returns:
        ``out`` [T, H, R]; with ``return_lse`` also ``lse`` float32 [T, H], the natural log of the sum of exp(score). A
        row without visible keys and a padding row give exactly 0 and -inf. A row with a NaN score gives NaN in both.

    Raises:
        ValueError: a wrong shape, dtype or static value, at trace time.
        NotImplementedError: no implementation (or none of those named) supports the call (the message has the reasons),
            or arrays are sharded over explicit mesh axes.

    The derivative of "xla", in forward and reverse mode, is that of "reference", which stores all scores: float32
    [B, S, H, W * P]. "mosaic_gpu" has none and raises NotImplementedError.
    """
    metadata = _check(q_latent, q_rope, pool, metadata, spec, tree_mask)
    return_lse = check_flag("return_lse", return_lse)
    check_sinks(sinks, spec.num_heads, return_lse)
    skip_threshold = check_skip_threshold(skip_threshold)
    q_scale, out_dtype = check_q_scale(q_scale, q_latent), result_dtype(q_latent.dtype, out_dtype)
    call = MLACall.of(
        pool,
        spec,
        max_q_len=metadata.max_q_len,
        causal=causal,
        tree=tree_mask is not None,
        sinks=sinks is not None,
        batch_invariant=batch_invariant,
        skip=skip_threshold is not None,
        q_dtype=q_latent.dtype,
    )
    layer = jnp.asarray(pool.placement.check_layer(layer), jnp.int32)
    out, lse = compute(
        "mla_attention",
        choose("mla_attention", call, IMPLEMENTATIONS, implementation),
        IMPLEMENTATIONS,
        (q_latent, q_rope, pool, metadata, layer, tree_mask, sinks, q_scale),
        spec=spec,
        causal=call.causal,
        batch_invariant=call.batch_invariant,
        out_dtype=out_dtype,
        **({} if skip_threshold is None else {"skip_threshold": skip_threshold}),
    )
    return (out, lse) if return_lse else out


def plan_mla(
    metadata: AttentionMetadata,
    pool: LatentPool,
    spec: MLASpec,
    *,
    causal: bool = True,
    tree: bool = False,
    sinks: bool = False,
    out_dtype: DTypeLike = jnp.bfloat16,
    q_dtype: DTypeLike = jnp.bfloat16,
    implementation: Order = None,
    batch_invariant: bool = False,
    skip: bool = False,
) -> AttentionMetadata:
    """Adds a work list to the metadata, which calls of ``mla_attention`` share: plan once per step for all layers.

    A call without a list, or with arguments that differ from the planned ones, computes its own list; results are the
    same. The list is valid for the lengths and rows it was computed from: plan again after replacing them.

    Args:
        metadata: metadata from a builder.
        pool, spec, causal, implementation, batch_invariant: as in the planned calls; ``pool`` may be abstract.
        tree, sinks, skip: whether the planned calls have a ``tree_mask``, ``sinks``, and a ``skip_threshold``.
        out_dtype: ``out_dtype`` of the planned calls.
        q_dtype: dtype of the queries of the planned calls.

    Raises:
        ValueError: a wrong shape, dtype or static value.
        NotImplementedError: no implementation (or none of those named) supports such calls; the message says why.
    """
    flags = {"causal": causal, "tree": tree, "sinks": sinks, "batch_invariant": batch_invariant, "skip": skip}
    choice = functools.partial(choose, "mla_attention", implementations=IMPLEMENTATIONS, implementation=implementation)
    return plan_calls(metadata, pool, spec, MLACall, choice, out_dtype=out_dtype, q_dtype=q_dtype, **flags)


def _check(q_latent, q_rope, pool, metadata, spec, tree_mask) -> AttentionMetadata:
    """Checks arguments; returns the metadata with its static fields as Python integers."""
    rows = metadata.slots.shape[0]
    check_shape("q_latent", q_latent, (rows, spec.num_heads, spec.kv_lora_rank), "T of metadata.slots, spec's H and R")
    check_shape("q_rope", q_rope, (rows, spec.num_heads, spec.qk_rope_head_dim), "T of metadata.slots, spec's H and E")
    for name, array in (("q_latent", q_latent), ("q_rope", q_rope)):
        check_operand(name, array)
    if q_latent.dtype != q_rope.dtype:
        raise ValueError(f"q_rope has dtype {q_rope.dtype}, must be q_latent's {q_latent.dtype}")
    check_pool(pool, spec, metadata, LatentPool)
    metadata = check_paged_metadata(metadata)
    check_tree_mask(tree_mask, metadata, spec.window)
    return metadata
