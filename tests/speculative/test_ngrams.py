"""Drafts from a text: by hand, and against a search in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.speculative import DraftTree, ngram_drafts


def drafts(texts, widths, n, room=24):
    """Of several texts, with what is past their ends filled at random."""
    array = np.random.default_rng(0).integers(9, size=(len(texts), room)).astype(np.int32)
    for row, text in zip(array, texts, strict=True):
        row[: len(text)] = text
    lens = np.array(list(map(len, texts)), np.int32)
    return np.asarray(ngram_drafts(jnp.asarray(array), jnp.asarray(lens), DraftTree(widths), n=n)).tolist()


def test_by_hand():
    text = [5, 1, 2, 7, 1, 2, 8, 3, 1, 2]
    # After (1, 2) came 8 last, and 7 before; then what followed those.
    assert drafts([text], (1, 1, 1), 2) == [[8, 3, 1]]
    assert drafts([text], (2, 1), 2) == [[8, 7, 3, 1]]
    # (3, 1, 2) never stood there before, (1, 2) did: as many tokens are matched as can be.
    assert drafts([text], (1,), 3) == [[8]]
    # Of 7 1 2, 1 2 and 2, the longest: not the last one.
    assert drafts([[7, 1, 2, 4, 0, 2, 5, 7, 1, 2]], (1,), 3) == [[4]]
    # The text goes on in circles.
    assert drafts([[3, 4, 3, 4, 3]], (1, 1, 1, 1), 3) == [[4, 3, 4, 3]]
    # Nothing matches; nor does anything after that.
    assert drafts([[1, 2, 3]], (2, 2), 2) == [[-1] * 6]
    # What a text of one token, or none, is followed by.
    assert drafts([[1], []], (1, 1), 2) == [[-1, -1]] * 2


def followers(text, context, width, n):
    """The tokens after the longest matches, the last of equally long ones first; each token once."""
    scored = []
    for end in range(1, len(text)):
        run = 0
        while run < min(n, end, len(context)) and text[end - 1 - run] == context[-1 - run]:
            run += 1
        if run:
            scored.append((run, end))
    tokens = [text[end] for _, end in sorted(scored, reverse=True)]
    found = list(dict.fromkeys(tokens))[:width]
    return found + [-1] * (width - len(found))


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("n", [1, 3])
def test_against_a_search(widths, n):
    rng = np.random.default_rng(n)
    texts = [rng.integers(4, size=rng.integers(1, 24)).tolist() for _ in range(20)]
    for text, got in zip(texts, drafts(texts, widths, n), strict=True):
        level, want = [text], []
        for width in widths:
            # -1 is no token: no text holds it.
            level = [[*path, child] for path in level for child in followers(text, path, width, n)]
            want += [path[-1] for path in level]
        assert got == want


def test_errors(unchecked):
    tree = DraftTree.chain(2)
    with pytest.raises(ValueError, match="n=0 must be an integer of at least 1"):
        ngram_drafts(jnp.zeros((1, 4), jnp.int32), jnp.array([3]), tree, n=0)
    with pytest.raises(ValueError, match="text"):
        ngram_drafts(jnp.zeros((1, 4)), jnp.array([3]), tree, n=2)
    assert jax.eval_shape(
        lambda: ngram_drafts(jnp.zeros((0, 4), jnp.int32), jnp.zeros(0, jnp.int32), tree, n=2)
    ).shape == (0, 2)
