import math

import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.models.rope import Yarn, inverse_frequencies, rotate, rotation

R1 = Yarn(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
V2_LITE = Yarn(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707)
TINY = Yarn(factor=16.0, original_max_position_embeddings=256, mscale=1.0, mscale_all_dim=1.0)
KIMI = Yarn(factor=32.0, original_max_position_embeddings=4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0)
CASES = [(64, 10000.0, R1), (64, 10000.0, V2_LITE), (64, 10000.0, TINY), (64, 50000.0, KIMI), (32, 10000.0, R1)]


def expected_frequency(pair, dim, theta, yarn):
    """One pair at a time, from the number of turns that pairs make in the trained context (YaRN, section 3.2)."""
    plain = 1.0 / theta ** (2 * pair / dim)

    def turns(index):  # of a pair with a real index
        return yarn.original_max_position_embeddings / (2 * math.pi * theta ** (2 * index / dim))

    # The real index that makes a number of turns, by bisection: turns() falls as the index grows.
    def index_of(count):
        below, above = -1000.0, 1000.0
        for _ in range(200):
            middle = (below + above) / 2
            below, above = (middle, above) if turns(middle) > count else (below, middle)
        return below

    first = max(math.floor(index_of(yarn.beta_fast)), 0)
    last = min(math.ceil(index_of(yarn.beta_slow)), dim - 1)
    if pair <= first:
        return plain
    if pair >= last:
        return plain / yarn.factor
    share = (pair - first) / (last - first)
    return plain * (1 - share) + plain / yarn.factor * share


@pytest.mark.parametrize(("dim", "theta", "yarn"), CASES)
def test_yarn_frequencies_follow_the_paper(dim, theta, yarn):
    want = [expected_frequency(pair, dim, theta, yarn) for pair in range(dim // 2)]
    got = inverse_frequencies(dim, theta, yarn)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=2e-7)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain, stretched = inverse_frequencies(64, 10000.0), inverse_frequencies(64, 10000.0, R1)
    turns = 4096 * plain / (2 * np.pi)
    np.testing.assert_array_equal(stretched[turns > 40], plain[turns > 40])
    np.testing.assert_allclose(stretched[turns < 0.9], plain[turns < 0.9] / 40, rtol=1e-6)
    between = (turns > 1.5) & (turns < 25)
    assert between.sum() > 5
    assert (stretched[between] < plain[between]).all()
    assert (stretched[between] > plain[between] / 40).all()


def test_temperatures():
    # DeepSeek-R1: (0.1 ln 40 + 1) ** 2 on the softmax, and nothing on cos and sin, since the ratio is 1.
    assert R1.softmax_factor == pytest.approx(1.8738, abs=1e-4)
    assert R1.rotation_scale == 1.0
    assert V2_LITE.softmax_factor == pytest.approx((0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert V2_LITE.rotation_scale == 1.0
    uneven = Yarn(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.5)
    assert uneven.rotation_scale == pytest.approx((0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1))
    assert uneven.softmax_factor == pytest.approx((0.05 * math.log(40) + 1) ** 2)
    cos, sin = rotation(jnp.arange(5), 64, 10000.0, uneven)
    np.testing.assert_allclose(cos**2 + sin**2, uneven.rotation_scale**2, rtol=1e-5)
    shrunk = Yarn(factor=1.0, original_max_position_embeddings=4096, mscale_all_dim=1.0)
    assert shrunk.softmax_factor == shrunk.rotation_scale == 1.0


@pytest.mark.parametrize("heads", [(), (3,)])
def test_rotation_is_a_complex_product_of_interleaved_pairs(heads):
    rng = np.random.default_rng(0)
    positions = np.array([0, 1, 7, 300, 4000])
    x = rng.standard_normal((5, *heads, 64)).astype(np.float32)
    cos, sin = rotation(jnp.asarray(positions), 64, 10000.0)
    got = rotate(jnp.asarray(x), cos, sin)
    frequencies = 10000.0 ** (-np.arange(32) / 32)
    turn = np.exp(1j * positions[:, None] * frequencies).reshape(5, *(1 for _ in heads), 32)
    product = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    want = np.stack([product.real, product.imag], axis=-1).reshape(x.shape)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=2e-3)  # angles of position 4000 are rounded to float32
    np.testing.assert_allclose(got[:3], want[:3], atol=5e-6)


def test_scores_depend_on_distance_alone():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(np.tile(rng.standard_normal(64).astype(np.float32), (4, 1))) for _ in range(2))
    ahead = rotate(q, *rotation(jnp.array([5, 105, 205, 305]), 64, 10000.0, TINY))
    behind = rotate(k, *rotation(jnp.array([2, 102, 202, 302]), 64, 10000.0, TINY))
    scores = np.asarray((ahead * behind).sum(axis=-1))
    np.testing.assert_allclose(scores, scores[0], atol=2e-4)


def test_bfloat16_rotates_in_float32():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((3, 64)), jnp.bfloat16)
    cos, sin = rotation(jnp.array([1, 1000, 100000]), 64, 10000.0)
    assert cos.dtype == sin.dtype == jnp.float32
    got = rotate(x, cos, sin)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, rotate(x.astype(jnp.float32), cos, sin).astype(jnp.bfloat16))
