"""The adapter to the MLA kernels: ``supports``, the choice of kernel and row tile, work lists and kernel arguments."""

import dataclasses

import jax.numpy as jnp

from mla_attn.dispatch import Device, current_device
from mla_attn.metadata import row_owners
from mla_attn.mosaic_gpu import hopper
from mla_attn.pallas_kernels.tree_words import tree_words
from mla_attn.pallas_kernels.work_list import TILE, TILE_ROWS, Plan, sound_requests, work_list

_HEADS = 8  # TMA copies whole groups of 8 rows, so other head counts are padded
_LATENTS = ((512, 64), (256, 64), (512, 0))
_COPIED_BYTES = 16  # copies begin at multiples of it
_CHANNELS = 64  # channels of a copy, the span of the swizzle
_BLOCKS = "float8_e4m3fn:blocks"
_FLOAT8_OVERHEAD = 5  # key tiles that a thread block processes in the time of an item's begin and end; bfloat16: 3
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", _BLOCKS)
# Masked scores are MASKED; times the scale they must stay below START, the running maximum of a row without visible
# keys. This bounds the scale from below.
_LEAST_SCALE = 1e-3
# Most rows of a request for mla_stream: if memory is the bound; and if keys are so few that a thread block spends most
# of its time on prologue and epilogue, which smaller row tiles distribute over more blocks.
_STREAM_ROWS, _STREAM_ROWS_OF_FEW_KEYS = 64, 128
_TRANSPOSED_ROWS = 32  # most rows of a row tile of mla_stream whose products are transposed (rows are N of wgmma)


def supports(call, device: Device) -> str | None:
    """The reason why the kernels do not support a call (``ops.mla.MLACall``), or None."""
    if (reason := hopper.refuses(device)) is not None:
        return reason
    spec, latent = call.spec, (call.spec.kv_lora_rank, call.spec.qk_rope_head_dim)
    if call.format.name not in ("bfloat16", *_FLOAT8):
        return f"a {call.format.name} pool: must be bfloat16 or float8"
    if call.skip:
        return "skip_threshold: must be None"
    float8 = call.format.name in _FLOAT8
    if not float8 and call.q_dtype == jnp.float8_e4m3fn:
        return "float8_e4m3fn queries of a bfloat16 pool: must be of at least 16 bits"
    if float8 and call.q_dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
        return f"{call.q_dtype} queries of a {call.format.name} pool: must be bfloat16 or float8_e4m3fn"
    if latent not in _LATENTS:
        return f"latent {latent[0]} + {latent[1]}: must be {', '.join(f'{r} + {e}' for r, e in _LATENTS)}"
    elements = _COPIED_BYTES // call.format.storage_dtype.itemsize
    if call.row_width % elements:
        return f"pool rows of {call.row_width} elements: must be a multiple of {elements}"
    if call.format.name == _BLOCKS:
        if call.rope_offset != (offset := call.format.widths(latent[0], 0)[0]):
            return f"rope_offset={call.rope_offset}: must be {offset}"
    elif spec.qk_rope_head_dim and call.rope_offset % _CHANNELS:
        return f"rope_offset={call.rope_offset}: must be a multiple of {_CHANNELS}"
    if spec.window is not None:
        return f"window={spec.window}: must be None"
    if call.sinks:
        return "sinks: must be None"
    if spec.soft_cap is not None:
        return f"soft_cap={spec.soft_cap}: must be None"
    if spec.scale < _LEAST_SCALE:
        return f"scale={spec.scale}: must be at least {_LEAST_SCALE}"
    return None


@dataclasses.dataclass(frozen=True)
class Launch:
    """The launch of a call: the kernel's name, the plan of its work list, and whether rows are causal.

    It is kept as ``AttentionMetadata.work_plan``: a call with an equal launch uses the list in the metadata.
    """

    kernel: str
    plan: Plan
    causal: bool


def choose_kernel(rows: int, *, key_tiles: int, cores: int, batch_invariant: bool) -> tuple[str, int]:
    """Chooses a kernel, by name, and the most rows of a row tile.

    Args:
        rows: most rows of a request, query tokens times heads (a multiple of 8).
        key_tiles: key tiles of all requests' page tables together.
        cores: streaming multiprocessors of the device.
        batch_invariant: whether any number of rows must take the same kernel, so that bits do not depend on it.
    """
    if not batch_invariant:
        if rows <= _TRANSPOSED_ROWS:
            return "mla_stream", rows
        if key_tiles <= cores and rows <= _STREAM_ROWS_OF_FEW_KEYS:
            return "mla_stream", _TRANSPOSED_ROWS
        if rows <= _STREAM_ROWS:
            return "mla_stream", TILE_ROWS
    return "mla_decode", TILE_ROWS


def choose_float8_kernel(rows: int, *, batch_invariant: bool, **_) -> tuple[str, int]:
    """Chooses the kernel of a float8 pool; arguments and result are those of ``choose_kernel``."""
    return "mla_float8", _TRANSPOSED_ROWS if batch_invariant else min(rows, _TRANSPOSED_ROWS)


def plan_mla(metadata, pool, spec, *, causal, tree, batch_invariant, out_dtype):
    """Adds the work list of calls with these static arguments to the metadata; see ``ops.mla.plan_mla``."""
    del tree  # the list is the same with and without
    launch = _launch(metadata, pool, spec, causal=causal, batch_invariant=batch_invariant, out_dtype=out_dtype)
    return dataclasses.replace(metadata, work=_work(metadata, launch), work_plan=launch)


