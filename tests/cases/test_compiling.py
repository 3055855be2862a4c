"""C21: nothing compiles after warm-up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cases.paged import RANK, WIDTH, make_spec
from mla_attn import metadata as build
from mla_attn.buckets import Buckets, backend_compiles, ladder, warm_up
from mla_attn.cache import LatentPool
from mla_attn.models import DeepseekConfig, DeepseekForCausalLM
from mla_attn.ops import merge_states, mla_attention
from mla_attn.passes import SAMPLING, Passes, Shapes, zeros

BATCHES = ladder(4)
PAGE, TABLE, MAX_LEN = 4, 3, 12


def attention(*, sinks, spec):
    """Decode of one layer, with a sink per head or without; all requests' rows are the same."""

    def run(state, pool, x):
        metadata = build.for_decode(x["page_table"], x["lens"], page_size=PAGE, max_len=MAX_LEN)
        batch = x["lens"].shape[0]
        q_latent, q_rope = (
            jnp.broadcast_to(q, (batch, *q.shape[1:])) for q in (state["q"][..., :RANK], state["q"][..., RANK:])
        )
        out, lse = mla_attention(q_latent, q_rope, pool, metadata, spec, return_lse=True)
        if sinks:
            out, lse = merge_states([out], [lse], sinks=x["sinks"])
        return {"out": out, "lse": lse}, pool

    ints = {"page_table": (TABLE,), "lens": ()}
    rungs = [{name: jax.ShapeDtypeStruct((b, *tail), jnp.int32) for name, tail in ints.items()} for b in BATCHES]
    if sinks:
        rungs = [{**rung, "sinks": jax.ShapeDtypeStruct((spec.num_heads,), jnp.float32)} for rung in rungs]
    return Buckets("attention", run, rungs)


def test_c21_attention():
    """A bucket per batch size, with sinks and without: 300 random batches of 0 to 4 requests compile nothing."""
    backend_compiles()
    rng = np.random.default_rng(0)
    spec = make_spec(2)
    state = {"q": jnp.asarray(rng.standard_normal((1, 2, WIDTH), np.float32))}
    pool = LatentPool(jnp.asarray(rng.standard_normal((12, PAGE, WIDTH), np.float32)), 1, 12, RANK, 1, 12)
    buckets = {sinks: attention(sinks=sinks, spec=spec) for sinks in (False, True)}
    before = backend_compiles()
    warm_up(buckets.values(), state, pool, progress=False)
    assert backend_compiles() - before == 2 * len(BATCHES) == sum(b.compiles for b in buckets.values())
    before = backend_compiles()
    for _ in range(300):
        sinks, batch = bool(rng.integers(2)), rng.integers(max(BATCHES), endpoint=True)
        lens = rng.integers(MAX_LEN, size=batch, endpoint=True).astype(np.int32)
        inputs = {"page_table": rng.integers(12, size=(batch, TABLE), dtype=np.int32), "lens": lens}
        if sinks:
            inputs["sinks"] = rng.standard_normal(2).astype(np.float32)
        outputs, pool = buckets[sinks](state, pool, inputs)
        out = np.asarray(outputs["out"])
        assert len(out) == min(b for b in BATCHES if b >= batch)
        assert (out.any(axis=(1, 2)) == (np.pad(lens, (0, len(out) - batch)) > 0)).all()
    assert backend_compiles() == before
    assert not any(b.cold_compiles for b in buckets.values())


def test_c21_whole_model():
    """The passes of a model: 2 + 2 programs for two batch sizes, and none for any batch of them."""
    backend_compiles()
    config = DeepseekConfig.from_hf({
        "model_type": "deepseek_v3", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
        "q_lora_rank": None, "max_position_embeddings": 64, "n_routed_experts": None,
    })  # fmt: skip
    model = DeepseekForCausalLM(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    shapes = Shapes(batches=(1, 2), prompt_rows=(8,), table_width=TABLE, page_size=PAGE, max_len=MAX_LEN)
    passes = Passes(model, shapes)
    pools = model.create_pools(num_pages=2 * TABLE, page_size=PAGE)
    before = backend_compiles()
    warm_up([passes.prefill, passes.decode], passes.state, pools, progress=False)
    # One program for each pass, batch size and, in prompts, number of rows.
    assert backend_compiles() - before == len(shapes.batches) * len(shapes.prompt_rows) + len(shapes.batches)
    before, rng = backend_compiles(), np.random.default_rng(1)
    for _ in range(300):
        batch = rng.integers(2, endpoint=True)
        table = rng.permutation(2 * TABLE).reshape(2, TABLE)[:batch].astype(np.int32)
        shared = {"page_table": table, **zeros(SAMPLING, {"B": len(table)}, None)}
        if rng.random() < 0.3:
            q_lens = rng.integers(4, size=batch, endpoint=True).astype(np.int32)
            inputs = {"seq_lens": q_lens, "q_lens": q_lens, "prompt_tokens": np.zeros(q_lens.sum(), np.int32)}
            outputs, pools = passes.prefill(passes.state, pools, shared | inputs)
        else:
            lens = rng.integers(MAX_LEN, size=batch, endpoint=True).astype(np.int32)
            inputs = {"lens": lens, "active": rng.integers(2, size=batch, dtype=np.int32)}
            inputs["tokens"] = rng.integers(8, size=batch, dtype=np.int32)
            outputs, pools = passes.decode(passes.state, pools, shared | inputs)
        jax.block_until_ready(outputs)
    assert backend_compiles() == before


def test_c21_none_and_an_array():
    """An optional array that was absent at warm-up is an error that says so, not a compilation."""
    bucket = attention(sinks=False, spec=make_spec(2))
    pool = LatentPool(jnp.zeros((12, PAGE, WIDTH)), 1, 12, RANK, 1, 12)
    inputs = {
        "page_table": np.zeros((1, TABLE), np.int32),
        "lens": np.zeros(1, np.int32),
        "sinks": np.zeros(2, np.float32),
    }
    with pytest.raises(ValueError, match=r"inputs of 'attention' have structure .*'sinks'.*must be"):
        bucket({"q": jnp.zeros((1, 2, WIDTH))}, pool, inputs)
    assert bucket.compiles == 0
