"""The ops on Hopper GPUs: what the Pallas Mosaic GPU kernels serve, and the arrays and work lists they take."""

import dataclasses

import jax
import jax.numpy as jnp

from mla_attn.dispatch import current_device
from mla_attn.metadata import row_owners
from mla_attn.pallas_kernels.work_list import GROUP_ROWS, TILE, Plan, sound_requests, work_list

COMPUTE_CAPABILITY = "9.0"
_HEADS = 8  # rows of global memory are taken by so many: other head counts are padded
_LATENTS = ((512, 64), (256, 64), (512, 0))
_LEAST_SCALE = 1e-3  # what is masked must stay below the maximum of a row that sees nothing, once scaled
# Rows of a request up to which mla_stream serves it: where memory is the bound; and where there are so few keys that
# most of the time is a thread block's begin and end, which smaller groups share out.
_STREAM_ROWS, _STREAM_ROWS_OF_FEW_KEYS = 64, 128
_TURNED_ROWS = 32  # of a group of mla_stream whose rows are the N of its products


def supports_mla(call) -> str | None:
    """Why ``mla_attention`` is not served, or None; ``call`` is an ``ops.mla.MLACall``."""
    spec, latent = call.spec, (call.spec.kv_lora_rank, call.spec.qk_rope_head_dim)
    if call.platform != "gpu" or call.compute_capability != COMPUTE_CAPABILITY:
        where = call.platform if call.compute_capability is None else f"compute capability {call.compute_capability}"
        return f"{where}: must be an NVIDIA GPU of compute capability {COMPUTE_CAPABILITY}"
    if call.dtype != jnp.bfloat16:
        return f"a {call.dtype} pool: must be bfloat16"
    if latent not in _LATENTS:
        return f"latent {latent[0]} + {latent[1]}: must be {', '.join(f'{r} + {e}' for r, e in _LATENTS)}"
    if spec.window is not None:
        return f"window={spec.window}: must be None"
    if spec.soft_cap is not None:
        return f"soft_cap={spec.soft_cap}: must be None"
    if spec.scale < _LEAST_SCALE:
        return f"scale={spec.scale}: must be at least {_LEAST_SCALE}"
    return None


