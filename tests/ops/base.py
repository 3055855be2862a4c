"""The contract of ``mla_attention``, which every implementation subclasses: its op, its batches, its own sizes."""

import typing

import jax.numpy as jnp
import pytest

import helpers
from mla_attn.ops import mla, mla_attention
from ops import contract
from ops.contract import POISONS, supported


class MLA(contract.Contract):
    """The op, to subclass together with some of the mixins."""

    sizes: typing.ClassVar[dict] = {
        "heads": 2,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "page_size": 4,
        "dtype": "float32",
    }
    real_sizes: typing.ClassVar[dict] = {"heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    latents: tuple[tuple[int, int], ...] | None = None  # supported; None for any

    @staticmethod
    def op(queries, pool, metadata, spec, **options):
        return mla_attention(*queries, pool, metadata, spec, **options)

    def make_batch(self, seed, **sizes):
        return helpers.poisoned_batch(seed, **{**sizes, "dtype": jnp.dtype(sizes["dtype"])})

    def implementations(self):
        return mla.IMPLEMENTATIONS

    def described(self, batch, **options):
        return mla.MLACall.of(batch.pool, batch.spec, max_q_len=batch.metadata.max_q_len, **options)


class MLATests(
    MLA,
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

    @pytest.mark.parametrize("latent, rope", [(512, 64), (40, 0)])
    def test_latent_sizes(self, latent, rope):
        """DeepSeek's, and one without a rope part."""
        batch = self.batch(
            11,
            kv_lora_rank=latent,
            qk_rope_head_dim=rope,
            dtype="bfloat16",
            kv_lens=[65, 1, 130],
            q_lens=[1, 1, 2],
            page_size=64,
            heads=16,
            scale=192**-0.5,
            most=130,
        )
        served = supported((latent, rope), self.latents) and all(
            supported(*pair) for pair in (("bfloat16", self.dtypes), (64, self.page_sizes), (16, self.head_counts))
        )
        self.check(batch, served=served)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_blocks(self, dtype):
        """Rows of float8 latents in blocks of 128, with bfloat16 rope parts; with float8 queries too."""
        served = supported("float8_e4m3fn:blocks", self.cache_dtypes) and supported(dtype, self.dtypes)
        sizes = {"kv_lora_rank": 256, "cache": "float8_e4m3fn:blocks", "dtype": dtype, "layout": "packed"}
        batch = self.batch(45, **sizes)
        self.check(batch, served=served)
        if dtype == "bfloat16":
            self.check(helpers.quantized(batch), layer=2, served=served and self.float8_queries)
        if served:
            self.same_bits(*(self.attend(self.batch(45, **sizes, poison=p)) for p in POISONS.values()))
