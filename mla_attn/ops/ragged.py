"""Attention over packed, unpaged keys and values, for prefill and for expanded chunks of a cached prefix."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mla_attn.checks import (
    check_array,
    check_flag,
    check_operand,
    check_scale,
    check_shape,
    check_skip_threshold,
    check_soft_cap,
    check_type,
    check_window,
)
from mla_attn.dispatch import Implementation, Order, choose, compute
from mla_attn.metadata import RaggedMetadata
from mla_attn.mosaic_gpu import ragged as mosaic_gpu
from mla_attn.ops.checks import check_operand_scale, check_sinks, result_dtype, static_integers
from mla_attn.ops.paged import reference_supports, xla_supports
from mla_attn.reference.ragged import ragged_attention as reference_ragged
from mla_attn.triton import ragged as triton
from mla_attn.xla.ragged import ragged_attention as xla_ragged


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedCall:
    """Static facts of a call, from which (with the device) the implementation is chosen; made by ``RaggedCall.of``."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    sinks: bool
    skip: bool
    dtype: np.dtype
    q_dtype: np.dtype
    batch_invariant: bool

    @classmethod
    def of(
        cls,
        q: Float[Array | jax.ShapeDtypeStruct, "T H D"],
        k: Float[Array | jax.ShapeDtypeStruct, "Tk K D"],
        v: Float[Array | jax.ShapeDtypeStruct, "Tk K V"],
        *,
        sinks: bool = False,
        skip: bool = False,
        batch_invariant: bool = False,
    ) -> "RaggedCall":
        """The facts of a call over arrays, which may be abstract.

        Raises:
            ValueError: the number of query heads is not a multiple of the number of key heads, or a flag is no bool.
        """
        (_, heads, qk_dim), kv_heads = q.shape, k.shape[1]
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"q has {heads} heads, must be a multiple of k's {kv_heads}")
        sizes = {"heads": heads, "kv_heads": kv_heads, "qk_dim": qk_dim, "v_dim": v.shape[2]}
        flags = {"sinks": sinks, "skip": skip, "batch_invariant": batch_invariant}
        flags = {name: check_flag(name, flag) for name, flag in flags.items()}
        return cls(**sizes, **flags, dtype=np.dtype(k.dtype), q_dtype=np.dtype(q.dtype))


IMPLEMENTATIONS = (
    Implementation("mosaic_gpu", mosaic_gpu.supports, mosaic_gpu.ragged_attention, mosaic_gpu.plan_ragged),
    Implementation("triton", triton.supports, triton.ragged_attention),
    Implementation("xla", xla_supports, xla_ragged, derivative="reference"),
    Implementation("reference", reference_supports, reference_ragged, derivative="own"),
)


def plan_ragged(
    metadata: RaggedMetadata,
    q: Float[Array | jax.ShapeDtypeStruct, "T H D"],
    k: Float[Array | jax.ShapeDtypeStruct, "Tk K D"],
    v: Float[Array | jax.ShapeDtypeStruct, "Tk K V"],
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: bool = False,
    implementation: Order = None,
    batch_invariant: bool = False,
) -> RaggedMetadata:
    """Adds a work list to the metadata, which calls of ``ragged_attention`` share: plan once per step for all layers.

    A call without a list, or with arguments that differ from the planned ones, computes its own list; results are the
    same. The list is valid for the rows it was computed from: plan again after replacing them.

    Args:
        metadata: the rows of each request.
        q, k, v: operands of the planned calls; they may be abstract.
        causal, window, implementation, batch_invariant: as in the planned calls.
        sinks: whether the planned calls have ``sinks``.

    Raises:
        ValueError: a wrong shape, dtype or static value.
        NotImplementedError: no implementation (or none of those named) supports such calls; the message says why.
    """
    metadata = check_ragged_metadata(metadata)
    causal, window = check_flag("causal", causal), check_window(window)
    call = RaggedCall.of(q, k, v, sinks=sinks, batch_invariant=batch_invariant)
    chosen = choose("ragged_attention", call, IMPLEMENTATIONS, implementation)
    if chosen.plan is None:
        return metadata
    metadata = dataclasses.replace(metadata, work_plan=None)  # drop an older list, which may be for other lengths
    return chosen.plan(metadata, q, k, causal=causal, window=window)


def has_kernel(
    q: Float[Array | jax.ShapeDtypeStruct, "T H D"],
    k: Float[Array | jax.ShapeDtypeStruct, "Tk K D"],
    v: Float[Array | jax.ShapeDtypeStruct, "Tk K V"],
    *,
    implementation: Order,
    skip: bool = False,
) -> bool:
    """Whether calls over such arrays, which may be abstract, run in a kernel that plans its work; ``skip`` says whether
    they have a ``skip_threshold``."""
    try:
        call = RaggedCall.of(q, k, v, skip=skip)
        return choose("ragged_attention", call, IMPLEMENTATIONS, implementation).plan is not None
    except NotImplementedError:
        return False


