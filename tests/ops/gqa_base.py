"""The contract of ``gqa_attention``, which every implementation subclasses: its op, its batches, its own sizes."""

import typing

import jax.numpy as jnp
import pytest

import helpers
from mla_attn.ops import gqa, gqa_attention
from ops import contract
from ops.contract import supported


class GQA(contract.Contract):
    """The op, to subclass together with some of the mixins."""

    sizes: typing.ClassVar[dict] = {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "v_head_dim": 12,
        "page_size": 4,
        "dtype": "float32",
    }
    real_sizes: typing.ClassVar[dict] = {"heads": 16, "kv_heads": 2, "head_dim": 64, "v_head_dim": 64}

    @staticmethod
    def op(queries, pool, metadata, spec, **options):
        return gqa_attention(*queries, pool, metadata, spec, **options)

    def make_batch(self, seed, **sizes):
        # Rows of 12 channels are too short for bfloat16's tolerance of the cosine.
        wide = {} if sizes["dtype"] == "float32" else {"head_dim": 64, "v_head_dim": 64}
        sizes = {**sizes, **wide, "dtype": jnp.dtype(sizes["dtype"])}
        return helpers.kv_batch(seed, **{**sizes, "kv_heads": 1} if sizes["heads"] % sizes["kv_heads"] else sizes)

    def implementations(self):
        return gqa.IMPLEMENTATIONS

    def described(self, batch, **options):
        return gqa.GQACall.of(batch.pool, batch.spec, max_q_len=batch.metadata.max_q_len, **options)


class GQATests(
    GQA,
    contract.Lengths,
    contract.Layers,
    contract.Poison,
    contract.Sizes,
    contract.Softmax,
    contract.Visibility,
    contract.Results,
    contract.Float8,
    contract.Trees,
    contract.Invariance,
):
    """All of the contract."""

    layouts: tuple[str, ...] | None = None  # supported; None for any

    @pytest.mark.parametrize("pool_layout", ["hnd", "interleaved", "shuffled"])
    def test_layouts(self, pool_layout):
        """Of page strides too, and in rows wider than D and V, with NaN beside them."""
        sizes = {"page_stride": 5, "layer_stride": 2}
        served = supported(pool_layout, self.layouts) and self.strides
        self.check(self.laid_out(33, pool_layout, **sizes), layer=2, served=served)

    @pytest.mark.parametrize("pool_layout", ["hnd", "interleaved", "shuffled"])
    def test_float8_layouts(self, pool_layout):
        served = supported(pool_layout, self.layouts) and supported("float8_e5m2", self.cache_dtypes)
        self.check(self.laid_out(36, pool_layout, cache="float8_e5m2"), layer=2, served=served)

    def laid_out(self, seed, pool_layout, **sizes):
        """A batch in pages that the layout can have: in the shuffled one of 16 tokens, as many as 16 bytes hold."""
        pages = {"page_size": 16} if pool_layout == "shuffled" else {}
        return self.batch(seed, **sizes, **pages, pool_layout=pool_layout)

    def test_float16(self):
        self.check(self.batch(34, dtype="float16"), served=supported("float16", self.dtypes))

    @pytest.mark.parametrize("heads, kv_heads", [(6, 1), (7, 7), (32, 8)])
    def test_groups(self, heads, kv_heads):
        served = supported(heads, self.head_counts)
        self.check(self.batch(35, heads=heads, kv_heads=kv_heads, kv_lens=[9, 3], q_lens=[2, 1]), served=served)
