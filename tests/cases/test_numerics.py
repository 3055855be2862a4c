"""C01, the softmax scale, and C10, any number of heads."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import oracle
from cases.paged import (
    RANK,
    ROPE,
    WIDTH,
    assert_close,
    assert_expected,
    attend,
    both_dtypes,
    every_implementation,
    expected,
    ints,
    make_pool,
    make_spec,
    random_rows,
)  # fmt: skip
from mla_attn import metadata as build
from mla_attn.models import DeepseekConfig, DeepseekForCausalLM

NOPE = 128


def deepseek(yarn=None):
    """Config of a small model with DeepSeek's head widths."""
    scaling = {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4096, **yarn}} if yarn else {}
    sizes = {
        "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": NOPE,
        "q_lora_rank": None, "max_position_embeddings": 4096, "n_routed_experts": None,
    }  # fmt: skip
    return DeepseekConfig.from_hf({"model_type": "deepseek_v3", **sizes, **scaling})


PLAIN = deepseek().softmax_scale
YARN = deepseek({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}).softmax_scale


@both_dtypes
@every_implementation
@pytest.mark.parametrize(("scale", "weights"), [(PLAIN, [0.26894, 0.73106]), (YARN, [0.13310, 0.86690])])
def test_c01_scale(implementation, scale, weights, dtype):
    """The output shows the weights of two keys (0.3595 and 0.6405 if 576 were the width); that of one key is 1 under
    any scale, and proves nothing."""
    spec = make_spec(1, scale=scale)
    table = [[1], [0]]
    rows = np.eye(2, WIDTH, dtype=np.float32)
    pool = make_pool([rows, rows[:1]], table, page_size=64, num_pages=2, dtype=dtype)
    q = np.zeros((2, 1, WIDTH), np.float32)
    q[:, :, 1] = 13.8564  # raw products 0 and 13.8564 with the first and the second key
    metadata = build.for_decode(ints(table), ints([2, 1]), page_size=64)
    out, lse = attend(implementation, jnp.asarray(q, dtype), pool, metadata, spec, out_dtype=jnp.float32)
    np.testing.assert_allclose(out[0, 0, :2], weights, rtol=0, atol=1e-5 if dtype == "float32" else 3e-3)
    assert out[1, 0, :2].tolist() == [1, 0]
    assert (out[:, :, 2:] == 0).all() and lse[1, 0] == 0


def test_c01_scale_of_the_model():
    """192 ** -0.5 and not 576 ** -0.5; YaRN's factor squared; the model hands on what its config says."""
    assert PLAIN == 192**-0.5
    assert pytest.approx(1.87385, abs=1e-5) == YARN / PLAIN
    for yarn in (None, {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}):
        config = deepseek(yarn)
        model = nnx.eval_shape(lambda config=config: DeepseekForCausalLM(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
        assert model.attention_spec.scale == config.softmax_scale


@every_implementation
def test_c01_absorbed_is_unabsorbed(implementation):
    """The absorbed form against attention over the keys and values that the same weights expand."""
    heads, length = 2, 70
    rng = np.random.default_rng(0)
    w_uk, w_uv = (rng.standard_normal((heads, NOPE, RANK)) / RANK**0.5 for _ in range(2))
    q_nope, q_rope = 2 * rng.standard_normal((heads, NOPE)), 2 * rng.standard_normal((heads, ROPE))
    spec, table = make_spec(heads, scale=YARN), [[1, 0]]
    cached = np.asarray(random_rows(1, length))
    latent, rope = cached[:, :RANK].astype(np.float64), cached[:, RANK:].astype(np.float64)
    keys = np.concatenate(
        [np.einsum("nr,hdr->nhd", latent, w_uk), np.broadcast_to(rope[:, None], (length, heads, ROPE))], axis=-1
    )
    values = np.einsum("nr,hvr->nhv", latent, w_uv)
    q = np.concatenate([q_nope, q_rope], axis=-1)
    want, want_lse = oracle.attend(q, keys, values, scale=q.shape[1] ** -0.5 * 1.3688879454113936**2)

    absorbed = np.concatenate([np.einsum("hd,hdr->hr", q_nope, w_uk), q_rope], axis=-1)[None]
    pool = make_pool([cached], table, page_size=64, num_pages=2, dtype="float32")
    metadata = build.for_decode(ints(table), ints([length]), page_size=64)
    out, lse = attend(implementation, jnp.asarray(absorbed, jnp.float32), pool, metadata, spec)
    np.testing.assert_allclose(np.einsum("hr,hvr->hv", out[0].astype(np.float64), w_uv), want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse[0], want_lse, rtol=0, atol=1e-5)


HEADS = 128


@functools.cache
def heads_case(q_len):
    table = ints([[3, 0, 6, 1, 8], [2, 7, 5, 4, 9]])
    rows = np.asarray(random_rows(2, 365))
    pool = make_pool([rows[:65], rows[65:]], np.asarray(table), page_size=64, num_pages=10)
    kv_lens = ints([65, 300])
    if q_len == 1:
        metadata = build.for_decode(table, kv_lens, page_size=64)
    else:
        metadata = build.for_target_verify(table, kv_lens - q_len, num_tokens=q_len, page_size=64)
    return random_rows(3, 2 * q_len, HEADS, dtype="bfloat16"), pool, metadata


@functools.cache
def all_heads(implementation, q_len):
    q, pool, metadata = heads_case(q_len)
    return attend(implementation, q, pool, metadata, make_spec(HEADS), out_dtype=jnp.float32)


@every_implementation
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("heads", [1, 4, 8, 12, 16, 20, 64])
def test_c10_heads(implementation, heads, q_len):
    """The first heads of a call with 128: heads are independent, and no padding shows."""
    q, pool, metadata = heads_case(q_len)
    want = [x[:, :heads] for x in all_heads(implementation, q_len)]
    got = attend(implementation, q[:, :heads], pool, metadata, make_spec(heads), out_dtype=jnp.float32)
    assert got[0].shape == (2 * q_len, heads, RANK) and got[1].shape == (2 * q_len, heads)
    v_max = expected(q[:, :1], pool, metadata, make_spec(1))[2]
    assert_close(got, (*want, v_max), pool.dtype)


@every_implementation
@pytest.mark.parametrize("q_len", [1, 4])
def test_c10_all_heads(implementation, q_len):
    q, pool, metadata = heads_case(q_len)
    assert_expected(all_heads(implementation, q_len), q, pool, metadata, make_spec(HEADS))
