"""``mla_attention``: the shared tests for each implementation, and the errors of the op."""

import dataclasses
import functools
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
from helpers import made, zeros
from mla_attn.cache import LatentPool
from mla_attn.ops import mla, mla_attention
from ops import contract
from ops.base import MLA, MLATests
from ops.lanes import shrink

both = pytest.mark.parametrize("implementation", ["xla", "reference"])


class TestReference(MLATests):
    implementation = "reference"
    batch_invariant = False


class SmallXLA:
    """Blocks and tiles are small, so that short requests have several."""

    implementation = "xla"
    block_keys, max_lanes = 24, 1

    @property
    def batch_invariant(self):
        return jax.default_backend() == "cpu"

    @pytest.fixture(autouse=True)
    def small(self, request, monkeypatch):
        if request.node.name != "test_batch_invariant_at_real_sizes":  # of which tiles and blocks are a part
            shrink(monkeypatch, mla, block_keys=self.block_keys, max_lanes=self.max_lanes)


class TestXLA(SmallXLA, MLATests):
    """One lane, as on a CPU."""


@pytest.mark.slow
class TestXLAFloat8(SmallXLA, MLATests):
    """All of the contract over a float8 cache: also what ``contract.Float8`` leaves to bfloat16 and float32 caches."""

    sizes: ClassVar[dict] = {**MLATests.sizes, "cache": "float8_e4m3fn"}


class TestXLALanes(
    SmallXLA, MLA, contract.Lengths, contract.Poison, contract.Softmax, contract.Visibility, contract.Trees
):
    """Several lanes, as on a GPU: requests, and tiles of one, are shared between lanes and merged. In the rest of the
    contract lanes have no part."""

    block_keys, max_lanes = 8, 256


FLOAT8_QUERIES = {
    "q_latent": zeros(4, 2, 32, dtype=jnp.float8_e4m3fn),
    "q_rope": zeros(4, 2, 16, dtype=jnp.float8_e4m3fn),
}


@pytest.fixture
def call(unchecked):
    """Runs a right call of two requests with some arguments, fields or static facts changed."""
    batch = helpers.poisoned_batch(0, kv_lens=[5, 9], q_lens=[1, 2], num_layers=2)

    def run(*, metadata=None, pool=None, spec=None, **changes):
        arguments = {
            "q_latent": batch.q_latent,
            "q_rope": batch.q_rope,
            "pool": dataclasses.replace(batch.pool, **made(pool or {})),
            "metadata": dataclasses.replace(batch.metadata, **made(metadata or {})),
            "spec": dataclasses.replace(batch.spec, **(spec or {})),
            **made(changes),
        }
        return jax.eval_shape(functools.partial(mla_attention, **arguments))

    return run


