"""What calls hand to Triton, traced as for a GPU of any architecture on a machine without one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import helpers
from mla_attn.dispatch import Device, compiling_for
from mla_attn.metadata import RaggedMetadata
from mla_attn.ops import gqa_attention, mla_attention, ragged_attention
from mla_attn.triton import gpus

# A10, A100, L40S, H200, half of an MI250X, MI300X, MI355X.
DEVICES = {
    "sm_80": Device("gpu", "8.0", 108),
    "sm_86": Device("gpu", "8.6", 72),
    "sm_89": Device("gpu", "8.9", 142),
    "sm_90": Device("gpu", "9.0", 132),
    "gfx90a": Device("gpu", cores=104, arch="gfx90a"),
    "gfx942": Device("gpu", cores=304, arch="gfx942"),
    "gfx950": Device("gpu", cores=256, arch="gfx950"),
}

_VERIFY = {"q_lens": [16, 16], "max_q_len": 16}
# What differs from a decode call of 128 heads with 512 + 64 channels, and from one of 32 heads over 8 with 128.
MLA_CALLS = {
    "decode": {},
    "16 heads": {"heads": 16},
    "20 heads, pages of 1": {"heads": 20, "page_size": 1},
    "32 heads, tree": {"heads": 32, "q_lens": [4, 4], "max_q_len": 4, "tree": 6},
    "tree, window": {"q_lens": [4, 4], "max_q_len": 4, "tree": 6, "window": 60},
    "256 + 64, cap, sinks": {"kv_lora_rank": 256, "soft_cap": 30.0, "sinks": True},
    "40 + 0, not causal": {"kv_lora_rank": 40, "qk_rope_head_dim": 0, "causal": False, "heads": 3},
    "float16": {"dtype": jnp.dtype("float16")},
    "float32": {"dtype": jnp.dtype("float32")},
    "float8": {"cache": "float8_e4m3fn"},
    "float8, 16 heads": {"cache": "float8_e5m2", "heads": 16},
}
GQA_CALLS = {
    "decode": {},
    "verify": _VERIFY,
    "64, window, sinks": {"heads": 64, "head_dim": 64, "v_head_dim": 64, "window": 128, "sinks": True},
    "64, verify": {"heads": 64, "head_dim": 64, "v_head_dim": 64, **_VERIFY},
    "256": {"head_dim": 256, "v_head_dim": 256},
    "256, verify": {"head_dim": 256, "v_head_dim": 256, **_VERIFY},
    "128 over 1, pages of 1, hnd": {"heads": 128, "kv_heads": 1, "page_size": 1, "pool_layout": "hnd"},
    "shuffled": {"pool_layout": "shuffled"},
    "float32, 256": {"dtype": jnp.dtype("float32"), "head_dim": 256, "v_head_dim": 256},
    "float8, shuffled": {"cache": "float8_e4m3fn", "pool_layout": "shuffled"},
    "float8, 256, verify": {"cache": "float8_e4m3fn", "head_dim": 256, "v_head_dim": 256, **_VERIFY},
}
# The same of a prompt of 32 heads over 8 with 128 channels.
RAGGED_CALLS = {
    "prompt": {},
    "192 and 128, not causal": {"qk_dim": 192, "causal": False},
    "64, window, cap": {"qk_dim": 64, "v_dim": 64, "window": 100, "soft_cap": 30.0},
    "256": {"qk_dim": 256, "v_dim": 256},
    "short prompts": {"max_q_len": 9},
    "float16": {"dtype": "float16"},
    "float32, 192 and 128": {"qk_dim": 192, "dtype": "float32"},
    "float32, 256": {"qk_dim": 256, "v_dim": 256, "dtype": "float32"},
    "float8, 192 and 128": {"qk_dim": 192, "stored": "float8_e4m3fn"},
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch: ``kernel`` and ``target``, and the other arguments of ``triton_code.compiled``."""

    kernel: Any
    target: str
    options: dict[str, Any]


def mla_launches(target: str, *, tree=0, sinks=False, causal=True, **sizes) -> list[Launch]:
    """The launches of a call of ``mla_attention``."""
    shapes = {"heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "page_size": 64}
    batch = helpers.poisoned_batch(0, **{**shapes, **_LENGTHS, **sizes})
    return _launches(mla_attention, target, batch, tree, sinks, causal)


def gqa_launches(target: str, *, tree=0, sinks=False, causal=True, **sizes) -> list[Launch]:
    """The launches of a call of ``gqa_attention``."""
    shapes = {"heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "page_size": 16}
    batch = helpers.kv_batch(0, **{**shapes, **_LENGTHS, **sizes})
    return _launches(gqa_attention, target, batch, tree, sinks, causal)


_LENGTHS = {"kv_lens": [65, 1000], "q_lens": [1, 1], "dtype": jnp.dtype("bfloat16")}


def ragged_launches(
    target: str, *, qk_dim=128, v_dim=128, dtype="bfloat16", stored=None, max_q_len=512, **rules
) -> list[Launch]:
    """The launches of a call of ``ragged_attention``."""
    shapes = (((1024, 32, qk_dim), dtype), ((1024, 8, qk_dim), stored or dtype), ((1024, 8, v_dim), stored or dtype))
    ints = {name: jnp.zeros(2, jnp.int32) for name in ("q_starts", "q_lens", "kv_starts", "kv_lens")}
    metadata = RaggedMetadata(**ints, max_q_len=max_q_len, max_kv_len=512)
    arrays = (*(jax.ShapeDtypeStruct(*x) for x in shapes), metadata)
    return _traced(target, lambda *a: ragged_attention(*a, scale=0.1, implementation="triton", **rules), *arrays)


def _launches(op, target, batch, tree, sinks, causal) -> list[Launch]:
    m = batch.metadata
    mask = jnp.ones((m.q_lens.shape[0], m.max_q_len, tree), bool) if tree else None
    options = {"sinks": jnp.ones(batch.out_shape[1]) if sinks else None, "tree_mask": mask, "causal": causal}

    def call(queries, pool, metadata):
        return op(*queries, pool, metadata, batch.spec, implementation="triton", **options)

    return _traced(target, call, batch.queries, batch.pool, m)


def _traced(target, call, *arrays) -> list[Launch]:
    from mla_attn.pallas_kernels.triton import attention, prefill

    made: list[Launch] = []

    def record(kernel, arrays, outs, *, target, warps, stages, constants, **_):
        options = {"dtypes": tuple(x.dtype.name for x in (*arrays, *outs)), "warps": warps, "stages": stages}
        made.append(Launch(kernel, target, options | {"constants": dict(constants)}))
        return [jnp.zeros(out.shape, out.dtype) for out in outs]

    def update(kernels, arrays, updated, **options):
        record(kernels[0], arrays, updated, **options)
        return list(updated)

    with pytest.MonkeyPatch.context() as patch, compiling_for(DEVICES[target]):
        patch.setattr(gpus, "missing", lambda: None)
        patch.setattr(attention, "triton_call", record)
        patch.setattr(attention, "triton_update", update)
        patch.setattr(prefill, "triton_call", record)
        jax.clear_caches()  # of calls that were traced before
        jax.eval_shape(call, *arrays)
    return made
