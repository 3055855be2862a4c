"""Draft trees: their shape, their masks, and the path that the target model accepts.

Row 0 of a request is the anchor, the last emitted token; the other rows are drafts, parents before children. Row i of
the verify call is cached as key index ``prefix + i``, and its position for rotary embeddings is ``prefix + depth``.
Afterwards ``move_rows`` moves the rows of the accepted path to consecutive key indices.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mla_attn.checks import as_int32, check_integer, check_integers
from mla_attn.speculative.acceptance import Acceptance
from mla_attn.varying import vary_together


@dataclasses.dataclass(frozen=True)
class DraftTree:
    """The shape of a tree in which every node at depth d has ``widths[d]`` children; a chain has widths of 1.

    Nodes are numbered level by level, the anchor first. The children of a parent are consecutive, likeliest first.
    """

    widths: tuple[int, ...]

    def __post_init__(self):
        widths = tuple(check_integers("widths", self.widths))
        if not widths or min(widths) < 1:
            raise ValueError(f"widths={self.widths} must be one or more integers of at least 1")
        object.__setattr__(self, "widths", widths)  # hashable, with Python integers

    @classmethod
    def parse(cls, text: str) -> "DraftTree":
        """Reads "3x2x1" as three drafts after the anchor, two after each of them, and one after each of those."""
        parts = text.split("x") if isinstance(text, str) else [""]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"tree {text!r} must be widths of at least 1 joined by x, as 3x2x1")
        return cls(tuple(map(int, parts)))

    @classmethod
    def chain(cls, num_drafts: int) -> "DraftTree":
        """A chain of ``num_drafts`` drafts."""
        return cls((1,) * check_integer("num_drafts", num_drafts, 1))

    @property
    def depth(self) -> int:
        """Levels of drafts, which is the largest number that can be accepted."""
        return len(self.widths)

    @property
    def is_chain(self) -> bool:
        """Whether every node has at most one child."""
        return max(self.widths) == 1

    @functools.cached_property
    def level_sizes(self) -> tuple[int, ...]:
        """Nodes at each depth, starting with 1 for the anchor."""
        return tuple(math.prod(self.widths[:d]) for d in range(self.depth + 1))

    @functools.cached_property
    def level_starts(self) -> tuple[int, ...]:
        """Index of the first node at each depth."""
        return tuple(sum(self.level_sizes[:d]) for d in range(self.depth + 1))

    @property
    def size(self) -> int:
        """Rows S of a verify call: all nodes, the anchor included."""
        return sum(self.level_sizes)

    @functools.cached_property
    def parents(self) -> np.ndarray:
        """int32 [S], parent of each node; -1 for the anchor."""
        parents = [-1]
        for depth, width in enumerate(self.widths):
            first = self.level_starts[depth]
            parents += [first + i // width for i in range(self.level_sizes[depth] * width)]
        return np.array(parents, np.int32)

    @functools.cached_property
    def depths(self) -> np.ndarray:
        """int32 [S], depth of each node: 0 for the anchor."""
        return np.repeat(np.arange(self.depth + 1, dtype=np.int32), self.level_sizes)

    @functools.cached_property
    def mask(self) -> np.ndarray:
        """bool [S, S], the tree mask: node i sees node j if j is i or an ancestor of it."""
        mask = np.eye(self.size, dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask


def mask_of_parents(parents: Int[Array, "B S"]) -> Bool[Array, "B S S"]:
    """Tree masks of trees that differ by request: row i sees itself and its ancestors.

    Args:
        parents: parent row of each row, always before it; -1 for the anchor and for unused rows.
    """
    parents = as_int32("parents", parents)
    rows = parents.shape[1]
    direct = parents[:, :, None] == jnp.arange(rows, dtype=jnp.int32)[None, None]
    mask = jnp.broadcast_to(jnp.eye(rows, dtype=bool)[None], direct.shape)
    # Reachable in 1, 2, 4, ... steps: squaring covers any depth.
    for _ in range(max(1, (rows - 1).bit_length())):
        step = (mask | direct).astype(jnp.float32)
        mask = jnp.einsum("bij,bjk->bik", step, step) > 0
    return mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrunedTree:
    """Trees pruned to a budget, one per request: ``tokens``, ``parents``, ``depths``, int32 [B, S].

    Unused rows have token -1, parent -1 and depth 0.
    """

    tokens: Int[Array, "B S"]
    parents: Int[Array, "B S"]
    depths: Int[Array, "B S"]


def prune(
    tokens: Int[Array, "B nodes"], log_probs: Float[Array, "B nodes"], tree: DraftTree, *, budget: int
) -> PrunedTree:
    """Keeps the anchor and the ``budget`` likeliest drafts of a full tree (EAGLE-2, arXiv:2406.16858, section 4.2).

    A draft's likelihood is the product of the draft model's probabilities on its path. It never exceeds its parent's,
    and ties go to the earlier node, so the ancestors of a kept node are kept.

    Args:
        tokens: tokens of all nodes, the anchor first; -1 for missing drafts.
        log_probs: log-probability of each draft given its parent; the anchor's is ignored.
        tree: shape of the full tree.
        budget: number of drafts to keep, 1 to ``tree.size - 1``.
    """
    budget = check_integer("budget", budget, 1, tree.size - 1)
    tokens = as_int32("tokens", tokens)
    path = jnp.where(tokens < 0, -jnp.inf, log_probs.astype(jnp.float32)).at[:, 0].set(0.0)
    for level in range(1, tree.depth + 1):
        nodes = slice(tree.level_starts[level], tree.level_starts[level] + tree.level_sizes[level])
        path = path.at[:, nodes].add(path[:, tree.parents[nodes]])
    order = jnp.argsort(-path.at[:, 0].set(jnp.inf), axis=1, stable=True)[:, : budget + 1]
    kept = jnp.sort(order, axis=1)  # still numbered level by level: parents before children
    there = jnp.take_along_axis(path, kept, axis=1) > -jnp.inf
    place = jnp.zeros(tokens.shape, jnp.int32)
    place = jax.vmap(lambda p, k: p.at[k].set(jnp.arange(budget + 1, dtype=jnp.int32)))(place, kept)
    parents = jnp.asarray(tree.parents)[kept]
    parents = jnp.where(there & (parents >= 0), jnp.take_along_axis(place, jnp.maximum(parents, 0), axis=1), -1)
    return PrunedTree(
        tokens=jnp.where(there, jnp.take_along_axis(tokens, kept, axis=1), -1),
        parents=parents,
        depths=jnp.where(there, jnp.asarray(tree.depths)[kept], 0),
    )


def accept_tree(
    tokens: Int[Array, "B S"],
    parents: Int[Array, "B S"],
    targets: Int[Array, "B S"],
    q_lens: Int[Array, "B"],
    *,
    max_depth: int,
) -> tuple[Acceptance, Int[Array, "B depth"]]:
    """Follows the target's tokens down the tree from the anchor, as long as a child has that token (arXiv:2305.09781).

    If ``targets`` are the target's greedy tokens, the result is greedy decoding. If they are drawn from the target's
    distribution at each row, the result is exact sampling from the target, because drafting is deterministic: a child
    is taken with the probability of its token.

    Args:
        tokens: token of each row, the anchor first; -1 means no draft and is never accepted.
        parents: parent row of each row, -1 for the anchor.
        targets: the target's token after each row.
        q_lens: rows of each request in the verify call; 0 for padding. Rows past it are ignored.
        max_depth: most drafts that can be accepted, static.

    Returns:
        The outcome, with ``emitted`` [B, max_depth + 1], and the accepted rows [B, max_depth + 1]: the anchor first, -1
        after the last.
    """
    tokens, parents = as_int32("tokens", tokens), as_int32("parents", parents)
    targets, q_lens = as_int32("targets", targets), as_int32("q_lens", q_lens)
    max_depth = check_integer("max_depth", max_depth, 0)
    rows = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    candidates = (tokens >= 0) & (rows < q_lens[:, None]) & (rows > 0)
    live = q_lens > 0

    def descend(state, _):
        row, going = state
        target = jnp.take_along_axis(targets, row[:, None], axis=1)
        child = candidates & (parents == row[:, None]) & (tokens == target)
        found = going & child.any(axis=1)
        taken = jnp.argmax(child, axis=1).astype(jnp.int32)
        return (jnp.where(found, taken, row), found), (jnp.where(going, target[:, 0], -1), jnp.where(going, row, -1))

    start = vary_together((jnp.zeros(tokens.shape[0], jnp.int32), live), like=(tokens, parents, targets))
    _, (emitted, path) = jax.lax.scan(descend, start, length=max_depth + 1)
    count = (path >= 0).sum(axis=0, dtype=jnp.int32)
    last = jnp.maximum(count - 1, 0)
    return Acceptance(
        accepted_drafts=last,
        emitted=emitted.T,
        num_emitted=count,
        next_tokens=jnp.where(live, jnp.take_along_axis(emitted, last[None], axis=0)[0], 0),
    ), path.T


def path_moves(
    slots: Int[Array, "B S"], path: Int[Array, "B depth"]
) -> tuple[Int[Array, "moves"], Int[Array, "moves"]]:
    """Computes ``src, dst`` for ``move_rows``, which moves the rows of the accepted path to consecutive key indices.

    Args:
        slots: slot of each row of the verify call.
        path: accepted rows, from ``accept_tree``.
    """
    slots, path = as_int32("slots", slots), as_int32("path", path)
    src = jnp.where(path >= 0, jnp.take_along_axis(slots, jnp.maximum(path, 0), axis=1), -1)
    return src.ravel(), slots[:, : path.shape[1]].ravel()


def top_drafts(logits: Float[Array, "B nodes vocab"], width: int) -> Int[Array, "B children"]:
    """The ``width`` likeliest tokens after each node, likeliest first: the next level of a tree."""
    width = check_integer("width", width, 1, logits.shape[-1])
    return jax.lax.top_k(logits, width)[1].reshape(logits.shape[0], -1).astype(jnp.int32)