def test_the_call_without_changes_is_right(call):
    assert call().shape == (4, 2, 32)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q_latent": zeros(4, 2, 33)}, r"q_latent has shape \(4, 2, 33\), must be \(4, 2, 32\)"),
        ({"q_latent": zeros(5, 2, 32)}, r"q_latent has shape \(5, 2, 32\), must be \(4, 2, 32\)"),
        ({"q_latent": zeros(4, 64)}, r"q_latent has shape \(4, 64\), must be \(4, 2, 32\)"),
        ({"q_rope": zeros(4, 2, 8)}, r"q_rope has shape \(4, 2, 8\), must be \(4, 2, 16\)"),
        ({"q_latent": zeros(4, 2, 32, dtype=int)}, "q_latent has dtype int32, must be a floating"),
        ({"q_rope": zeros(4, 2, 16, dtype=jnp.bfloat16)}, "q_rope has dtype bfloat16, must be q_latent's float32"),
        ({"spec": {"num_heads": 3}}, r"q_latent has shape \(4, 2, 32\), must be \(4, 3, 32\)"),
        ({"pool": {"kv_lora_rank": 24}}, r"pool stores 24 latent \+ 16 rope channels per token, but spec has 32 \+ 16"),
        ({"layer": 2}, "layer=2 must be an integer from 0 to 1"),
        ({"layer": -1}, "layer=-1 must be an integer from 0 to 1"),
        ({"layer": np.int32(2)}, "layer=2 must be an integer from 0 to 1"),
        (
            {"pool": {"data": zeros(99, 4, 48, dtype=jnp.float8_e4m3fn)}},
            "pool.data.dtype=float8_e4m3fn must be float32: format float32",
        ),
        ({"layer": 0.5}, "layer=0.5 must be an integer"),
        ({"layer": zeros(1, dtype=int)}, r"layer is int32\[1\], must be one integer"),
        ({"layer": zeros()}, r"layer is float32\[\], must be one integer"),
        ({"causal": False, "spec": {"window": 3}}, "causal=False with window=3"),
        ({"causal": "False"}, "causal='False' must be True or False"),
        ({"causal": functools.partial(jnp.bool_, True)}, r"causal=Array\(True.* must be True or False"),
        ({"batch_invariant": [True]}, r"batch_invariant=\[True\] must be True or False"),
        ({"return_lse": 1}, "return_lse=1 must be True or False"),
        ({"out_dtype": jnp.int8}, "out_dtype=int8 must be a floating dtype"),
        ({"metadata": {"kv_lens": zeros(3, dtype=int)}}, r"metadata.kv_lens has shape \(3,\), must be \(2,\)"),
        ({"metadata": {"q_starts": zeros(2, 1, dtype=int)}}, r"metadata.q_starts has shape \(2, 1\), must be \(2,\)"),
        ({"metadata": {"kv_lens": zeros(2)}}, "metadata.kv_lens has dtype float32, must be int32"),
        ({"metadata": {"page_table": zeros(2, 4)}}, "metadata.page_table has dtype float32, must be int32"),
        (
            {"metadata": {"page_table": zeros(3, 4, dtype=int)}},
            r"page_table has shape \(3, 4\), must be \[B, W\] = \[2, at",
        ),
        ({"metadata": {"page_table": zeros(2, 0, dtype=int)}}, r"page_table has shape \(2, 0\), must be \[B, W\]"),
        ({"metadata": {"page_table": zeros(2, dtype=int)}}, r"page_table has shape \(2,\), must be \[B, W\]"),
        ({"metadata": {"q_lens": [1, 1]}}, "metadata.q_lens is a list, must be an array"),
        ({"metadata": {"q_lens": zeros(dtype=int)}}, r"metadata.q_lens has shape \(\), must be \[B\]"),
        ({"metadata": {"page_size": 8}}, "metadata was built with page_size=8, but the pool has page_size=4"),
        ({"metadata": {"max_q_len": 0}}, "metadata.max_q_len=0 must be an integer from 1 to 2147483647"),
        ({"metadata": {"kv_stride": 0}}, "metadata.kv_stride=0 must be an integer from 1 to 2147483647"),
        (
            {"tree_mask": zeros(2, 2, 2)},
            r"tree_mask is float32\[2, 2, 2\], must be bool \[B, S, M\] = \[2, 2, at least 2\]",
        ),
        (
            {"q_latent": zeros(4, 2, 32, dtype=jnp.float8_e5m2)},
            "q_latent has dtype float8_e5m2, must be a floating dtype of at least 16 bits or float8_e4m3fn",
        ),
        (
            {"q_latent": zeros(4, 2, 32, dtype=jnp.float8_e4m3fn)},
            "q_rope has dtype float32, must be q_latent's float8_e4m",
        ),
        ({"q_scale": 1.0}, "q_scale= with an operand of float32: must be None"),
        ({**FLOAT8_QUERIES, "q_scale": zeros(4)}, r"q_scale has shape \(4,\), must be \[\] or \[T, H\] = \(4, 2\)"),
        ({**FLOAT8_QUERIES, "q_scale": zeros(4, 2, dtype=jnp.bfloat16)}, "q_scale has dtype bfloat16, must be float32"),
        ({**FLOAT8_QUERIES, "q_scale": 0.0}, "q_scale=0.0 must be a finite number above 0"),
        (
            {"pool": {"data": zeros(16, 4, 48, dtype=jnp.uint8)}},
            "pool.data.dtype=uint8 must be float32: format float32",
        ),
        ({"q_rope": zeros(4, 2, 16, dtype=jnp.float4_e2m1fn)}, "q_rope has dtype float4_e2m1fn, must be"),
        ({"out_dtype": jnp.float8_e5m2}, "out_dtype=float8_e5m2 must be a floating dtype"),
        ({"pool": {"data": zeros(2 * 8, 4, 48, dtype=jnp.float8_e4m3fn)}}, "float8_e4m3fn"),
        ({"tree_mask": zeros(2, 2, 1, dtype=bool)}, r"tree_mask is bool\[2, 2, 1\]"),
        ({"tree_mask": zeros(2, 3, 3, dtype=bool)}, r"tree_mask is bool\[2, 3, 3\]"),
        ({"tree_mask": [[[True]]]}, "tree_mask is a list, must be an array"),
        ({"q_latent": [1.0]}, "q_latent is a list, must be an array"),
        ({"tree_mask": zeros(2, 2, dtype=bool)}, r"tree_mask has shape \(2, 2\), must be \[B, S, M\]"),
        ({"sinks": zeros(3)}, r"sinks has shape \(3,\), must be \(2,\): \[H\], query heads"),
        ({"sinks": zeros(2, dtype=int)}, "sinks has dtype int32, must be a floating"),
        ({"sinks": zeros(2), "return_lse": True}, r"sinks with return_lse=True: .* merge_states\(sinks=\)"),
        ({"implementation": "cuda"}, "implementation='cuda' must be one of mosaic_gpu, triton, xla, reference"),
    ],
)
def test_errors(call, change, message):
    with pytest.raises(ValueError, match=message):
        call(**change)


