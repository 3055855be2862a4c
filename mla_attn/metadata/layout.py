"""The page layout of a batch: the page arguments of all builders in one object."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from mla_attn.checks import INT32_MAX, as_int32, check_index, check_integer
from mla_attn.text import shown


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """The page table of a batch, which maps positions to slots. Every builder creates one in its first line.

    Attributes:
        page_table: int32 [B, W], page ids after the page map; invalid ids are negative or past the pool.
        page_size: tokens per page P.
        max_len: most tokens of a request: one integer, or int32 [B].
        kv_offsets: int32 [B], position of each request's first key in the table; None if all are 0.
        rank: rank of this table's device among those that hold a request's tokens in turn, an integer or int32 [].
        ranks: number of them; position p is held by rank ``p % ranks``.
    """

    page_table: Int[Array, "B W"]
    page_size: int
    max_len: int | Int[Array, "B"]
    kv_offsets: Int[Array, "B"] | None = None
    rank: int | Int[Array, ""] = 0
    ranks: int = 1

    @classmethod
    def of(
        cls,
        page_table: Any,
        *,
        page_size: int,
        max_len: int | None = None,
        page_map: Any = None,
        kv_offsets: Any = None,
        context: Any = None,
    ) -> "PageLayout":
        """Checks the page arguments of a builder and returns their layout; raises ValueError."""
        page_table = as_int32("page_table", page_table)
        if page_table.ndim != 2 or page_table.shape[1] == 0:
            raise ValueError(f"page_table has shape {page_table.shape}, must be [B, W] with W at least 1")
        page_size = check_integer("page_size", page_size, 1, INT32_MAX)
        rank, ranks = _check_context(context)
        capacity = min(page_table.shape[1] * page_size * ranks, INT32_MAX)  # positions are int32
        limit = capacity if kv_offsets is None else INT32_MAX
        most = capacity if max_len is None else check_integer("max_len", max_len, 1, limit)
        if page_map is not None:
            page_map = as_int32("page_map", page_map)
            if page_map.ndim != 1 or page_map.size == 0:
                raise ValueError(f"page_map has shape {page_map.shape}, must be [V], V at least 1")
            mapped = jnp.take(page_map, page_table, mode="fill", fill_value=-1)
            page_table = jnp.where(page_table < 0, -1, mapped)  # a negative index would wrap
        layout = cls(page_table, page_size, most, rank=rank, ranks=ranks)
        if kv_offsets is None:
            return layout
        kv_offsets = layout.per_request("kv_offsets", kv_offsets)
        if max_len is None:  # the end of the table, computed so that the sum cannot wrap
            most = jnp.minimum(kv_offsets, INT32_MAX - capacity) + capacity
        return dataclasses.replace(layout, max_len=most, kv_offsets=kv_offsets)

    @property
    def batch(self) -> int:
        """Requests B."""
        return self.page_table.shape[0]

    @property
    def first_keys(self) -> Int[Array, "B"]:
        """Position of each request's key with index 0 on this rank."""
        first = jnp.zeros(self.batch, jnp.int32) if self.kv_offsets is None else self.kv_offsets
        return first + self.rank if self.ranks > 1 else first

    def per_request(self, name: str, array: Any) -> Int[Array, "B"]:
        """Checks an argument of one integer per request, and returns it as int32."""
        array = as_int32(name, array)
        if array.shape != (self.batch,):
            raise ValueError(f"{name} has shape {array.shape}, must be ({self.batch},), one for each row of page_table")
        return array

    def room(self, prefix_lens: Int[Array, "B"]) -> Int[Array, "B"]:
        """Number of tokens that fit after each prefix.

        It is 0 for a negative prefix, which marks padding: its positions would wrap to the end of the table.
        """
        return jnp.where(prefix_lens < 0, 0, jnp.maximum(self.max_len - prefix_lens, 0))

    def slots(self, requests: Int[Array, "T"], positions: Int[Array, "T"]) -> Int[Array, "T"]:
        """Slot of the token at a position of a request; -1 where the table has no page."""
        held: Any = True
        if self.ranks > 1:
            held = positions % self.ranks == self.rank
        if self.kv_offsets is not None:
            offsets = self.kv_offsets[requests]
            held, positions = held & (positions >= offsets), positions - offsets
            held &= (positions >= 0) & (positions // self.ranks < self.page_table.shape[1] * self.page_size)
            positions = jnp.where(held, positions, 0)
        if self.ranks > 1:
            positions = positions // self.ranks
        pages = self.page_table[requests, positions // self.page_size]
        known = (pages >= 0) & (pages < INT32_MAX // self.page_size)  # an invalid id must not overflow to a valid slot
        return jnp.where(known & held, pages * self.page_size + positions % self.page_size, -1)


def _check_context(context: Any) -> tuple[int | Int[Array, ""], int]:
    """Checks ``context``, None or ``(rank, size)``; returns both, (0, 1) for None."""
    if context is None:
        return 0, 1
    if not isinstance(context, tuple) or len(context) != 2:
        raise ValueError(f"context={shown(context)} must be None or (rank, size)")
    size = check_integer("size of context", context[1], 1, INT32_MAX)
    return check_index("rank of context", context[0], 0, size - 1), size
