"""``gqa_attention``: the shared tests for each implementation, chosen numbers, and the errors of the op."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
from layouts import LAYOUTS, arrays_of
from mla_attn import metadata as build
from mla_attn.cache import KVPool
from mla_attn.ops import gqa, gqa_attention, ragged_attention
from mla_attn.specs import GQASpec
from ops.gqa_base import GQATests
from ops.lanes import shrink

both = pytest.mark.parametrize("implementation", ["xla", "reference"])


@pytest.mark.slow
class TestReference(GQATests):
    implementation = "reference"
    batch_invariant = False


class TestXLA(GQATests):
    """Blocks and tiles are small, so that short requests have several."""

    implementation = "xla"

    @property
    def batch_invariant(self):
        return jax.default_backend() == "cpu"

    @pytest.fixture(autouse=True)
    def small(self, request, monkeypatch):
        if request.node.name != "test_batch_invariant_at_real_sizes":  # of which tiles and blocks are a part
            shrink(monkeypatch, gqa, block_keys=24, max_lanes=8 if request.node.name == "test_layouts[hnd]" else 1)


class OneLayout(TestXLA):
    """All of the contract over another layout than the first."""

    test_layouts = test_float8_layouts = None


@pytest.mark.slow
class TestXLAHeads(OneLayout):
    sizes: ClassVar[dict] = {**TestXLA.sizes, "pool_layout": "hnd"}


@pytest.mark.slow
class TestXLAInterleaved(OneLayout):
    sizes: ClassVar[dict] = {**TestXLA.sizes, "pool_layout": "interleaved"}


@pytest.mark.slow
class TestXLAShuffled(OneLayout):
    """In pages that float8 numbers can have too."""

    sizes: ClassVar[dict] = {**TestXLA.sizes, "pool_layout": "shuffled", "page_size": 16}

    @pytest.mark.parametrize("page_size, dtype", [(4, "float32"), (8, "bfloat16"), (48, "float32")])
    def test_page_sizes(self, page_size, dtype):
        super().test_page_sizes(page_size, dtype)


@pytest.mark.slow
class TestXLAFloat8(TestXLA):
    """All of the contract over a float8 cache: also what ``contract.Float8`` leaves to bfloat16 and float32 caches."""

    sizes: ClassVar[dict] = {**TestXLA.sizes, "cache": "float8_e5m2"}


@both
@pytest.mark.parametrize(
    "rows, dtype, cache", [(6, "float32", None), (1, "bfloat16", None), (6, "bfloat16", "float8_e4m3fn")]
)
def test_layouts_differ_in_no_bit(implementation, rows, dtype, cache):
    """Of the same rows in the same pages."""
    sizes = {"page_size": 16, "head_dim": 64, "heads": 8, "kv_heads": 2, "dtype": jnp.dtype(dtype), "cache": cache}
    lens = {"kv_lens": [0, 1, 63, 700], "q_lens": [1, 1, rows, rows], "max_q_len": rows}
    found = {}
    for layout in LAYOUTS:
        batch = helpers.kv_batch(0, **sizes, **lens, pool_layout=layout)
        call = functools.partial(gqa_attention, spec=batch.spec, implementation=implementation, return_lse=True)
        attend = jax.jit(call, compiler_options=helpers.OPTIMIZED)
        found[layout] = [np.asarray(x).tobytes() for x in attend(batch.q, batch.pool, batch.metadata)]
    assert all(bits == found["nhd"] for bits in found.values()), [n for n in LAYOUTS if found[n] != found["nhd"]]


def counting_pool(length, page_size=16, layout="nhd", pages=20):
    """Token t of the one request, whose pages are in order, has the value t; the rest is NaN."""
    v = np.full((pages * page_size, 1, 4), np.nan, np.float32)
    v[:length] = np.arange(length)[:, None, None]
    v = v.reshape(pages, page_size, 1, 4)
    k = np.where(np.isnan(v), v, 0)
    return KVPool.of(*map(jnp.asarray, arrays_of(layout, k, v)), layout=layout)


def table_of(pool):
    return jnp.arange(pool.num_pages, dtype=jnp.int32)[None]


@functools.partial(jax.jit, static_argnames=("spec", "implementation", "causal"))
def attend(pool, metadata, sinks, tree_mask, *, spec, implementation, causal):
    q = jnp.zeros((metadata.slots.shape[0], 2, 4))
    options = {"sinks": sinks, "tree_mask": tree_mask, "implementation": implementation, "causal": causal}
    return gqa_attention(q, pool, metadata, spec, **options)


def means(pool, metadata, implementation, *, window, sinks=None, tree_mask=None, causal=True):
    """The mean position of the keys that each row sees: queries are 0."""
    spec = GQASpec(num_heads=2, num_kv_heads=1, head_dim=4, scale=1.0, window=window)
    out = attend(pool, metadata, sinks, tree_mask, spec=spec, implementation=implementation, causal=causal)
    assert (out == out[:, :1, :1]).all()
    return out[:, 0, 0].tolist()


def ints(*values):
    return jnp.asarray(values, jnp.int32)


@both
@pytest.mark.parametrize("layout", LAYOUTS)
def test_c14_a_window_counts_the_row_itself(implementation, layout):
    """Of 300 keys the last 128; a sink of ln 128 weighs as much as these."""
    pool = counting_pool(300, layout=layout)
    metadata = build.for_decode(table_of(pool), ints(300), page_size=16)
    got = functools.partial(means, pool, metadata, implementation, window=128)
    assert got() == pytest.approx([235.5], rel=1e-6)
    assert got(sinks=jnp.full(2, np.log(128), jnp.float32)) == pytest.approx([117.75], rel=1e-6)


@both
def test_rows_of_a_verify_call_have_windows_of_their_own(implementation):
    pool = counting_pool(304)
    metadata = build.for_target_verify(table_of(pool), ints(300), num_tokens=4, page_size=16)
    want = [236.5, 237.5, 238.5, 239.5]
    assert means(pool, metadata, implementation, window=128) == pytest.approx(want, rel=1e-6)
    lens = ints(127, 128, 129)
    metadata = build.for_decode(table_of(pool).repeat(3, axis=0), lens, page_size=16)
    assert means(pool, metadata, implementation, window=128) == pytest.approx([63.0, 63.5, 64.5], rel=1e-6)


@both
def test_a_tree_with_a_window(implementation):
    """Parents (-1, 0, 0, 2) over a prefix of 10: siblings share a position, so they see the same of the prefix."""
    pool = counting_pool(14)
    metadata = build.for_target_verify(table_of(pool), ints(10), num_tokens=4, page_size=16, depths=ints(0, 1, 1, 2))
    mask = jnp.asarray([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], bool)
    got = means(pool, metadata, implementation, window=4, tree_mask=mask)
    assert got == pytest.approx([8.5, 9.5, 9.75, 11.0], rel=1e-6)


@both
def test_a_cap_of_scores(implementation):
    """Scores of 60 and 0 capped at 30, as the log-sum-exp of each key alone shows."""
    spec = GQASpec(num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0, soft_cap=30.0)
    pool = KVPool.of(jnp.asarray([[[60.0]], [[0.0]]])[..., None], jnp.ones((2, 1, 1, 1)), layout="nhd")
    metadata = build.for_decode(ints([0], [1]), ints(1, 1), page_size=1)
    _, lse = gqa_attention(jnp.ones((2, 1, 1)), pool, metadata, spec, return_lse=True, implementation=implementation)
    assert lse.ravel().tolist() == pytest.approx([28.92083, 0.0], abs=1e-5)


@pytest.mark.parametrize("implementation", ["xla"])
@pytest.mark.parametrize("causal", [True, False])
def test_c15_tails_of_values(implementation, causal):
    """Values of 1, NaN after the length: the output is 1, whatever the tile's end, at the first call and the second."""
    for length in (1, 63, 64, 65, 257):
        pool = counting_pool(length)
        pool = dataclasses.replace(pool, v=pool.k + 1)
        metadata = build.for_decode(table_of(pool), ints(length), page_size=16)
        got = [means(pool, metadata, implementation, window=None, causal=causal) for _ in range(2)]
        assert got == [[1.0], [1.0]]