@both
@pytest.mark.parametrize("window", [10**9, 2**31 - 1])
def test_a_window_before_the_tables_first_key(implementation, window):
    """A table that begins after the first row: the window's first position less the offset would wrap."""
    batch = helpers.poisoned_batch(0, kv_lens=[12], q_lens=[12], kv_offsets=[4], window=window)
    options = {"return_lse": True, "implementation": implementation}
    out, lse = mla_attention(batch.q_latent, batch.q_rope, batch.pool, batch.metadata, batch.spec, **options)
    want, want_lse, v_max = batch.expected()
    assert np.isneginf(want_lse[:4]).all() and np.isfinite(want_lse[4:]).all()
    helpers.assert_attention_close(out, lse, want, want_lse, visible_v_max=v_max, dtype=jnp.float32)


@both
def test_wide_integers_and_strict_promotion(implementation):
    """Of ``jax_enable_x64``: no intermediate takes a wider type than the arrays."""
    batch = helpers.poisoned_batch(0, kv_lens=[5, 9], q_lens=[1, 2])
    arrays = batch.q_latent, batch.q_rope, batch.pool, batch.metadata
    want = mla_attention(*arrays, batch.spec, return_lse=True, implementation=implementation)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        attend = functools.partial(mla_attention, spec=batch.spec, return_lse=True, implementation=implementation)
        assert not re.search(r"\b[fi]64\[\d", str(jax.make_jaxpr(attend)(*arrays)))
        got = attend(*arrays)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int8])
def test_narrow_static_sizes(dtype):
    """NumPy's: ``-(-5 // 3)`` of an unsigned integer is none, and products of narrow ones wrap."""
    batch = helpers.poisoned_batch(0, kv_lens=[9], q_lens=[5], max_q_len=5)
    sizes = {"max_q_len": dtype(5), "kv_stride": dtype(1), "page_size": dtype(4)}
    narrow = dataclasses.replace(batch.metadata, **sizes)
    arrays = batch.q_latent, batch.q_rope, batch.pool
    want, got = (
        jax.make_jaxpr(functools.partial(mla_attention, spec=batch.spec))(*arrays, m)
        for m in (
            batch.metadata,
            narrow,
        )
    )
    assert str(got) == str(want)
    planned = mla.plan_mla(narrow, batch.pool, batch.spec)
    assert [type(getattr(planned, name)) for name in sizes] == [int] * 3


