"""Calls of the paged ops that the Hopper kernels serve, to lower and to compile without a GPU."""

import contextlib
import functools
import time
import types

import jax
import jax.numpy as jnp
import pytest
from jax._src.lib.mlir import ir

import helpers
from mla_attn.dispatch import compiling_for
from mla_attn.metadata import RaggedMetadata
from mla_attn.mosaic_gpu.hopper import refuses
from mla_attn.ops import gqa_attention, mla_attention, plan_gqa, plan_mla, ragged_attention
from mla_attn.support import H200

# The oldest jax that the library runs on has not all that its kernels need.
needs_kernels = pytest.mark.skipif(refuses(H200) is not None, reason=f"no kernel on an H200: {refuses(H200)}")

# What differs from a decode call of 16 heads, 512 + 64 channels, pages of 64.
CALLS = {
    "decode": {},
    "decode, 128 heads": {"heads": 128},
    "decode, 128 heads, few keys": {"heads": 128, "kv_lens": [65, 300]},
    "decode, 64 heads": {"heads": 64},
    "decode, 20 heads": {"heads": 20},
    "decode, 24 heads": {"heads": 24},
    "decode, 32 heads": {"heads": 32},
    "decode, 3 heads": {"heads": 3},
    "verify": {"max_q_len": 4},
    "verify, 128 heads": {"heads": 128, "max_q_len": 4},
    "verify, 20 heads": {"heads": 20, "max_q_len": 3},
    "tree": {"max_q_len": 4, "tree": 4},
    "tree, 8 heads": {"heads": 8, "max_q_len": 4, "tree": 37},
    "tree of earlier steps, 128 heads": {"heads": 128, "max_q_len": 4, "tree": 37},
    "not causal": {"max_q_len": 4, "causal": False},
    "strided": {"max_q_len": 4, "kv_stride": 3, "page_stride": 5, "layer_stride": 2, "num_layers": 3},
    "256 + 64": {"kv_lora_rank": 256},
    "256 + 64, 128 heads": {"kv_lora_rank": 256, "heads": 128},
    "512 + 0": {"qk_rope_head_dim": 0},
    "512 + 0, 128 heads": {"qk_rope_head_dim": 0, "heads": 128},
    "pages of 1": {"page_size": 1},
    "pages of 1, 128 heads": {"page_size": 1, "heads": 128},
    "pages of 8": {"page_size": 8},
    "pages of 8, 128 heads": {"page_size": 8, "heads": 128},
    "pages of 16": {"page_size": 16},
    "pages of 48, 128 heads": {"page_size": 48, "heads": 128},
    "pages of 128": {"page_size": 128},
    "batch invariant": {"batch_invariant": True},
    "batch invariant, 128 heads": {"batch_invariant": True, "heads": 128, "max_q_len": 4},
    "float32 result": {"out_dtype": jnp.float32},
    "rows of 640": {"row_width": 640, "rope_offset": 512},
    "rows of 640, 128 heads, pages of 1": {"row_width": 640, "rope_offset": 576, "heads": 128, "page_size": 1},
    "float8": {"cache": "float8_e4m3fn"},
    "float8, 128 heads": {"cache": "float8_e4m3fn", "heads": 128},
    "float8, tree, 24 heads, pages of 1": {"cache": "float8_e4m3fn", "heads": 24, "tree": 4, "page_size": 1},
    "float8_e5m2, 8 heads, 256 + 64, queries too": {
        "cache": "float8_e5m2",
        "heads": 8,
        "kv_lora_rank": 256,
        "quantized": True,
    },
    "float8 blocks": {"cache": "float8_e4m3fn:blocks"},
    "float8 blocks, 128 heads": {"cache": "float8_e4m3fn:blocks", "heads": 128, "batch_invariant": True},
    "float8 blocks, pages of 8, 512 + 0": {
        "cache": "float8_e4m3fn:blocks",
        "page_size": 8,
        "qk_rope_head_dim": 0,
        "quantized": True,
    },
}

# The same, several at a time: few programs, for a short test.
MIXED = {
    "decode, 128 heads": CALLS["decode, 128 heads"],
    "tree, 20 heads, pages of 16, float32 result": {
        "heads": 20,
        "max_q_len": 4,
        "tree": 37,
        "page_size": 16,
        "out_dtype": jnp.float32,
    },
    "invariant verify, 64 heads, 512 + 0, pages of 48": {
        "heads": 64,
        "max_q_len": 4,
        "batch_invariant": True,
        "qk_rope_head_dim": 0,
        "page_size": 48,
    },
    "tree, 4 heads, pages of 1": {"heads": 4, "max_q_len": 4, "tree": 37, "page_size": 1},
    "rows of 640": {"row_width": 640, "rope_offset": 576, "heads": 128},
    "strided, not causal, 3 heads, 256 + 64, pages of 128": {
        "heads": 3,
        "kv_lora_rank": 256,
        "kv_stride": 3,
        "page_stride": 5,
        "layer_stride": 2,
        "num_layers": 3,
        "causal": False,
        "page_size": 128,
    },
    "float8, tree, 20 heads, pages of 16, float32 result": {
        "cache": "float8_e4m3fn",
        "heads": 20,
        "max_q_len": 4,
        "tree": 37,
        "page_size": 16,
        "out_dtype": jnp.float32,
    },
    "float8 blocks and queries, invariant verify, 3 heads, pages of 1": {
        "cache": "float8_e4m3fn:blocks",
        "quantized": True,
        "heads": 3,
        "max_q_len": 4,
        "batch_invariant": True,
        "page_size": 1,
    },
}

