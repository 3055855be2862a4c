"""The jitted entry points, one a mode, for one layer of any model.

Each writes this call's rows into the cache, attends, and returns ``(out, pool)``. Specs are static and the pool is
donated; inside an outer ``jit`` they inline and the outer one donates. ``decode``, ``target_verify``, ``draft_extend``
and ``draft_decode`` run absorbed, over the paged cache; ``prefill`` and ``extend`` run in the expanded form over fresh
keys and values, which costs fewer operations for many rows.
"""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mla_attn.cache import LatentPool, read_latent, write_latent
from mla_attn.checks import INT32_MAX, check_integer, check_number, check_shape
from mla_attn.metadata import AttentionMetadata
from mla_attn.ops.checks import check_pool
from mla_attn.ops.merge import merge_states
from mla_attn.ops.mla import mla_attention
from mla_attn.ops.ragged import ragged_attention
from mla_attn.specs import MLASpec

PREFIX_CHUNK = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """Queries scaled by their position, as Llama 4 does to sharpen attention over long contexts.

    A query at position p is multiplied by ``1 + beta * ln(1 + floor(p / original_max_position))``.
    """

    beta: float
    original_max_position: int

    def __post_init__(self):
        object.__setattr__(self, "beta", check_number("beta", self.beta))
        check_integer("original_max_position", self.original_max_position, 1, INT32_MAX)

    def factors(self, positions: Int[Array, "T"]) -> Float[Array, "T"]:
        """float32 factor of each row."""
        return 1.0 + self.beta * jnp.log1p((positions // self.original_max_position).astype(jnp.float32))


_STATIC = ("spec", "query_scaling", "implementation")


def _absorbed_step(name: str, summary: str):
    """A jitted step over the paged cache. The modes differ in their metadata and in nothing else, but each is its own
    compiled program under its own name, as buckets and profiles see it."""

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
        query_scaling: QueryScaling | None = None,
        implementation: str | None = None,
        batch_invariant: bool = False,
    ) -> tuple[Float[Array, "T H R"], LatentPool]:
        pool = write_latent(pool, latent, rope, metadata.slots, layer=layer)
        q_latent, q_rope = (_scaled(q, metadata, query_scaling) for q in (q_latent, q_rope))
        out = mla_attention(
            q_latent,
            q_rope,
            pool,
            metadata,
            spec,
            layer=layer,
            tree_mask=tree_mask,
            implementation=implementation,
            batch_invariant=batch_invariant,
        )
        return cast(Array, out), pool

    step.__name__ = step.__qualname__ = name
    step.__doc__ = f"{summary}\n{_ABSORBED_DOC}"
    return jax.jit(step, static_argnames=(*_STATIC, "batch_invariant"), donate_argnames="pool")


_ABSORBED_DOC = """
    Args:
        q_latent: absorbed queries, ``q_nope @ W_UK``; [T, H, R].
        q_rope: rotated queries; [T, H, E].
        latent: this call's compressed rows, after their norm; [T, R].
        rope: this call's rope keys, after rotation; [T, E].
        pool: the cache; donated.
        metadata: from the mode's builder; its ``slots`` say where the rows go.
        spec: static facts of the attention.
        layer: layer of the pool, a Python int or an int32 scalar. It is traced here: one that does not exist cannot be
            refused, writes nothing, and gives results that mean nothing.
        tree_mask: of ``mla_attention``, for verifying or drafting trees.
        query_scaling: position-dependent scaling of the queries.
        implementation: of ``mla_attention``.
        batch_invariant: of ``mla_attention``.

    Returns:
        ``(out [T, H, R], pool)``; ``out`` is in latent space.

    Raises:
        ValueError, NotImplementedError: as ``write_latent`` and ``mla_attention``.
    """

decode = _absorbed_step("decode", "One token per request; metadata from ``for_decode`` or ``for_mixed``.")
target_verify = _absorbed_step("target_verify", "The anchor token and its drafts; metadata from ``for_target_verify``.")
draft_extend = _absorbed_step(
    "draft_extend", "The accepted tokens through the draft model; metadata from ``for_draft_extend``."
)
draft_decode = _absorbed_step("draft_decode", "One step of drafting; metadata from ``for_draft_decode``.")


def _scaled(q, metadata, query_scaling):
    if query_scaling is None:
        return q
    factors = query_scaling.factors(metadata.positions)[:, None, None]
    return (q.astype(jnp.float32) * factors).astype(q.dtype)


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="pool")
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
    implementation: str | None = None,
) -> tuple[Float[Array, "T H V"], LatentPool]:
    """Whole prompts, expanded: attends to the fresh keys and values only, nothing is read from the cache.

    Metadata from ``for_extend`` with ``seq_lens = q_lens``; a request with a cached prefix needs ``extend``.

    Args:
        q: queries ``[nope | rope]``, rotated; [T, H, D].
        k: fresh keys ``[nope | rope]``, the rope part repeated over heads; [T, H, D].
        v: fresh values; [T, H, V].
        latent: this call's compressed rows, for the cache.
        rope: this call's rope keys, for the cache.
        pool: the cache; donated.
        metadata: rows and slots.
        spec: static facts of the attention.
        layer: layer of the pool.
        query_scaling: position-dependent scaling of the queries.
        implementation: of ``ragged_attention``.

    Returns:
        ``(out [T, H, V], pool)``.
    """
    _check_expanded(q, k, v, pool, metadata, spec)
    pool = write_latent(pool, latent, rope, metadata.slots, layer=layer)
    out, _ = _fresh(_scaled(q, metadata, query_scaling), k, v, metadata, spec, implementation)
    return out.astype(q.dtype), pool


