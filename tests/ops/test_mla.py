"""``mla_attention``: the shared tests for each implementation."""

from typing import ClassVar

import pytest

import mla_attn.xla.mla
from ops.base import MLATests
from ops.lanes import shrink


class TestReference(MLATests):
    implementation = "reference"
    batch_invariant = False


class TestXLA(MLATests):
    """One lane, as on a CPU. Blocks and tiles are small, so that short requests have several."""

    implementation = "xla"
    block_keys, platform = 24, "cpu"
    quick_compiles: ClassVar[dict] = {"xla_backend_optimization_level": 0}

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        shrink(monkeypatch, mla_attn.xla.mla, block_keys=self.block_keys, platform=self.platform)


class TestXLALanes(TestXLA):
    """Several lanes, as on a GPU: requests, and tiles of one, are shared between lanes and merged."""

    block_keys, platform = 8, "default"
    batch_invariant = None
    # What lanes have no part in, TestXLA has tested.
    test_one_layer_read_by_a_number = test_layer_scanned_over = test_page_sizes = test_latent_sizes = None
    test_pages_of_a_shared_pool = test_result_types = test_out_dtype = test_batch_invariant = None
