"""The paged ops by the Hopper kernels: the shared tests, and what only they promise. On a GPU of its kind."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import float8
import helpers
from mla_attn.cache import LatentPool
from mla_attn.dispatch import compiling_for, current_device
from mla_attn.metadata import RaggedMetadata, for_decode
from mla_attn.mosaic_gpu import gqa as gqa_adapter
from mla_attn.mosaic_gpu import mla as mosaic_gpu
from mla_attn.ops import mla_attention, plan_gqa, plan_mla, plan_ragged, ragged_attention
from mla_attn.specs import MLASpec
from ops import contract
from ops.base import MLATests
from ops.contract import POISONS
from ops.gqa_base import GQA, GQATests
from ops.ragged_base import RaggedTests

pytestmark = pytest.mark.gpu


def check_large_scores(tests):
    """Scores of hundreds neither overflow nor lose the softmax: its weights are then 0 and 1."""
    batch = tests.batch(12, scale=7.0, layout="packed")
    out, lse = tests.attend(batch)
    want, want_lse, _ = batch.expected()
    assert np.abs(want_lse[np.isfinite(lse)]).max() > 100
    assert (np.isneginf(want_lse) == np.isneginf(lse)).all()
    np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=4e-2)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4)


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
            nan = np.nan if pool.data.dtype != jnp.uint8 else np.uint8(0x7F)
            pool = dataclasses.replace(pool, data=pool.data.at[page, 0].set(nan))
        out, lse = self.attend(dataclasses.replace(batch, q_latent=q_latent, pool=pool))
        want, want_lse = self.attend(batch)
        assert np.isnan(np.asarray(out[0], np.float32)).all() and np.isnan(lse[0]).all()
        self.same_bits((out[1:], lse[1:]), (want[1:], want_lse[1:]))

    def test_scale_and_large_scores(self):
        check_large_scores(self)


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


class TestFloat8(TestMosaicGPU):
    """All of it over a float8 cache; the 96 rows of a request are three groups."""

    sizes: ClassVar[dict] = {**TestMosaicGPU.sizes, "cache": "float8_e4m3fn"}
    cache_dtypes, float8_queries = ("float8_e4m3fn", "float8_e5m2"), True

    @pytest.mark.parametrize("cache", ["float8_e4m3fn", None])
    def test_float8_queries(self, cache):
        """Not of a bfloat16 cache."""
        if cache is not None:
            super().test_float8_queries(cache)
        else:
            self.check(helpers.quantized(self.batch(42, cache=None)), served=False)

    @pytest.mark.parametrize("page_size", [1, 16, 64])
    @pytest.mark.parametrize("latent, rope", [(512, 64), (512, 0)])
    def test_blocks_on_every_page(self, page_size, latent, rope):
        """Rows of 656 and 528 bytes, copied in every way."""
        sizes = {"kv_lora_rank": latent, "qk_rope_head_dim": rope, "cache": "float8_e4m3fn:blocks"}
        make = functools.partial(self.batch, 45, layout="packed", page_size=page_size, most=700, **sizes)
        self.check(make())
        self.check(helpers.quantized(make()), layer=2)
        self.check(make(), batch_invariant=True)
        self.same_bits(*(self.attend(make(poison=p)) for p in POISONS.values()))

    @pytest.mark.parametrize("cache", ["float8_e4m3fn", "float8_e5m2"])
    def test_every_code(self, cache):
        """All 256, each as key and value of a request of its own; NaN and infinity give NaN."""
        codes = np.arange(256, dtype=np.uint8)
        rows = np.zeros((256, 1, 320), np.uint8)
        rows[..., :256] = codes[:, None, None]
        want = codes.view(getattr(ml_dtypes, cache)).astype(np.float32)
        spec = MLASpec(num_heads=8, kv_lora_rank=256, qk_rope_head_dim=64, scale=1.0)
        pool = LatentPool.of(jnp.asarray(rows), kv_lora_rank=256, rope_dim=64, dtype=cache)
        table, lens = jnp.arange(256, dtype=jnp.int32)[:, None], jnp.ones(256, jnp.int32)
        q = np.zeros((256, 8, 320), np.float32)
        q[:, 0, 5] = 2.0**-8
        q = jnp.asarray(q, jnp.bfloat16)
        options = {"return_lse": True, "implementation": "mosaic_gpu", "out_dtype": jnp.float32}
        metadata = for_decode(table, lens, page_size=1)
        out, lse = mla_attention(q[..., :256], q[..., 256:], pool, metadata, spec, **options)
        finite = np.isfinite(want)
        np.testing.assert_array_equal(np.asarray(out[:, 0])[finite], np.repeat(want[finite, None], 256, axis=1))
        np.testing.assert_allclose(lse[:, 0][finite], want[finite] * 2.0**-8, rtol=1e-6, atol=1e-30)
        assert np.isnan(out[:, 0][~finite]).all() and np.isnan(lse[:, 0][~finite]).all()

    @pytest.mark.parametrize("cache", ["float8_e4m3fn", "float8_e4m3fn:blocks"])
    @pytest.mark.parametrize("heads", [8, 16, 24, 32, 128])
    def test_decode(self, heads, cache):
        """As many rows as heads, on every kind of page."""
        sizes = {"kv_lens": [0, 1, 63, 64, 65, 1000, 130, 5000], "q_lens": [1] * 8, "max_q_len": 1, "most": 5000}
        for page_size in (1, 8, 64):
            self.check(self.batch(13, heads=heads, page_size=page_size, kv_lora_rank=512, cache=cache, **sizes))


class HopperGQA(GQA):
    """The kernels of GQA, two KV heads a thread block, four query heads in all."""

    # What TMA cannot copy is gathered: pages of less than 8, and the interleaved layout of the shared tests, in rows of
    # 136 elements.
    implementation = "mosaic_gpu"
    kernel = True
    sizes: ClassVar[dict] = {**GQATests.sizes, "head_dim": 128, "v_head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
    dtypes, float8_queries = ("bfloat16", "float16"), False
    cache_dtypes = ("float8_e4m3fn", "float8_e5m2")
    layouts = ("nhd", "hnd", "interleaved")
    choose_kernel = staticmethod(gqa_adapter.choose_kernel)

    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch):
        if jax.devices()[0].compute_capability != "9.0":
            pytest.skip("needs compute capability 9.0")
        monkeypatch.setattr(gqa_adapter, "choose_kernel", self.choose_kernel)

    def make_batch(self, seed, **sizes):
        dims = {name: sizes[name] for name in ("head_dim", "v_head_dim")}
        sizes = {**sizes, "dtype": jnp.dtype(sizes["dtype"])}
        return helpers.kv_batch(seed, **{**sizes, **dims, "kv_heads": 1 if sizes["heads"] % 2 else sizes["kv_heads"]})


class TestGQA(HopperGQA, GQATests):
    """Rows of products are columns, most of nobody; but in calls of more than 32 rows."""

    def test_scale_and_large_scores(self):
        check_large_scores(self)

    def test_groups(self):  # of shapes that the shared test does not let be wide
        for heads, kv_heads in ((6, 1), (7, 7), (32, 8), (64, 1), (142, 2)):
            for cache in (None, "float8_e4m3fn"):
                sizes = {"heads": heads, "kv_heads": kv_heads, "kv_lens": [9, 300], "q_lens": [2, 1], "cache": cache}
                self.check(self.batch(35, most=300, **sizes))

    def test_sinks_of_divided_groups(self):
        """71 query heads of a KV head are two sets of 36, one head of which is nobody's."""
        sizes = {"heads": 142, "kv_heads": 2, "kv_lens": [9, 300], "q_lens": [2, 1], "most": 300}
        self.check(self.batch(38, **sizes), sinks=jnp.linspace(-2.0, 4.0, 142, dtype=jnp.float32))

    @pytest.mark.parametrize("pool_layout", ["hnd", "interleaved"])
    def test_float8_layouts(self, pool_layout):
        """Rows of 136 bytes, which interleaved pools of the shared tests have, are no multiple of 16."""
        batch = self.batch(36, pool_layout=pool_layout, cache="float8_e5m2")
        self.check(batch, layer=2, served=pool_layout == "hnd")
        if pool_layout == "interleaved":
            narrow = dataclasses.replace(batch.pool, k=batch.pool.k[..., :128])
            self.check(dataclasses.replace(batch, pool=narrow), layer=2)

    @pytest.mark.parametrize("cache", ["float8_e4m3fn", "float8_e5m2"])
    def test_every_code(self, cache):
        """Each finite code as a value of a request with one key, which is its result, and as a channel of the key."""
        numbers = np.arange(256, dtype=np.uint8).view(jnp.dtype(cache)).astype(np.float32).reshape(2, 128)
        numbers = np.where(np.isfinite(numbers), numbers, 0)
        batch = self.batch(39, cache=cache, kv_lens=[1, 1], q_lens=[1, 1], max_q_len=1)
        page = batch.pool.placement.physical_pages(batch.metadata.page_table[:, 0], 0)
        codes = jnp.asarray(np.broadcast_to(float8.codes(numbers, cache)[:, None], (2, 2, 128)))
        scales = {"k_scale": jnp.ones(()), "v_scale": jnp.ones(())}
        k, v = (x.at[page, 0].set(codes) for x in batch.pool.arrays)
        pool = dataclasses.replace(batch.pool, k=k, v=v, **scales)
        for channel in range(0, 128, 5):
            q = jnp.zeros_like(batch.q).at[:, :, channel].set(1)
            out, lse = self.attend(dataclasses.replace(batch, q=q, pool=pool), layer=0)
            assert (np.asarray(out, np.float32) == numbers[:, None]).all()
            np.testing.assert_allclose(lse, numbers[:, [channel] * 4] * batch.spec.scale, rtol=1e-6)

    @pytest.mark.parametrize("head_dim, v_head_dim", [(64, 128), (128, 64), (128, 128), (128, 256), (256, 256)])
    @pytest.mark.parametrize("cache", [None, "float8_e4m3fn"])
    def test_dims(self, head_dim, v_head_dim, cache):
        """Also divided into KV splits."""
        sizes = {"kv_lens": [0, 1, 63, 64, 65, 1000, 130, 5000], "q_lens": [1] * 8, "max_q_len": 1, "most": 5000}
        dims = {"head_dim": head_dim, "v_head_dim": v_head_dim, "cache": cache}
        self.check(self.batch(36, heads=16, kv_heads=4, **dims, **sizes))

    @pytest.mark.parametrize("pool_layout", ["nhd", "hnd", "interleaved"])
    @pytest.mark.parametrize("page_size", [1, 4, 8, 48, 64, 128, 544])
    def test_every_way_to_copy_a_page(self, page_size, pool_layout):
        """Row by row, in pieces, and whole; bytes too."""
        sizes = {"layout": "packed", "page_size": page_size, "pool_layout": pool_layout}
        self.check(self.batch(14, **sizes))
        if pool_layout != "interleaved":
            for dim in (64, 128):
                self.check(self.batch(14, head_dim=dim, v_head_dim=dim, cache="float8_e4m3fn", **sizes))

    def test_rows_of_other_systems(self):
        """Padded to 128, which TMA takes, with NaN and infinity beside keys and values."""
        batch = self.batch(16, page_size=64, layout="packed", head_dim=64, v_head_dim=64)
        for poison in (np.nan, np.inf):
            k, v = (jnp.pad(x, ((0, 0),) * 3 + ((0, 64),), constant_values=poison) for x in batch.pool.arrays)
            pools = {
                "nhd": (k, v),
                "hnd": (k.swapaxes(1, 2), v.swapaxes(1, 2)),
                "interleaved": (jnp.stack([k, v], 3), None),
            }
            for pool_layout, (k, v) in pools.items():
                pool = dataclasses.replace(batch.pool, k=k, v=v, layout=pool_layout)
                self.check(dataclasses.replace(batch, pool=pool))

    @pytest.mark.parametrize("window", [None, 100])
    @pytest.mark.parametrize("cache", [None, "float8_e4m3fn"])
    @pytest.mark.parametrize("page_size, head_dim", [(4, 64), (64, 128), (16, 256)])
    def test_a_thread_block_takes_one_item_after_the_other(self, page_size, head_dim, cache, window):
        """Few blocks for a list of dozens: each loads its next item while one ends, whole or part of a split."""
        sizes = {
            "kv_lens": [3000, 0, 1, 64, 6, 65, 700, 128, 63, 1300, 130, 200, 40],
            "q_lens": [6, 1, 1, 0, 6, 4, 2, 5, 6, 1, 6, 3, 6],
            "most": 3000,
        }
        sizes = {**sizes, "head_dim": head_dim, "v_head_dim": head_dim, "page_size": page_size, "window": window}
        batch = self.batch(15, heads=16, cache=cache, **sizes)
        sinks = jnp.asarray(np.resize([1.5, -np.inf, np.inf, -2.0], 16), jnp.float32)
        with compiling_for(dataclasses.replace(current_device(), cores=8)):
            items, splits = plan_gqa(batch.metadata, batch.pool, batch.spec, implementation="mosaic_gpu").work[:2]
            assert items > 2 * 8 and (splits > 0) == (window is None)
            for invariant in (False, True):
                self.check(batch, batch_invariant=invariant)
                self.check(batch, sinks=sinks, batch_invariant=invariant)

    def test_prompt_parts(self):
        """More rows than a row tile has: 64 tokens of 4 heads are four."""
        sizes = {"kv_lens": [100, 700, 64, 5], "q_lens": [100, 128, 64, 5], "max_q_len": 128, "most": 700}
        for cache in (None, "float8_e4m3fn"):
            for window in (None, 90):
                self.check(self.batch(37, window=window, heads=8, cache=cache, **sizes))

    @pytest.mark.parametrize("what", ["query", "key"])
    @pytest.mark.parametrize("kv_len", [5, 70, 9000])
    def test_nan_is_not_taken_for_no_key(self, what, kv_len):
        """In a row tile of its own, and through the combine: NaN in ``out`` and ``lse``, and in no other request."""
        batch = self.batch(17, kv_lens=[kv_len, 9], q_lens=[1, 2], max_q_len=2, most=kv_len)
        q, pool = batch.q, batch.pool
        if what == "query":
            q = q.at[0].set(np.nan)
        else:
            page = pool.placement.physical_pages(batch.metadata.page_table[0, 0], batch.layer)
            pool = dataclasses.replace(pool, k=pool.k.at[page, 0].set(np.nan))
        out, lse = self.attend(dataclasses.replace(batch, q=q, pool=pool))
        want, want_lse = self.attend(batch)
        assert np.isnan(np.asarray(out[0], np.float32)).all() and np.isnan(lse[0]).all()
        self.same_bits((out[1:], lse[1:]), (want[1:], want_lse[1:]))