def test_a_window_holds_a_trees_columns(call):
    with pytest.raises(ValueError, match=r"window=1 with tree_mask \[2, 2, 2\]: must be at least M"):
        call(tree_mask=zeros(2, 2, 2, dtype=bool), spec={"window": 1})


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_arrays_of_numpy(unchecked, implementation):
    """An allocator's page tables and a tree's mask are NumPy's; closed over, they meet traced indices."""
    batch = helpers.poisoned_batch(0, kv_lens=[5, 9], q_lens=[1, 2])
    mask = np.tri(2, dtype=bool)[None].repeat(2, axis=0)
    attend = functools.partial(mla_attention, spec=batch.spec, implementation=implementation)
    want = attend(batch.q_latent, batch.q_rope, batch.pool, batch.metadata, tree_mask=jnp.asarray(mask))
    metadata = jax.tree.map(np.asarray, batch.metadata)
    q_latent, q_rope = np.asarray(batch.q_latent), np.asarray(batch.q_rope)
    got = attend(q_latent, q_rope, batch.pool, metadata, tree_mask=mask)
    closed = jax.jit(lambda pool: attend(q_latent, q_rope, pool, metadata, tree_mask=mask))(batch.pool)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(closed, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("what", ["query", "key"])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_nan_is_not_taken_for_no_key(implementation, what):
    """A broken cache must not look like an empty one."""
    batch = helpers.poisoned_batch(0, kv_lens=[5, 9], q_lens=[1, 2])
    q_latent, pool = batch.q_latent, batch.pool
    if what == "query":
        q_latent = q_latent.at[0].set(np.nan)
    else:
        page = pool.placement.physical_pages(batch.metadata.page_table[0, 0], batch.layer)
        pool = dataclasses.replace(pool, data=pool.data.at[page, 0].set(np.nan))
    options = {"layer": batch.layer, "return_lse": True, "implementation": implementation}
    out, lse = mla_attention(q_latent, batch.q_rope, pool, batch.metadata, batch.spec, **options)
    assert jnp.isnan(out[0]).all() and jnp.isnan(lse[0]).all()
    assert jnp.isfinite(out[1:3]).all()


@pytest.mark.parametrize("width, rope_offset", [(64, 32), (64, 40)])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_rows_of_other_systems(implementation, width, rope_offset):
    """Rows wider than R + E, NaN beside the two parts: equal bits to rows of R + E, without a copy of the pool."""
    batch = helpers.poisoned_batch(0, kv_lens=[5, 9], q_lens=[1, 2])
    array = np.full((*batch.pool.data.shape[:2], width), np.nan, np.float32)
    array[..., :32], array[..., rope_offset : rope_offset + 16] = batch.pool.data[..., :32], batch.pool.data[..., 32:]
    wide = LatentPool.of(jnp.asarray(array), kv_lora_rank=32, rope_dim=16, rope_offset=rope_offset)
    attend = functools.partial(mla_attention, spec=batch.spec, implementation=implementation)
    want, got = (attend(batch.q_latent, batch.q_rope, pool, batch.metadata) for pool in (batch.pool, wide))
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes() and np.isfinite(got).all()


def test_in_double_precision():
    """JAX's wider defaults leave the op as it is."""
    batch = helpers.poisoned_batch(0, kv_lens=[5, 9], q_lens=[1, 2])
    with jax.enable_x64(True):
        out, lse = mla_attention(
            batch.q_latent, batch.q_rope, batch.pool, batch.metadata, batch.spec, return_lse=True, implementation="xla"
        )
    want, want_lse, _ = batch.expected()
    assert out.dtype == lse.dtype == jnp.float32
    np.testing.assert_allclose(out[:3], want[:3], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse[:3], want_lse[:3], rtol=1e-5)
