"""Mixtures of experts: DeepSeek's (a router, routed and shared experts), and gpt-oss's."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from mla_attn.models.config import DeepseekConfig
from mla_attn.models.decoder_config import DecoderConfig
from mla_attn.models.layers import MLP, Linear, dot, gated, weight
from mla_attn.ops.grouped_matmul import grouped_matmul

# Most (token, expert) pairs that are ordered without a sort, and most comparisons to choose experts without one. XLA
# compiles a sort anew for every layer, 0.12 s of a processor.
_COMPARED_PAIRS, _COMPARISONS = 2048, 2**22


class _Sharded(nnx.Module):
    """Experts of which a device has some, or a part of each.

    Attributes:
        summed: axes of the enclosing ``jax.shard_map`` over which the width of every expert is sharded.
        experts: axes over which the experts are sharded.
        tokens: those of ``experts`` whose devices have tokens of their own.
    """

    summed: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()

    def _multiply(self, rows, weights: nnx.Param, sizes):
        """``grouped_matmul`` by this device's experts; the rows of others give zeros."""
        return grouped_matmul(rows, weights[...], sizes, first_group=self._first(weights))

    def _first(self, weights: nnx.Param):
        """This device's first expert."""
        return jax.lax.axis_index(self.experts) * weights.shape[0] if self.experts else 0

    def _through(self, x, experts, weights, count: int, run) -> Float[Array, "T dim"]:
        """``through_experts``; devices of ``tokens`` gather their tokens, and each computes for its experts."""
        if self.tokens:
            x, experts, weights = (
                jax.lax.all_gather(each, self.tokens, axis=0, tiled=True) for each in (x, experts, weights)
            )
        out = through_experts(x, experts, weights, count, run)
        if summed := (*self.summed, *(axis for axis in self.experts if axis not in self.tokens)):
            out = jax.lax.psum(out, summed)
        return jax.lax.psum_scatter(out, self.tokens, scatter_dimension=0, tiled=True) if self.tokens else out


class MoE(_Sharded):
    """Routed experts, of which each token passes through a few, plus shared experts for every token."""

    def __init__(self, config: DeepseekConfig, *, dtype, rngs: nnx.Rngs):
        dim, width, count = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        self.gate = Router(config, rngs=rngs)
        self.gate_proj = weight(rngs, (count, dim, width), dtype)
        self.up_proj = weight(rngs, (count, dim, width), dtype)
        self.down_proj = weight(rngs, (count, width, dim), dtype)
        self.has_shared = config.n_shared_experts > 0
        if self.has_shared:
            self.shared_experts = MLP(dim, width * config.n_shared_experts, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T dim"]) -> Float[Array, "T dim"]:
        experts, weights = self.gate(x)
        out = self._experts(x, experts, weights).astype(x.dtype)
        return out + self.shared_experts(x) if self.has_shared else out

    def _experts(self, x, experts: Int[Array, "T k"], weights: Float[Array, "T k"]) -> Float[Array, "T dim"]:
        def run(rows, sizes, _):
            gate, up = (self._multiply(rows, each, sizes) for each in (self.gate_proj, self.up_proj))
            return self._multiply(gated(gate, up, x.dtype), self.down_proj, sizes)

        return self._through(x, experts, weights, self.gate.kernel.shape[1], run)


def through_experts(
    x: Float[Array, "T dim"],
    experts: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    count: int,
    run: Callable[[Array, Array, Array], Array],
) -> Float[Array, "T dim"]:
    """Sorts the (token, expert) pairs by expert, runs each expert over its rows, and sums the weighted results.

    Args:
        x: one row per token.
        experts: experts of each token.
        weights: weights of their results.
        count: number of experts.
        run: function from rows sorted by expert [T * k, dim], the number of rows of each expert, and the expert of each
            row, to results.
    """
    chosen = experts.reshape(-1)
    order, places = sorted_pairs(chosen)
    sizes = jnp.bincount(chosen, length=count).astype(jnp.int32)
    out = run(x[order // experts.shape[1]], sizes, chosen[order])[places]
    return (out.reshape(*experts.shape, -1) * weights[..., None]).sum(axis=1)


def sorted_pairs(chosen: Int[Array, "pairs"]) -> tuple[Int32[Array, "pairs"], Int32[Array, "pairs"]]:
    """Sorts pairs by expert, stably: the pair at each place, and the place of each pair."""
    count, numbers = chosen.size, jnp.arange(chosen.size, dtype=jnp.int32)

    def inverse(permutation):
        return jnp.zeros_like(numbers).at[permutation].set(numbers, unique_indices=True, mode="promise_in_bounds")

    if count <= _COMPARED_PAIRS:
        keys = chosen.astype(jnp.int32) * count + numbers  # far from 2**31 for so few
        places = (keys[None] < keys[:, None]).sum(axis=1, dtype=jnp.int32)
        return inverse(places), places
    order = jnp.argsort(chosen).astype(jnp.int32)
    return order, inverse(order)


def largest(scores: Float[Array, "*rows n"], k: int) -> Int32[Array, "*rows k"]:
    """The indices that ``jax.lax.top_k`` returns: those of the ``k`` largest scores of each row, best first, of equal
    ones the first."""
    count = scores.shape[-1]
    if scores.size * count > _COMPARISONS:
        return jax.lax.top_k(scores, k)[1]
    bits = jax.lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32)
    keys = jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)  # integers of the same order, NaN included
    others, own = keys[..., None, :], keys[..., :, None]

    def number(shape: tuple[int, ...], axis: int) -> Int32[Array, "..."]:
        return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) + axis)

    earlier = number((*scores.shape, count), -1) < number((*scores.shape, count), -2)
    places = ((others > own) | ((others == own) & earlier)).sum(axis=-1, dtype=jnp.int32)
    shape = (*scores.shape[:-1], k, count)
    return jnp.where(places[..., None, :] == number(shape, -2), number(shape, -1), 0).sum(axis=-1, dtype=jnp.int32)