class TestGQARowsFirst(
    HopperGQA, contract.Lengths, contract.Poison, contract.Softmax, contract.Visibility, contract.Trees
):
    """The kernel of many rows, for few: most rows of products are of nobody."""

    @staticmethod
    def choose_kernel(tile_rows: int, *, float8: bool, **_) -> str:
        return "gqa_stream" if float8 else "gqa_decode"

    @pytest.mark.parametrize("head_dim, v_head_dim", [(64, 128), (128, 64), (256, 256)])
    def test_dims(self, head_dim, v_head_dim):
        """With sinks, of query heads of which KV heads have as many, or parts."""
        for heads, kv_heads in ((8, 2), (4, 4), (142, 2)):
            sizes = {"heads": heads, "kv_heads": kv_heads, "kv_lens": [9, 300], "q_lens": [2, 1], "most": 300}
            batch = self.batch(39, head_dim=head_dim, v_head_dim=v_head_dim, **sizes)
            self.check(batch, sinks=jnp.linspace(-2.0, 4.0, heads, dtype=jnp.float32))


class TestGQAXLA(GQA, contract.Layers, contract.Softmax, contract.Visibility, contract.Float8, contract.Trees):
    """What other GPUs run, in float32 and over caches of float8."""

    implementation = "xla"
    batch_invariant = False


