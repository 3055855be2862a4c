"""``mla_attention`` by the Hopper kernels: the shared tests, and what only they promise. On a GPU of its kind."""

from typing import ClassVar

import jax
import numpy as np
import pytest

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
    page_sizes = (16, 48, 64)
    latents = ((512, 64),)
    window = soft_cap = False

    @pytest.fixture(autouse=True)
    def hopper(self):
        if jax.devices()[0].compute_capability != "9.0":
            pytest.skip("needs compute capability 9.0")

    def test_scale_and_large_scores(self):
        """Scores of hundreds neither overflow nor lose the softmax: its weights are then 0 and 1."""
        batch = self.batch(12, scale=7.0, layout="packed")
        out, lse = self.attend(batch)
        want, want_lse, _ = batch.expected()
        assert np.abs(want_lse[np.isfinite(lse)]).max() > 100
        assert (np.isneginf(want_lse) == np.isneginf(lse)).all()
        np.testing.assert_allclose(np.asarray(out, np.float32), want, atol=4e-2)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-4)
