"""Layers that models of all families share.

Parameters have the model's dtype. Products of float32 run at the highest precision (no TF32), those of bfloat16
accumulate in float32.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}  # JAX's GELU is the tanh form
_LEAST_ROWS = 8  # least rows of a product


class Linear(nnx.Module):
    """``x @ kernel``, plus ``bias`` if there is one, accumulated in float32; ``kernel`` is [in, out].

    ``nnx.Linear`` is not used, because the precision must follow the dtype and heads need the float32 accumulator.

    Attributes:
        summed: axes of the enclosing ``jax.shard_map`` over which the rows of the kernel and the channels of ``x`` are
            sharded.
        gathered: axes over which the columns are sharded, for results that every device needs.
    """

    summed: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()

    def __init__(self, dim_in: int, dim_out: int, *, dtype, rngs: nnx.Rngs, bias: bool = False):
        self.kernel = weight(rngs, (dim_in, dim_out), dtype)
        if bias:
            self.bias = nnx.Param(jnp.zeros(dim_out, dtype))

    def __call__(self, x):
        return self.float32(x).astype(x.dtype)

    def float32(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        """The result before it is rounded to the dtype of ``x``."""
        product = dot(x, self.kernel[...])
        if self.summed:
            product = jax.lax.psum(product, self.summed)
        if hasattr(self, "bias"):
            product = product + jnp.broadcast_to(self.bias[...].astype(jnp.float32), product.shape)
        return _gather_last(product, self.gathered)


class Embedding(nnx.Module):
    """Token embeddings [vocab, dim]. Ids outside the vocabulary (padding) are clipped, so that rows stay finite.

    Attributes:
        sharded: axes of the enclosing ``jax.shard_map`` over which the vocabulary is sharded.
    """

    sharded: tuple[str, ...] = ()

    def __init__(self, vocab: int, dim: int, *, dtype, rngs: nnx.Rngs):
        self.embedding = weight(rngs, (vocab, dim), dtype)

    def __call__(self, tokens: Int[Array, "T"]) -> Float[Array, "T dim"]:
        table = self.embedding[...]
        if not self.sharded:
            return jnp.take(table, tokens, axis=0, mode="clip")
        ranks, rank = jax.lax.axis_size(self.sharded), jax.lax.axis_index(self.sharded)
        own = jnp.clip(tokens, 0, ranks * table.shape[0] - 1) - rank * table.shape[0]
        rows = jnp.take(table, own, axis=0, mode="clip")
        held = (own >= 0) & (own < table.shape[0])
        return jax.lax.psum(jnp.where(held[:, None], rows, jnp.zeros((), rows.dtype)), self.sharded)

    def attend(self, x: Float[Array, "*rows dim"]) -> Float[Array, "*rows vocab"]:
        """Float32 logits, with the embedding as the head."""
        return _gather_last(dot(x, self.embedding[...].T), self.sharded)


class RMSNorm(nnx.Module):
    """``x / rms(x) * (offset + scale)``, computed in float32; checkpoints of Gemma hold scales about an offset of 1."""

    def __init__(self, dim: int, eps: float, *, dtype, offset: float = 0.0):
        self.eps, self.offset = eps, offset
        self.scale = nnx.Param(jnp.full(dim, 1.0 - offset, dtype))

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        if self.offset:
            scale = scale + self.offset
        return (wide * jnp.broadcast_to(scale, x.shape)).astype(x.dtype)


class MLP(nnx.Module):
    """Dense gated MLP: SwiGLU, or GeGLU with the activation "gelu_tanh"."""

    def __init__(self, dim: int, width: int, *, dtype, rngs: nnx.Rngs, activation: str = "silu"):
        self.activation = activation
        self.gate_proj = Linear(dim, width, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(dim, width, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(width, dim, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(gated(self.gate_proj.float32(x), self.up_proj.float32(x), x.dtype, self.activation))


def _gather_last(x: Float[Array, "*rows part"], axes: tuple[str, ...]) -> Float[Array, "*rows whole"]:
    """Gathers the last axis over axes of a mesh."""
    return jax.lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True) if axes else x


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], dtype) -> nnx.Param:
    """A parameter drawn from N(0, 0.02)."""
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))


def _precision(x: Array) -> jax.lax.Precision:
    # By default GPUs multiply float32 in TF32; products of bfloat16 are exact anyway.
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def dot(x, kernel):
    """Product over the last axis of ``x`` and the first of ``kernel``, in float32."""
    if x.size == x.shape[-1]:
        # XLA turns a product of one row and a matrix into a multiplication and a sum, and on GPUs writes the float32
        # products to memory. With rows of zeros added it stays a matrix product.
        rows = jnp.pad(x.reshape(1, -1), ((0, _LEAST_ROWS - 1), (0, 0)))
        return dot(rows, kernel)[:1].reshape(*x.shape[:-1], -1)
    return jnp.matmul(x, kernel, precision=_precision(x), preferred_element_type=jnp.float32)


def einsum(equation, x, kernel):
    """``jnp.einsum`` at the precision of ``dot``, in the dtype of ``x``."""
    # The output has the dtype of x, not float32 (sums are float32 anyway), because XLA on CPUs with bf16 units refuses
    # some batched bf16 products with float32 output.
    return jnp.einsum(equation, x, kernel, precision=_precision(x), preferred_element_type=x.dtype)


def gated(gate, up, dtype, activation: str = "silu"):
    """SwiGLU (arXiv:2002.05202) of the two halves, or GeGLU with GELU's tanh form, in ``dtype``."""
    return (ACTIVATIONS[activation](gate) * up).astype(dtype)


def capped(x, cap: float | None):
    """``cap * tanh(x / cap)``; x itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
