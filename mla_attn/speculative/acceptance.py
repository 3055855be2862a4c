"""Acceptance of the drafts of a chain by the target model, computed on the device without reading anything back."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from mla_attn.checks import as_int32, check_array, check_type


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Outcome of one verify step.

    A step emits the accepted drafts and one more token: the target's own token after the last accepted draft, which is
    the correction or, when all drafts were accepted, the bonus token.

    Attributes:
        accepted_drafts: int32 [B], 0 to K.
        emitted: int32 [B, K + 1], the accepted drafts, the correction or bonus token, then -1.
        num_emitted: int32 [B], ``accepted_drafts + 1``; 0 for padding requests.
        next_tokens: int32 [B], the last emitted token, whose row is not cached yet.
    """

    accepted_drafts: Int[Array, "B"]
    emitted: Int[Array, "B tokens"]
    num_emitted: Int[Array, "B"]
    next_tokens: Int[Array, "B"]


def accept_greedy(drafts: Int[Array, "B K"], targets: Int[Array, "B tokens"], q_lens: Int[Array, "B"]) -> Acceptance:
    """Accepts drafts as long as they equal the target's greedy tokens (arXiv:2211.17192 at temperature 0).

    Args:
        drafts: drafted tokens; -1 means no draft and is never accepted.
        targets: greedy token of the target after each row (anchor first), [B, K + 1].
        q_lens: rows of each request in the verify call, anchor included; 0 for padding. Drafts past it are ignored.

    Raises:
        ValueError: a wrong shape or dtype.
    """
    drafts, targets = as_int32("drafts", drafts), as_int32("targets", targets)
    q_lens = as_int32("q_lens", q_lens)
    if targets.shape != (drafts.shape[0], drafts.shape[1] + 1):
        raise ValueError(f"targets has shape {targets.shape}, must be [B, K + 1] for drafts of {drafts.shape}")
    column = jnp.arange(targets.shape[1], dtype=jnp.int32)[None]
    right = (drafts == targets[:, :-1]) & (drafts >= 0) & (column[:, 1:] < q_lens[:, None])
    accepted = jnp.cumprod(right, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
    live = q_lens > 0
    emitted = jnp.where((column <= accepted[:, None]) & live[:, None], targets, -1)
    return Acceptance(
        accepted_drafts=jnp.where(live, accepted, 0),
        emitted=emitted,
        num_emitted=jnp.where(live, accepted + 1, 0),
        next_tokens=jnp.where(live, jnp.take_along_axis(targets, accepted[:, None], axis=1)[:, 0], 0),
    )


def accept_sampled(
    keys: Key[Array, "B"],
    drafts: Int[Array, "B K"],
    draft_probs: Float[Array, "B K vocab"] | None,
    target_probs: Float[Array, "B tokens vocab"],
    q_lens: Int[Array, "B"],
) -> Acceptance:
    """Accepts drafts by speculative sampling (arXiv:2211.17192, algorithm 1): emitted tokens have the target's
    distribution.

    Draft d is accepted with probability ``min(1, p(d) / q(d))``. The first rejected draft is replaced by a token drawn
    from ``max(p - q, 0)``, normalised. If all are accepted, the bonus token is drawn from p.
    Probabilities of any floating dtype are compared in float32.

    Args:
        keys: one random key per request, so that a request's tokens do not depend on its batch.
        drafts: drafted tokens; -1 means no draft and is never accepted.
        draft_probs: q, the distributions that the drafts were drawn from; None if drafting was deterministic (greedy or
            top-k), so that q is 1 at the draft and 0 elsewhere.
        target_probs: p after each row (anchor first), [B, K + 1, vocab].
        q_lens: rows of each request in the verify call, anchor included; 0 for padding. Drafts past it are ignored.

    Raises:
        ValueError: a wrong shape or dtype.
    """
    drafts, q_lens = as_int32("drafts", drafts), as_int32("q_lens", q_lens)
    batch, count = drafts.shape
    for name, array in (("target_probs", target_probs), ("draft_probs", draft_probs)):
        if array is not None:
            check_array(name, array)
            check_type(name, array, jnp.floating)
    if target_probs.shape[:2] != (batch, count + 1):
        raise ValueError(f"target_probs has shape {target_probs.shape}, must be [B, K + 1, vocab] for {drafts.shape}")
    if draft_probs is not None and draft_probs.shape != (batch, count, target_probs.shape[2]):
        raise ValueError(f"draft_probs has shape {draft_probs.shape}, must be [B, K, vocab] for {drafts.shape}")
    target_probs = jnp.asarray(target_probs, jnp.float32)
    vocab = target_probs.shape[2]
    column = jnp.arange(count, dtype=jnp.int32)[None]
    real = (drafts >= 0) & (column + 1 < q_lens[:, None])
    q = jax.nn.one_hot(drafts, vocab) if draft_probs is None else draft_probs
    q = jnp.asarray(q, jnp.float32)
    q = jnp.where(real[:, :, None], q, 0.0)  # a missing draft subtracts nothing from p
    token = jnp.maximum(drafts, 0)[:, :, None]
    p_draft, q_draft = (jnp.take_along_axis(x, token, axis=2)[:, :, 0] for x in (target_probs[:, :-1], q))
    judge, draw = jax.vmap(lambda key: tuple(jax.random.split(key)), out_axes=0)(keys)
    chance = jax.vmap(lambda key: jax.random.uniform(key, (count,), jnp.float32))(judge)
    taken = real & (chance * q_draft < p_draft)
    accepted = jnp.cumprod(taken, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)

    p_next = jnp.take_along_axis(target_probs, accepted[:, None, None], axis=1)[:, 0]
    q_next = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
    q_next = jnp.take_along_axis(q_next, accepted[:, None, None], axis=1)[:, 0]
    rest = jnp.maximum(p_next - q_next, 0)
    rest = jnp.where(rest.sum(axis=-1, keepdims=True) > 0, rest, p_next)  # the sum is 0 if p = q up to rounding
    corrections = jax.vmap(jax.random.categorical)(draw, jnp.log(rest)).astype(jnp.int32)
    column = jnp.arange(count + 1, dtype=jnp.int32)[None]
    tokens = jnp.where(column < accepted[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), corrections[:, None])
    live = q_lens > 0
    return Acceptance(
        accepted_drafts=jnp.where(live, accepted, 0),
        emitted=jnp.where((column <= accepted[:, None]) & live[:, None], tokens, -1),
        num_emitted=jnp.where(live, accepted + 1, 0),
        next_tokens=jnp.where(live, corrections, 0),
    )
