"""Speculative sampling: what is emitted is distributed as the target's tokens, whoever made the drafts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.speculative import accept_sampled

REQUESTS = 20_000
P = np.array([[0.5, 0.3, 0.2], [0.05, 0.15, 0.8], [0.4, 0.4, 0.2]], np.float32)  # after the anchor, each draft
Q = np.array([[0.2, 0.7, 0.1], [0.6, 0.1, 0.3]], np.float32)
FAIL = 18.4  # chi-square of 2 degrees of freedom: a right sampler exceeds it once in 10,000

accept = jax.jit(accept_sampled)


def run(drafts, q, *, seed=0, q_lens=3, p=P):
    """One verify step of many requests that differ in their keys and drafts."""
    keys = jax.random.split(jax.random.key(seed), REQUESTS)
    p, q = (None if x is None else jnp.broadcast_to(jnp.asarray(x), (REQUESTS, *x.shape)) for x in (p, q))
    found = accept(keys, jnp.asarray(drafts, jnp.int32), q, p, jnp.full(REQUESTS, q_lens, jnp.int32))
    return jax.tree.map(np.asarray, found)


def drawn(q, seed=1):
    """Drafts drawn from the rows of q."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.choice(3, REQUESTS, p=row / row.sum()) for row in q.astype(float)], axis=1)


def chi_square(tokens, p):
    counts = np.bincount(tokens, minlength=len(p))
    wanted = len(tokens) * p
    return ((counts - wanted) ** 2 / wanted).sum()


def worst(found):
    """Largest statistic: of each emitted token, among the steps that emitted it, against the target's row.

    The rows of P do not depend on the tokens before them, so each token has its row's distribution; with it, given the
    ones before it are accepted, the text has the target's.
    """
    return max(chi_square(found.emitted[found.num_emitted > i, i], P[i].astype(float)) for i in range(3))


def check_consistent(found, drafts):
    accepted, emitted = found.accepted_drafts, found.emitted
    for i in range(2):
        assert (emitted[accepted > i, i] == drafts[accepted > i, i]).all()
    assert ((emitted >= 0) == (np.arange(3) < found.num_emitted[:, None])).all()
    assert (found.num_emitted == accepted + 1).all()
    assert (found.next_tokens == emitted[np.arange(REQUESTS), accepted]).all()


def test_drawn_drafts():
    """The target's distribution, and as many accepted as can be: sum of min(p, q)."""
    drafts = drawn(Q)
    found = run(drafts, Q)
    check_consistent(found, drafts)
    assert worst(found) < FAIL
    first = np.minimum(P[0], Q[0]).sum()
    assert (found.accepted_drafts > 0).mean() == pytest.approx(first, abs=0.015)
    second = np.minimum(P[1], Q[1]).sum()
    assert (found.accepted_drafts[found.accepted_drafts > 0] > 1).mean() == pytest.approx(second, abs=0.02)


@pytest.mark.parametrize("drafts", [(0, 2), (1, 0), (2, 1)])
def test_chosen_drafts(drafts):
    """Drafts that nobody drew: accepted with the target's probability of them; equal to one-hot distributions."""
    drafts = np.broadcast_to(drafts, (REQUESTS, 2))
    found = run(drafts, None)
    check_consistent(found, drafts)
    assert worst(found) < FAIL
    assert (found.accepted_drafts > 0).mean() == pytest.approx(P[0, drafts[0, 0]], abs=0.015)
    same = run(drafts, np.eye(3, dtype=np.float32)[drafts[0]])
    for name in ("emitted", "num_emitted", "next_tokens"):
        assert getattr(found, name).tobytes() == getattr(same, name).tobytes()


def test_drafts_said_to_be_chosen():
    """It is right, if wasteful, to say so of drafts that were drawn: they are accepted less often."""
    found = run(drawn(Q), None)
    assert worst(found) < FAIL
    assert (found.accepted_drafts > 0).mean() == pytest.approx((P[0] * Q[0]).sum(), abs=0.015)


@pytest.mark.parametrize(("true", "told"), [(Q, P[:2]), (Q, np.full((2, 3), 1 / 3, np.float32))])
def test_a_wrong_q_is_found_out(true, told):
    """The same test fails when the drafts come from another distribution than the one that is told."""
    assert worst(run(drawn(true), told)) > 2 * FAIL


def test_equal_distributions_accept_everything():
    drafts = drawn(P[:2])
    found = run(drafts, P[:2])
    assert (found.accepted_drafts == 2).all() and (found.emitted[:, :2] == drafts).all()
    assert chi_square(found.emitted[:, 2], P[2].astype(float)) < FAIL


