"""Drawn tokens: their distribution, and that it is nobody else's business."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.sampling import sample

DRAWS = 20_000
LOGITS = np.array([1.0, 0.2, 0.7, -1.0, -2.0], np.float32)


@jax.jit
def draw(logits, positions, options):
    return sample(logits, positions, **options)


def options(batch, *, temperature=1.0, top_k=0, top_p=1.0, seed=0):
    """Arrays of one request each; a number stands for all requests."""
    kinds = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "seed": np.uint32}
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    return {name: np.broadcast_to(np.asarray(given[name], kind), batch).copy() for name, kind in kinds.items()}


def drawn(**given):
    """A token of each of DRAWS requests, who differ in their seeds."""
    logits = np.broadcast_to(LOGITS, (DRAWS, 1, len(LOGITS)))
    given = options(DRAWS, seed=np.arange(DRAWS), **given)
    return np.asarray(draw(logits, np.full((DRAWS, 1), 7, np.int32), given))[:, 0]


def probabilities(logits=LOGITS, temperature=1.0, top_k=0, top_p=1.0):
    """In float64, token by token as the definition has it."""
    p = np.exp(logits.astype(float) / temperature)
    order = np.argsort(-p, kind="stable")[: top_k or len(p)]
    kept, total = [], 0.0
    for token in order:
        if total >= top_p:
            break
        kept.append(token)
        total += p[token] / p[order].sum()
    found = np.zeros(len(p))
    found[kept] = p[kept] / p[kept].sum()
    return found


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 2},
        {"top_k": 100},
        {"top_p": 0.6},
        {"top_p": 0.01},
        {"top_k": 4, "top_p": 0.8, "temperature": 1.5},
        {"top_k": 2, "top_p": 0.5},  # of all tokens the first two are above a half, of these two the first is
    ],
)
def test_distribution(given):
    counts, want = np.bincount(drawn(**given), minlength=len(LOGITS)), probabilities(**given)
    assert (counts[want == 0] == 0).all()
    expected = DRAWS * want[want > 0]
    # Chi-square of up to 4 degrees of freedom: a right sampler exceeds 24 once in 10,000.
    assert ((counts[want > 0] - expected) ** 2 / expected).sum() < 24


def test_temperature_zero_is_greedy_whatever_the_others_draw():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 3, 50)).astype(np.float32)
    positions = np.arange(18, dtype=np.int32).reshape(6, 3)
    given = options(6, temperature=[0, 1, 0, 2, 0, 0], top_k=[1, 5, 0, 0, 3, 0], seed=3)
    found = np.asarray(draw(logits, positions, given))
    best = logits.argmax(axis=-1)
    assert (found[[0, 2, 4, 5]] == best[[0, 2, 4, 5]]).all()
    assert (found[[1, 3]] != best[[1, 3]]).any()
    assert (np.asarray(draw(logits, positions, options(6, temperature=0.0))) == best).all()


def test_a_draw_depends_on_seed_position_and_logits_alone():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((4, 3, 50)).astype(np.float32)
    positions = np.array([[5, 6, 7], [0, 1, 2], [9, 3, 9], [4, 4, 4]], np.int32)
    given = options(4, temperature=[1, 0.7, 0, 2], top_k=[0, 5, 0, 0], top_p=[0.9, 1, 1, 1], seed=[3, 3, 5, 2**32 - 1])
    together = np.asarray(draw(logits, positions, given))
    for b in range(4):
        for s in range(3):
            alone = draw(
                logits[b : b + 1, s : s + 1],
                positions[b : b + 1, s : s + 1],
                {n: x[b : b + 1] for n, x in given.items()},
            )
            assert alone[0, 0] == together[b, s]


def test_seeds_and_positions_make_other_draws():
    logits = np.zeros((2, 64, 100), np.float32)
    positions = np.tile(np.arange(64, dtype=np.int32), (2, 1))
    found = np.asarray(draw(logits, positions, options(2, seed=[1, 2])))
    assert (found[0] == found[1]).sum() < 8
    assert len(np.unique(found[0])) > 20
    later = np.asarray(draw(logits, positions + 1, options(2, seed=[1, 2])))
    assert (later[:, :-1] == found[:, 1:]).all()


def test_no_token_is_lost_at_a_top_p_of_one():
    """Cumulative sums in float32 pass 1 before the last of many tokens."""
    vocab = 50_000
    logits, positions = np.zeros((1, 200, vocab), np.float32), np.arange(200, dtype=np.int32)[None]
    found = np.asarray(draw(logits, positions, options(1, top_k=vocab - 1)))  # with top-k, so that it is looked at
    assert found.max() > 0.97 * vocab
    assert found.min() < 0.03 * vocab


def test_equal_logits_at_the_edge_stay():
    logits = jnp.asarray([[[2.0, 1.0, 1.0, 0.0]]])
    found = {int(draw(logits, np.int32([[p]]), options(1, top_k=2))[0, 0]) for p in range(200)}
    assert found == {0, 1, 2}


def test_zeros_of_either_sign_are_equal():
    logits = jnp.asarray([[[0.0, -0.0, -1.0]]])
    found = {int(draw(logits, np.int32([[p]]), options(1, top_k=1))[0, 0]) for p in range(50)}
    assert found == {0, 1}


def test_top_p_is_a_share_of_all_tokens_that_top_k_leaves():
    """Four of them where three are equal: the first has 0.48 of their probability, and 0.58 of that of two."""
    logits = jnp.asarray([[[1.0, 0.0, 0.0, 0.0, -1.0]]])
    found = {int(draw(logits, np.int32([[p]]), options(1, top_k=2, top_p=0.5))[0, 0]) for p in range(200)}
    assert found == {0, 1, 2, 3}


def test_the_edges_of_float32():
    """A top_p that is 0 in float32 leaves the likeliest token, and so does a temperature of almost nothing."""
    assert (drawn(top_p=1e-46) == LOGITS.argmax()).all()
    assert (drawn(temperature=1e-38) == LOGITS.argmax()).all()


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1.2e-38, 1e-30, 1e-5])
def test_c54_temperatures_of_almost_nothing(temperature):
    """The likeliest token whatever the filters; nothing overflows into another."""
    for filters in ({}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 4, "top_p": 1e-45}):
        assert (drawn(temperature=temperature, **filters) == LOGITS.argmax()).all()


def test_it_neither_sorts_nor_loops():
    """Either may keep the conditional around it out of command buffers: a sort where XLA takes a library's."""
    logits, positions = jnp.zeros((2, 1, 50)), jnp.zeros((2, 1), jnp.int32)
    text = str(jax.make_jaxpr(draw)(logits, positions, options(2)))
    assert "cond[" in text
    assert not any(word in text for word in ("sort[", "while[", "top_k["))
