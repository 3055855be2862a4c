"""Scales of a float8 cache, measured on prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_attn import metadata as build
from mla_attn.models.calibration import measure_scales
from traffic import small_model
from windows import windowed_model

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7], [12]]


@pytest.mark.parametrize(
    ("make", "prompts"), [(small_model, PROMPTS), (windowed_model, PROMPTS), (small_model, [[12]])]
)
def test_scales_are_maxima_of_rows(make, prompts):
    """Of whole prompts, each in a cache of its own, read by NumPy; the last chunk of a prompt may be short. After a
    single token the draft layer has one row, that of the likeliest token."""
    model, longest = make(), max(map(len, prompts))

    @nnx.jit
    def rows_of(model, tokens, following, length):
        pools = model.create_pools(num_pages=longest, page_size=1)
        m = build.for_extend(
            jnp.arange(longest)[None], length, length, max_q_len=longest, num_rows=longest, page_size=1
        )
        by_group = dict.fromkeys(pools, m)
        hidden, pools = model(tokens, pools, by_group, mode="prefill")
        likeliest = model.logits(hidden)
        if model.can_draft:
            _, pools = model.draft(hidden, following, pools, by_group, mode="prefill")
        return likeliest, pools

    largest = {}
    for prompt in prompts:
        tokens, length = jnp.asarray(np.resize(prompt, longest)), jnp.asarray([len(prompt)])
        logits, _ = rows_of(model, tokens, tokens, length)
        following = np.resize([*prompt[1:], int(logits[len(prompt) - 1].argmax())], longest)
        _, pools = rows_of(model, tokens, jnp.asarray(following), length)
        for name, pool in pools.items():
            parts = {"scale": pool.data} if hasattr(pool, "data") else {"k_scale": pool.k, "v_scale": pool.v}
            for part, x in parts.items():
                found = np.abs(np.asarray(x)).reshape(pool.num_layers, -1).max(axis=1)
                largest[name, part] = np.maximum(largest.get((name, part), 0), found)
    scales = measure_scales(model, prompts, page_size=4, prefill_chunk=4)
    assert {(name, part) for name, parts in scales.items() for part in parts} == set(largest)
    for (name, part), found in largest.items():
        np.testing.assert_allclose(scales[name][part], found / 448, rtol=1e-5)
        assert len(set(scales[name][part])) == len(found)  # of each layer its own


def test_rows_of_zeros_have_a_scale_of_1():
    model = windowed_model()
    graphdef, state = nnx.split(model)
    nothing = nnx.merge(graphdef, jax.tree.map(jnp.zeros_like, state))
    scales = measure_scales(nothing, PROMPTS, page_size=4, prefill_chunk=4)
    assert {x for parts in scales.values() for values in parts.values() for x in values} == {1.0}


def test_rows_that_are_not_finite():
    graphdef, state = nnx.split(windowed_model())
    broken = nnx.merge(graphdef, jax.tree.map(lambda x: x * jnp.nan, state))
    with pytest.raises(ValueError, match="layer 0 of cache group 'full' has rows that are not finite: no k_scale fits"):
        measure_scales(broken, PROMPTS, page_size=4, prefill_chunk=4)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts is empty, must hold at least one"),
        ([[1], []], {}, r"prompts\[1\] has 0 tokens, must have 1 to max_position_embeddings=4096"),
        ([[1] * 4097], {}, r"prompts\[0\] has 4097 tokens"),
        ([[13]], {}, r"prompts\[0\] holds a token that is not 0 to 12"),
        ([[1]], {"page_size": 0}, "page_size=0 must be"),
        ([[1]], {"prefill_chunk": 0}, "prefill_chunk=0 must be"),
    ],
)
def test_errors(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        measure_scales(windowed_model(), prompts, **options)