class Router(nnx.Module):
    """Chooses the experts of each token. It computes in float32 for any model dtype, because near ties flip experts."""

    def __init__(self, config: DeepseekConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.kernel = weight(rngs, (config.hidden_size, config.n_routed_experts), jnp.float32)
        if config.topk_method == "noaux_tc":
            self.e_score_correction_bias = nnx.Param(jnp.zeros(config.n_routed_experts, jnp.float32))

    def __call__(self, x: Float[Array, "T dim"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        """Experts of each token and their weights (arXiv:2405.04434 section 2.2.2, arXiv:2412.19437 section 2.1.2).

        ``greedy`` takes the best k. ``group_limited_greedy`` takes the best k of the groups with the best experts.
        ``noaux_tc`` does the same, but ranks groups by their best two, and adds a learned bias for the choice but not
        to the weights. With ``norm_topk_prob`` all three normalise the weights and then scale them; V2's published code
        scales only weights that are not normalised.
        """
        config = self.config
        scores = dot(x.astype(jnp.float32), self.kernel[...])
        if config.scoring_func == "softmax":
            scores = ranked = jax.nn.softmax(scores, axis=-1)
        else:
            scores = jax.nn.sigmoid(scores)
            ranked = scores + self.e_score_correction_bias[...][None]
        if config.topk_method != "greedy":
            ranked = _keep_groups(
                ranked, config.n_group, config.topk_group, best=2 if config.topk_method == "noaux_tc" else 1
            )
        experts = largest(ranked, config.num_experts_per_tok)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return experts, weights * config.routed_scaling_factor


def _keep_groups(scores: Float[Array, "T experts"], groups: int, kept: int, *, best: int):
    """Scores with -inf outside the ``kept`` groups whose ``best`` highest scores sum highest.

    They are -inf and not 0, because a biased score may be negative, and a dropped expert must never win.
    """
    grouped = scores.reshape(scores.shape[0], groups, -1)
    group_scores = jnp.take_along_axis(grouped, largest(grouped, best), axis=-1).sum(axis=-1)
    chosen = largest(group_scores, kept)
    keep = jax.nn.one_hot(chosen, groups, dtype=bool).any(axis=1)
    return jnp.where(keep[..., None], grouped, -jnp.inf).reshape(scores.shape)


class ClampedMoE(_Sharded):
    """The experts of gpt-oss: biases throughout, clamped SwiGLU (Hugging Face's code published with the checkpoints).

    An expert is ``down(min(gate, c) * sigmoid(1.702 min(gate, c)) * (clip(up, -c, c) + 1))``. The weights of a token's
    experts are the softmax over only their router logits.
    """

    def __init__(self, config: DecoderConfig, *, dtype, rngs: nnx.Rngs):
        dim, width, count = config.hidden_size, config.intermediate_size, config.num_experts
        self.chosen, self.limit = config.num_experts_per_tok, config.swiglu_limit
        self.router = Linear(dim, count, dtype=jnp.float32, rngs=rngs, bias=True)  # near ties flip experts
        self.gate_proj = weight(rngs, (count, dim, width), dtype)
        self.up_proj = weight(rngs, (count, dim, width), dtype)
        self.down_proj = weight(rngs, (count, width, dim), dtype)
        self.gate_bias = nnx.Param(jnp.zeros((count, width), dtype))
        self.up_bias = nnx.Param(jnp.zeros((count, width), dtype))
        self.down_bias = nnx.Param(jnp.zeros((count, dim), dtype))

    def __call__(self, x: Float[Array, "T dim"]) -> Float[Array, "T dim"]:
        logits = self.router.float32(x.astype(jnp.float32))
        experts = largest(logits, self.chosen)
        weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1), axis=-1)
        return self._through(x, experts, weights, self.router.kernel.shape[1], self._run).astype(x.dtype)

    def _run(self, rows, sizes, experts):
        own = experts - self._first(self.gate_proj)

        def bias(biases):
            return biases[...].astype(jnp.float32)[jnp.clip(own, 0, biases.shape[0] - 1)]

        gate = jnp.minimum(self._multiply(rows, self.gate_proj, sizes) + bias(self.gate_bias), self.limit)
        up = self._multiply(rows, self.up_proj, sizes) + bias(self.up_bias)
        up = jnp.clip(up, -self.limit, self.limit)
        hidden = (gate * jax.nn.sigmoid(1.702 * gate) * (up + 1.0)).astype(rows.dtype)
        # Added once, by the first of the devices that have parts of an expert, or by the one that has all of it.
        added = jax.lax.axis_index(self.summed) == 0 if self.summed else (own >= 0) & (own < self.down_bias.shape[0])
        out = self._multiply(hidden, self.down_proj, sizes)
        return out + jnp.where(jnp.broadcast_to(added, own.shape)[:, None], bias(self.down_bias), 0.0)
