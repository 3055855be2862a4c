"""``ragged_attention``: the shared tests for each implementation, and the errors of the op."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import made, zeros
from mla_attn.metadata import RaggedMetadata
from mla_attn.ops import ragged, ragged_attention
from ops.lanes import shrink
from ops.ragged_base import RaggedTests, ragged_batch


class TestReference(RaggedTests):
    implementation = "reference"


class TestXLA(RaggedTests):
    """One lane, as on a CPU."""

    implementation = "xla"
    max_lanes = 1

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        shrink(monkeypatch, ragged, block_keys=8, max_lanes=self.max_lanes)


class TestXLALanes(TestXLA):
    """Several lanes, as on a GPU."""

    max_lanes = 256
    # What lanes have no part in, TestXLA has tested.
    test_heads_share_keys_in_groups = test_dims_of_deepseek = test_values_wider_than_keys = None
    test_soft_cap = test_out_dtype = None


@pytest.fixture
def call(unchecked):
    """Runs a right call of two requests with some arguments changed."""
    batch = ragged_batch(0, kv_lens=[5, 9], q_lens=[1, 2])

    def run(*, metadata=None, **changes):
        metadata = RaggedMetadata(**{**batch.places, "max_q_len": 6, "max_kv_len": 40, **made(metadata or {})})
        arguments = {"q": batch.q, "k": batch.k, "v": batch.v, "metadata": metadata, "scale": 0.2, **made(changes)}
        return jax.eval_shape(functools.partial(ragged_attention, **arguments))

    return run


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_wide_integers_and_strict_promotion(implementation):
    """Of ``jax_enable_x64``: no intermediate takes a wider type than the arrays."""
    batch = ragged_batch(0, kv_lens=[5, 9], q_lens=[1, 2])
    arrays = batch.q, batch.k, batch.v, RaggedMetadata(**batch.places, max_q_len=6, max_kv_len=40)
    attend = functools.partial(ragged_attention, scale=0.3, return_lse=True, implementation=implementation)
    want = attend(*arrays)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        assert not re.search(r"\b[fi]64\[\d", str(jax.make_jaxpr(attend)(*arrays)))
        got = attend(*arrays)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_narrow_static_sizes(dtype):
    """NumPy's: ``-(-6 // 4)`` of an unsigned integer is none."""
    batch = ragged_batch(0, kv_lens=[5, 9], q_lens=[1, 2])
    arrays, attend = (batch.q, batch.k, batch.v), functools.partial(ragged_attention, scale=0.3)
    want, got = (
        jax.make_jaxpr(attend)(*arrays, RaggedMetadata(**batch.places, max_q_len=kind(6), max_kv_len=kind(40)))
        for kind in (int, dtype)
    )
    assert str(got) == str(want)


def test_the_call_without_changes_is_right(call):
    assert call().shape == (12, 4, 16)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": zeros(12, 4, 25)}, r"q has shape \(12, 4, 25\), must be \(12, 4, 24\)"),
        ({"causal": "False"}, "causal='False' must be True or False"),
        ({"return_lse": [True]}, r"return_lse=\[True\] must be True or False"),
        ({"q": zeros(12, 24)}, r"q has shape \(12, 24\), must be \[T, H, D\]"),
        ({"k": zeros(80, 48)}, r"k has shape \(80, 48\), must be \[Tk, K, D\]"),
        ({"v": zeros(80, 32)}, r"v has shape \(80, 32\), must be \[Tk, K, V\]"),
        ({"v": zeros(79, 2, 16)}, r"v has shape \(79, 2, 16\), must be \(80, 2, 16\)"),
        ({"q": zeros(12, 5, 24)}, "q has 5 heads, must be a multiple of k's 2"),
        ({"k": zeros(80, 0, 24), "v": zeros(80, 0, 16)}, "q has 4 heads, must be a multiple of k's 0"),
        ({"k": zeros(80, 2, 24, dtype=int)}, "k has dtype int32, must be a floating"),
        ({"v": zeros(80, 2, 16, dtype=jnp.bfloat16)}, "v has dtype bfloat16, must be k's float32"),
        ({"metadata": {"q_lens": zeros(3, dtype=int)}}, r"metadata.q_starts has shape \(2,\), must be \(3,\)"),
        ({"metadata": {"kv_lens": zeros(3, dtype=int)}}, r"metadata.kv_lens has shape \(3,\), must be \(2,\)"),
        ({"metadata": {"kv_starts": zeros(2)}}, "metadata.kv_starts has dtype float32, must be int32"),
        ({"metadata": {"max_q_len": 0}}, "metadata.max_q_len=0 must be an integer from 1 to 2147483647"),
        ({"metadata": {"max_kv_len": 0}}, "metadata.max_kv_len=0 must be an integer from 1 to 2147483647"),
        ({"scale": float("nan")}, "scale=nan must be a finite number above 0"),
        ({"scale": 0.0}, "scale=0.0 must be a finite number above 0"),
        ({"window": 0}, "window=0 must be an integer from 1 to 2147483647"),
        ({"window": 2, "causal": False}, "window=2 with causal=False"),
        ({"soft_cap": 0.0}, r"soft_cap=0.0 must be a finite number above 0 and of at most 1e\+30"),
        ({"soft_cap": float("nan")}, "soft_cap=nan must be a finite number above 0"),
        (
            {"q": zeros(12, 4, 24, dtype=jnp.float8_e5m2)},
            "q has dtype float8_e5m2, must be a floating dtype of at least 16",
        ),
        ({"k_scale": 0.5}, "k_scale= with an operand of float32: must be None"),
        (
            {"q": zeros(12, 4, 24, dtype=jnp.float8_e4m3fn), "v_scale": 0.5},
            "v_scale= with an operand of float32: must be",
        ),
        (
            {"q": zeros(12, 4, 24, dtype=jnp.float8_e4m3fn), "q_scale": zeros(1)},
            r"q_scale has shape \(1,\), must be \[\]",
        ),
        ({"k": zeros(80, 2, 24, dtype=jnp.float8_e5m2)}, "k has dtype float8_e5m2, must be a floating dtype of at"),
        ({"v": zeros(80, 2, 16, dtype=jnp.float8_e4m3)}, "v has dtype float8_e4m3, must be a floating dtype of at"),
        ({"out_dtype": jnp.float8_e4m3fn}, "out_dtype=float8_e4m3fn must be a floating dtype"),
        ({"scale": "0.1"}, "scale='0.1' must be a finite number above 0"),
        ({"metadata": {"max_q_len": 6.0}}, "metadata.max_q_len=6.0 must be an integer from 1 to"),
        ({"out_dtype": jnp.int8}, "out_dtype=int8 must be a floating dtype"),
        ({"implementation": "cuda"}, "implementation='cuda' must be one of mosaic_gpu, triton, xla, reference"),
    ],
)
def test_errors(call, change, message):
    with pytest.raises(ValueError, match=message):
        call(**change)
