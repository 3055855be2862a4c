"""The GQA op: one function for decode, verify, draft-extend, prompt parts, mixed batches and cross attention."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mla_attn.cache import KVPool
from mla_attn.checks import check_flag, check_out_dtype, check_shape, check_type
from mla_attn.dispatch import Implementation, Order, choose, compute
from mla_attn.metadata import AttentionMetadata
from mla_attn.ops.checks import check_paged_metadata, check_pool, check_sinks, check_tree_mask
from mla_attn.ops.paged import PagedCall, facts_of, plan_calls, reference_supports, xla_supports
from mla_attn.reference.gqa import gqa_attention as reference_gqa
from mla_attn.specs import GQASpec
from mla_attn.xla.gqa import gqa_attention as xla_gqa


@dataclasses.dataclass(frozen=True, kw_only=True)
class GQACall(PagedCall):
    """Static facts of a call, which with the device decide the implementation; made by ``GQACall.of``."""

    layout: str

    @classmethod
    def of(
        cls,
        pool: KVPool,
        spec: GQASpec,
        *,
        max_q_len: int = 1,
        causal: bool = True,
        tree: bool = False,
        sinks: bool = False,
        batch_invariant: bool = False,
    ) -> "GQACall":
        """The facts of calls over ``pool``, which may be abstract (of ``jax.eval_shape``).

        Raises:
            ValueError: a value or a combination that no call may have.
        """
        flags = {"causal": causal, "tree": tree, "sinks": sinks, "batch_invariant": batch_invariant}
        facts = facts_of(pool, spec, max_q_len=max_q_len, **flags)
        return cls(**facts, layout=pool.layout)


IMPLEMENTATIONS = (
    Implementation("xla", xla_supports, xla_gqa, derivative="reference"),
    Implementation("reference", reference_supports, reference_gqa, derivative="own"),
)


def gqa_attention(
    q: Float[Array, "T H D"],
    pool: KVPool,
    metadata: AttentionMetadata,
    spec: GQASpec,
    *,
    layer: int | Int[Array, ""] = 0,
    causal: bool = True,
    tree_mask: Bool[Array, "B S M"] | None = None,
    sinks: Float[Array, "H"] | None = None,
    return_lse: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: Order = None,
    batch_invariant: bool = False,
) -> Float[Array, "T H V"] | tuple[Float[Array, "T H V"], Float[Array, "T H"]]:
    """Grouped-query attention over a paged cache (arXiv:2305.13245); with ``causal=False`` cross attention too.

    The position of row j of a request is ``a = kv_len - q_len + j``; it sees the cached keys at ``p < kv_len`` with
    ``p <= a`` if causal and ``p > a - window`` if the spec has a window. Query head h reads KV head ``h * K // H``; its
    score with a key is ``scale * q . k``.

    Args:
        q: packed query rows after rotation; [T, H, D]. Products run in the pool's dtype: float32 queries of a bfloat16
            pool are rounded to it.
        pool: cache of all layers; this call's rows must already be written.
        metadata: rows, lengths and page table, from a builder of ``mla_attn.metadata``.
        spec: heads, dims and scale.
        layer: layer of the pool, a Python int or an int32 scalar.
        causal: False lets every row of a request see all its ``kv_len`` keys.
        tree_mask: bool [B, S, M >= S], which of the last keys each row may see besides being causal, for draft trees:
            row j sees the key at ``p`` if ``tree_mask[b, j, c]`` for ``c = p - (kv_len - q_len) + M - S``; keys with
            ``c < 0`` are visible. M = S covers the tokens of this call, M > S those of earlier draft steps too. With a
            window, of at least M, these are visible if ``p > metadata.positions[row] - window`` (siblings share a
            position), and those of the mask's columns whatever the window.
        sinks: raw logits of each head, neither scaled nor capped: ``exp(sink)`` joins the softmax denominator. -inf is
            none; where it is inf, ``out`` is 0.
        return_lse: also return the log-sum-exp; not with ``sinks``, which ``merge_states`` takes.
        out_dtype: dtype of ``out``; that of ``q`` if None.
        implementation: "xla" or "reference", or names in the order in which to try them; None picks.
        batch_invariant: the bits of a row depend on its query, its visible keys and static arguments alone, not on its
            batch, bucket or mode: a decode row equals the same row of a verify call. Without it these may change
            rounding: a bfloat16 result by at most 2 units in the last place of its row's largest number.

    Returns:
        ``out`` [T, H, V]; with ``return_lse`` also ``lse`` float32 [T, H], the natural log of the sum of exp(score). A
        row that sees no key, and a row nobody owns, gives exactly 0 and -inf; a row with a score that is NaN, NaN in
        both.

    Raises:
        ValueError: wrong shape, dtype or static value, when traced.
        NotImplementedError: no implementation (or none of those named) supports the call, with the reason; arrays are
            sharded over explicit mesh axes.

    The derivative, in either mode, is that of "reference", which holds every score at once: float32 [B, S, H, W * P].
    """
    metadata = _check(q, pool, metadata, spec, tree_mask)
    return_lse = check_flag("return_lse", return_lse)
    check_sinks(sinks, spec.num_heads, return_lse)
    check_out_dtype(out_dtype)
    call = GQACall.of(
        pool,
        spec,
        max_q_len=metadata.max_q_len,
        causal=causal,
        tree=tree_mask is not None,
        sinks=sinks is not None,
        batch_invariant=batch_invariant,
    )
    out, lse = compute(
        "gqa_attention",
        choose("gqa_attention", call, IMPLEMENTATIONS, implementation),
        IMPLEMENTATIONS,
        (q, pool, metadata, jnp.asarray(pool.placement.check_layer(layer), jnp.int32), tree_mask, sinks),
        spec=spec,
        causal=call.causal,
        batch_invariant=call.batch_invariant,
        out_dtype=np.dtype(q.dtype if out_dtype is None else out_dtype),
    )
    return (out, lse) if return_lse else out


def plan_gqa(
    metadata: AttentionMetadata,
    pool: KVPool,
    spec: GQASpec,
    *,
    causal: bool = True,
    tree: bool = False,
    sinks: bool = False,
    out_dtype: DTypeLike = jnp.bfloat16,
    implementation: Order = None,
    batch_invariant: bool = False,
) -> AttentionMetadata:
    """The metadata with the work list that calls of ``gqa_attention`` with it share: made once a step for all layers.

    Without it, or where a call differs from what it was made for, the call makes one of its own, which takes time but
    changes nothing. The list holds for the lengths and rows it was made from: plan again after replacing them.

    Args:
        metadata: from a builder.
        pool, spec, causal, implementation, batch_invariant: as in the calls to come; ``pool`` may be abstract.
        tree, sinks: whether they have a ``tree_mask``, and ``sinks``.
        out_dtype: dtype of their results.

    Raises:
        ValueError: wrong shape, dtype or static value.
        NotImplementedError: no implementation (or none of those named) supports such calls, with the reason.
    """
    flags = {"causal": causal, "tree": tree, "sinks": sinks, "batch_invariant": batch_invariant}
    choice = functools.partial(choose, "gqa_attention", implementations=IMPLEMENTATIONS, implementation=implementation)
    return plan_calls(metadata, pool, spec, GQACall, choice, out_dtype=out_dtype, **flags)


def _check(q, pool, metadata, spec, tree_mask) -> AttentionMetadata:
    """The metadata, its static fields as Python's numbers."""
    rows = metadata.slots.shape[0]
    check_shape("q", q, (rows, spec.num_heads, spec.head_dim), "T of metadata.slots, spec's H and D")
    check_type("q", q, jnp.floating)
    check_pool(pool, spec, metadata, KVPool)
    metadata = check_paged_metadata(metadata)
    check_tree_mask(tree_mask, metadata, spec.window)
    return metadata
