"""The work list of the kernel of prompts: which query rows of which request a thread block takes, and which keys.

The query tokens of each request are divided into *row tiles* of ``ROWS`` tokens, its keys, from the first one on, into
tiles of ``KEYS``. A row tile is of all heads alike: the kernel takes each head of it as a unit of its own. Row tiles
are ordered longest first. Rows that no request owns form row tiles without keys: they become zeros.

Everything is computed in JAX, with static shapes, once per step; all layers share the list.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from mla_attn.pallas_kernels.work_list import TILE, owner, segments_of

ROWS = 128  # most query tokens of a row tile
KEYS = 128  # keys of a key tile
# A row tile: first packed token, tokens, position of the first one among the keys, first key tile, key tiles, keys of
# the request, row of its first key.
ITEM = ("row", "rows", "position", "tile", "tiles", "keys", "key_row")
HEADER = 1  # the list begins with the number of its items


@dataclasses.dataclass(frozen=True)
class PromptPlan:
    """Static sizes of a list.

    Attributes:
        num_requests: requests B.
        num_tokens: packed query tokens T.
        num_keys: packed keys Tk.
        max_q_len, max_kv_len: most query tokens and keys of a request.
        causal: whether rows see keys up to their own position only.
        window: visible keys per row; None for all.
    """

    num_requests: int
    num_tokens: int
    num_keys: int
    max_q_len: int
    max_kv_len: int
    causal: bool = True
    window: int | None = None

    heads: ClassVar[int] = 1  # rows are divided by tokens

    @property
    def num_rows(self) -> int:
        """The rows that are divided among requests."""
        return self.num_tokens

    @property
    def max_tiles(self) -> int:
        """The most tiles of a request's keys, in the tiles of ``work_list.py``."""
        return -(-min(self.max_kv_len, self.num_keys) // TILE)

    @property
    def num_items(self) -> int:
        """Records of ``ITEM`` in the list: the most that any batch of these sizes has."""
        return self.num_tokens // ROWS + min(2 * self.num_requests + 1, self.num_tokens)

    @property
    def size(self) -> int:
        """Length of the list."""
        return HEADER + self.num_items * len(ITEM)


@functools.partial(jax.jit, static_argnames=("plan",), inline=True)
def prompt_list(
    q_starts: Int[Array, "B"],
    q_lens: Int[Array, "B"],
    kv_starts: Int[Array, "B"],
    kv_lens: Int[Array, "B"],
    *,
    plan: PromptPlan,
) -> Int[Array, "size"]:
    """Makes the list, int32 [plan.size]: the number of items, then ``plan.num_items`` records of ``ITEM``.

    Whatever one request's numbers are, each row of the others is in one item: a request whose rows are out of range, or
    overlap those of one before it, owns none.

    Args:
        q_starts, q_lens, kv_starts, kv_lens: fields of ``RaggedMetadata``.
        plan: static sizes.
    """
    kv_lens = jnp.minimum(kv_lens, min(plan.max_kv_len, plan.num_keys))
    s = segments_of(q_starts, q_lens, kv_lens, jnp.zeros_like(kv_lens), plan, plan.max_q_len, 1)
    key_rows = jnp.clip(kv_starts, 0, plan.num_keys)[s.request]
    row_tiles = -(-s.tokens // ROWS)
    upto = jnp.where(jnp.tri(row_tiles.shape[0], dtype=bool), row_tiles[None], 0).sum(axis=1)
    of, nth, live = owner(upto - row_tiles, row_tiles, jnp.arange(plan.num_items, dtype=jnp.int32))

    first = nth * ROWS
    rows = jnp.where(live, jnp.clip(s.tokens[of] - first, 0, ROWS), 0)
    position, end = s.position[of] + first, s.keys[of]
    if plan.causal:
        end = jnp.minimum(end, position + rows)
    tile = jnp.zeros_like(end)
    if plan.window is not None:  # keys left of every row's window
        tile = jnp.maximum(position + 1 - plan.window, 0) // KEYS
    tiles = jnp.where(live, jnp.maximum(-(-end // KEYS) - tile, 0), -1)
    fields = {
        "row": s.token[of] + first,
        "rows": rows,
        "position": position,
        "tile": tile,
        "tiles": tiles,
        "keys": s.keys[of],
        "key_row": key_rows[of],
    }
    records = jnp.stack([fields[name] for name in ITEM], axis=1)
    # Sorted by counting: one small kernel, where XLA's own sort takes several.
    index = jnp.arange(plan.num_items, dtype=jnp.int32)
    records, tiles = jax.lax.optimization_barrier((records, tiles))
    before = (tiles[None] > tiles[:, None]) | ((tiles[None] == tiles[:, None]) & (index[None] < index[:, None]))
    place = before.sum(axis=1, dtype=jnp.int32)
    ordered = jnp.zeros_like(records).at[place].set(records, unique_indices=True)
    return jnp.concatenate([upto[-1:], ordered.ravel()]).astype(jnp.int32)