def test_what_the_target_excludes_is_never_emitted():
    p = np.array([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], np.float32)
    for drafts, accepted in (((0, 2), 0), ((1, 2), 1)):
        for q in (None, np.eye(3, dtype=np.float32)[list(drafts)] * 0.9 + 1 / 30):
            found = run(np.broadcast_to(drafts, (REQUESTS, 2)), q, p=p)
            if q is None:
                assert (found.accepted_drafts == accepted).all()
            assert (found.emitted[:, 0] == 1).all() and (found.emitted[:, 1] < 2).all()


@pytest.mark.parametrize("q_lens", [0, 1, 2])
def test_rows_that_are_not_there(q_lens):
    """Drafts past a request's rows are none; the token after the last one that is there is the target's."""
    found = run(drawn(Q), Q, q_lens=q_lens)
    assert (found.accepted_drafts <= max(q_lens - 1, 0)).all()
    assert (found.emitted[:, q_lens:] == -1).all()
    for i in range(q_lens):
        assert chi_square(found.emitted[found.num_emitted > i, i], P[i].astype(float)) < FAIL
    if q_lens == 0:
        assert not found.num_emitted.any() and not found.next_tokens.any()


def test_placeholders():
    """A draft of -1 takes nothing from the target's distribution, whatever stands in its place in q."""
    drafts = drawn(Q)
    drafts[::2, 1] = -1
    drafts[1::2, 0] = -1
    found = run(drafts, Q)
    assert (found.accepted_drafts[1::2] == 0).all() and (found.accepted_drafts[::2] <= 1).all()
    assert worst_of(found, slice(None, None, 2), 2) < FAIL and worst_of(found, slice(1, None, 2), 1) < FAIL


def worst_of(found, requests, tokens):
    emitted, counts = found.emitted[requests], found.num_emitted[requests]
    return max(chi_square(emitted[counts > i, i], P[i].astype(float)) for i in range(tokens))


def test_a_request_does_not_depend_on_its_batch():
    """Its key is its own."""
    drafts = drawn(Q)[:6]
    p, q = (np.broadcast_to(x, (6, *x.shape)) for x in (P, Q))

    def emitted(seeds):
        keys = jnp.stack([jax.random.key(int(seed)) for seed in seeds])
        return accept(keys, jnp.asarray(drafts[seeds], jnp.int32), q, p, jnp.full(6, 3, jnp.int32)).emitted.tolist()

    together, turned = emitted(np.arange(6)), emitted(np.array([3, 0, 5, 5, 1, 2]))
    assert turned == [together[i] for i in (3, 0, 5, 5, 1, 2)]
    assert len({tuple(row) for row in together}) > 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_any_floating_dtype_is_compared_in_float32(dtype):
    """Also where JAX promotes nothing by itself; 0.5 and 0.25 are exact in all of them."""
    drafts, lens = jnp.asarray([[0, 2], [1, 3]], jnp.int32), jnp.asarray([3, 2], jnp.int32)
    p = jnp.broadcast_to(jnp.asarray([0.5, 0.25, 0.25, 0.0], jnp.float32), (2, 3, 4))
    keys = jax.random.split(jax.random.key(1), 2)
    wants = [accept_sampled(keys, drafts, q, p, lens) for q in (None, p[:, :2])]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        p = jnp.asarray(p, dtype)
        for want, q in zip(wants, (None, p[:, :2]), strict=True):
            got = accept_sampled(keys, drafts, q, p, lens)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert a.dtype == b.dtype and a.tolist() == b.tolist()


def test_errors(unchecked):
    keys, lens = jax.random.split(jax.random.key(0), 2), jnp.full(2, 3, jnp.int32)
    drafts, p = jnp.zeros((2, 2), jnp.int32), jnp.ones((2, 3, 5))
    for change, message in (
        ({"target_probs": p[:, :2]}, r"target_probs has shape \(2, 2, 5\), must be \[B, K \+ 1, vocab\] for \(2, 2\)"),
        ({"target_probs": jnp.ones((2, 3, 5), jnp.int32)}, "target_probs has dtype int32, must be a floating dtype"),
        ({"draft_probs": p}, r"draft_probs has shape \(2, 3, 5\), must be \[B, K, vocab\] for \(2, 2\)"),
        ({"draft_probs": p[:, :2, :4]}, r"draft_probs has shape \(2, 2, 4\), must be \[B, K, vocab\]"),
    ):
        with pytest.raises(ValueError, match=message):
            accept_sampled(keys, drafts, **{"draft_probs": None, "target_probs": p, "q_lens": lens, **change})
