"""float32 means float32 throughout: every product of the traced model, those inside the attention ops included."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from checkpoints import V2, V3
from mla_attn import metadata as build
from mla_attn.models import DeepseekConfig, DeepseekForCausalLM, layers
from mla_attn.models.deepseek import GROUP

PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
MODES = ["prefill", "extend", "decode", "target_verify", "draft_extend", "draft_decode"]


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def trace(folder, mode, dtype):
    """The jaxpr of a pass with everything a model has: layers, head and, where there is one, the draft layer."""
    config = DeepseekConfig.from_hf(json.loads((folder / "config.json").read_text()))
    config = dataclasses.replace(config, num_hidden_layers=2)
    model = nnx.eval_shape(lambda: DeepseekForCausalLM(config, dtype=dtype, rngs=nnx.Rngs(0)))
    pools = jax.eval_shape(lambda: model.create_pools(num_pages=8, page_size=4))
    graph, state = nnx.split(model)

    def run(state, pools, table, tokens, lengths):
        model = nnx.merge(graph, state)
        metadata = build.for_extend(table, lengths, jnp.ones_like(lengths), max_q_len=1, page_size=4)
        metadata = {GROUP: metadata}
        hidden, pools = model(tokens, pools, metadata, mode=mode)
        out = [model.logits(hidden)]
        if config.num_nextn_predict_layers:
            drafted, pools = model.draft(hidden, tokens, pools, metadata, mode=mode)
            out.append(model.draft_logits(drafted))
        return out, pools

    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 4), (2,), (2,))]
    traced = jax.jit(run).trace(state, pools, *ints)
    return traced, list(equations(traced.jaxpr.jaxpr))


@pytest.mark.parametrize("folder", [V3, V2], ids=["v3", "v2"])
@pytest.mark.parametrize("mode", MODES)
def test_float32_throughout(folder, mode):
    _, found = trace(folder, mode, jnp.float32)
    products = [equation for equation in found if equation.primitive.name in PRODUCTS]
    # Per layer: projections, absorption or expansion, scores and values, the MLP or the router and three ragged ones.
    assert len(products) > 25
    assert sum(equation.primitive.name == "ragged_dot_general" for equation in products) == (6 if folder == V3 else 3)
    highest = jax.lax.Precision.HIGHEST
    for equation in products:
        assert equation.params["precision"] in (highest, (highest, highest)), equation
        assert {v.aval.dtype for v in equation.invars[:2] + equation.outvars} == {jnp.dtype(jnp.float32)}, equation
    # Nothing is rounded on the way either, inputs and outputs of the whole program included.
    for equation in found:
        for variable in equation.outvars:
            dtype = getattr(variable.aval, "dtype", None)
            assert dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype == jnp.float32, equation


def test_ragged_products_are_lowered_at_the_same_precision():
    """JAX lowers ragged_dot to something else, which must not forget the precision."""
    text = trace(V3, "decode", jnp.float32)[0].lower().as_text()
    lines = [line for line in text.splitlines() if "dot_general" in line or "ragged_dot" in line]
    assert len(lines) > 25
    assert not [line for line in lines if line.count("HIGHEST") != 2]


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_bfloat16_accumulates_in_float32(mode):
    _, found = trace(V3, mode, jnp.bfloat16)
    products = [equation for equation in found if equation.primitive.name in PRODUCTS]
    # Products with W_UK and W_UV are asked for in bfloat16: XLA on CPUs with bf16 units refuses them in float32. Their
    # sums are float32 all the same.
    by_head = [e for e in products if any(v.aval.shape == (4, 64, 512) for v in e.invars)]
    assert len(by_head) == 2 * 3
    others = [equation for equation in products if equation not in by_head]
    assert {v.aval.dtype for equation in others for v in equation.outvars} == {jnp.dtype(jnp.float32)}
    routers = [equation for equation in products if equation.invars[1].aval.shape == (192, 8)]
    assert len(routers) == 2
    for equation in routers:
        assert {v.aval.dtype for v in equation.invars} == {jnp.dtype(jnp.float32)}
        assert equation.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("equation", ["thd,hdr->thr", "thr,hvr->thv"])
def test_bfloat16_products_by_head_run(equation, rows):
    """On every CPU: with float32 output XLA compiled some of them for CPUs with bf16 units, and failed when run."""
    heads, small, rank = 16, 32, 512
    inner = small if equation.startswith("thd") else rank
    x, kernel = jnp.ones((rows, heads, inner), jnp.bfloat16), jnp.ones((heads, small, rank), jnp.bfloat16)
    out = jax.jit(lambda x, kernel: layers.einsum(equation, x, kernel))(x, kernel)
    assert out.dtype == jnp.bfloat16 and (out == inner).all()
