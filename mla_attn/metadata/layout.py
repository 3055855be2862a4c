"""The page layout of a batch: what every builder is told of pages, in one object."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from mla_attn.checks import INT32_MAX, as_int32, check_integer


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """The pages of a batch, and where a token at a position lies. Builders make one in their first line.

    Attributes:
        page_table: int32 [B, W], page ids after the page map; ids that name no page are negative or past the pool.
        page_size: tokens per page P.
        max_len: most tokens a request may hold, or int32 [B], of each request.
        kv_offsets: int32 [B], position of each request's first key in the table; None where all are 0.
    """

    page_table: Int[Array, "B W"]
    page_size: int
    max_len: int | Int[Array, "B"]
    kv_offsets: Int[Array, "B"] | None = None

    @classmethod
    def of(
        cls,
        page_table: Any,
        *,
        page_size: int,
        max_len: int | None = None,
        page_map: Any = None,
        kv_offsets: Any = None,
    ) -> "PageLayout":
        """Checks the arguments of a builder and makes their layout; ValueError as the builders."""
        page_table = as_int32("page_table", page_table)
        if page_table.ndim != 2 or page_table.shape[1] == 0:
            raise ValueError(f"page_table has shape {page_table.shape}, must be [B, W] with W at least 1")
        page_size = check_integer("page_size", page_size, 1, INT32_MAX)
        capacity = min(page_table.shape[1] * page_size, INT32_MAX)  # positions are int32
        limit = capacity if kv_offsets is None else INT32_MAX
        most = capacity if max_len is None else check_integer("max_len", max_len, 1, limit)
        if page_map is not None:
            page_map = as_int32("page_map", page_map)
            if page_map.ndim != 1 or page_map.size == 0:
                raise ValueError(f"page_map has shape {page_map.shape}, must be [V], V at least 1")
            mapped = jnp.take(page_map, page_table, mode="fill", fill_value=-1)
            page_table = jnp.where(page_table < 0, -1, mapped)  # a negative index would wrap
        layout = cls(page_table, page_size, most)
        if kv_offsets is None:
            return layout
        kv_offsets = layout.per_request("kv_offsets", kv_offsets)
        if max_len is None:  # what the table holds; no sum may wrap
            most = jnp.minimum(kv_offsets, INT32_MAX - capacity) + capacity
        return dataclasses.replace(layout, max_len=most, kv_offsets=kv_offsets)

    @property
    def batch(self) -> int:
        """Requests B."""
        return self.page_table.shape[0]

    def per_request(self, name: str, array: Any) -> Int[Array, "B"]:
        """Checks an argument of one integer per request, and returns it as int32."""
        array = as_int32(name, array)
        if array.shape != (self.batch,):
            raise ValueError(f"{name} has shape {array.shape}, must be ({self.batch},), one for each row of page_table")
        return array

    def room(self, prefix_lens: Int[Array, "B"]) -> Int[Array, "B"]:
        """Tokens that fit behind each prefix.

        None fit behind a negative one, which is no request: its positions would wrap to the end of the table.
        """
        return jnp.where(prefix_lens < 0, 0, jnp.maximum(self.max_len - prefix_lens, 0))

    def slots(self, requests: Int[Array, "T"], positions: Int[Array, "T"]) -> Int[Array, "T"]:
        """Slot of a request's token at a position; -1 where the table has no page."""
        held: Any = True
        if self.kv_offsets is not None:
            offsets = self.kv_offsets[requests]
            held, positions = positions >= offsets, positions - offsets
            held &= (positions >= 0) & (positions < self.page_table.shape[1] * self.page_size)
            positions = jnp.where(held, positions, 0)
        pages = self.page_table[requests, positions // self.page_size]
        known = (pages >= 0) & (pages < INT32_MAX // self.page_size)  # a foreign id must not overflow into range
        return jnp.where(known & held, pages * self.page_size + positions % self.page_size, -1)
