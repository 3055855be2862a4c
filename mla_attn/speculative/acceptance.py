"""Which drafts the target model accepts. Device arrays throughout: no round trip to the host."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Outcome of one verify step.

    *Accepted drafts* and *emitted tokens* differ by one: each step also emits the target's own token after the last
    accepted draft, the correction (or, when all drafts were right, the bonus).

    Attributes:
        accepted_drafts: int32 [B], 0 to K.
        emitted: int32 [B, K + 1], accepted drafts then the correction or bonus, -1 after them.
        num_emitted: int32 [B], ``accepted_drafts + 1``; 0 on padding rows.
        next_tokens: int32 [B], the last emitted token, whose row is not cached yet.
    """

    accepted_drafts: Int[Array, "B"]
    emitted: Int[Array, "B tokens"]
    num_emitted: Int[Array, "B"]
    next_tokens: Int[Array, "B"]


def accept_greedy(drafts: Int[Array, "B K"], targets: Int[Array, "B tokens"], q_lens: Int[Array, "B"]) -> Acceptance:
    """Accept drafts as long as they equal the target's greedy tokens (arXiv:2211.17192 at temperature 0).

    Args:
        drafts: drafted tokens; -1 stands for no draft and is never accepted.
        targets: greedy token of the target after each row (anchor first), [B, K + 1].
        q_lens: rows of each request in the verify call, anchor included; 0 on padding rows. Drafts past it are none.
    """
    if targets.shape != (drafts.shape[0], drafts.shape[1] + 1):
        raise ValueError(f"targets has shape {targets.shape}, must be [B, K + 1] for drafts of {drafts.shape}")
    column = jnp.arange(targets.shape[1])
    right = (drafts == targets[:, :-1]) & (drafts >= 0) & (column[1:] < q_lens[:, None])
    accepted = jnp.cumprod(right, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    live = q_lens > 0
    emitted = jnp.where((column <= accepted[:, None]) & live[:, None], targets, -1)
    return Acceptance(
        accepted_drafts=jnp.where(live, accepted, 0),
        emitted=emitted,
        num_emitted=jnp.where(live, accepted + 1, 0),
        next_tokens=jnp.where(live, jnp.take_along_axis(targets, accepted[:, None], axis=1)[:, 0], 0),
    )
