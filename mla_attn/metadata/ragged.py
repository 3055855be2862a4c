"""The metadata of attention over packed, unpaged keys."""

import dataclasses
from collections.abc import Hashable

import jax
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedMetadata:
    """The rows of each request in packed queries and packed keys.

    Request b has query rows ``q_starts[b] : q_starts[b] + q_lens[b]`` and key rows ``kv_starts[b] : kv_starts[b] +
    kv_lens[b]``; either range may be empty. The key in row ``kv_starts[b] + p`` has position p, and query row j of the
    request has position ``kv_lens[b] - q_lens[b] + j``.

    Attributes:
        q_starts: int32 [B], first query row of each request; ranges are disjoint and ascending.
        q_lens: int32 [B], query rows of each request.
        kv_starts: int32 [B], first key row of each request.
        kv_lens: int32 [B], key rows of each request.
        max_q_len: static bound of ``q_lens``.
        max_kv_len: static bound of ``kv_lens``.
        work: the list of work items that ``plan_ragged`` adds; None without.
        work_plan: static arguments for which ``work`` was made; a call with others makes its own list.
    """

    q_starts: Int[Array, "B"]
    q_lens: Int[Array, "B"]
    kv_starts: Int[Array, "B"]
    kv_lens: Int[Array, "B"]
    max_q_len: int = dataclasses.field(metadata={"static": True})
    max_kv_len: int = dataclasses.field(metadata={"static": True})
    work: Int[Array, "items"] | None = None
    work_plan: Hashable = dataclasses.field(default=None, metadata={"static": True})
