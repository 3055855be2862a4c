"""Draft trees against plain loops: shapes, masks, pruning, acceptance, and the rows that move."""

import functools
import types

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.cache import LatentPool, move_rows
from mla_attn.speculative import (
    DraftTree,
    accept_greedy,
    accept_tree,
    mask_of_parents,
    path_moves,
    prune,
    top_drafts,
)

WIDTHS = [(1,), (3,), (1, 1, 1), (2, 2), (3, 2), (4, 1, 1), (1, 3, 2), (2, 1, 2, 1)]


def ints(values):
    return jnp.asarray(values, jnp.int32)


def ancestors(parents, row):
    """A row, its parent, and so on up to the anchor."""
    found = []
    while row >= 0:
        found.append(row)
        row = parents[row]
    return found


@pytest.mark.parametrize("widths", WIDTHS)
def test_shape(widths):
    """Level by level; children of one parent side by side."""
    tree = DraftTree(widths)
    parents, depths, level = [-1], [0], [0]
    for depth, width in enumerate(widths):
        assert tree.level_starts[depth] == level[0] and tree.level_sizes[depth] == len(level)
        level = [len(parents) + i * width + j for i, _ in enumerate(level) for j in range(width)]
        parents += [tree.level_starts[depth] + i // width for i in range(len(level))]
        depths += [depth + 1] * len(level)
    assert tree.level_starts[-1] == level[0] and tree.level_sizes[-1] == len(level)
    assert tree.parents.tolist() == parents and tree.depths.tolist() == depths
    assert (tree.size, tree.depth) == (len(parents), len(widths))
    assert tree.is_chain == (widths == (1,) * len(widths))
    for row in range(tree.size):
        assert np.flatnonzero(tree.mask[row]).tolist() == sorted(ancestors(parents, row))
    assert DraftTree.parse("x".join(map(str, widths))) == tree


@pytest.mark.parametrize(
    "text", ["", "x", "3x", "x3", "3xx2", "0x2", "2x0", "-1", "2x-1", "a", "3 x 2", "1.0", "2X2", 3, None]
)
def test_parse_errors(text, unchecked):
    with pytest.raises(ValueError, match=f"tree {text!r} must be widths of at least 1 joined by x, as 3x2x1"):
        DraftTree.parse(text)


@pytest.mark.parametrize("widths", [(), (0,), (2, -1), (1.5,), (True,), "12", 3, None, "of JAX"])
def test_width_errors(widths, unchecked):
    widths = (jnp.int32(2),) if widths == "of JAX" else widths
    with pytest.raises(ValueError, match=r"widths(=| holds).* must be (one or more|a sequence of) integers"):
        DraftTree(widths)


@pytest.mark.parametrize("drafts", [0, -1, "3", 2.0, True])
def test_chain_errors(drafts, unchecked):
    with pytest.raises(ValueError, match=f"num_drafts={drafts!r} must be an integer of at least 1"):
        DraftTree.chain(drafts)


def test_widths_are_a_static_argument_whatever_sequence_they_were():
    assert hash(DraftTree([2, 1])) == hash(DraftTree(np.array([2, 1]))) == hash(DraftTree((2, 1)))


ROWS = 17


def any_parents(rows):
    """Parents before their children, -1 for rows that are not there."""
    return st.tuples(st.just(-1), *(st.integers(-1, row - 1) for row in range(1, rows)))


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(parents=st.lists(any_parents(ROWS), min_size=2, max_size=2))
def test_mask_of_parents(parents):
    mask = np.asarray(_mask(ints(parents)))
    for b, row in np.ndindex(2, ROWS):
        assert np.flatnonzero(mask[b, row]).tolist() == sorted(ancestors(parents[b], row))


_mask = jax.jit(mask_of_parents)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33])
def test_mask_of_a_chain(rows):
    """Every depth, powers of two and one more."""
    assert (np.asarray(_mask(jnp.arange(rows, dtype=jnp.int32)[None] - 1))[0] == np.tri(rows, dtype=bool)).all()


def prune_by_hand(tokens, log_probs, tree, budget):
    """Every draft's path, the likeliest first, of equals the earlier one; then in order of their numbers."""
    path = []
    for row in range(tree.size):
        whole = ancestors(tree.parents, row)[:-1]
        there = all(tokens[node] >= 0 for node in whole)
        path.append(sum(log_probs[node] for node in whole) if there else -np.inf)
    drafts = sorted(range(1, tree.size), key=lambda row: (-path[row], row))[:budget]
    kept = [0, *sorted(row for row in drafts if path[row] > -np.inf)]
    parents = [kept.index(tree.parents[row]) if row else -1 for row in kept]
    return [tokens[row] for row in kept], parents, [tree.depths[row] for row in kept]


@functools.partial(jax.jit, static_argnames=("tree", "budget"))
def _prune(tokens, log_probs, tree, budget):
    return prune(tokens, log_probs, tree, budget=budget)


