"""The Triton kernels without a GPU: interpreted on tiny shapes, and compiled for every architecture."""

from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
import triton_host
from mla_attn.dispatch import Device, compiling_for
from mla_attn.metadata import RaggedMetadata
from mla_attn.ops import gqa_attention, mla_attention, ragged_attention
from mla_attn.support import A100, H200
from mla_attn.triton import gpus
from ops import contract
from ops.base import MLA
from ops.batches import random_tree
from ops.gqa_base import GQA
from ops.ragged_base import RaggedTests

pytestmark = triton_host.needs_triton


class Interpreted:
    """Calls under Triton's interpreter, as on a GPU of one multiprocessor, which divides keys into KV splits."""

    implementation = "triton"
    kernel = True
    device = Device("gpu", "9.0", 1)

    @pytest.fixture(autouse=True)
    def interpreter(self, monkeypatch):
        with triton_host.interpreting(monkeypatch, self.device):
            yield

    def few(self, seed, **changes):
        """A batch with a KV split, rows and heads of padding, and requests without keys or rows."""
        sizes = {"kv_lens": [0, 1, 140, 64, 9], "q_lens": [1, 1, 2, 3, 0], "max_q_len": 3, "page_size": 16, "most": 140}
        return self.batch(seed, **{**sizes, "dtype": "bfloat16", **changes})

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("heads", [1, 6, 24])
    def test_heads(self, heads, dtype):
        self.check(self.few(1, heads=heads, dtype=dtype))

    @pytest.mark.parametrize("page_size", [1, 48, 64])
    def test_page_sizes(self, page_size):
        self.check(self.few(2, page_size=page_size, layout="packed"))

    def test_not_causal_with_strides(self):
        batch = self.few(3, kv_offsets=[2, 1, 0, 2, 1], kv_stride=3, page_stride=5, layer_stride=2)
        self.check(batch)
        self.check(batch, causal=False, layer=2)

    @pytest.mark.parametrize("window", [None, 20])
    def test_window_cap_and_sinks(self, window):
        batch = self.few(4, window=window, soft_cap=0.8, scale=1.0, dtype="float32")
        self.check(batch)
        sinks = np.resize(np.asarray([1.5, -np.inf, np.inf, -2.0], np.float32), batch.out_shape[1])
        self.check(batch, sinks=jnp.asarray(sinks))

    @pytest.mark.parametrize("window", [None, 9])
    def test_trees(self, window):
        batch = self.few(5, window=window)
        mask = random_tree(np.random.default_rng(5), batch, 3)
        self.check(batch, tree_mask=jnp.asarray(mask))

    @pytest.mark.parametrize("cache", ["float8_e4m3fn", "float8_e5m2"])
    def test_float8(self, cache):
        """Every code of a float8 is a bfloat16; scales enter before the cap."""
        self.check(self.few(6, cache=cache, soft_cap=0.8, dtype="float32"), layer=2)
        batch = self.few(6, cache=cache)
        self.check(batch, layer=2)
        self.check(helpers.quantized(batch), layer=1)

    def test_splits_of_batch_invariant_calls(self):
        self.check(self.few(7, kv_lens=[0, 1, 2050, 70, 9], most=2050, page_size=64), batch_invariant=True)


class TestMLAInterpreted(Interpreted, MLA):
    sizes: ClassVar[dict] = {**MLA.sizes, "kv_lora_rank": 96}


class TestGQAInterpreted(Interpreted, GQA, contract.Invariance):
    sizes: ClassVar[dict] = {**GQA.sizes, "heads": 6}

    @pytest.mark.parametrize("pool_layout", ["hnd", "interleaved", "shuffled"])
    def test_layouts(self, pool_layout):
        self.check(self.few(8, pool_layout=pool_layout, head_dim=64, v_head_dim=64))


