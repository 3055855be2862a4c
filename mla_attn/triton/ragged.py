"""Adapter to the prefill kernel, for ``ragged_attention``."""

import jax
import jax.numpy as jnp

from mla_attn.cache.formats import operand_dtype
from mla_attn.dispatch import Device, current_device
from mla_attn.pallas_kernels.triton.prefill_configs import prefill_config
from mla_attn.pallas_kernels.triton.prefill_list import prefill_list
from mla_attn.triton import gpus, paged

_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
_MOST_CHANNELS = 256


def supports(call, device: Device) -> str | None:
    """The reason why the kernel does not support a call (``ops.ragged.RaggedCall``), or None."""
    if (reason := gpus.refuses(device)) is not None:
        return reason
    if call.dtype.name not in _DTYPES:
        return f"{call.dtype.name} keys and values: must be {', '.join(_DTYPES)}"
    if call.skip:
        return "skip_threshold: must be None"
    if call.batch_invariant:
        return "batch_invariant=True: the sizes of products depend on the longest request"
    for name, dim in (("qk_dim", call.qk_dim), ("v_dim", call.v_dim)):
        if not 1 <= dim <= _MOST_CHANNELS:
            return f"{name}={dim}: must be 1 to {_MOST_CHANNELS}"
    return None


def ragged_attention(
    q, k, v, metadata, sinks, q_scale, k_scale, v_scale, *, scale, causal, window, soft_cap, out_dtype
):
    """Makes the list of tiles and launches the kernel: ``(out [T, H, V], lse float32 [T, H])``."""
    from mla_attn.pallas_kernels.triton.prefill import PrefillCall, prefill

    m, (tokens, heads, dim), values = metadata, q.shape, v.shape[2]
    if 0 in (tokens, k.shape[0], m.q_lens.shape[0]):
        return paged.nothing((tokens, heads, values), out_dtype)
    float8 = k.dtype == jnp.float8_e4m3fn
    dtype = operand_dtype(q.dtype) if float8 else k.dtype
    target = gpus.target(current_device())
    assert target is not None  # refused before
    wide = dtype == jnp.float32
    config = prefill_config(target, max_q_len=m.max_q_len, channels=dim + values, wide=wide)
    sizes = {"num_tokens": tokens, "tile": config.rows, "max_q_len": m.max_q_len, "max_kv_len": m.max_kv_len}
    tiles = prefill_list(m.q_starts, m.q_lens, m.kv_starts, m.kv_lens, **sizes, causal=causal)
    if float8:  # their bits, which every GPU can read
        k, v = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (k, v))
    given = [x for x in (q_scale, k_scale) if x is not None]
    factor = jnp.stack(given).prod().reshape(1) if given else None
    call = PrefillCall(
        scale=scale, format="float8_e4m3fn" if float8 else k.dtype.name, causal=causal, window=window, soft_cap=soft_cap
    )
    out, lse = prefill(
        q.astype(dtype), k, v, tiles, None if sinks is None else sinks.astype(jnp.float32), factor,
        call=call, config=config, out_dtype=out_dtype if v_scale is None else jnp.float32,
    )  # fmt: skip
    return out if v_scale is None else (out * v_scale).astype(out_dtype), lse
