"""Which drafts are accepted, against a loop over one request at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.speculative import DraftTree, accept_greedy, accept_sampled, accept_tree

VOCAB = 11


def ints(values):
    return jnp.asarray(values, jnp.int32)


def by_greedy(drafts, targets, q_lens):
    return accept_greedy(ints(drafts), ints(targets), ints(q_lens))


def by_tree(drafts, targets, q_lens):
    """A chain is a tree."""
    batch, count = np.shape(drafts)
    tokens = np.concatenate([np.zeros((batch, 1)), drafts], axis=1)
    parents = np.tile(DraftTree((1,) * count).parents, (batch, 1))
    return accept_tree(ints(tokens), ints(parents), ints(targets), ints(q_lens), max_depth=count)[0]


def by_sampling(drafts, targets, q_lens):
    """A target without doubt leaves nothing to chance."""
    keys = jax.random.split(jax.random.key(0), len(drafts))
    probabilities = jax.nn.one_hot(ints(targets), VOCAB)
    return accept_sampled(keys, ints(drafts), None, probabilities, ints(q_lens))


ways = pytest.mark.parametrize("accept", [by_greedy, by_tree, by_sampling])


def outcome(result):
    """Of each request: drafts accepted, tokens emitted, and the last of them."""
    assert {x.dtype for x in jax.tree.leaves(result)} == {jnp.dtype(jnp.int32)}
    found = []
    for row, count in zip(np.asarray(result.emitted), result.num_emitted.tolist(), strict=True):
        assert (row[:count] >= 0).all()
        assert (row[count:] == -1).all()
        found.append(row[:count].tolist())
    return list(zip(result.accepted_drafts.tolist(), found, result.next_tokens.tolist(), strict=True))


@ways
def test_a_placeholder_is_never_accepted(accept):
    """Token -1 is no draft, though an index of -1 would find the last entry of the vocabulary, the very one wanted."""
    last = VOCAB - 1
    drafts = [[5, -1, -1], [-1, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    result = accept(drafts, [[5, last, 4, 2]] * 4, [4, 0, 0, 0])
    assert outcome(result) == [(1, [5, last], last), (0, [], 0), (0, [], 0), (0, [], 0)]


@ways
def test_all_some_and_no_drafts_are_right(accept):
    drafts, targets = [[1, 2, 3], [1, 2, 9], [9, 2, 3], [1, 9, 3]], [[1, 2, 3, 4]] * 4
    result = accept(drafts, targets, [4, 4, 4, 4])
    assert outcome(result) == [(3, [1, 2, 3, 4], 4), (2, [1, 2, 3], 3), (0, [1], 1), (1, [1, 2], 2)]


@ways
def test_drafts_past_the_rows_of_a_request_are_none(accept):
    """Ragged verification: a request with fewer rows has fewer drafts; one row is plain decoding."""
    result = accept([[1, 2, 3]] * 4, [[1, 2, 3, 4]] * 4, [3, 2, 1, 0])
    assert outcome(result) == [(2, [1, 2, 3], 3), (1, [1, 2], 2), (0, [1], 1), (0, [], 0)]


def loop(drafts, targets, rows):
    if rows == 0:
        return 0, [], 0
    emitted = []
    for number, target in enumerate(targets):
        emitted.append(target)
        if number + 1 >= rows or number == len(drafts) or drafts[number] != target:
            break
    return len(emitted) - 1, emitted, emitted[-1]


@pytest.mark.parametrize("accept", [by_greedy, by_tree])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_acceptance_is_a_loop(accept, count):
    """Over few tokens, so that drafts are often right."""
    rng = np.random.default_rng(count)
    drafts, targets = rng.integers(-1, 2, (2000, count)), rng.integers(0, 2, (2000, count + 1))
    q_lens = rng.integers(0, count + 2, 2000)
    want = [loop(*request) for request in zip(drafts.tolist(), targets.tolist(), q_lens.tolist(), strict=True)]
    assert outcome(accept(drafts, targets, q_lens)) == want
    assert {accepted for accepted, _, _ in want} == set(range(count + 1))


def test_wrong_shapes(unchecked):
    with pytest.raises(ValueError, match=r"targets has shape \(2, 3\), must be \[B, K \+ 1\] for drafts of \(2, 3\)"):
        accept_greedy(jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3), jnp.int32), jnp.ones(2, jnp.int32))
