"""Adapter to the paged attention kernel for GQA: layouts of keys and values, and scales of KV heads."""

import dataclasses
import math

import jax.numpy as jnp

from mla_attn.dispatch import Device
from mla_attn.triton import paged

_LAYOUTS = ("nhd", "hnd", "interleaved", "shuffled")
_MOST_CHANNELS = 256


def supports(call, device: Device) -> str | None:
    """The reason why the kernel does not support a call (``ops.gqa.GQACall``), or None."""
    if (reason := paged.refuses(call, device)) is not None:
        return reason
    if call.layout not in _LAYOUTS:
        return f"layout={call.layout!r}: must be {', '.join(_LAYOUTS)}"
    for name in ("head_dim", "v_head_dim"):
        if (dim := getattr(call.spec, name)) > _MOST_CHANNELS:
            return f"{name}={dim}: must be at most {_MOST_CHANNELS}"
    return None


def plan_gqa(metadata, pool, spec, *, causal, tree, batch_invariant, out_dtype):
    """Adds the work list of calls with these static arguments to the metadata; see ``ops.gqa.plan_gqa``."""
    del out_dtype  # the list is the same for any
    flags = {"causal": causal, "tree": tree, "batch_invariant": batch_invariant}
    launch = _launch(metadata, pool, spec, jnp.bfloat16, **flags)
    return dataclasses.replace(metadata, work=paged.work_of(metadata, launch), work_plan=launch)


def _heads(spec) -> paged.Heads:
    channels = {"dim": spec.head_dim, "values": spec.v_head_dim, "shared_values": False}
    return paged.Heads(kv_heads=spec.num_kv_heads, group=spec.num_heads // spec.num_kv_heads, **channels)


def _launch(metadata, pool, spec, q_dtype, *, causal, tree, batch_invariant):
    flags = {"causal": causal, "tree": tree, "batch_invariant": batch_invariant}
    return paged.make_launch(metadata, pool, _heads(spec), q_dtype=q_dtype, window=spec.window, **flags)


def gqa_attention(q, pool, metadata, layer, tree_mask, sinks, q_scale, *, spec, causal, batch_invariant, out_dtype):
    """Launches the kernel and the merge of KV splits: ``(out [T, H, V], lse float32 [T, H])``."""
    shape = (*q.shape[:2], spec.v_head_dim)
    if q.shape[0] == 0 or metadata.q_lens.shape[0] == 0:
        return paged.nothing(shape, out_dtype)
    flags = {"causal": causal, "tree": tree_mask is not None, "batch_invariant": batch_invariant}
    launch = _launch(metadata, pool, spec, q.dtype, **flags)
    scales = pool.scales_of(layer)
    k_scale, v_scale = (None, None) if scales is None else (_of_query_heads(x, spec) for x in scales)
    k_part, v_part = _parts(pool)
    group = pool.k.shape[-1] if pool.layout == "shuffled" else 0
    out, lse = paged.launch_kernel(
        (q,), pool.k, pool.arrays[-1], pool, metadata, layer, tree_mask, sinks,
        paged.score_factors(shape, q_scale, k_scale),
        heads=_heads(spec), launch=launch, window=spec.window, out_dtype=out_dtype if v_scale is None else jnp.float32,
        scale=spec.scale, soft_cap=spec.soft_cap, k_part=k_part, v_part=v_part, group=group,
    )  # fmt: skip
    return out if v_scale is None else (out * v_scale[..., None]).astype(out_dtype), lse


def _of_query_heads(scale, spec):
    """Repeats the scales [K] of KV heads for the query heads that read them, [1, H]; a scale [] becomes [1, 1]."""
    return scale.reshape(1, 1) if scale.ndim == 0 else jnp.repeat(scale, spec.num_heads // spec.num_kv_heads)[None]


def _parts(pool):
    """Where keys and values lie in the pool's arrays."""
    from mla_attn.pallas_kernels.triton.attention import Part

    def part(array, first=0):
        heads, width = pool.num_kv_heads, array.shape[-1]
        if pool.layout == "shuffled":
            token = width if array is pool.k else width * array.shape[3]
            return Part(page=math.prod(array.shape[1:]), token=token, head=math.prod(array.shape[2:]))
        if pool.layout == "hnd":
            token, head = width, pool.page_size * width
        else:
            head = width * (2 if pool.layout == "interleaved" else 1)
            token = heads * head
        return Part(page=math.prod(array.shape[1:]), token=token, head=head, first=first)

    if pool.layout == "interleaved":
        return part(pool.k), part(pool.k, pool.k.shape[-1])
    return part(pool.k), part(pool.v)
