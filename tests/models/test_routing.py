"""Expert choice and expert sums against loops over tokens in float64 NumPy."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints import V2, V3
from mla_attn.dispatch import compiling_for
from mla_attn.models import DeepseekConfig
from mla_attn.models.moe import MoE, Router, largest, sorted_pairs
from mla_attn.support import H200

TOKENS, DIM, EXPERTS = 200, 24, 12


def make_config(fixture, **changes):
    config = DeepseekConfig.from_hf(json.loads((fixture / "config.json").read_text()))
    sizes = {"hidden_size": DIM, "n_routed_experts": EXPERTS, "moe_intermediate_size": 20, "num_experts_per_tok": 3}
    return dataclasses.replace(config, **(sizes | changes))


def make_inputs(router, seed=0):
    rng = np.random.default_rng(seed)
    router.kernel.set_value(jnp.asarray(rng.standard_normal((DIM, EXPERTS)), jnp.float32))
    return rng.standard_normal((TOKENS, DIM)).astype(np.float32)


def route(scores, ranked, *, groups, kept, best, k, norm, scaling):
    """Experts and weights of one token; ``groups=1`` for no groups. Ties are too rare to matter here."""
    allowed = list(range(len(scores)))
    if groups > 1:
        size = len(scores) // groups
        members = [allowed[g * size : (g + 1) * size] for g in range(groups)]
        value = [sum(sorted((ranked[e] for e in group), reverse=True)[:best]) for group in members]
        chosen = sorted(range(groups), key=lambda g: -value[g])[:kept]
        allowed = [e for g in chosen for e in members[g]]
    experts = sorted(allowed, key=lambda e: -ranked[e])[:k]
    weights = np.array([scores[e] for e in experts])
    if norm:
        weights = weights / weights.sum()
    return experts, weights * scaling


def check_routing(router, x, scores, ranked, **rule):
    experts, weights = map(np.asarray, jax.jit(lambda x: router(x))(jnp.asarray(x)))
    for t in range(len(x)):
        want_experts, want_weights = route(scores[t], ranked[t], **rule)
        assert experts[t].tolist() == want_experts, f"token {t}"
        np.testing.assert_allclose(weights[t], want_weights, rtol=1e-5)
    return experts


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_softmax_routing(method, norm):
    config = make_config(
        V2, topk_method=method, n_group=4, topk_group=2, norm_topk_prob=norm, routed_scaling_factor=16.0
    )
    router = Router(config, rngs=nnx.Rngs(0))
    x = make_inputs(router)
    logits = x.astype(np.float64) @ np.asarray(router.kernel[...], np.float64)
    scores = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    rule = {"kept": 2, "k": 3, "norm": norm, "scaling": 16.0}
    groups = 4 if method == "group_limited_greedy" else 1
    check_routing(router, x, scores, scores, groups=groups, best=1, **rule)
    if groups == 4:  # the data tell a group's best expert from its best two
        assert any(route(s, s, groups=4, best=1, **rule)[0] != route(s, s, groups=4, best=2, **rule)[0] for s in scores)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("shift", [0.0, -5.0])
def test_sigmoid_routing_with_bias(groups, norm, shift):
    """With a shift of -5 every biased score is negative: a dropped group masked with 0 would win."""
    config = make_config(
        V3, n_group=groups, topk_group=max(1, groups - 1), norm_topk_prob=norm, routed_scaling_factor=2.5
    )
    router = Router(config, rngs=nnx.Rngs(0))
    x = make_inputs(router)
    bias = np.random.default_rng(1).standard_normal(EXPERTS).astype(np.float32) * 0.3 + np.float32(shift)
    router.e_score_correction_bias.set_value(jnp.asarray(bias))
    scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ np.asarray(router.kernel[...], np.float64))))
    ranked = scores + bias
    rule = {"groups": groups, "kept": max(1, groups - 1), "k": 3, "norm": norm, "scaling": 2.5}
    check_routing(router, x, scores, ranked, best=2, **rule)
    assert any(
        route(s, s, best=2, **rule)[0] != route(s, r, best=2, **rule)[0] for s, r in zip(scores, ranked, strict=True)
    )
    if groups > 1:
        assert any(
            route(s, r, best=1, **rule)[0] != route(s, r, best=2, **rule)[0]
            for s, r in zip(scores, ranked, strict=True)
        )


def test_router_computes_in_float32_whatever_the_activations():
    router = Router(make_config(V3), rngs=nnx.Rngs(0))
    x = jnp.asarray(make_inputs(router), jnp.bfloat16)
    _, weights = router(x)
    assert router.kernel.dtype == weights.dtype == jnp.float32
    np.testing.assert_array_equal(weights, router(x.astype(jnp.float32))[1])


@pytest.mark.parametrize("shared", [0, 2])
def test_experts_sum_like_a_loop(shared):
    config = make_config(V2, n_shared_experts=shared, routed_scaling_factor=2.0)
    moe = MoE(config, dtype=jnp.float32, rngs=nnx.Rngs(3))
    x = make_inputs(moe.gate)
    # One expert that nobody chooses, one that all choose.
    moe.gate.kernel.set_value(moe.gate.kernel[...].at[:, 5].set(0.0))
    x[:, 0] = 30.0
    moe.gate.kernel.set_value(moe.gate.kernel[...].at[0].set(jnp.zeros(EXPERTS).at[5].set(-9.0).at[2].set(9.0)))
    for param in (moe.gate_proj, moe.up_proj, moe.down_proj):
        param.set_value(param[...] * 20)
    experts, weights = map(np.asarray, moe.gate(jnp.asarray(x)))
    assert (experts == 2).any(axis=1).all()
    assert not (experts == 5).any()
    got = jax.jit(lambda x: moe(x))(jnp.asarray(x))

    def swiglu(row, gate, up, down):
        gate, up, down = (np.asarray(kernel, np.float64) for kernel in (gate, up, down))
        hidden = row @ gate
        return (hidden / (1 + np.exp(-hidden)) * (row @ up)) @ down

    for t, row in enumerate(x.astype(np.float64)):
        want = sum(
            w * swiglu(row, moe.gate_proj[e], moe.up_proj[e], moe.down_proj[e])
            for e, w in zip(experts[t], weights[t], strict=True)
        )
        if shared:
            mlp = moe.shared_experts
            want = want + swiglu(row, mlp.gate_proj.kernel[...], mlp.up_proj.kernel[...], mlp.down_proj.kernel[...])
        np.testing.assert_allclose(got[t], want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


def test_a_row_of_nan_stays_alone():
    """Padding rows may carry anything a caller left there: no other row may see it."""
    moe = MoE(make_config(V3), dtype=jnp.float32, rngs=nnx.Rngs(3))
    x = make_inputs(moe.gate)
    run = jax.jit(lambda x: moe(x))
    clean, poisoned = x.copy(), x.copy()
    poisoned[[0, 17, 199]] = np.nan
    valid = ~np.isnan(poisoned[:, 0])
    np.testing.assert_array_equal(np.asarray(run(clean))[valid], np.asarray(run(poisoned))[valid])


@pytest.mark.parametrize("dtype, kernel", [(jnp.bfloat16, True), (jnp.float32, False)])
def test_experts_on_an_h200(dtype, kernel):
    """The grouped product's kernel serves all three products of bfloat16, where XLA's would be dense."""
    config = make_config(V2, hidden_size=128, moe_intermediate_size=64)
    moe = nnx.eval_shape(lambda: MoE(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(moe)
    with compiling_for(H200):
        traced = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).trace(
            state, jax.ShapeDtypeStruct((TOKENS, 128), dtype)
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("call @grouped_matmul") == (3 if kernel else 0)
    assert ("custom_call @mosaic_gpu" in text) == kernel


@pytest.mark.parametrize("pairs, experts", [(0, 4), (1, 1), (384, 64), (2048, 256), (2049, 256)])
def test_pairs_sorted_by_expert(pairs, experts):
    """Stably, whether they are few, which are compared with each other, or many, which are sorted."""
    chosen = np.random.default_rng(pairs).integers(0, experts, pairs).astype(np.int32)
    order, places = jax.jit(sorted_pairs)(chosen)
    np.testing.assert_array_equal(order, np.argsort(chosen, kind="stable"))
    np.testing.assert_array_equal(places, np.argsort(order))
    assert order.dtype == places.dtype == jnp.int32
    assert ("sort(" in jax.jit(sorted_pairs).lower(chosen).compile().as_text()) == (pairs > 2048)


@pytest.mark.parametrize("shape, k", [((5, 8), 3), ((2, 3, 7), 1), ((64, 64), 6), ((4, 1), 1), ((600, 96), 8)])
def test_the_largest_are_those_of_top_k(shape, k):
    """Few are compared each with each, more are sorted; of equal ones the first, infinite and NaN ones included."""
    rng = np.random.default_rng(0)
    scores = rng.integers(-4, 5, shape).astype(np.float32)
    scores[rng.random(shape) < 0.1] = np.inf
    scores[rng.random(shape) < 0.1] = -np.inf
    scores[rng.random(shape) < 0.05] = np.nan
    compiled = jax.jit(largest, static_argnums=1).lower(scores, k).compile()
    np.testing.assert_array_equal(compiled(scores), jax.lax.top_k(scores, k)[1])
    assert ("TopK" in compiled.as_text() or "sort(" in compiled.as_text()) == (scores.size * shape[-1] > 2**22)
