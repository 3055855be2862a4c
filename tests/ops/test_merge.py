"""``merge_states`` against the float64 oracle, its exact identities, and its errors."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
import oracle
from helpers import made, zeros
from mla_attn.ops import merge_states

ROWS, HEADS, DIM = 4, 3, 8
INF = np.inf


@functools.partial(jax.jit, static_argnames="out_dtype")
def merge(outs, lses, sinks=None, out_dtype=None):
    return merge_states(outs, lses, sinks=sinks, out_dtype=out_dtype)


def state(seed, lse=None, dtype=np.float32):
    """A partial ``(out, lse)``; rows whose lse is -inf hold NaN."""
    rng = np.random.default_rng(seed)
    out = rng.standard_normal((ROWS, HEADS, DIM), np.float32)
    lse = 3 * rng.standard_normal((ROWS, HEADS), np.float32) if lse is None else np.full((ROWS, HEADS), lse, np.float32)
    out[np.isneginf(lse)] = np.nan
    return jnp.asarray(out, dtype), jnp.asarray(lse)


def against_oracle(states, sinks=None, out_dtype=None, v_max=4.0):
    outs, lses = zip(*states, strict=True)
    out, lse = merge(outs, lses, sinks, out_dtype)
    want, want_lse = oracle.merge_oracle(outs, lses, sinks)
    dtype = outs[0].dtype if out_dtype is None else out_dtype
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    if sinks is None:
        helpers.assert_attention_close(out, lse, want, want_lse, visible_v_max=np.full((ROWS, 1), v_max), dtype=dtype)
    else:  # next to a large sink an output is tiny, and its relative error that of the sink's exponential
        np.testing.assert_allclose(out, want, atol=1e-5, rtol=1e-4)
        np.testing.assert_allclose(lse, want_lse, atol=1e-5, rtol=1e-6)
    return out, lse


def same_bits(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), cuts=st.lists(st.integers(0, 24), min_size=2, max_size=2))
def test_split_at_any_place_is_one_pass(seed, cuts):
    """Parts may be empty; what they hold then is NaN."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((ROWS, HEADS, DIM))
    k, v = (rng.standard_normal((24, HEADS, DIM)) for _ in range(2))
    whole = [oracle.attend(row, k, v, scale=0.5) for row in q]
    first, second = sorted(cuts)
    parts = []
    for keys in (slice(0, first), slice(first, second), slice(second, 24)):
        out, lse = (
            np.stack(x) for x in zip(*(oracle.attend(row, k[keys], v[keys], scale=0.5) for row in q), strict=True)
        )
        out[np.isneginf(lse)] = np.nan
        parts.append((jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32)))
    outs, lses = zip(*parts, strict=True)
    out, lse = merge(outs, lses)
    want, want_lse = (np.stack(x) for x in zip(*whole, strict=True))
    helpers.assert_attention_close(
        out, lse, want, want_lse, visible_v_max=np.full((ROWS, 1), np.abs(v).max()), dtype="float32"
    )


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    lses=st.lists(
        st.lists(st.sampled_from([-INF, -1e4, -90.0, -1.0, 0.0, 2.5, 90.0, 1e4]), min_size=12, max_size=12),
        min_size=3,
        max_size=3,
    ),
)
def test_any_lse(seed, lses):
    """Far apart, equal, empty here and there: no overflow, no NaN."""
    states = []
    for i, values in enumerate(lses):
        out, _ = state(seed + i)
        lse = np.reshape(values, (ROWS, HEADS)).astype(np.float32)
        states.append((jnp.where(np.isneginf(lse)[..., None], jnp.nan, out), jnp.asarray(lse)))
    against_oracle(states)


def test_natural_logarithm():
    outs = [jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1))]
    out, lse = merge_states(outs, [jnp.zeros((1, 1)), jnp.full((1, 1), 2.0)])
    np.testing.assert_allclose([out.item(), lse.item()], [0.880797, 2.126928], atol=5e-7)


@pytest.mark.parametrize("payload", [np.nan, np.inf, -np.inf, 3e38])
def test_empty_states_give_an_empty_one(payload):
    nothing = jnp.full((ROWS, HEADS, DIM), payload), jnp.full((ROWS, HEADS), -INF)
    for count in (1, 3):
        out, lse = merge([nothing[0]] * count, [nothing[1]] * count)
        assert (np.asarray(out) == 0).all() and np.isneginf(lse).all()


def test_nan_is_no_empty_state():
    """What went wrong in one part goes on to the whole."""
    outs = [jnp.ones((ROWS, HEADS, DIM))] * 2
    out, lse = merge(outs, [jnp.full((ROWS, HEADS), jnp.nan), jnp.zeros((ROWS, HEADS))])
    assert jnp.isnan(out).all() and jnp.isnan(lse).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("lse", [None, 0.0, 88.7, -1e30, 1e30])