def ragged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "Tk K D"],
    v: Float[Array, "Tk K V"],
    metadata: RaggedMetadata,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    q_scale: float | Float[Array, ""] | None = None,
    k_scale: float | Float[Array, ""] | None = None,
    v_scale: float | Float[Array, ""] | None = None,
    return_lse: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: Order = None,
    skip_threshold: float | None = None,
    batch_invariant: bool = False,
) -> Float[Array, "T H V"] | tuple[Float[Array, "T H V"], Float[Array, "T H"]]:
    """Attention of packed queries over packed keys and values; every request sees its own keys only.

    The position of row j of a request is ``a = kv_len - q_len + j``; it sees the key at position ``p < kv_len`` iff
    ``p <= a`` when causal and ``p > a - window`` with a window.

    Args:
        q: queries [T, H, D]; H a multiple of K. q, k and v may be float8_e4m3fn: their products are exact, in bfloat16
            (or in the other operand's dtype), and weights are not rounded to float8.
        k: keys [Tk, K, D].
        v: values [Tk, K, V]; V may differ from D (DeepSeek: 192 and 128).
        metadata: the rows of each request.
        scale: softmax scale.
        causal: False lets every row see all keys of its request.
        window: number of visible keys per row, its own included; needs ``causal``.
        soft_cap: scores become ``cap * tanh(score / cap)``.
        sinks: one raw logit per head, neither scaled nor capped: ``exp(sink)`` is added to the softmax denominator.
            -inf means no sink; with inf, ``out`` is 0.
        q_scale, k_scale, v_scale: scales of float8_e4m3fn operands, float32 []; None for 1.
        return_lse: also return the log-sum-exp; not allowed with ``sinks``: pass those to ``merge_states``.
        out_dtype: dtype of ``out``; None for that of ``q``, or for bfloat16 if that is float8.
        implementation: "mosaic_gpu", "triton", "xla" or "reference", or names in the order to try them; None for the
            default choice.
        batch_invariant: require a request's results to have the same bits in any batch of the same static sizes.
        skip_threshold: positive number; a tile of keys may be left out if, for each of the rows that are computed
            together, its largest score lies more than ``ln(kv_len / skip_threshold)`` below the largest before
            (skip-softmax, arXiv:2512.12087). If it is a number f below 1, ``out`` differs by at most ``2 f / (1 + f)``
            times the largest visible value, and ``lse`` is lower by at most ``ln(1 + f)``, apart from rounding. Where
            ``kv_len`` is at most f, nothing is left out. Derivatives are exact. None for exact results.

    Returns:
        ``out`` [T, H, V]; with ``return_lse`` also ``lse`` float32 [T, H] (natural log). Rows without visible keys and
        padding rows give exactly 0 and -inf; rows with a NaN score give NaN in both.

    Raises:
        ValueError: a wrong shape, dtype or static value, at trace time.
        NotImplementedError: no implementation (or none of those named) supports the call (the message has the reasons),
            or arrays are sharded over explicit mesh axes.

    The derivative of "xla", in forward and reverse mode, is that of "reference", which stores all scores: float32 [B,
    max_q_len, H, max_kv_len]. "mosaic_gpu" and "triton" have none.
    """
    for name, array, axes in (("q", q, "[T, H, D]"), ("k", k, "[Tk, K, D]"), ("v", v, "[Tk, K, V]")):
        check_heads(name, array, axes)
    check_shape("q", q, (*q.shape[:2], k.shape[2]), "[T, H, D] with k's D")
    check_shape("v", v, (*k.shape[:2], v.shape[2]), "[Tk, K, V] with k's Tk and K")
    if k.dtype != v.dtype:
        raise ValueError(f"v has dtype {v.dtype}, must be k's {k.dtype}")
    metadata = check_ragged_metadata(metadata)
    causal, return_lse = check_flag("causal", causal), check_flag("return_lse", return_lse)
    scale, window, soft_cap = check_scale(scale), check_window(window), check_soft_cap(soft_cap)
    if window is not None and not causal:
        raise ValueError(f"window={window} with causal={causal}: a window needs causal=True")
    scales = (("q_scale", q_scale, q), ("k_scale", k_scale, k), ("v_scale", v_scale, v))
    scales = (check_operand_scale(name, scale, array.dtype) for name, scale, array in scales)
    check_sinks(sinks, q.shape[1], return_lse)
    skip_threshold = check_skip_threshold(skip_threshold)
    flags = {"sinks": sinks is not None, "skip": skip_threshold is not None, "batch_invariant": batch_invariant}
    call = RaggedCall.of(q, k, v, **flags)
    out, lse = compute(
        "ragged_attention",
        choose("ragged_attention", call, IMPLEMENTATIONS, implementation),
        IMPLEMENTATIONS,
        (q, k, v, metadata, sinks, *scales),
        scale=scale,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        out_dtype=result_dtype(q.dtype, out_dtype),
        **({} if skip_threshold is None else {"skip_threshold": skip_threshold}),
    )
    return (out, lse) if return_lse else out


def check_heads(name: str, array, axes: str) -> None:
    """Raises ValueError unless ``array`` (queries, keys or values) is floating with three axes."""
    check_array(name, array)
    if array.ndim != 3:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, must be {axes}")
    check_operand(name, array)


def check_ragged_metadata(metadata: RaggedMetadata) -> RaggedMetadata:
    """Checks metadata, which is often made by hand; returns it with its static fields as Python integers."""
    for name in ("q_starts", "q_lens", "kv_starts", "kv_lens"):
        array = getattr(metadata, name)
        check_shape(f"metadata.{name}", array, metadata.q_lens.shape[:1], "[B] of metadata.q_lens")
        check_type(f"metadata.{name}", array, jnp.int32)
    return static_integers(metadata, "max_q_len", "max_kv_len")
