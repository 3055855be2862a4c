"""The next token of each request from its logits: greedy, or drawn at a temperature, with a seed of its own.

A draw is a function of the request's seed, the position of the new token, and the logits: nothing else in the batch
has a part in it. The same request then gets the same tokens whoever runs beside it, whether its rows are decoded one by
one or judged as drafts, and when it is computed again.
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
    """A token after each row: the likeliest one at temperature 0, otherwise one drawn by the Gumbel-max trick.

    Args:
        logits: float32, of each row of each request.
        positions: of the rows; a row at p draws the token at p + 1.
        temperature: what logits are divided by; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens; 0 from all. Of equal logits at the edge all stay.
        top_p: then draw from the fewest likeliest tokens whose probability, as a share of those that stay, reaches p
            (arXiv:1904.09751); 1 from all.
        seed: of each request's random numbers.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> Int[Array, "B S"]:
        # From the top, so that no temperature overflows.
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
    """Logits with -inf at what top-k and top-p leave out."""
    keys = _ordered(logits)
    least = jnp.where(top_k > 0, _least_kept(keys, jnp.ones_like(logits), top_k.astype(jnp.float32)), 0)
    masses = jnp.where(keys >= least[..., None], jnp.exp(logits), 0.0)
    # A sum in float32 may stop short of the whole, or pass it early: top_p = 1 takes no part.
    nucleus = jnp.where(top_p < 1, _least_kept(keys, masses, top_p * masses.sum(axis=-1)), 0)
    least = jnp.minimum(jnp.maximum(least, nucleus), keys.max(axis=-1))  # a top_p may be 0 in float32
    return jnp.where(keys >= least[..., None], logits, -jnp.inf)


def _ordered(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """The bits of float32 numbers, so changed that they compare as the numbers do (NaN apart)."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)  # -0.0 equals 0.0
    return jax.lax.bitcast_convert_type(jnp.where(bits < 0, ~bits, bits | jnp.int32(-(2**31))), jnp.uint32)


def _least_kept(
    keys: UInt32[Array, "B S vocab"], masses: Float[Array, "B S vocab"], wanted: Float[Array, "B #S"]
) -> UInt32[Array, "B S"]:
    """The greatest key at and above which the masses reach what is wanted, found four bits at a time; 0 if even all
    of them together do not.

    Sorting takes about as long, but XLA (jaxlib 0.11.2) does it by a library call for some shapes. That keeps the
    conditional around it out of command buffers, and the host waits for the whole pass to learn which branch to take.
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