class TestMosaicGPUPrompts(RaggedTests):
    implementation = "mosaic_gpu"
    kernel = True
    test_float8 = test_values_wider_than_keys = None  # refused

    @pytest.fixture(autouse=True)
    def hopper(self):
        if jax.devices()[0].compute_capability != "9.0":
            pytest.skip("needs compute capability 9.0")

    def batch(self, seed, **changes):
        changes["dtype"] = {"float32": "bfloat16"}.get(changes.get("dtype", "float32"), changes.get("dtype"))
        return super().batch(seed, **{"qk_dim": 64, "v_dim": 64, **changes})

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("qk_dim, v_dim", [(64, 64), (128, 128), (192, 128)])
    def test_tiles(self, qk_dim, v_dim, dtype):
        """Around the ends of row tiles and of key tiles, with keys longer and shorter than queries."""
        places = {"q_lens": [130, 0, 64, 128, 257, 1, 63], "kv_lens": [130, 7, 300, 129, 200, 700, 1]}
        sizes = {"qk_dim": qk_dim, "v_dim": v_dim, "heads": 6, "kv_heads": 2, "max_q_len": 257, "max_kv_len": 700}
        batch = self.batch(21, **places, **sizes, layout="packed", dtype=dtype)
        bounds = {"max_q_len": 257, "max_kv_len": 700, "scale": qk_dim**-0.5}
        for rules in ({}, {"causal": False}, {"soft_cap": 0.8}):
            self.check(batch, **bounds, **rules)
        for window in (1, 70, 128, 300):
            self.check(self.batch(22, **places, **sizes, layout="packed", window=window), window=window, **bounds)

    def test_sinks(self):
        places = {"q_lens": [130, 3], "kv_lens": [300, 9], "heads": 4, "max_q_len": 130, "max_kv_len": 300}
        batch = self.batch(23, **places, layout="packed")
        sinks = jnp.asarray([1.5, -np.inf, np.inf, -2.0], jnp.float32)
        metadata = RaggedMetadata(**batch.places, max_q_len=130, max_kv_len=300)
        out, want = (
            ragged_attention(batch.q, batch.k, batch.v, metadata, scale=0.125, sinks=sinks, implementation=name)
            for name in ("mosaic_gpu", "xla")
        )
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out, want)), atol=2e-2)

    def test_a_request_has_the_same_bits_alone(self):
        sizes = {"heads": 4, "kv_heads": 2, "max_q_len": 200, "max_kv_len": 500}
        batch = self.batch(24, q_lens=[200, 77, 130], kv_lens=[500, 77, 400], **sizes, layout="packed")

        def attend(places):
            metadata = RaggedMetadata(**places, max_q_len=200, max_kv_len=500)
            return ragged_attention(
                batch.q, batch.k, batch.v, metadata, scale=0.1, return_lse=True, batch_invariant=True,
                implementation="mosaic_gpu",
            )  # fmt: skip

        together = attend(batch.places)
        for n in range(3):
            alone = attend({name: place.at[:].set(0).at[n].set(place[n]) for name, place in batch.places.items()})
            rows = slice(int(batch.places["q_starts"][n]), int(batch.places["q_starts"][n] + batch.places["q_lens"][n]))
            for a, b in zip(alone, together, strict=True):
                assert np.array_equal(np.asarray(a[rows], np.float32), np.asarray(b[rows], np.float32))

    def test_a_planned_call(self):
        batch = self.batch(25, layout="packed")
        metadata = RaggedMetadata(**batch.places, max_q_len=6, max_kv_len=40)
        planned = plan_ragged(metadata, batch.q, batch.k, batch.v, implementation="mosaic_gpu")
        assert planned.work is not None
        results = [ragged_attention(batch.q, batch.k, batch.v, m, scale=0.2) for m in (metadata, planned)]
        assert np.array_equal(*(np.asarray(out, np.float32) for out in results))
