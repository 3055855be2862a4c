"""``ragged_attention``: the shared tests for each implementation."""

from typing import ClassVar

import pytest

import mla_attn.xla.ragged
from ops.lanes import shrink
from ops.ragged_base import RaggedTests


class TestReference(RaggedTests):
    implementation = "reference"


class TestXLA(RaggedTests):
    """One lane, as on a CPU."""

    implementation = "xla"
    platform = "cpu"
    quick_compiles: ClassVar[dict] = {"xla_backend_optimization_level": 0}

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        shrink(monkeypatch, mla_attn.xla.ragged, block_keys=8, platform=self.platform)


class TestXLALanes(TestXLA):
    """Several lanes, as on a GPU."""

    platform = "default"
    # What lanes have no part in, TestXLA has tested.
    test_dims_of_deepseek = test_values_wider_than_keys = test_out_dtype = None
