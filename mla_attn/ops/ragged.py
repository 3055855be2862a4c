"""Attention over packed, unpaged keys and values: prefill, and chunks of a cached prefix after expansion."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mla_attn.checks import (
    check_array,
    check_integer,
    check_out_dtype,
    check_scale,
    check_shape,
    check_soft_cap,
    check_type,
    check_window,
)
from mla_attn.dispatch import Implementation, choose
from mla_attn.reference.ragged import ragged_attention as reference_ragged
from mla_attn.xla.ragged import ragged_attention as xla_ragged


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedCall:
    """Static facts of a call, which decide the implementation."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int

    def __post_init__(self):
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"q has {self.heads} heads, must be a multiple of k's {self.kv_heads}")


def _portable(call: RaggedCall) -> str | None:
    return None


IMPLEMENTATIONS = (
    Implementation("xla", _portable, xla_ragged),
    Implementation("reference", _portable, reference_ragged),
)


def ragged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "Tk K D"],
    v: Float[Array, "Tk K V"],
    *,
    q_starts: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    kv_starts: Int[Array, "B"],
    kv_lens: Int[Array, "B"],
    max_q_len: int,
    max_kv_len: int,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "T H V"] | tuple[Float[Array, "T H V"], Float[Array, "T H"]]:
    """Attention of packed queries over packed keys and values; every request sees its own keys only.

    Request b owns query rows ``q_starts[b] : q_starts[b] + q_lens[b]`` and key rows ``kv_starts[b] : kv_starts[b] +
    kv_lens[b]``. Row j stands at ``a = kv_len - q_len + j`` and sees key ``p < kv_len`` iff ``p <= a`` when causal and
    ``p > a - window`` with a window.

    Args:
        q: queries [T, H, D]; H a multiple of K.
        k: keys [Tk, K, D].
        v: values [Tk, K, V]; V may differ from D (DeepSeek: 192 and 128).
        q_starts: first query row of each request; ranges disjoint and ascending.
        q_lens: query rows of each request, 0 allowed.
        kv_starts: first key row of each request.
        kv_lens: key rows of each request, 0 allowed.
        max_q_len: static bound of ``q_lens``.
        max_kv_len: static bound of ``kv_lens``.
        scale: softmax scale.
        causal: False lets every row see all keys of its request.
        window: keys a row may see, itself included; needs ``causal``.
        soft_cap: scores become ``cap * tanh(score / cap)``.
        return_lse: also return the log-sum-exp.
        out_dtype: dtype of ``out``; that of ``q`` if None.
        implementation: "xla" or "reference"; None picks.

    Returns:
        ``out`` [T, H, V]; with ``return_lse`` also ``lse`` float32 [T, H] (natural log). Rows that see no key and rows
        nobody owns give exactly 0 and -inf.

    Raises:
        ValueError: wrong shape, dtype or static value, when traced.
        NotImplementedError: no implementation (or not the named one) serves the call, with the reason.
    """
    for name, array, axes in (("q", q, "[T, H, D]"), ("k", k, "[Tk, K, D]"), ("v", v, "[Tk, K, V]")):
        check_array(name, array)
        if array.ndim != 3:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, must be {axes}")
    rows, keys = q.shape[0], k.shape[0]
    kv_heads, qk_dim = k.shape[1:]
    check_shape("q", q, (rows, q.shape[1], qk_dim), "[T, H, D] with k's D")
    check_shape("v", v, (keys, kv_heads, v.shape[-1]), "[Tk, K, V] with k's Tk and K")
    call = RaggedCall(heads=q.shape[1], kv_heads=kv_heads, qk_dim=qk_dim, v_dim=v.shape[-1])
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_type(name, array, jnp.floating)
    if k.dtype != v.dtype:
        raise ValueError(f"v has dtype {v.dtype}, must be k's {k.dtype}")
    for name, array in (("q_starts", q_starts), ("q_lens", q_lens), ("kv_starts", kv_starts), ("kv_lens", kv_lens)):
        check_shape(name, array, q_lens.shape, "[B] of q_lens")
        check_type(name, array, jnp.int32)
    for name, value in (("max_q_len", max_q_len), ("max_kv_len", max_kv_len)):
        check_integer(name, value, 1)
    scale, window, soft_cap = check_scale(scale), check_window(window), check_soft_cap(soft_cap)
    if window is not None and not causal:
        raise ValueError(f"window={window} with causal={causal}: a window needs causal=True")
    check_out_dtype(out_dtype)

    q_starts, q_lens, kv_starts, kv_lens = map(jnp.asarray, (q_starts, q_lens, kv_starts, kv_lens))
    chosen = choose("ragged_attention", call, IMPLEMENTATIONS, implementation)
    with jax.named_scope(f"ragged_attention_{chosen.name}"):
        out, lse = chosen.run(
            q,
            k,
            v,
            q_starts=q_starts,
            q_lens=q_lens,
            kv_starts=kv_starts,
            kv_lens=kv_lens,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
            scale=scale,
            causal=causal,
            window=window,
            soft_cap=soft_cap,
        )
    out = out.astype(q.dtype if out_dtype is None else out_dtype)
    return (out, lse) if return_lse else out