# The same of ``gqa_attention``: what differs from a decode call of 32 heads over 8, 128 channels, pages of 64.
GQA_CALLS = {
    "GQA: decode": {},
    "GQA: verify, 64 channels, pages of 16": {"heads": 64, "head_dim": 64, "max_q_len": 4, "page_size": 16},
    "GQA: sinks, window": {"heads": 64, "head_dim": 64, "window": 128, "sinks": True},
    "GQA: prompt parts, tree": {"max_q_len": 64, "tree": 70},
    "GQA: 256 channels": {"head_dim": 256},
    "GQA: interleaved, pages of 1": {"pool_layout": "interleaved", "page_size": 1},
    "GQA: hnd, one head, float16, invariant": {
        "heads": 6,
        "kv_heads": 1,
        "pool_layout": "hnd",
        "dtype": jnp.float16,
        "out_dtype": jnp.float32,
        "batch_invariant": True,
        "v_head_dim": 64,
        "max_q_len": 3,
    },
    "GQA: strided, not causal, cap": {
        "kv_stride": 3,
        "page_stride": 5,
        "layer_stride": 2,
        "num_layers": 3,
        "causal": False,
        "soft_cap": 30.0,
    },
}

GQA_CALLS |= {
    "GQA: float8": {"cache": "float8_e4m3fn"},
    "GQA: float8, 64 channels, sinks, pages of 1": {
        "cache": "float8_e5m2",
        "heads": 64,
        "head_dim": 64,
        "sinks": True,
        "page_size": 1,
    },
    "GQA: float8, 256 channels, prompt parts, tree": {
        "cache": "float8_e4m3fn",
        "head_dim": 256,
        "max_q_len": 64,
        "tree": 70,
    },
    "GQA: float8, one head": {"cache": "float8_e4m3fn", "heads": 8, "kv_heads": 1, "pool_layout": "hnd"},
    "GQA: 8 heads over 8, sinks": {"heads": 8, "sinks": True},
    "GQA: 142 heads over 2, tree, window": {"heads": 142, "kv_heads": 2, "max_q_len": 3, "tree": 5, "window": 70},
}

# Calls of ``ragged_attention``: what differs from a causal one of 8 heads, 192 and 128 channels.
PROMPT_CALLS = {
    "prompts": {},
    "prompts: 16 heads over 2, 128 channels": {"heads": 16, "kv_heads": 2, "qk_dim": 128},
    "prompts: 64 channels, not causal": {"qk_dim": 64, "v_dim": 64, "causal": False, "return_lse": True},
    "prompts: sinks, window, cap, float16": {
        "qk_dim": 128,
        "window": 300,
        "sinks": True,
        "soft_cap": 30.0,
        "dtype": jnp.float16,
        "out_dtype": jnp.float32,
        "batch_invariant": True,
    },
}

NOTHING = {
    "no requests": {"kv_lens": [], "q_lens": [], "num_rows": 3, "layout": "packed"},
    "no rows": {"kv_lens": [0, 0], "q_lens": [0, 0], "num_rows": 0, "layout": "packed"},
}


def make_gqa(*, tree=0, sinks=False, causal=True, batch_invariant=False, out_dtype=None, **sizes):
    """What ``make`` returns, of ``gqa_attention``."""
    defaults = {
        "kv_lens": [65, 8500],
        "q_lens": [1, 1],
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "page_size": 64,
        "dtype": jnp.bfloat16,
    }
    batch = helpers.kv_batch(0, **{**defaults, **sizes})
    spec, shared = batch.spec, {"causal": causal, "implementation": "mosaic_gpu", "batch_invariant": batch_invariant}

    def plan(pool, metadata):
        return plan_gqa(metadata, pool, spec, tree=tree > 0, sinks=sinks, **shared)

    def attend(pool, metadata, layer, q):
        shape = (metadata.q_lens.shape[0], metadata.max_q_len, tree)
        return gqa_attention(
            q,
            pool,
            metadata,
            spec,
            layer=layer,
            tree_mask=jnp.ones(shape, bool) if tree else None,
            sinks=jnp.zeros(spec.num_heads) if sinks else None,
            out_dtype=out_dtype,
            return_lse=not sinks,
            **shared,
        )

    return plan, attend, (batch.pool, batch.metadata, jnp.int32(0), batch.q)


