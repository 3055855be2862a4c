"""The adapter to the kernel of prompts: ``supports``, and the arrays and the work list that it takes."""

import dataclasses

import jax.numpy as jnp

from mla_attn.dispatch import Device, current_device
from mla_attn.mosaic_gpu import hopper
from mla_attn.pallas_kernels.prompt_list import PromptPlan, prompt_list

_DTYPES = ("bfloat16", "float16")
_DIMS = ((192, 128), (128, 128), (64, 64))
_NEAR_BYTES = 32 * 2**20  # of keys and values that thread blocks read at the same time: they stay in L2


def supports(call, device: Device) -> str | None:
    """The reason why the kernel does not support a call (``ops.ragged.RaggedCall``), or None."""
    if (reason := hopper.refuses(device)) is not None:
        return reason
    if call.dtype.name not in _DTYPES:
        return f"{call.dtype.name} keys: must be {' or '.join(_DTYPES)}"
    if call.q_dtype == jnp.float8_e4m3fn:
        return "float8_e4m3fn queries: must be of at least 16 bits"
    if call.skip:
        return "skip_threshold: must be None"
    if (call.qk_dim, call.v_dim) not in _DIMS:
        return f"dims {call.qk_dim}/{call.v_dim}: must be {', '.join(f'{d}/{v}' for d, v in _DIMS)}"
    return None


def near_heads(num_keys: int, heads: int, kv_heads: int, row_bytes: int) -> int:
    """Heads whose units run at the same time: as many as have room for their keys and values in L2.

    Args:
        num_keys: packed keys.
        heads, kv_heads: query heads H, a multiple of key heads K.
        row_bytes: bytes of a key and its value.
    """
    room = max(_NEAR_BYTES // max(num_keys * row_bytes, 1), 1)
    sets = max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= room)
    return sets * (heads // kv_heads)


def plan_ragged(metadata, q, k, *, causal, window):
    """The metadata with the work list of calls with these static arguments; as ``ops.ragged.plan_ragged``."""
    plan = _plan(metadata, q, k, causal, window)
    return dataclasses.replace(metadata, work=_work(metadata, plan), work_plan=plan)


def _plan(m, q, k, causal: bool, window: int | None) -> PromptPlan:
    return PromptPlan(
        num_requests=m.q_lens.shape[0],
        num_tokens=q.shape[0],
        num_keys=k.shape[0],
        max_q_len=m.max_q_len,
        max_kv_len=m.max_kv_len,
        causal=causal,
        window=window,
    )


def _work(m, plan: PromptPlan):
    if m.work_plan == plan:
        return m.work
    return prompt_list(m.q_starts, m.q_lens, m.kv_starts, m.kv_lens, plan=plan)


def ragged_attention(
    q, k, v, metadata, sinks, q_scale, k_scale, v_scale, *, scale, causal, window, soft_cap, out_dtype
):
    """Launches the kernel: ``(out [T, H, V], lse float32 [T, H])``."""
    from mla_attn.pallas_kernels.mosaic_gpu.ragged_prefill import Call, ragged_prefill

    del q_scale, k_scale, v_scale  # refused before
    (tokens, heads, _), (keys, kv_heads, _) = q.shape, k.shape
    if 0 in (tokens, keys, heads, metadata.q_lens.shape[0]):
        return jnp.zeros((tokens, heads, v.shape[2]), out_dtype), jnp.full((tokens, heads), -jnp.inf, jnp.float32)
    plan = _plan(metadata, q, k, causal, window)
    row_bytes = k.dtype.itemsize * (k.shape[2] + v.shape[2])
    call = Call(
        scale=scale,
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=k.shape[2],
        v_dim=v.shape[2],
        near_heads=near_heads(keys, heads, kv_heads, row_bytes),
        soft_cap=soft_cap,
    )
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    arrays = (q.astype(k.dtype), k, v, _work(metadata, plan), sinks)
    return ragged_prefill(*arrays, call=call, plan=plan, out_dtype=out_dtype, blocks=current_device().cores)
