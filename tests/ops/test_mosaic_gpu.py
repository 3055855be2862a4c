"""``mla_attention`` by the Hopper kernels: the shared tests, and what only they promise. On a GPU of its kind."""

import dataclasses
from typing import ClassVar

import jax
import numpy as np
import pytest

from mla_attn.dispatch import compiling_for, current_device
from mla_attn.mosaic_gpu import mla as mosaic_gpu
from mla_attn.ops import plan_mla
from ops.base import MLATests

pytestmark = pytest.mark.gpu


class TestMosaicGPU(MLATests):
    implementation = "mosaic_gpu"
    kernel = True
    sizes: ClassVar[dict] = {
        "heads": 16,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 64,
        "page_size": 16,
        "dtype": "bfloat16",
    }
    dtypes = ("bfloat16",)
    cache_dtypes, float8_queries = (), False
    latents = ((512, 64), (512, 0))
    window = soft_cap = sinks = False

    @staticmethod
    def choose_kernel(rows: int, **_) -> tuple[str, int]:
        """The kernel under test, in place of the choice by speed."""
        return "mla_decode", 64

    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch):
        if jax.devices()[0].compute_capability != "9.0":
            pytest.skip("needs compute capability 9.0")
        monkeypatch.setattr(mosaic_gpu, "choose_kernel", self.choose_kernel)

    @pytest.mark.parametrize("latent, rope", latents)
    @pytest.mark.parametrize("page_size", [1, 4, 8, 48, 128, 544])
    def test_every_way_to_copy_a_page(self, page_size, latent, rope):
        """Row by row, in pieces, and whole."""
        sizes = {"page_size": page_size, "kv_lora_rank": latent, "qk_rope_head_dim": rope, "layout": "packed"}
        self.check(self.batch(14, **sizes))

    @pytest.mark.parametrize("latent, rope, page_size", [(256, 64, 4), (512, 64, 64), (512, 0, 16)])
    def test_a_thread_block_takes_one_item_after_the_other(self, latent, rope, page_size):
        """Few blocks for a list of dozens: each loads its next item while one ends, whole or part of a split."""
        sizes = {
            "kv_lens": [3000, 0, 1, 64, 6, 65, 700, 128, 63, 1300, 130, 200, 40],
            "q_lens": [6, 1, 1, 0, 6, 4, 2, 5, 6, 1, 6, 3, 6],
            "most": 3000,
        }
        batch = self.batch(15, kv_lora_rank=latent, qk_rope_head_dim=rope, page_size=page_size, **sizes)
        with compiling_for(dataclasses.replace(current_device(), cores=8)):
            items, splits = plan_mla(batch.metadata, batch.pool, batch.spec, implementation="mosaic_gpu").work[:2]
            assert items > 2 * 8 and splits > 0
            self.check(batch)
            self.check(batch, batch_invariant=True)

    @pytest.mark.parametrize("page_size", [1, 16, 64])
    @pytest.mark.parametrize("rope_offset", [512, 576])
    def test_rows_of_other_systems(self, page_size, rope_offset):
        """Padded to 640, with NaN and infinity beside their parts."""
        for poison in (np.nan, np.inf):
            sizes = {"kv_lora_rank": 512, "row_width": 640, "rope_offset": rope_offset, "page_size": page_size}
            self.check(self.batch(16, poison=poison, layout="packed", **sizes))

    @pytest.mark.parametrize("what", ["query", "key"])
    @pytest.mark.parametrize("kv_len", [5, 70, 9000])
    def test_nan_is_not_taken_for_no_key(self, what, kv_len):
        """In a row tile of its own, and through the combine: NaN in ``out`` and ``lse``, and in no other request."""
        sizes = {"kv_lens": [kv_len, 9], "q_lens": [1, 2], "max_q_len": 2, "most": kv_len}
        batch = self.batch(17, **sizes)
        q_latent, pool = batch.q_latent, batch.pool
        if what == "query":
            q_latent = q_latent.at[0].set(np.nan)
        else:
            page = pool.placement.physical_pages(batch.metadata.page_table[0, 0], batch.layer)
            pool = dataclasses.replace(pool, data=pool.data.at[page, 0].set(np.nan))
        out, lse = self.attend(dataclasses.replace(batch, q_latent=q_latent, pool=pool))
        want, want_lse = self.attend(batch)
        assert np.isnan(np.asarray(out[0], np.float32)).all() and np.isnan(lse[0]).all()
        self.same_bits((out[1:], lse[1:]), (want[1:], want_lse[1:]))

    def test_scale_and_large_scores(self):
        """Scores of hundreds neither overflow nor lose the softmax: its weights are then 0 and 1."""
        batch = self.batch(12, scale=7.0, layout="packed")
        out, lse = self.attend(batch)
        want, want_lse, _ = batch.expected()
        assert np.abs(want_lse[np.isfinite(lse)]).max() > 100
        assert (np.isneginf(want_lse) == np.isneginf(lse)).all()
        np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=4e-2)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-4)


class TestFewRows(TestMosaicGPU):
    """Groups of 64 rows of mla_stream: the 48 of a request in the shared tests, of 6 query tokens."""

    sizes: ClassVar[dict] = {**TestMosaicGPU.sizes, "heads": 5}

    @staticmethod
    def choose_kernel(rows: int, *, batch_invariant: bool, **_) -> tuple[str, int]:
        return ("mla_stream" if rows <= 64 and not batch_invariant else "mla_decode"), 64


class TestTransposed(TestFewRows):
    """At most 32 rows a group, where products have keys first; here the 48 of a request are two groups."""

    @staticmethod
    def choose_kernel(rows: int, *, batch_invariant: bool, **_) -> tuple[str, int]:
        return ("mla_stream", min(rows, 32)) if rows <= 128 and not batch_invariant else ("mla_decode", 64)

    @pytest.mark.parametrize("heads", [8, 16, 24, 32, 128])
    def test_decode(self, heads):
        """As many rows as heads, on every kind of page."""
        sizes = {"kv_lens": [0, 1, 63, 64, 65, 1000, 130, 5000], "q_lens": [1] * 8, "max_q_len": 1, "most": 5000}
        for page_size in (1, 8, 64):
            self.check(self.batch(13, heads=heads, page_size=page_size, **sizes))