@functools.partial(jax.jit, static_argnames=(*_STATIC, "chunk_size"), donate_argnames="pool")
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
    query_scaling: QueryScaling | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H V"], LatentPool]:
    """New tokens on top of a cached prefix, expanded.

    The new tokens attend to each other, then to the prefix chunk by chunk: ``chunk_size`` cached rows of each request
    are read back, expanded through ``w_uk`` and ``w_uv``, attended to, and merged by log-sum-exp. Memory is that of
    one chunk, ``B * chunk_size * H * (D + V)`` elements; time follows the longest prefix.

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
        layer: layer of the pool.
        chunk_size: cached tokens per request expanded at a time.
        query_scaling: position-dependent scaling of the queries.
        implementation: of ``ragged_attention``.

    Returns:
        ``(out [T, H, V], pool)``.

    Raises:
        NotImplementedError: a spec with a window.
    """
    if spec.window is not None:
        raise NotImplementedError(f"extend with window={spec.window} is not served: use mla_attention")
    chunk_size = check_integer("chunk_size", chunk_size, 1)
    _check_expanded(q, k, v, pool, metadata, spec)
    heads, v_dim = q.shape[1], v.shape[2]
    check_shape("w_uk", w_uk, (heads, q.shape[2] - rope.shape[1], spec.kv_lora_rank), "[H, D - E, R]")
    check_shape("w_uv", w_uv, (heads, v_dim, spec.kv_lora_rank), "[H, V, R]")
    m = metadata
    pool = write_latent(pool, latent, rope, m.slots, layer=layer)
    q = _scaled(q, m, query_scaling)
    state = _fresh(q, k, v, m, spec, implementation)
    prefix = m.kv_lens - m.q_lens
    chunk = min(chunk_size, m.page_table.shape[1] * pool.page_size)
    batch = m.q_lens.shape[0]
    starts = jnp.arange(batch, dtype=jnp.int32) * chunk

    def add_chunk(i, state):
        begin = jnp.full(batch, i * chunk, jnp.int32)
        keys, values = _expand(*read_latent(pool, m.page_table, begin, chunk, layer=layer), w_uk, w_uv, q.dtype)
        part = ragged_attention(
            q,
            keys.reshape(batch * chunk, heads, -1),
            values.reshape(batch * chunk, heads, -1),
            q_starts=m.q_starts,
            q_lens=m.q_lens,
            kv_starts=starts,
            kv_lens=jnp.clip(prefix - begin, 0, chunk),
            max_q_len=m.max_q_len,
            max_kv_len=chunk,
            scale=spec.scale,
            causal=False,
            soft_cap=spec.soft_cap,
            return_lse=True,
            out_dtype=jnp.float32,
            implementation=implementation,
        )
        return merge_states([state[0], part[0]], [state[1], part[1]])

    out, _ = jax.lax.fori_loop(0, -(-jnp.max(prefix, initial=0) // chunk), add_chunk, state)
    return out.astype(q.dtype), pool


def _check_expanded(q, k, v, pool, metadata, spec):
    for name, array, axes in (("q", q, "[T, H, D]"), ("k", k, "[T, H, D]"), ("v", v, "[T, H, V]")):
        if array.ndim != 3:
            raise ValueError(f"{name} has shape {array.shape}, must be {axes}")
    rows = (metadata.slots.shape[0], spec.num_heads)
    check_shape("q", q, (*rows, q.shape[2]), "T of metadata.slots, spec's H")
    check_shape("k", k, (*rows, q.shape[2]), "as q")
    check_shape("v", v, (*rows, v.shape[2]), "rows and heads of q")
    check_pool(pool, spec, metadata)


def _fresh(q, k, v, metadata, spec, implementation):
    """This call's rows over this call's keys: float32 ``(out, lse)``."""
    return ragged_attention(
        q,
        k,
        v,
        q_starts=metadata.q_starts,
        q_lens=metadata.q_lens,
        kv_starts=metadata.q_starts,
        kv_lens=metadata.q_lens,
        max_q_len=metadata.max_q_len,
        max_kv_len=metadata.max_q_len,
        scale=spec.scale,
        window=spec.window,
        soft_cap=spec.soft_cap,
        return_lse=True,
        out_dtype=jnp.float32,
        implementation=implementation,
    )


def _expand(latent, rope, w_uk, w_uv, dtype):
    """Cached rows [B, n, R], [B, n, E] to keys [B, n, H, D], values [B, n, H, V] (arXiv:2405.04434, eq. 10 to 12)."""
    latent, rope = latent.astype(dtype), rope.astype(dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    nope = jnp.einsum("bnr,hdr->bnhd", latent, w_uk.astype(dtype), precision=precision)
    values = jnp.einsum("bnr,hvr->bnhv", latent, w_uv.astype(dtype), precision=precision)
    rope = jnp.broadcast_to(rope[:, :, None], (*nope.shape[:3], rope.shape[-1]))
    return jnp.concatenate([nope, rope], axis=-1), values
