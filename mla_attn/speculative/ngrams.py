"""N-gram drafting: tokens that followed earlier occurrences of the request's last tokens in its own text."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from mla_attn.checks import as_int32, check_integer
from mla_attn.speculative.tree import DraftTree


def ngram_drafts(text: Int[Array, "B L"], lens: Int[Array, "B"], tree: DraftTree, *, n: int) -> Int[Array, "B nodes"]:
    """Drafts a tree by prompt lookup (vLLM's and sglang's "ngram" speculation): each node's children are the tokens
    that followed earlier occurrences of the node's last tokens in the text, the longest match first.

    Up to ``n`` tokens are matched; of equally long matches the latest wins. The children of a node are distinct.

    Args:
        text: tokens of each request, not negative, the anchor last; entries past its length are ignored.
        lens: tokens of each request.
        tree: shape of the tree.
        n: most tokens to match, at least 1.

    Returns:
        Tokens of all nodes except the anchor; -1 for nodes without a match and for their descendants.
    """
    text, lens, n = as_int32("text", text), as_int32("lens", lens), check_integer("n", n, 1)
    at = lens[:, None] - n + jnp.arange(n, dtype=jnp.int32)[None]
    last = jnp.take_along_axis(text, jnp.maximum(at, 0), axis=1, mode="clip")
    suffixes = jnp.where(at >= 0, last, -1)[:, None]  # [B, nodes of the level, n]; a suffix with -1 matches nothing
    drafts = []
    for width in tree.widths:
        children = _followers(text, lens, suffixes, width)
        drafts.append(children.reshape(text.shape[0], suffixes.shape[1] * width))
        before = jnp.repeat(suffixes[:, :, 1:], width, axis=1)
        suffixes = jnp.concatenate([before, drafts[-1][:, :, None]], axis=2)
    return jnp.concatenate(drafts, axis=1)


def _followers(text, lens, suffixes, width: int):
    """The ``width`` tokens that follow the longest matches of each suffix, [B, nodes, width]."""
    room, n = text.shape[1], suffixes.shape[2]
    place = jnp.arange(room, dtype=jnp.int32)[None, None]
    matched, run = jnp.bool_(True), jnp.int32(0)
    for k in range(n):  # distance back from the token that follows
        before = jnp.pad(text, ((0, 0), (k + 1, 0)), constant_values=-2)[:, :room]
        matched &= before[:, None] == suffixes[:, :, n - 1 - k, None]
        run += matched.astype(jnp.int32)
    there = (run > 0) & (place < lens[:, None, None])
    score = jnp.where(there, run * room + place, -1)
    children = []
    for _ in range(width):
        best = score.argmax(axis=2)
        token = jnp.where(score.max(axis=2) >= 0, jnp.take_along_axis(text, best, axis=1), -1)
        children.append(token)
        score = jnp.where(text[:, None] == token[:, :, None], -1, score)
    return jnp.stack(children, axis=2).astype(jnp.int32)