@both
def test_sinks_of_packed_keys(implementation):
    """Of ``ragged_attention``: a row without keys is 0, an infinite sink leaves nothing."""
    lens = {"q_starts": ints(0, 1), "q_lens": ints(1, 1), "kv_starts": ints(0, 2), "kv_lens": ints(2, 0)}
    metadata = build.RaggedMetadata(**lens, max_q_len=1, max_kv_len=2)
    q, k, v = jnp.zeros((2, 4, 8)), jnp.zeros((2, 2, 8)), jnp.full((2, 2, 8), 6.0)
    sinks = jnp.asarray([np.log(2), 0.0, -jnp.inf, jnp.inf])
    attend = functools.partial(ragged_attention, q, k, v, metadata, scale=1.0, implementation=implementation)
    assert attend(sinks=sinks)[..., 0].ravel().tolist() == pytest.approx([3, 4, 6, 0, 0, 0, 0, 0], rel=1e-6)
    with pytest.raises(ValueError, match="sinks with return_lse=True"):
        attend(sinks=sinks, return_lse=True)


def test_heads_read_the_head_of_their_group():
    """Head h of H reads KV head ``h * K // H``."""
    batch = helpers.kv_batch(0, heads=6, kv_heads=3, kv_lens=[9], q_lens=[1])
    v = jnp.broadcast_to(jnp.arange(3.0)[:, None], batch.pool.v.shape)
    pool = dataclasses.replace(batch.pool, v=v)
    out = gqa_attention(batch.q, pool, batch.metadata, batch.spec)
    assert out[0, :, 0].tolist() == pytest.approx([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": jnp.zeros((4, 4, 9))}, r"q has shape \(4, 4, 9\), must be \(4, 4, 8\)"),
        ({"q": jnp.zeros((4, 4, 8), int)}, "q has dtype int32, must be a floating"),
        ({"spec": {"num_kv_heads": 4}}, "pool has num_kv_heads=2, .* but spec has num_kv_heads=4"),
        ({"spec": {"v_head_dim": 7}}, "v_head_dim=8, but spec has .* v_head_dim=7"),
        ({"pool": helpers.poisoned_batch(0, kv_lens=[1], q_lens=[1]).pool}, "pool is a LatentPool, must be a KVPool"),
        ({"layer": 1}, "layer=1 must be an integer from 0 to 0"),
        ({"causal": False, "spec": {"window": 3}}, "causal=False with window=3"),
        ({"tree_mask": jnp.zeros((2, 2, 2))}, "tree_mask is float32"),
        ({"tree_mask": jnp.zeros((2, 2, 5), bool), "spec": {"window": 4}}, r"window=4 with tree_mask \[2, 2, 5\]"),
        ({"sinks": jnp.zeros(3)}, r"sinks has shape \(3,\), must be \(4,\)"),
        ({"sinks": jnp.zeros(4), "return_lse": True}, r"sinks with return_lse=True: .* merge_states\(sinks=\)"),
        ({"implementation": "cuda"}, "implementation='cuda' must be one of"),
    ],
)
def test_errors(unchecked, change, message):
    batch = helpers.kv_batch(0, kv_lens=[5, 9], q_lens=[1, 2])
    spec = dataclasses.replace(batch.spec, **change.get("spec", {}))
    arguments = {"q": batch.q, "pool": batch.pool, "metadata": batch.metadata, **change, "spec": spec}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(gqa_attention, **arguments))


def test_what_is_stored_in_float8_is_refused(unchecked):
    batch = helpers.kv_batch(0, kv_lens=[5], q_lens=[1])
    pool = jax.tree.map(lambda x: x.astype(jnp.float8_e4m3fn), batch.pool)
    with pytest.raises(ValueError, match="dtype=float8_e4m3fn must be float32: format float32"):
        gqa_attention(batch.q, pool, batch.metadata, batch.spec)