@pytest.mark.parametrize(("widths", "budget"), [((3, 2), 1), ((3, 2), 4), ((3, 2), 9), ((2, 2, 2), 6), ((4, 1, 1), 5)])
def test_prune(widths, budget):
    """Against brute force. Probabilities are eighths of a unit, so that sums are exact and ties are ties."""
    tree = DraftTree(widths)
    nodes = st.tuples(st.integers(-1, 9), st.sampled_from([0, -0.125, -0.5, -1, -2]))
    nodes = st.lists(nodes, min_size=tree.size, max_size=tree.size)

    @hypothesis.settings(deadline=None, max_examples=30)
    @hypothesis.given(requests=st.lists(nodes, min_size=2, max_size=2))
    def run(requests):
        tokens, log_probs = (np.array([[node[i] for node in row] for row in requests]) for i in (0, 1))
        tokens[:, 0] = 7
        got = _prune(ints(tokens), jnp.asarray(log_probs, jnp.float32), tree, budget)
        masks = np.asarray(mask_of_parents(got.parents))
        assert got.tokens.shape == got.parents.shape == got.depths.shape == (2, budget + 1)
        for b in range(2):
            there = np.asarray(got.tokens[b]) >= 0
            want_tokens, want_parents, want_depths = prune_by_hand(tokens[b], log_probs[b], tree, budget)
            # Rows that are not there may stand between those that are: parents are compared by rank among the latter.
            rank = np.cumsum(there) - 1
            parents = np.asarray(got.parents[b])
            assert np.asarray(got.tokens[b])[there].tolist() == want_tokens
            assert [rank[p] if p >= 0 else -1 for p in parents[there]] == want_parents
            assert np.asarray(got.depths[b])[there].tolist() == want_depths
            for values, absent in ((got.tokens, -1), (got.parents, -1), (got.depths, 0)):
                assert (np.asarray(values[b])[~there] == absent).all()
            assert (masks[b][there].sum(axis=1) == 1 + np.array(want_depths)).all()

    run()


def test_prune_all_placeholders():
    """The anchor alone is left."""
    tree = DraftTree((2, 2))
    tokens = ints([[3, -1, -1, 5, 6, 7, 8]])
    got = prune(tokens, jnp.zeros((1, 7)), tree, budget=3)
    assert got.tokens.tolist() == [[3, -1, -1, -1]] and got.parents.tolist() == [[-1] * 4]


@pytest.mark.parametrize("budget", [0, 7, -1])
def test_prune_errors(budget):
    with pytest.raises(ValueError, match=f"budget={budget} must be an integer from 1 to 6"):
        prune(jnp.zeros((1, 7), jnp.int32), jnp.zeros((1, 7)), DraftTree((2, 2)), budget=budget)


def accept_by_hand(tokens, parents, targets, q_len, max_depth):
    """One request: from the anchor down to the first child that holds the target's token, and so on."""
    if q_len == 0:
        return types.SimpleNamespace(path=[], emitted=[])
    path, emitted = [0], [targets[0]]
    while len(path) <= max_depth:
        right = [row for row in range(1, q_len) if tokens[row] == emitted[-1] >= 0]
        children = [row for row in right if parents[row] == path[-1]]
        if not children:
            break
        path.append(children[0])
        emitted.append(targets[children[0]])
    return types.SimpleNamespace(path=path, emitted=emitted)


_accept_tree = jax.jit(accept_tree, static_argnames="max_depth")
REQUESTS, NODES = 3, 8


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(
    parents=st.lists(any_parents(NODES), min_size=REQUESTS, max_size=REQUESTS),
    tokens=st.lists(st.integers(-1, 2), min_size=REQUESTS * NODES, max_size=REQUESTS * NODES),
    targets=st.lists(st.integers(-1, 2), min_size=REQUESTS * NODES, max_size=REQUESTS * NODES),
    q_lens=st.lists(st.integers(0, NODES), min_size=REQUESTS, max_size=REQUESTS),
    max_depth=st.sampled_from([2, NODES - 1]),
)
@hypothesis.example(  # all of a chain is right, and longer than what is accepted
    parents=[tuple(range(-1, NODES - 1))] * REQUESTS,
    tokens=[*range(NODES)] * REQUESTS,
    targets=[*range(1, NODES + 1)] * REQUESTS,
    q_lens=[NODES] * REQUESTS,
    max_depth=2,
)
def test_accept_tree(parents, tokens, targets, q_lens, max_depth):
    """Siblings may hold the same token, rows may be missing, and the tree may be deeper than is accepted."""
    tokens, targets = (np.reshape(x, (REQUESTS, NODES)) for x in (tokens, targets))
    found, path = _accept_tree(ints(tokens), ints(parents), ints(targets), ints(q_lens), max_depth=max_depth)
    assert found.emitted.shape == path.shape == (REQUESTS, max_depth + 1)
    for b in range(REQUESTS):
        want = accept_by_hand(tokens[b], parents[b], targets[b], q_lens[b], max_depth)
        count = len(want.emitted)
        padding = [-1] * (max_depth + 1 - count)
        assert found.emitted[b].tolist() == want.emitted + padding
        assert path[b].tolist() == want.path + padding
        assert found.num_emitted[b] == count and found.accepted_drafts[b] == max(count - 1, 0)
        assert found.next_tokens[b] == (want.emitted[-1] if count else 0)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    drafts=st.lists(st.lists(st.integers(-1, 2), min_size=4, max_size=4), min_size=REQUESTS, max_size=REQUESTS),
    targets=st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), min_size=REQUESTS, max_size=REQUESTS),
    q_lens=st.lists(st.integers(0, 5), min_size=REQUESTS, max_size=REQUESTS),
)
def test_a_chain_is_accepted_as_by_accept_greedy(drafts, targets, q_lens):
    drafts, targets, q_lens = ints(drafts), ints(targets), ints(q_lens)
    tokens = jnp.pad(drafts, ((0, 0), (1, 0)))
    parents = jnp.broadcast_to(ints(DraftTree((1,) * 4).parents), tokens.shape)
    chain, path = _accept_tree(tokens, parents, targets, q_lens, max_depth=4)
    greedy = _accept_greedy(drafts, targets, q_lens)
    for name in ("accepted_drafts", "emitted", "num_emitted", "next_tokens"):
        assert getattr(chain, name).tolist() == getattr(greedy, name).tolist(), name
    rows = np.arange(5)[None]
    assert (np.asarray(path) == np.where(rows < np.asarray(greedy.num_emitted)[:, None], rows, -1)).all()


