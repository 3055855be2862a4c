"""The MLA op: one function for decode, verify, draft-extend, absorbed extend and mixed batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mla_attn.cache import LatentPool
from mla_attn.checks import check_array, check_out_dtype, check_shape, check_type
from mla_attn.dispatch import Implementation, choose, current_device
from mla_attn.metadata import AttentionMetadata
from mla_attn.mosaic_gpu import mla as mosaic_gpu
from mla_attn.ops.checks import check_pool
from mla_attn.reference.mla import mla_attention as reference_mla
from mla_attn.specs import MLASpec
from mla_attn.xla.mla import mla_attention as xla_mla


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLACall:
    """Static facts of a call, which decide the implementation."""

    spec: MLASpec
    page_size: int
    dtype: np.dtype
    max_q_len: int
    causal: bool = True
    tree: bool = False
    batch_invariant: bool = False
    platform: str = "cpu"
    compute_capability: str | None = None

    def __post_init__(self):
        if self.page_size < 1 or self.max_q_len < 1:
            raise ValueError(f"page_size={self.page_size} and max_q_len={self.max_q_len} must be at least 1")
        if self.spec.window is not None and not self.causal:
            raise ValueError(f"causal=False with window={self.spec.window}: a window needs causal=True")


def _tree_with_window(call: MLACall) -> str | None:
    """What no implementation serves."""
    return f"tree_mask with window={call.spec.window}" if call.tree and call.spec.window is not None else None


def _xla_supports(call: MLACall) -> str | None:
    if call.batch_invariant and call.platform != "cpu":
        return f"batch_invariant=True on {call.platform}: promised on cpu only"
    return _tree_with_window(call)


def _reference_supports(call: MLACall) -> str | None:
    if call.batch_invariant:
        return "batch_invariant=True: it specifies values, not bits"
    return _tree_with_window(call)


IMPLEMENTATIONS = (
    Implementation("mosaic_gpu", mosaic_gpu.supports_mla, mosaic_gpu.mla_attention, mosaic_gpu.plan_mla),
    Implementation("xla", _xla_supports, xla_mla),
    Implementation("reference", _reference_supports, reference_mla),
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
    return_lse: bool = False,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
    batch_invariant: bool = False,
) -> Float[Array, "T H R"] | tuple[Float[Array, "T H R"], Float[Array, "T H"]]:
    """Absorbed multi-head latent attention over a paged cache (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

    Row j of a request stands at ``a = kv_len - q_len + j`` and sees the cached keys at ``p < kv_len`` with ``p <= a``
    if causal and ``p > a - window`` if the spec has a window. Its score is ``scale * (q_latent . c + q_rope . r)`` for
    the cached row ``[c | r]``, its value is c: the result stays in latent space, to be taken through the value half of
    ``kv_b_proj``.

    Args:
        q_latent: packed query rows after absorption, ``q_nope @ W_UK``; [T, H, R]. Products run in the pool's dtype:
            float32 queries of a bfloat16 pool are rounded to it.
        q_rope: rotary part of the queries; [T, H, E].
        pool: cache of all layers; this call's rows must already be written.
        metadata: rows, lengths and page table, from a builder of ``mla_attn.metadata``.
        spec: heads, dims and scale.
        layer: layer of the pool, a Python int or an int32 scalar.
        causal: False lets every row of a request see all its ``kv_len`` keys.
        tree_mask: bool [B, S, M >= S], which of the last keys each row may see besides being causal, for draft trees:
            row j sees the key at ``p`` if ``tree_mask[b, j, c]`` for ``c = p - (kv_len - q_len) + M - S``; keys with
            ``c < 0`` are visible. M = S covers the tokens of this call, M > S those of earlier draft steps too.
        return_lse: also return the log-sum-exp.
        out_dtype: dtype of ``out``; that of ``q_latent`` if None.
        implementation: "mosaic_gpu", "xla" or "reference"; None picks.
        batch_invariant: the bits of a row depend on its query, its visible keys and static arguments alone, not on its
            batch, bucket or mode: a decode row equals the same row of a verify call. Without it these may change
            rounding: a bfloat16 result by at most 2 units in the last place of its row's largest number.

    Returns:
        ``out`` [T, H, R]; with ``return_lse`` also ``lse`` float32 [T, H], the natural log of the sum of exp(score). A
        row that sees no key, and a row nobody owns, gives exactly 0 and -inf.

    Raises:
        ValueError: wrong shape, dtype or static value, when traced.
        NotImplementedError: no implementation (or not the named one) serves the call, with the reason.
    """
    _check(q_latent, q_rope, pool, metadata, spec, tree_mask)
    check_out_dtype(out_dtype)
    metadata, tree_mask = jax.tree.map(jnp.asarray, (metadata, tree_mask))  # NumPy's cannot be indexed while traced
    out_dtype = np.dtype(q_latent.dtype if out_dtype is None else out_dtype)
    call = _call(pool, metadata, spec, causal, tree_mask is not None, batch_invariant)
    chosen = choose("mla_attention", call, IMPLEMENTATIONS, implementation)
    with jax.named_scope(f"mla_attention_{chosen.name}"):
        out, lse = chosen.run(
            q_latent,
            q_rope,
            pool,
            metadata,
            spec,
            layer=jnp.asarray(pool.placement.check_layer(layer)),
            causal=causal,
            tree_mask=tree_mask,
            batch_invariant=batch_invariant,
            out_dtype=out_dtype,
        )
    out = out.astype(out_dtype)
    return (out, lse) if return_lse else out


def plan_mla(
    metadata: AttentionMetadata,
    pool: LatentPool,
    spec: MLASpec,
    *,
    causal: bool = True,
    tree: bool = False,
    out_dtype: DTypeLike = jnp.bfloat16,
    implementation: str | None = None,
    batch_invariant: bool = False,
) -> AttentionMetadata:
    """The metadata with the work list that calls of ``mla_attention`` with it share: made once a step for all layers.

    Without it, or where a call differs from what it was made for, the call makes one of its own, which takes time but
    changes nothing. The list holds for the lengths and rows it was made from: plan again after replacing them.

    Args:
        metadata: from a builder.
        pool, spec, causal, implementation, batch_invariant: as in the calls to come.
        tree: whether they have a ``tree_mask``.
        out_dtype: dtype of their results.

    Raises:
        NotImplementedError: no implementation (or not the named one) serves such calls, with the reason.
    """
    call = _call(pool, metadata, spec, causal, tree, batch_invariant)
    chosen = choose("mla_attention", call, IMPLEMENTATIONS, implementation)
    if chosen.plan is None:
        return metadata
    metadata = dataclasses.replace(metadata, work_plan=None)  # a list it has may be of other lengths
    return chosen.plan(
        metadata, pool, spec, causal=causal, batch_invariant=batch_invariant, out_dtype=np.dtype(out_dtype)
    )


def _call(pool, metadata, spec, causal, tree, batch_invariant) -> MLACall:
    return MLACall(
        spec=spec,
        page_size=pool.page_size,
        dtype=pool.dtype,
        max_q_len=metadata.max_q_len,
        causal=causal,
        tree=tree,
        batch_invariant=batch_invariant,
        **current_device().facts,
    )


def _check(q_latent, q_rope, pool, metadata, spec, tree_mask):
    rows = metadata.slots.shape[0]
    check_shape("q_latent", q_latent, (rows, spec.num_heads, spec.kv_lora_rank), "T of metadata.slots, spec's H and R")
    check_shape("q_rope", q_rope, (rows, spec.num_heads, spec.qk_rope_head_dim), "T of metadata.slots, spec's H and E")
    for name, array in (("q_latent", q_latent), ("q_rope", q_rope)):
        check_type(name, array, jnp.floating)
    if q_latent.dtype != q_rope.dtype:
        raise ValueError(f"q_rope has dtype {q_rope.dtype}, must be q_latent's {q_latent.dtype}")
    check_pool(pool, spec, metadata)
    batch = metadata.q_lens.shape[0]
    for name in ("q_starts", "q_lens", "kv_lens", "kv_offsets"):
        check_shape(f"metadata.{name}", getattr(metadata, name), (batch,), "B of metadata.q_lens")
    check_array("metadata.page_table", metadata.page_table)
    check_shape("metadata.page_table", metadata.page_table, (batch, metadata.page_table.shape[-1]), "[B, W]")
    for name in ("q_starts", "q_lens", "kv_lens", "kv_offsets", "page_table"):
        check_type(f"metadata.{name}", getattr(metadata, name), jnp.int32)
    if metadata.page_table.shape[1] < 1:
        raise ValueError(f"metadata.page_table has shape {metadata.page_table.shape}: W must be at least 1")
    if metadata.max_q_len < 1 or metadata.kv_stride < 1:
        raise ValueError(f"max_q_len={metadata.max_q_len} and kv_stride={metadata.kv_stride} must be at least 1")
    if tree_mask is not None:
        check_array("tree_mask", tree_mask)
        if tree_mask.ndim != 3:
            raise ValueError(f"tree_mask has shape {tree_mask.shape}, must be [B, S, M]")
        rows = metadata.max_q_len
        if tree_mask.dtype != jnp.bool_ or tree_mask.shape[:2] != (batch, rows) or not tree_mask.shape[2] >= rows:
            raise ValueError(
                f"tree_mask is {tree_mask.dtype}{list(tree_mask.shape)}, must be bool [B, S, M] = "
                f"[{batch}, {rows}, at least {rows}]"
            )
