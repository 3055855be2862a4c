"""The paged ops by the Triton kernels: the shared tests. On a GPU; ``pallas_kernels/test_triton.py`` needs none."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.dispatch import compiling_for, current_device
from mla_attn.ops import plan_gqa, plan_mla
from mla_attn.triton import gpus
from ops.base import MLATests
from ops.gqa_base import GQATests
from ops.ragged_base import RaggedTests

pytestmark = pytest.mark.gpu

CACHES = ("float8_e4m3fn", "float8_e5m2")  # not in blocks
# Around the ends of key tiles, and so many keys that they are divided into KV splits.
LENGTHS = {
    "kv_lens": [3000, 0, 1, 64, 6, 65, 700, 128, 63, 1300, 130, 200, 40],
    "q_lens": [6, 1, 1, 0, 6, 4, 2, 5, 6, 1, 6, 3, 6],
    "most": 3000,
}


@pytest.fixture(autouse=True)
def launches():
    if (reason := gpus.refuses(current_device())) is not None:
        pytest.skip(reason)


def few_programs():
    """A GPU with so few multiprocessors that each program takes several items."""
    return compiling_for(dataclasses.replace(current_device(), cores=4))


class TestMLA(MLATests):
    implementation = "triton"
    kernel = True
    cache_dtypes = CACHES

    @pytest.mark.parametrize("latent, rope", [(512, 64), (256, 64), (512, 0), (40, 8)])
    @pytest.mark.parametrize("heads", [1, 16, 20, 128])
    def test_items_and_splits(self, heads, latent, rope):
        """Of every size of row tile; sets of heads that are padded, and that read the same keys."""
        sizes = {"heads": heads, "kv_lora_rank": latent, "qk_rope_head_dim": rope, "dtype": "bfloat16"}
        for page_size in (1, 16, 64):
            batch = self.batch(15, page_size=page_size, **sizes, **LENGTHS)
            with few_programs():
                items, splits = plan_mla(batch.metadata, batch.pool, batch.spec, implementation="triton").work[:2]
                assert items > 2 * 4 and splits > 0
                self.check(batch)
                self.check(batch, batch_invariant=True)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_deepseek_in_every_type(self, dtype):
        sizes = {"heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "page_size": 64, "dtype": dtype}
        self.check(self.batch(18, scale=192**-0.5, **sizes))

    @pytest.mark.parametrize("rope_offset", [512, 576])
    def test_rows_of_other_systems(self, rope_offset):
        """Padded to 640, with NaN and infinity beside their parts."""
        for poison in (np.nan, np.inf):
            sizes = {"kv_lora_rank": 512, "row_width": 640, "rope_offset": rope_offset, "dtype": "bfloat16"}
            self.check(self.batch(16, poison=poison, layout="packed", qk_rope_head_dim=64, **sizes))

    @pytest.mark.parametrize("what", ["query", "key"])
    @pytest.mark.parametrize("kv_len", [5, 70, 9000])
    def test_nan_is_not_taken_for_no_key(self, what, kv_len):
        check_nan(self, what, kv_len)


class TestGQA(GQATests):
    implementation = "triton"
    kernel = True
    cache_dtypes = CACHES

    @pytest.mark.parametrize("heads, kv_heads", [(4, 4), (16, 4), (20, 4), (71, 1), (128, 1)])
    @pytest.mark.parametrize("window", [None, 100])
    def test_items_and_splits(self, heads, kv_heads, window):
        """Sets of heads that are padded, and several that read one KV head; with sinks too."""
        sizes = {"heads": heads, "kv_heads": kv_heads, "dtype": "bfloat16", "window": window}
        sinks = jnp.asarray(np.resize([1.5, -np.inf, np.inf, -2.0], heads), jnp.float32)
        for page_size in (1, 16, 64):
            batch = self.batch(15, page_size=page_size, **sizes, **LENGTHS)
            with few_programs():
                items, splits = plan_gqa(batch.metadata, batch.pool, batch.spec, implementation="triton").work[:2]
                assert items > 2 * 4 and (splits > 0) == (window is None)
                for invariant in (False, True):
                    self.check(batch, batch_invariant=invariant)
                    self.check(batch, sinks=sinks, batch_invariant=invariant)

    def make_batch(self, seed, **sizes):
        import helpers

        wide = (
            {}
            if sizes["dtype"] == "float32"
            else {"head_dim": max(64, sizes["head_dim"]), "v_head_dim": max(64, sizes["v_head_dim"])}
        )
        sizes = {**sizes, **wide, "dtype": jnp.dtype(sizes["dtype"])}
        return helpers.kv_batch(seed, **{**sizes, "kv_heads": 1} if sizes["heads"] % sizes["kv_heads"] else sizes)

    @pytest.mark.parametrize(
        "head_dim, v_head_dim", [(64, 128), (128, 64), (96, 96), (128, 128), (256, 256), (80, 200)]
    )
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_dims(self, head_dim, v_head_dim, dtype):
        """Also divided into KV splits."""
        sizes = {"kv_lens": [0, 1, 63, 64, 65, 1000, 130, 5000], "q_lens": [1] * 8, "max_q_len": 1, "most": 5000}
        dims = {"head_dim": head_dim, "v_head_dim": v_head_dim}
        self.check(self.batch(36, **dims, heads=16, kv_heads=4, dtype=dtype, page_size=16, **sizes))

    def test_prompt_parts(self):
        """More rows than a row tile has."""
        sizes = {"kv_lens": [100, 700, 64, 5], "q_lens": [100, 128, 64, 5], "max_q_len": 128, "most": 700}
        for window in (None, 90):
            self.check(self.batch(37, window=window, heads=8, dtype="bfloat16", page_size=16, **sizes))

    @pytest.mark.parametrize("what", ["query", "key"])
    @pytest.mark.parametrize("kv_len", [5, 70, 9000])
    def test_nan_is_not_taken_for_no_key(self, what, kv_len):
        check_nan(self, what, kv_len)


class TestRagged(RaggedTests):
    implementation = "triton"
    kernel = True

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("qk_dim, v_dim", [(64, 64), (128, 128), (192, 128), (96, 80), (256, 256)])
    def test_prompts(self, qk_dim, v_dim, dtype):
        """More rows than a tile has."""
        sizes = {"kv_lens": [700, 0, 70, 250], "q_lens": [300, 3, 64, 240], "max_q_len": 300, "max_kv_len": 700}
        dims = {"qk_dim": qk_dim, "v_dim": v_dim, "heads": 4, "kv_heads": 2}
        for rules in ({}, {"window": 100}, {"causal": False}):
            batch = self.batch(20, dtype=dtype, layout="packed", window=rules.get("window"), **dims, **sizes)
            self.check(batch, scale=qk_dim**-0.5, max_q_len=300, max_kv_len=700, **rules)


def check_nan(tests, what, kv_len):
    """In a row tile of its own, and through the merge: NaN in ``out`` and ``lse``, and in no other request."""
    batch = tests.batch(17, kv_lens=[kv_len, 9], q_lens=[1, 2], max_q_len=2, most=kv_len, page_size=16)
    first, pool = batch.queries[0], batch.pool
    name = "data" if hasattr(pool, "data") else "k"
    if what == "query":
        first = first.at[0].set(np.nan)
    else:
        page = pool.placement.physical_pages(batch.metadata.page_table[0, 0], batch.layer)
        pool = dataclasses.replace(pool, **{name: getattr(pool, name).at[page, 0].set(np.nan)})
    changed = dataclasses.replace(batch.with_queries(first, *batch.queries[1:]), pool=pool)
    out, lse = tests.attend(changed)
    want, want_lse = tests.attend(batch)
    assert np.isnan(np.asarray(out[0], np.float32)).all() and np.isnan(lse[0]).all()
    tests.same_bits((out[1:], lse[1:]), (want[1:], want_lse[1:]))
