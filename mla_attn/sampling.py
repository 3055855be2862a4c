"""Sampling: the next token of each request from its logits, greedy or at a temperature, with a seed per request.

A token depends only on the request's seed, the token's position, and the logits, not on the rest of the batch. So a
request gets the same tokens whatever runs beside it, whether its rows are decoded one by one or verified as drafts, and
when it is computed again.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


def sample(
    logits: Float[Array, "B S vocab"],
    positions: Int[Array, "B S"],
    *,
    temperature: Float[Array, "B"],
    top_k: Int[Array, "B"],
    top_p: Float[Array, "B"],
    seed: UInt32[Array, "B"],
) -> Int[Array, "B S"]:
    """Picks a token after each row: the likeliest at temperature 0, otherwise a sample by the Gumbel-max trick.

    Args:
        logits: float32 logits of each row of each request.
        positions: positions of the rows; a row at p gives the token at p + 1.
        temperature: divisor of the logits; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens and all ties with the last of them; 0 keeps all.
        top_p: of these, keep the smallest set of likeliest tokens whose total probability, renormalised after top_k,
            reaches p (arXiv:1904.09751); 1 keeps all.
        seed: random seed of each request.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Int[Array, "B S"]:
        # Relative to the maximum, so that no temperature overflows.
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1.0)[
            :, None, None
        ]
        narrowed = jax.lax.cond(
            jnp.any((temperature > 0) & ((top_k > 0) | (top_p < 1))),
            lambda: _narrow(scaled, top_k[:, None], top_p[:, None]),
            lambda: scaled,
        )
        drawn = jnp.argmax(narrowed + _noise(seed, positions, logits.shape[-1]), axis=-1).astype(jnp.int32)
        return jnp.where((temperature > 0)[:, None], drawn, greedy)

    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: greedy)


def _narrow(logits, top_k, top_p):
    """Logits with -inf for the tokens that top-k and top-p remove."""
    keys = _ordered(logits)
    least = jnp.where(top_k > 0, _least_kept(keys, jnp.ones_like(logits), top_k.astype(jnp.float32)), 0)
    masses = jnp.where(keys >= least[..., None], jnp.exp(logits), 0.0)
    # A float32 sum may end below the total or reach it early, so top_p = 1 is handled separately.
    nucleus = jnp.where(top_p < 1, _least_kept(keys, masses, top_p * masses.sum(axis=-1)), 0)
    least = jnp.minimum(jnp.maximum(least, nucleus), keys.max(axis=-1))  # top_p may round to 0 in float32
    return jnp.where(keys >= least[..., None], logits, -jnp.inf)


def _ordered(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Maps float32 numbers to unsigned integers of the same order (NaN excepted)."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)  # -0.0 equals 0.0
    return jax.lax.bitcast_convert_type(jnp.where(bits < 0, ~bits, bits | jnp.int32(-(2**31))), jnp.uint32)


def _least_kept(
    keys: UInt32[Array, "B S vocab"], masses: Float[Array, "B S vocab"], wanted: Float[Array, "B #S"]
) -> UInt32[Array, "B S"]:
    """The greatest key such that the masses of keys at or above it reach ``wanted``; 0 if the total does not.

    It is found four bits at a time. Sorting takes about as long, but XLA (jaxlib 0.11.2) sorts some shapes with a
    library call, which cannot be in a command buffer: the host would wait for the whole pass to choose the branch of
    the conditional around it.
    """
    least, digits = jnp.zeros(keys.shape[:-1], jnp.uint32), jnp.arange(1, 16, dtype=jnp.uint32)[None, None]
    for shift in range(28, -1, -4):
        candidates = least[..., None] + (digits << shift)
        above = jnp.where(keys[..., None] >= candidates[..., None, :], masses[..., None], 0.0).sum(axis=-2)
        least += (above >= wanted[..., None]).sum(axis=-1, dtype=jnp.uint32) << shift
    return least


def _noise(seed, positions, vocab: int) -> Float[Array, "B S vocab"]:
    def row(seed, position):
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (vocab,))

    return jax.vmap(jax.vmap(row, in_axes=(None, 0)))(seed, positions)
