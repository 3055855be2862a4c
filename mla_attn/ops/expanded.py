"""Attention in the expanded form, over per-head keys and values; a cached prefix is expanded chunk by chunk."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mla_attn.cache import LatentPool, read_latent
from mla_attn.checks import check_dtype
from mla_attn.dispatch import Order, with_derivative
from mla_attn.metadata import AttentionMetadata, RaggedMetadata, row_owners
from mla_attn.ops.checks import check_operand_scale
from mla_attn.ops.merge import merge_states
from mla_attn.ops.quantization import quantize
from mla_attn.ops.ragged import ragged_attention
from mla_attn.specs import MLASpec
from mla_attn.varying import vary_together

OperandScales = tuple[Array, Array, Array] | None  # of float8 queries, keys and values, float32 []; None: not float8
State = tuple[Float[Array, "T H V"], Float[Array, "T H"]]  # (out, lse), both float32


def fresh_rows(metadata: AttentionMetadata) -> RaggedMetadata:
    """Ragged metadata with this call's rows as queries and as keys."""
    m = metadata
    return RaggedMetadata(
        q_starts=m.q_starts,
        q_lens=m.q_lens,
        kv_starts=m.q_starts,
        kv_lens=m.q_lens,
        max_q_len=m.max_q_len,
        max_kv_len=m.max_q_len,
    )


def check_operand_scales(operand_dtype: DTypeLike | None, operand_scales: Any) -> OperandScales:
    """The scales of float8 operands, None where operands stay as they are.

    Raises:
        ValueError: another dtype, or scales that are not three of float32 [], or are given without the dtype.
    """
    if operand_dtype is None:
        if operand_scales is not None:
            raise ValueError("operand_scales= with operand_dtype=None: must be None")
        return None
    dtype = check_dtype("operand_dtype", operand_dtype)
    if dtype != jnp.float8_e4m3fn:
        raise ValueError(f"operand_dtype={dtype.name} must be float8_e4m3fn or None")
    scales = (1.0, 1.0, 1.0) if operand_scales is None else operand_scales
    if not isinstance(scales, Sequence) or len(scales) != 3:
        raise ValueError(f"operand_scales={scales!r} must be three: of queries, keys and values")
    scales = (1.0 if scale is None else scale for scale in scales)
    checked: Any = (check_operand_scale(f"operand_scales[{i}]", scale, dtype) for i, scale in enumerate(scales))
    return tuple(checked)


def _attend(q, k, v, rows: RaggedMetadata, *, scales: OperandScales, **options) -> State:
    """``ragged_attention``; with ``scales``, operands are quantised to float8 first."""
    if scales is not None:
        q, k, v = (quantize(x, scale) for x, scale in zip((q, k, v), scales, strict=True))
        options |= dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    out, lse = ragged_attention(q, k, v, rows, return_lse=True, out_dtype=jnp.float32, **options)
    return out, lse


def attend_fresh(
    q: Float[Array, "T H D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H V"],
    metadata: AttentionMetadata,
    spec: MLASpec,
    *,
    scales: OperandScales,
    implementation: Order,
    skip_threshold: float | None,
) -> State:
    """Attention of this call's rows over this call's keys."""
    return _attend(
        q,
        k,
        v,
        fresh_rows(metadata),
        scale=spec.scale,
        scales=scales,
        window=spec.window,
        soft_cap=spec.soft_cap,
        implementation=implementation,
        skip_threshold=skip_threshold,
    )


def add_prefix(
    state: State,
    q: Float[Array, "T H D"],
    w_uk: Float[Array, "H N R"],
    w_uv: Float[Array, "H V R"],
    pool: LatentPool,
    metadata: AttentionMetadata,
    spec: MLASpec,
    *,
    layer: int | Int[Array, ""],
    chunk_size: int,
    num_chunks: int | None,
    context_axes: tuple[str, ...],
    scales: OperandScales,
    implementation: Order,
    skip_threshold: float | None,
) -> State:
    """Merges attention over the keys cached before this call, which are those in the table, into ``state``.

    It reads, expands, attends to and merges ``chunk_size`` cached rows of each request at a time, gathered from the
    ranks of ``context_axes`` that hold them in turn. The derivative covers the whole table and keeps every chunk's
    keys.

    With ``num_chunks`` there is no loop whose end the host must wait for; rows of requests whose prefixes are longer
    become NaN.
    """
    arrays = (state, q, w_uk, w_uv, pool, metadata, jnp.asarray(layer, jnp.int32), scales)
    static = {"spec": spec, "chunk_size": chunk_size, "num_chunks": num_chunks, "axes": context_axes}
    static |= {"implementation": implementation, "skip_threshold": skip_threshold}
    # A loop over the chunks of the longest prefix has no reverse-mode derivative; a loop over the whole table has one.
    run, differentiated = (functools.partial(_add_chunks, whole_table=whole, **static) for whole in (False, True))
    return with_derivative(run, differentiated, arrays)