def make(*, tree=0, causal=True, batch_invariant=False, out_dtype=None, quantized=False, **sizes):
    """``(plan, attend, arguments)``: functions of the arrays of a batch; ``attend`` takes what ``plan`` returns."""
    defaults = {
        "kv_lens": [65, 8500],
        "q_lens": [1, 1],
        "heads": 16,
        "page_size": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "dtype": jnp.bfloat16,
    }
    batch = helpers.poisoned_batch(0, **{**defaults, **sizes})
    batch = helpers.quantized(batch) if quantized else batch
    spec, shared = batch.spec, {"causal": causal, "implementation": "mosaic_gpu", "batch_invariant": batch_invariant}

    def plan(pool, metadata):
        planned_for = jnp.bfloat16 if out_dtype is None else out_dtype
        q_dtype = batch.q_latent.dtype
        return plan_mla(metadata, pool, spec, tree=tree > 0, out_dtype=planned_for, q_dtype=q_dtype, **shared)

    def attend(pool, metadata, layer, q_latent, q_rope):
        shape = (metadata.q_lens.shape[0], metadata.max_q_len, tree)
        return mla_attention(
            q_latent,
            q_rope,
            pool,
            metadata,
            spec,
            layer=layer,
            tree_mask=jnp.ones(shape, bool) if tree else None,
            q_scale=batch.q_scale,
            out_dtype=out_dtype,
            return_lse=True,
            **shared,
        )

    return plan, attend, (batch.pool, batch.metadata, jnp.int32(0), batch.q_latent, batch.q_rope)


def make_prompts(
    *, heads=8, kv_heads=8, qk_dim=192, v_dim=128, dtype=jnp.bfloat16, tokens=1000, requests=3, sinks=False,
    return_lse=False, **options,
):  # fmt: skip
    """``(attend, arguments)`` of ``ragged_attention``; the arguments are abstract."""
    X, numbers = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((requests,), jnp.int32)

    def attend(q, k, v, *places):
        names = ("q_starts", "q_lens", "kv_starts", "kv_lens")
        metadata = RaggedMetadata(**dict(zip(names, places, strict=True)), max_q_len=tokens, max_kv_len=tokens)
        given = jnp.zeros(heads) if sinks else None
        shared = {"scale": 0.1, "sinks": given, "return_lse": return_lse, "implementation": "mosaic_gpu"}
        return ragged_attention(q, k, v, metadata, **shared, **options)

    shapes = ((heads, qk_dim), (kv_heads, qk_dim), (kv_heads, v_dim))
    return attend, (*(X((tokens, *shape), dtype) for shape in shapes), *[numbers] * 4)


def scanned(num_layers=3):
    """``(scan, arguments)``: one list for all layers, and the stacked results of each."""
    plan, attend, (pool, metadata, _, *queries) = make(num_layers=num_layers)

    def scan(pool, metadata, *queries):
        planned, layers = plan(pool, metadata), jnp.arange(num_layers)
        return jax.lax.scan(lambda _, layer: (None, attend(pool, planned, layer, *queries)), None, layers)[1]

    return scan, (pool, metadata, *queries)


def lower(function, *arguments) -> jax.stages.Lowered:
    """The function for an H200."""
    with compiling_for(H200):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


@contextlib.contextmanager
def counted_operations():
    """Collects in a list how many operations layouts are inferred for, of each kernel that is lowered meanwhile."""
    from jax.experimental.mosaic.gpu import core

    counts, infer = [], core.layout_inference.infer_layout

    def counted(module, **options):
        seen = []

        def see(operation):
            seen.append(operation.name)
            inlined = operation.name == "mosaic_gpu.custom_primitive"
            return ir.WalkResult.SKIP if inlined else ir.WalkResult.ADVANCE

        module.operation.walk(see, ir.WalkOrder.PRE_ORDER)
        counts.append(len(seen))
        return infer(module, **options)

    core.layout_inference.infer_layout = counted
    try:
        yield counts
    finally:
        core.layout_inference.infer_layout = infer


def lowering_seconds(function, *arguments) -> tuple[float, jax.stages.Lowered]:
    """Processor seconds to trace and lower, and what came of it."""
    begin = time.process_time()
    lowered = lower(function, *arguments)
    return time.process_time() - begin, lowered


@functools.cache
def attention_seconds() -> float:
    """What JAX's own attention for Hopper takes in this process: the least of three, after one for the imports."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(block_q=64, block_kv=64, max_concurrent_steps=2)
    array = jax.ShapeDtypeStruct((2, 1024, 8, 128), jnp.float16)
    before = attention_mgpu.cuda_versions
    attention_mgpu.cuda_versions = types.SimpleNamespace(cuda_runtime_get_version=lambda: 13000)  # there is no GPU
    try:
        run = [lowering_seconds(lambda *x: attention_mgpu.attention(*x, config), array, array, array) for _ in range(4)]
    finally:
        attention_mgpu.cuda_versions = before
    return min(seconds for seconds, _ in run[1:])