def test_empty_states_change_no_bit(dtype, lse):
    """Negative zeros and extremes of the other state are kept, on either side of the empty one."""
    out, lse = state(5, lse, dtype)
    out = out.at[0, 0, :4].set(jnp.asarray([-0.0, 0.0, 3e38, -1e-30], dtype)).at[1, 1].set(jnp.asarray(-0.0, dtype))
    nothing = jnp.full_like(out, jnp.nan), jnp.full_like(lse, -INF)
    for call in (merge, merge_states):  # XLA drops an addition of 0.0, which would hide the loss of a -0.0
        same_bits(call([out], [lse]), (out, lse))
        same_bits(call([out, nothing[0]], [lse, nothing[1]]), (out, lse))
        same_bits(call([nothing[0], out, nothing[0]], [nothing[1], lse, nothing[1]]), (out, lse))


def test_square_states_are_not_transposed():
    """As many rows as heads, every lse different."""
    rng = np.random.default_rng(6)
    outs = [jnp.asarray(rng.standard_normal((16, 16, 2)), jnp.float32) for _ in range(2)]
    lses = [jnp.asarray(rng.permutation(256).reshape(16, 16) / 64, jnp.float32) for _ in range(2)]
    out, lse = merge(outs, lses)
    want, want_lse = oracle.merge_oracle(outs, lses)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_dtypes():
    states = [state(i, dtype=jnp.bfloat16) for i in range(2)]
    against_oracle(states)
    against_oracle(states, out_dtype=jnp.float32)
    (wide, lse), (narrow, _) = state(0), states[1]
    out, _ = merge([wide, narrow], [lse, lse])
    assert out.dtype == jnp.float32
    assert merge([narrow, wide], [lse, lse])[0].dtype == jnp.bfloat16
    # Sums are float32: a thousandth of one state survives next to the other.
    out, _ = merge([narrow, narrow], [lse, lse - 7], out_dtype=jnp.float32)
    np.testing.assert_allclose(out, narrow.astype(jnp.float32), rtol=1e-5)


def test_sink_enters_the_denominator_once():
    """A sink equal to a head's lse halves it, however many partials there are; the lse leaves it out."""
    sinks = jnp.asarray([np.log(6.0), 0.5, -2.0], jnp.float32)
    out, lse = merge([jnp.ones((ROWS, HEADS, DIM))] * 3, [jnp.full((ROWS, HEADS), np.log(2.0))] * 3, sinks)
    np.testing.assert_allclose(out[:, 0], 0.5, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(6.0), rtol=1e-6)
    against_oracle([state(i) for i in range(3)], sinks)
    against_oracle([state(7, -INF), state(8)], sinks)


@pytest.mark.parametrize("sink", [-INF, -1e30, -200.0, 200.0, 1e30, INF])
def test_extreme_sinks(sink):
    """Minus infinity is no sink at all, plus infinity takes everything; a row without keys stays empty."""
    states = [state(9), state(10)]
    outs, lses = zip(*states, strict=True)
    plain_out, plain_lse = merge(outs, lses)
    out, lse = merge(outs, lses, jnp.full(HEADS, sink))
    assert np.asarray(lse).tobytes() == np.asarray(plain_lse).tobytes()
    if sink < 0:
        np.testing.assert_allclose(out, plain_out, rtol=1e-6)
    else:
        assert (np.abs(out) <= 1e-30).all()
    empty = state(11, -INF)
    out, lse = merge([empty[0]] * 2, [empty[1]] * 2, jnp.full(HEADS, sink))
    assert (np.asarray(out) == 0).all() and np.isneginf(lse).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"outs": []}, "outs has 0 partials and lses 2: must be equal and at least 1"),
        ({"outs": [], "lses": []}, "outs has 0 partials and lses 0"),
        ({"lses": [zeros(4, 3)]}, "outs has 2 partials and lses 1"),
        (
            {"outs": [zeros(4, 3, 8), zeros(4, 3, 9)]},
            r"outs\[1\] has shape \(4, 3, 9\), must be \(4, 3, 8\)",
        ),
        ({"lses": [zeros(4, 3), zeros(3, 4)]}, r"lses\[1\] has shape \(3, 4\), must be \(4, 3\)"),
        ({"outs": [zeros(4, 3, 8), zeros(4, 3, 8, dtype=int)]}, r"outs\[1\] has dtype int32, must be a floating"),
        ({"lses": [zeros(4, 3, dtype=int), zeros(4, 3)]}, r"lses\[0\] has dtype int32, must be a floating"),
        ({"sinks": zeros(4)}, r"sinks has shape \(4,\), must be \(3,\)"),
        (
            {"outs": [zeros(4, 3, 8, dtype=jnp.float8_e4m3fn)] * 2},
            r"outs\[0\] has dtype float8_e4m3fn, must be a floating dtype of at least 16 bits",
        ),
        ({"lses": [zeros(4, 3), zeros(4, 3, dtype=jnp.float8_e5m2)]}, r"lses\[1\] has dtype float8_e5m2"),
        ({"sinks": zeros(3, dtype=jnp.float8_e4m3)}, "sinks has dtype float8_e4m3, must be a floating"),
        ({"out_dtype": jnp.float8_e4m3fn}, "out_dtype=float8_e4m3fn must be a floating dtype"),
        ({"sinks": zeros(3, dtype=int)}, "sinks has dtype int32, must be a floating"),
    ],
)
def test_errors(unchecked, change, message):
    call = made({"outs": [zeros(4, 3, 8)] * 2, "lses": [zeros(4, 3)] * 2, **change})
    with pytest.raises(ValueError, match=message):
        merge_states(**call)