def _add_chunks(
    state, q, w_uk, w_uv, pool, metadata, layer, scales, *, spec, chunk_size, num_chunks, axes, implementation,
    skip_threshold, whole_table: bool,
):  # fmt: skip
    m, batch, ranks = metadata, metadata.q_lens.shape[0], metadata.kv_stride
    first = m.kv_offsets - jax.lax.axis_index(axes) if axes else m.kv_offsets  # of all ranks
    cached = jnp.maximum(m.kv_lens - m.q_lens - first, 0)
    room = m.page_table.shape[1] * pool.page_size * ranks
    of_rank = -(-min(chunk_size, room) // ranks)
    chunk = of_rank * ranks
    starts = jnp.arange(batch, dtype=jnp.int32) * chunk

    def add_chunk(i, state, layer=layer):
        begin = jnp.full(batch, i * chunk, jnp.int32)
        indices = jnp.full(batch, i * of_rank, jnp.int32)
        held = begin[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None] < cached[:, None]
        # Rows that no query sees may be NaN; the derivative of the weights would multiply them by 0.
        latent, rope = (
            jnp.where(held[:, :, None], _in_turn(x, axes), jnp.zeros((), x.dtype))
            for x in read_latent(pool, m.page_table, indices, of_rank, layer=layer, dtype=q.dtype)
        )
        keys, values = _expand(latent, rope, w_uk, w_uv, q.dtype)
        rows = RaggedMetadata(
            q_starts=m.q_starts,
            q_lens=m.q_lens,
            kv_starts=starts,
            kv_lens=jnp.clip(cached - begin, 0, chunk),
            max_q_len=m.max_q_len,
            max_kv_len=chunk,
        )
        out, lse = _attend(
            q,
            keys.reshape(batch * chunk, *keys.shape[2:]),
            values.reshape(batch * chunk, *values.shape[2:]),
            rows,
            scale=spec.scale,
            scales=scales,
            causal=False,
            soft_cap=spec.soft_cap,
            implementation=implementation,
            skip_threshold=skip_threshold,
        )
        return merge_states([state[0], out], [state[1], lse])

    if num_chunks is not None and not whole_table:
        num_chunks = min(num_chunks, -(-room // chunk))
        for i in range(num_chunks):
            # A chunk is read and expanded once the one before is merged: so memory is that of one.
            state, layer = jax.lax.optimization_barrier((state, layer))
            state = add_chunk(i, state, layer)
        return _nan_where(cached > num_chunks * chunk, state, m)
    chunks = -(-room // chunk) if whole_table else -(-jnp.max(cached, initial=0) // chunk)
    if axes and not whole_table:  # the same on all ranks, which JAX does not know
        chunks = jax.lax.pmax(chunks, axes)
    return jax.lax.fori_loop(
        0, chunks, add_chunk, vary_together(state, like=(w_uk, w_uv, pool, metadata, layer, scales))
    )


def _nan_where(requests: Bool[Array, "B"], state: State, m: AttentionMetadata) -> State:
    """The state with NaN in the rows of some requests."""
    (out, lse), of = state, row_owners(m.q_starts, m.q_lens, state[0].shape[0])
    owner, owned = of
    wrong = requests[owner] & owned if requests.shape[0] else jnp.zeros(out.shape[0], bool)
    return jnp.where(wrong[:, None, None], jnp.nan, out), jnp.where(wrong[:, None], jnp.nan, lse)


def _in_turn(rows: Float[Array, "B n width"], axes: tuple[str, ...]) -> Float[Array, "B m width"]:
    """The rows of all ranks in the order of their positions, of which each rank holds one in turn."""
    if not axes:
        return rows
    gathered = jax.lax.all_gather(rows, axes, axis=2)
    return gathered.reshape(rows.shape[0], -1, rows.shape[2])


def _expand(latent, rope, w_uk, w_uv, dtype):
    """Expands cached rows to keys [B, n, H, D] and values [B, n, H, V] (arXiv:2405.04434, equations 10 to 12)."""
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    nope = jnp.einsum("bnr,hdr->bnhd", latent, w_uk.astype(dtype), precision=precision)
    values = jnp.einsum("bnr,hvr->bnhv", latent, w_uv.astype(dtype), precision=precision)
    rope = jnp.broadcast_to(rope[:, :, None], (*nope.shape[:3], rope.shape[-1]))
    return jnp.concatenate([nope, rope], axis=-1), values
