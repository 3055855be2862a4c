"""Adapter to the paged attention kernel for absorbed MLA: values are the first channels of the keys."""

import dataclasses

import jax.numpy as jnp

from mla_attn.dispatch import Device
from mla_attn.triton import paged

_MOST_LATENT, _MOST_ROPE = 512, 64  # channels of both parts


def supports(call, device: Device) -> str | None:
    """The reason why the kernel does not support a call (``ops.mla.MLACall``), or None."""
    if (reason := paged.refuses(call, device)) is not None:
        return reason
    latent, rope = call.spec.kv_lora_rank, call.spec.qk_rope_head_dim
    if latent > _MOST_LATENT or rope > _MOST_ROPE:
        return f"latent {latent} + {rope}: must be at most {_MOST_LATENT} + {_MOST_ROPE}"
    return None


def plan_mla(metadata, pool, spec, *, causal, tree, batch_invariant, out_dtype):
    """Adds the work list of calls with these static arguments to the metadata; see ``ops.mla.plan_mla``."""
    del out_dtype  # the list is the same for any
    flags = {"causal": causal, "tree": tree, "batch_invariant": batch_invariant}
    launch = _launch(metadata, pool, spec, jnp.bfloat16, **flags)
    return dataclasses.replace(metadata, work=paged.work_of(metadata, launch), work_plan=launch)


def _heads(spec) -> paged.Heads:
    channels = {"dim": spec.latent_dim, "values": spec.kv_lora_rank, "shared_values": True}
    return paged.Heads(kv_heads=1, group=spec.num_heads, **channels)


def _launch(metadata, pool, spec, q_dtype, *, causal, tree, batch_invariant):
    flags = {"causal": causal, "tree": tree, "batch_invariant": batch_invariant}
    return paged.make_launch(metadata, pool, _heads(spec), q_dtype=q_dtype, window=spec.window, **flags)


def mla_attention(
    q_latent, q_rope, pool, metadata, layer, tree_mask, sinks, q_scale, *, spec, causal, batch_invariant, out_dtype
):
    """Launches the kernel and the merge of KV splits: ``(out [T, H, R] in out_dtype, lse float32 [T, H])``."""
    from mla_attn.pallas_kernels.triton.attention import Part

    if q_latent.shape[0] == 0 or metadata.q_lens.shape[0] == 0:
        return paged.nothing(q_latent.shape, out_dtype)
    flags = {"causal": causal, "tree": tree_mask is not None, "batch_invariant": batch_invariant}
    launch = _launch(metadata, pool, spec, q_latent.dtype, **flags)
    scale = pool.scale_of(layer)
    factors = paged.score_factors(q_latent.shape, q_scale, scale)
    _, page_size, width = pool.data.shape
    out, lse = paged.launch_kernel(
        (q_latent, q_rope), pool.data, None, pool, metadata, layer, tree_mask, sinks, factors,
        heads=_heads(spec), launch=launch, window=spec.window, out_dtype=out_dtype if scale is None else jnp.float32,
        scale=spec.scale, soft_cap=spec.soft_cap, rope_at=pool.rope_offset,
        k_part=Part(page=page_size * width, token=width), v_part=None,
    )  # fmt: skip
    return out if scale is None else (out * scale).astype(out_dtype), lse