class TestRaggedInterpreted(RaggedTests):
    implementation = "triton"
    kernel = True

    @pytest.fixture(autouse=True)
    def interpreter(self, monkeypatch):
        with triton_host.interpreting(monkeypatch, Interpreted.device):
            yield

    def test_sinks_and_many_tiles(self):
        """More rows than a tile has, and requests apart from each other."""
        sizes = {"kv_lens": [300, 0, 70, 150], "q_lens": [300, 3, 64, 140], "max_q_len": 300, "max_kv_len": 300}
        batch = self.batch(20, dtype="bfloat16", qk_dim=192, v_dim=128, heads=2, kv_heads=1, layout="packed", **sizes)
        for rules in ({}, {"window": 100}, {"causal": False}):
            self.check(batch, scale=192**-0.5, max_q_len=300, max_kv_len=300, **rules)


def test_many_splits():
    """More than are merged at a time, of a row tile of 3 rows of 2 sets; one is empty, and the largest comes late."""
    from mla_attn.pallas_kernels.triton.combine import merge_splits

    splits, lanes, rows, values = 37, 2, 3, 24
    rng = np.random.default_rng(0)
    lse = rng.normal(0, 3, (splits + 1, lanes, rows)).astype(np.float32)
    lse[5], lse[30] = -np.inf, lse[30] + 20
    partial = rng.normal(0, 1, (splits + 1, lanes, rows, values)).astype(np.float32)
    work = np.array([9, 1, 2 * lanes * rows, 1, splits, rows], np.int32)  # one record, of token 2, from result 1 on
    out, out_lse = np.full((5 * lanes * rows, values), 7, np.float32), np.full(5 * lanes * rows, 7, np.float32)
    constants = {"SPLITS": 16, "VALUES": values, "VALUES_BLOCK": 32, "TEAM_LANES": lanes, "COMBINED_AT": 2}
    constants |= {"COMBINED_FIELDS": 4, "TILE_ROWS": rows, "SETS": lanes, "HEADS": rows, "HAS_SINKS": False}
    triton_host.run(merge_splits, (work, partial, lse, work), (out, out_lse), (2, lanes * rows), constants)

    weights = np.exp2(lse[1:].astype(np.float64) - lse[1:].max(axis=0))
    want = ((weights[..., None] * partial[1:]).sum(axis=0) / weights.sum(axis=0)[..., None]).reshape(-1, values)
    want_lse = np.log(2) * (lse[1:].max(axis=0) + np.log2(weights.sum(axis=0))).reshape(-1)
    own = slice(2 * lanes * rows, 3 * lanes * rows)
    np.testing.assert_allclose(out[own], want, atol=1e-6)
    np.testing.assert_allclose(out_lse[own], want_lse, rtol=1e-6)
    assert (np.delete(out, np.s_[own], axis=0) == 7).all()  # rows of others


@pytest.mark.parametrize("device", [A100, H200], ids=lambda device: device.compute_capability)
@pytest.mark.parametrize("op", ["mla", "gqa", "ragged"])
def test_lowered(device, op):
    """Through jax-triton, where a GPU plugin is installed, which needs no GPU for it."""
    if (reason := gpus.missing()) is not None:
        pytest.skip(reason)
    sizes = {"kv_lens": [65, 1000], "q_lens": [1, 2], "dtype": jnp.dtype("bfloat16")}
    if op == "ragged":
        ints = {name: jnp.zeros(2, jnp.int32) for name in ("q_starts", "q_lens", "kv_starts", "kv_lens")}
        metadata = RaggedMetadata(**ints, max_q_len=64, max_kv_len=64)
        arrays, call = (*(jnp.zeros((64, 4, 64), jnp.bfloat16),) * 3, metadata), partial(ragged_attention, scale=0.1)
    else:
        batch = {"mla": helpers.poisoned_batch, "gqa": helpers.kv_batch}[op](0, heads=8, **sizes)
        arrays = (*batch.queries, batch.pool, batch.metadata)
        call = partial({"mla": mla_attention, "gqa": gqa_attention}[op], spec=batch.spec)
    with compiling_for(device):
        traced = jax.jit(lambda *a: call(*a, implementation="triton")).trace(*arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call") == (1 if op == "ragged" else 2)
