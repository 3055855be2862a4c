"""What is changed in JAX: it saves time, and nothing else becomes of a kernel."""

import re

import jax
import pytest

from kernel_calls import GQA_CALLS, MIXED, lower, make, make_gqa, needs_kernels
from mla_attn.dispatch import compiling_for
from mla_attn.pallas_kernels.mosaic_gpu import jax_workarounds
from mla_attn.support import H200

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(
        jax.__version__ not in jax_workarounds.VERSIONS, reason=f"nothing is changed in jax {jax.__version__}"
    ),
]


@pytest.mark.parametrize(
    "name",
    [
        "strided, not causal, 3 heads, 256 + 64, pages of 128",
        "GQA: decode",
        pytest.param("decode, 128 heads", marks=pytest.mark.slow),
    ],
)
def test_layouts_are_those_that_jax_infers_alone(name, monkeypatch):
    from jax.experimental.mosaic.gpu import layout_inference

    short, full = layout_inference.infer_layout, layout_inference.infer_layout.__wrapped__

    def kernels(infer) -> list[str]:
        texts = []

        def kept(module, **options):
            infer(module, **options)
            texts.append(re.sub(r'mosaic_gpu.dump_basename = "\w+"', "", str(module)))

        monkeypatch.setattr(layout_inference, "infer_layout", kept)
        plan, attend, (pool, metadata, *rest) = (
            make_gqa(**GQA_CALLS[name]) if name in GQA_CALLS else make(**MIXED[name])
        )
        with compiling_for(H200):
            planned = jax.eval_shape(plan, pool, metadata)
        lower(lambda *arguments: attend(*arguments), pool, planned, *rest)
        return texts

    found = kernels(short)
    assert len(found) == 2
    assert found == kernels(full)


def test_other_kernels_keep_their_names():
    from jax._src.lib.mlir import ir
    from jax.experimental.mosaic.gpu import layout_inference

    seen = []
    infer = jax_workarounds._with_numbers(lambda _: seen.append(dict(getattr(jax_workarounds._own, "numbers", {}))))
    with ir.Context() as context:
        context.allow_unregistered_dialects = True
        for name, expected in (("theirs", {}), ("mla_decode", {"builtin.module": 0, "x.y": 1})):
            infer(ir.Module.parse(f'module @{name} {{ "x.y"() : () -> () }}'))
            assert {operation.name: number for operation, number in seen.pop().items()} == expected
    assert not hasattr(jax_workarounds._own, "numbers")
    assert layout_inference.infer_layout.__wrapped__


def test_other_versions_of_jax_stay_as_they_are(monkeypatch):
    from jax.experimental.mosaic.gpu import layout_inference

    monkeypatch.setattr(layout_inference, "infer_layout", before := object())
    monkeypatch.setattr(jax_workarounds, "VERSIONS", ())
    jax_workarounds.install()
    assert layout_inference.infer_layout is before
