"""The merge of partial attention results over disjoint sets of keys."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mla_attn.checks import check_out_dtype, check_shape, check_type


def merge_states(
    outs: Sequence[Float[Array, "T H V"]] | Float[Array, "n T H V"],
    lses: Sequence[Float[Array, "T H"]] | Float[Array, "n T H"],
    *,
    sinks: Float[Array, "H"] | None = None,
    out_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "T H V"], Float[Array, "T H"]]:
    """Merges partial results into attention over the union of their keys (Flash-Decoding; arXiv:2205.14135, 3.1).

    ``lse = log sum_i exp(lse_i)`` and ``out = sum_i exp(lse_i - lse) out_i``. A partial with an lse of -inf saw no key:
    its output is ignored, even if it is NaN. Rows whose partials are all empty give 0 and -inf.

    Args:
        outs: partial outputs [T, H, V], one or more, in a sequence or in one array.
        lses: their log-sum-exps, natural log, [T, H].
        sinks: raw sink logits per head, [H]: each adds ``exp(sink)`` to the softmax denominator, once for all
            partials. The returned ``lse`` excludes it.
        out_dtype: dtype of the merged output; None for that of ``outs[0]``.

    Returns:
        ``(out, lse)``, ``lse`` float32.

    Raises:
        ValueError: there are no partials, or their shapes differ.
    """
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(f"outs has {len(outs)} partials and lses {len(lses)}: must be equal and at least 1")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_shape(f"outs[{i}]", out, tuple(outs[0].shape), "shape of outs[0]")
        check_shape(f"lses[{i}]", lse, tuple(outs[0].shape[:-1]), "leading axes of outs[0]")
        check_type(f"outs[{i}]", out, jnp.floating)
        check_type(f"lses[{i}]", lse, jnp.floating)
    check_out_dtype(out_dtype)
    if sinks is not None:
        check_shape("sinks", sinks, tuple(outs[0].shape[-2:-1]), "[H] of outs")
        check_type("sinks", sinks, jnp.floating)

    lses = [lse.astype(jnp.float32) for lse in lses]
    max_lse = lses[0]
    for lse in lses[1:]:
        max_lse = jnp.maximum(max_lse, lse)
    shift = jnp.where(jnp.isneginf(max_lse), 0.0, max_lse)  # if all are empty, -inf - -inf would be NaN
    exps = [jnp.exp(lse - shift) for lse in lses]
    sum_exp = sum(exps, jnp.zeros_like(shift))
    filled = sum_exp != 0  # true for NaN, which must be kept
    sum_exp = jnp.where(filled, sum_exp, 1.0)
    lse = jnp.where(filled, shift + jnp.log(sum_exp), -jnp.inf)
    # This is exp(lse) / (exp(lse) + exp(sink)).
    kept = 1.0 if sinks is None else jax.nn.sigmoid(lse - sinks.astype(jnp.float32)[None])
    merged = jnp.full(outs[0].shape, -0.0, jnp.float32)  # the identity of addition: 0.0 would turn -0.0 into 0.0
    for out, exp in zip(outs, exps, strict=True):
        share = (exp / sum_exp * kept)[..., None]  # not exp(part - lse): a large lse is rounded more than its parts
        used = share != 0
        # Masked before the product too, because the derivative of `share` multiplies by it, and 0 * NaN is NaN.
        part = jnp.where(used, out.astype(jnp.float32), 0.0)
        merged += jnp.where(used, part * share, -0.0)
    merged = jnp.where(filled[..., None], merged, 0.0)
    return merged.astype(outs[0].dtype if out_dtype is None else out_dtype), lse