def _padded(heads: int) -> int:
    return -(-heads // _HEADS) * _HEADS


def _group_rows(rows: int, *, few_keys: bool) -> int | None:
    """Of mla_stream for requests of so many rows; None where they are mla_decode's."""
    if rows <= _TURNED_ROWS:
        return rows
    if few_keys and rows <= _STREAM_ROWS_OF_FEW_KEYS:
        return _TURNED_ROWS
    return GROUP_ROWS if rows <= _STREAM_ROWS else None


def _plan(metadata, spec, page_size: int, *, batch_invariant, out_dtype) -> Plan:
    heads = _padded(spec.num_heads)
    rows = heads * metadata.max_q_len  # of a request
    requests, lanes = metadata.q_lens.shape[0], current_device().cores
    max_tiles = -(-metadata.page_table.shape[1] * page_size // TILE)
    # batch_invariant promises the bits of one kernel for any rows.
    group_rows = None if batch_invariant else _group_rows(rows, few_keys=requests * max_tiles <= lanes)
    return Plan(
        num_requests=requests,
        num_rows=metadata.slots.shape[0] * heads,
        heads=heads,
        group_rows=group_rows or GROUP_ROWS,
        streams=group_rows is not None,
        lanes=lanes,
        max_tiles=max_tiles,
        combine_all=out_dtype != jnp.bfloat16,  # only what the combine writes was not rounded to bfloat16 before
        invariant=batch_invariant,
    )


def plan_mla(metadata, pool, spec, *, causal, batch_invariant, out_dtype):
    """The metadata with a work list."""
    plan = _plan(metadata, spec, pool.page_size, batch_invariant=batch_invariant, out_dtype=out_dtype)
    work = _work(metadata, plan, causal=causal)
    return dataclasses.replace(metadata, work=work, work_plan=(plan, causal))


def _work(m, plan: Plan, *, causal: bool):
    if m.work_plan == (plan, causal):
        return m.work
    lengths = (m.q_starts, m.q_lens, m.kv_lens, m.kv_offsets)
    return work_list(*lengths, plan=plan, max_q_len=m.max_q_len, causal=causal, kv_stride=m.kv_stride)


def mla_attention(q_latent, q_rope, pool, metadata, spec, *, layer, causal, tree_mask, batch_invariant, out_dtype):
    """``(out [T, H, R], lse float32 [T, H])``; out is float32 or bfloat16."""
    from mla_attn.pallas_kernels.mosaic_gpu.combine import combine
    from mla_attn.pallas_kernels.mosaic_gpu.mla_block import Call
    from mla_attn.pallas_kernels.mosaic_gpu.mla_decode import mla_decode
    from mla_attn.pallas_kernels.mosaic_gpu.mla_stream import mla_stream

    m, (tokens, heads, _) = metadata, q_latent.shape
    if tokens == 0 or m.q_lens.shape[0] == 0:
        return jnp.zeros(q_latent.shape, out_dtype), jnp.full((tokens, heads), -jnp.inf)
    plan = _plan(m, spec, pool.page_size, batch_invariant=batch_invariant, out_dtype=out_dtype)
    work = _work(m, plan, causal=causal)
    call = Call(
        heads=plan.heads,
        scale=spec.scale,
        max_q_len=m.max_q_len,
        num_pages=pool.num_pages,
        causal=causal,
        kv_stride=m.kv_stride,
        page_stride=pool.page_stride,
        layer_stride=pool.layer_stride,
        tree_keys=0 if tree_mask is None else tree_mask.shape[2],
    )
    tree = None if tree_mask is None else _tree_words(tree_mask, m, plan)
    q_rope = _rows(q_rope, plan) if spec.qk_rope_head_dim else None
    arrays = (_rows(q_latent, plan), q_rope, pool.data, m.page_table, layer.reshape(1), work, tree)
    kernel = mla_stream if plan.streams else mla_decode
    out, lse, partial, partial_lse = kernel(*arrays, call=call, plan=plan)
    out, lse = combine(work, partial, partial_lse, out.astype(out_dtype), lse, plan=plan)
    return tuple(x.reshape(tokens, plan.heads, *x.shape[1:])[:, :heads] for x in (out, lse))


def _rows(q, plan):
    """[T * heads, ...] in the kernel's type, heads padded."""
    q = jnp.pad(q.astype(jnp.bfloat16), ((0, 0), (0, plan.heads - q.shape[1]), (0, 0)))
    return q.reshape(-1, q.shape[2])


def _tree_words(tree_mask, m, plan):
    """Bits of each row's mask, 32 keys a word: int32 [words, rows and a group more]."""
    tokens, keys = m.slots.shape[0], tree_mask.shape[2]
    words = -(-keys // 32)
    bits = jnp.pad(tree_mask, ((0, 0), (0, 0), (0, words * 32 - keys))).reshape(*tree_mask.shape[:2], words, 32)
    places = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, 3)
    packed = (bits.astype(jnp.uint32) << places).sum(axis=-1, dtype=jnp.uint32)
    sound = sound_requests(m.q_starts, m.q_lens, num_tokens=tokens, max_q_len=m.max_q_len)
    owner, _ = row_owners(m.q_starts, jnp.where(sound, m.q_lens, 0), tokens)
    row = jnp.clip(jnp.arange(tokens, dtype=jnp.int32) - m.q_starts[owner], 0, m.max_q_len - 1)
    packed = jax.lax.bitcast_convert_type(packed[owner, row], jnp.int32)  # [T, words]
    return jnp.pad(jnp.repeat(packed.T, plan.heads, axis=1), ((0, 0), (0, plan.group_rows)))
