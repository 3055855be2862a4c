"""The list of tiles of query tokens that a prefill kernel computes, those with most keys first; needs no Triton."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from mla_attn.pallas_kernels.work_list import sound_requests

# First query token, tokens, first key row of the request, its keys, and position of the first token.
RECORD = ("token", "tokens", "key", "keys", "position")


@functools.partial(jax.jit, static_argnames=("num_tokens", "tile", "max_q_len", "max_kv_len", "causal"), inline=True)
def prefill_list(
    q_starts: Int32[Array, "B"],
    q_lens: Int32[Array, "B"],
    kv_starts: Int32[Array, "B"],
    kv_lens: Int32[Array, "B"],
    *,
    num_tokens: int,
    tile: int,
    max_q_len: int,
    max_kv_len: int,
    causal: bool,
) -> Int32[Array, "tiles fields"]:
    """Makes the list: tiles of ``tile`` tokens of each request, and of the tokens between requests, without keys.

    Tokens of a request whose rows are out of range, or overlap those of one before it, are of none.
    """
    sound = sound_requests(q_starts, q_lens, num_tokens=num_tokens, max_q_len=max_q_len)
    ends = jnp.where(sound, q_starts + q_lens, 0)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jax.lax.cummax(ends)])  # where the gap before each begins
    starts = jnp.where(sound, q_starts, before[:-1])
    token = jnp.append(jnp.stack([before[:-1], starts], axis=1).ravel(), before[-1])
    stop = jnp.append(jnp.stack([starts, jnp.where(sound, ends, starts)], axis=1).ravel(), num_tokens)
    tokens, none = stop - token, jnp.zeros_like(q_lens)
    keys = jnp.where(sound, jnp.clip(kv_lens, 0, max_kv_len), 0)
    fields = [jnp.append(jnp.stack([none, x], axis=1).ravel(), 0) for x in (kv_starts, keys, kv_lens - q_lens)]

    tiles = -(-tokens // tile)
    upto = jnp.cumsum(tiles, dtype=jnp.int32)
    most = num_tokens // tile + min(2 * q_lens.shape[0] + 1, num_tokens)
    number = jnp.arange(most, dtype=jnp.int32)
    of = jnp.minimum(jnp.searchsorted(upto, number, side="right"), tokens.shape[0] - 1).astype(jnp.int32)
    nth = (number - upto[of] + tiles[of]) * tile
    count = jnp.where(number < upto[-1], jnp.clip(tokens[of] - nth, 0, tile), 0)
    key, keys, position = (x[of] for x in fields)
    position = position + nth
    work = jnp.minimum(keys, position + count) if causal else keys
    records = jnp.stack([token[of] + nth, count, key, keys, position], axis=1).astype(jnp.int32)
    return records[jnp.argsort(jnp.where(count > 0, -work, 1))]