def _launch(metadata, pool, spec, *, causal, batch_invariant, out_dtype) -> Launch:
    heads, requests, cores = _padded(spec.num_heads), metadata.q_lens.shape[0], current_device().cores
    max_tiles = -(-metadata.page_table.shape[1] * pool.page_size // TILE)
    choose = choose_float8_kernel if pool.format.name in _FLOAT8 else choose_kernel
    kernel, tile_rows = choose(
        heads * metadata.max_q_len, key_tiles=requests * max_tiles, cores=cores, batch_invariant=batch_invariant
    )
    plan = Plan(
        num_requests=requests,
        num_rows=metadata.slots.shape[0] * heads,
        heads=heads,
        tile_rows=tile_rows,
        blocks=cores,
        max_tiles=max_tiles,
        combine_all=out_dtype != jnp.bfloat16,  # kernels write bfloat16; the combine writes float32
        invariant=batch_invariant,
        overhead=_FLOAT8_OVERHEAD if kernel == "mla_float8" else Plan.overhead,
    )
    return Launch(kernel, plan, causal)


def _work(m, launch: Launch):
    if m.work_plan == launch:
        return m.work
    lengths = (m.q_starts, m.q_lens, m.kv_lens, m.kv_offsets)
    return work_list(*lengths, plan=launch.plan, max_q_len=m.max_q_len, causal=launch.causal, kv_stride=m.kv_stride)


def mla_attention(
    q_latent, q_rope, pool, metadata, layer, tree_mask, sinks, q_scale, *, spec, causal, batch_invariant, out_dtype
):
    """Launches the chosen kernel, then the combine: ``(out [T, H, R] in out_dtype, lse float32 [T, H])``."""
    from mla_attn.pallas_kernels.mosaic_gpu.combine import combine
    from mla_attn.pallas_kernels.mosaic_gpu.mla_block import Call
    from mla_attn.pallas_kernels.mosaic_gpu.mla_decode import mla_decode
    from mla_attn.pallas_kernels.mosaic_gpu.mla_float8 import mla_float8
    from mla_attn.pallas_kernels.mosaic_gpu.mla_stream import mla_stream

    del sinks  # refused before
    m, (tokens, heads, _) = metadata, q_latent.shape
    if tokens == 0 or m.q_lens.shape[0] == 0:
        return jnp.zeros(q_latent.shape, out_dtype), jnp.full((tokens, heads), -jnp.inf, jnp.float32)
    launch = _launch(m, pool, spec, causal=causal, batch_invariant=batch_invariant, out_dtype=out_dtype)
    plan, work = launch.plan, _work(m, launch)
    call = Call(
        heads=plan.heads,
        scale=spec.scale,
        max_q_len=m.max_q_len,
        num_pages=pool.num_pages,
        rope_offset=pool.rope_offset,
        causal=causal,
        kv_stride=m.kv_stride,
        page_stride=pool.page_stride,
        layer_stride=pool.layer_stride,
        tree_keys=0 if tree_mask is None else tree_mask.shape[2],
        cache=pool.format.name,
    )
    tree = None if tree_mask is None else _tree_words(tree_mask, m, plan)
    q_rope = _rows(q_rope, plan) if spec.qk_rope_head_dim else None
    arrays = (_rows(q_latent, plan), q_rope, pool.data, m.page_table, layer.reshape(1), work, tree)
    if launch.kernel == "mla_float8":
        scales = jnp.ones(1) if pool.scale is None else pool.scale.reshape(-1)
        arrays += scales, _row_scales(q_scale, q_latent, plan)
    kernel = {"mla_decode": mla_decode, "mla_stream": mla_stream, "mla_float8": mla_float8}[launch.kernel]
    out, lse, partial, partial_lse = kernel(*arrays, call=call, plan=plan)
    out, lse = combine(work, partial, partial_lse, out.astype(out_dtype), lse, plan=plan)
    return tuple(x.reshape(tokens, plan.heads, *x.shape[1:])[:, :heads] for x in (out, lse))


def _padded(heads: int) -> int:
    return -(-heads // _HEADS) * _HEADS


def _rows(q, plan):
    """Packed rows [T * heads, ...] in bfloat16, heads padded."""
    q = jnp.pad(q.astype(jnp.bfloat16), ((0, 0), (0, plan.heads - q.shape[1]), (0, 0)))
    return q.reshape(-1, q.shape[2])


def _row_scales(q_scale, q, plan):
    """The queries' scales for every packed row, and ``plan.tile_rows`` more; None if queries have none."""
    if q_scale is None:
        return None
    scales = jnp.pad(jnp.broadcast_to(q_scale, q.shape[:2]), ((0, 0), (0, plan.heads - q.shape[1])))
    return jnp.pad(scales.ravel(), (0, plan.tile_rows))


def _tree_words(tree_mask, m, plan):
    """The tree mask's bits for every packed row. Rows of invalid requests get arbitrary bits, which nothing reads."""
    tokens = m.slots.shape[0]
    sound = sound_requests(m.q_starts, m.q_lens, num_tokens=tokens, max_q_len=m.max_q_len)
    owner, _ = row_owners(m.q_starts, jnp.where(sound, m.q_lens, 0), tokens)
    row = jnp.clip(jnp.arange(tokens, dtype=jnp.int32) - m.q_starts[owner], 0, m.max_q_len - 1)
    return tree_words(tree_mask, owner, row, heads=plan.heads, extra_rows=plan.tile_rows)