_accept_greedy = jax.jit(accept_greedy)


def test_accept_greedy_errors(unchecked):
    with pytest.raises(ValueError, match=r"targets has shape \(2, 3\), must be \[B, K \+ 1\] for drafts of \(2, 3\)"):
        accept_greedy(ints(np.zeros((2, 3))), ints(np.zeros((2, 3))), ints([4, 4]))


def test_integers_of_any_width(unchecked):
    """A chain of 200 rows in int8 parents, -1 beside unsigned slots and tokens: nothing wraps."""
    parents = np.full((1, 200), -1, np.int8)
    parents[0, 1:100] = np.arange(99)
    mask = np.asarray(mask_of_parents(jnp.asarray(parents)))[0]
    assert (mask[:100, :100] == np.tri(100, dtype=bool)).all() and (mask[100:] == np.eye(200, dtype=bool)[100:]).all()
    src, dst = path_moves(np.array([[3, 7]], np.uint8), np.array([[1, -1]], np.int8))
    assert (src.tolist(), dst.tolist()) == ([7, -1], [3, 7])
    got = accept_greedy(ints([[4, 5]]), np.array([[4, 6, 7]], np.uint32), np.array([3], np.uint8))
    assert got.emitted.tolist() == [[4, 6, -1]] and got.emitted.dtype == jnp.int32


@pytest.mark.parametrize("committed", [0, 3, 11, 13])
def test_accepted_rows_are_moved_into_place(committed):
    """From the verify call's slots to the positions that follow the prefix, in every layer; the rest stays.

    Of a request that is near the end of its pages, rows past it were never written and are not moved.
    """
    tree, page_size, limit = DraftTree((2, 2)), 4, 16
    pages, rng = np.array([[5, 2, 0, 6], [1, 4, 7, 3]]), np.random.default_rng(committed)
    data = rng.standard_normal((2 * 8, page_size, 5)).astype(np.float32)
    pool = LatentPool(jnp.asarray(data), 2, 8, 3, 1, 8)
    positions = committed + np.arange(tree.size)
    slots = np.where(
        positions < limit,
        pages[:, np.minimum(positions, limit - 1) // page_size] * page_size + positions % page_size,
        -1,
    )
    room = min(limit - committed, tree.size)
    # Request 0 goes down to the last grandchild of its second child, request 1 to its second child's first.
    tokens = ints([[0, 1, 2, 3, 4, 5, 6]] * 2)
    targets = ints([[2, 9, 6, 9, 9, 9, 9], [2, 9, 5, 9, 9, 9, 9]])
    parents = jnp.broadcast_to(ints(tree.parents), tokens.shape)
    _, path = _accept_tree(tokens, parents, targets, ints([room, room]), max_depth=tree.depth)
    moved = np.asarray(jax.jit(move_rows)(pool, *path_moves(ints(slots), path)).data).reshape(2, 32, 5)

    want = data.reshape(2, 32, 5).copy()
    full = [[0, 2, 6], [0, 2, 5]]
    for b in range(2):
        kept = [row for row in full[b] if row < room]
        assert path[b].tolist() == kept + [-1] * (3 - len(kept))
        for place, row in enumerate(kept):
            want[:, slots[b, place]] = data.reshape(2, 32, 5)[:, slots[b, row]]
    assert moved.tobytes() == want.tobytes()


def test_top_drafts():
    """Likeliest first, of equals the lower token; children of one node side by side."""
    logits = jnp.asarray([[[0.0, 3.0, 1.0, 3.0], [5.0, 4.0, 4.0, -1.0]]])
    assert top_drafts(logits, 3).tolist() == [[1, 3, 2, 0, 1, 2]]
    assert top_drafts(logits, 1).tolist() == [[1, 0]]
