"""Adapter to the GQA kernel: what it supports, and the arrays and work lists that it takes."""

import dataclasses
import math

import jax.numpy as jnp

from mla_attn.dispatch import Device, current_device
from mla_attn.metadata import row_owners
from mla_attn.mosaic_gpu import hopper
from mla_attn.pallas_kernels.even_list import EvenPlan, even_list
from mla_attn.pallas_kernels.tree_words import tree_words
from mla_attn.pallas_kernels.work_list import TILE, TILE_ROWS, sound_requests

_DTYPES = ("bfloat16", "float16")
_LAYOUTS = ("nhd", "hnd", "interleaved")
_DIMS = (64, 128, 256)
_ROW_ELEMENTS = 8  # copies begin at multiples of 16 bytes, 8 elements
_WIDE = 256  # channels of a key and its value together, above which two KV heads leave no room for stages


def supports(call, device: Device) -> str | None:
    """The reason why the kernel does not support a call (``ops.gqa.GQACall``), or None."""
    if (reason := hopper.refuses(device)) is not None:
        return reason
    spec, group = call.spec, call.spec.num_heads // call.spec.num_kv_heads
    if call.format.name not in _DTYPES:
        return f"a {call.format.name} pool: must be {' or '.join(_DTYPES)}"
    if call.skip:
        return "skip_threshold: must be None"
    if call.layout not in _LAYOUTS:
        return f"layout={call.layout!r}: must be {', '.join(_LAYOUTS)}"
    if call.q_dtype == jnp.float8_e4m3fn:
        return "float8_e4m3fn queries: must be of at least 16 bits"
    for name in ("head_dim", "v_head_dim"):
        if (dim := getattr(spec, name)) not in _DIMS:
            return f"{name}={dim}: must be {', '.join(map(str, _DIMS))}"
    if any(width % _ROW_ELEMENTS for width in call.row_widths):
        return f"pool rows of {call.row_widths} elements: must be multiples of {_ROW_ELEMENTS}"
    if group > TILE_ROWS:
        return f"{group} query heads of a KV head: must be at most {TILE_ROWS}"
    if call.tree and spec.window is not None:
        return f"tree_mask with window={spec.window}: must be one of them"
    return None


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a call launches: the plan of its work list, which is of causal rows or not.

    Kept as ``AttentionMetadata.work_plan``: a call whose launch is an equal one takes the list that is there.
    """

    plan: EvenPlan
    causal: bool


def teams(kv_heads: int, cores: int, *, wide: bool) -> tuple[int, int, int]:
    """KV heads that a thread block takes at a time, thread blocks of a team, and teams.

    Args:
        kv_heads: KV heads K.
        cores: streaming multiprocessors of the device, each of which runs a thread block.
        wide: whether the rows of two KV heads are too wide for a thread block.
    """
    block_heads = 1 if wide or kv_heads % 2 else 2
    lanes = math.gcd(kv_heads // block_heads, cores)
    return block_heads, lanes, cores // lanes


def plan_gqa(metadata, pool, spec, *, causal, batch_invariant, out_dtype):
    """The metadata with the work list of calls with these static arguments; as ``ops.gqa.plan_gqa``."""
    del out_dtype  # the list is the same for any
    launch = _launch(metadata, pool, spec, causal=causal, batch_invariant=batch_invariant)
    return dataclasses.replace(metadata, work=_work(metadata, launch), work_plan=launch)


def _launch(metadata, pool, spec, *, causal, batch_invariant) -> Launch:
    group = spec.num_heads // spec.num_kv_heads
    wide = spec.head_dim + spec.v_head_dim > _WIDE
    block_heads, lanes, count = teams(spec.num_kv_heads, current_device().cores, wide=wide)
    plan = EvenPlan(
        num_requests=metadata.q_lens.shape[0],
        num_tokens=metadata.slots.shape[0],
        kv_heads=spec.num_kv_heads,
        heads=group,
        tile_tokens=min(metadata.max_q_len, TILE_ROWS // group),
        block_heads=block_heads,
        lanes=lanes,
        teams=count,
        max_tiles=-(-metadata.page_table.shape[1] * pool.page_size // TILE),
        window=spec.window,
        invariant=batch_invariant,
    )
    return Launch(plan, causal)


def _work(m, launch: Launch):
    if m.work_plan == launch:
        return m.work
    lengths = (m.q_starts, m.q_lens, m.kv_lens, m.kv_offsets)
    return even_list(*lengths, plan=launch.plan, max_q_len=m.max_q_len, causal=launch.causal, kv_stride=m.kv_stride)


def gqa_attention(q, pool, metadata, layer, tree_mask, sinks, q_scale, *, spec, causal, batch_invariant, out_dtype):
    """Launches the kernel, then the combine if units may be divided: ``(out [T, H, V], lse float32 [T, H])``."""
    from mla_attn.pallas_kernels.mosaic_gpu.combine import combine
    from mla_attn.pallas_kernels.mosaic_gpu.gqa_block import Call
    from mla_attn.pallas_kernels.mosaic_gpu.gqa_decode import gqa_decode

    del q_scale  # refused before
    m, (tokens, heads, _) = metadata, q.shape
    shape = (tokens, heads, spec.v_head_dim)
    if tokens == 0 or m.q_lens.shape[0] == 0:
        return jnp.zeros(shape, out_dtype), jnp.full((tokens, heads), -jnp.inf)
    launch = _launch(m, pool, spec, causal=causal, batch_invariant=batch_invariant)
    plan, work = launch.plan, _work(m, launch)
    call = Call(
        scale=spec.scale,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        layout=pool.layout,
        max_q_len=m.max_q_len,
        num_pages=pool.num_pages,
        causal=causal,
        soft_cap=spec.soft_cap,
        kv_stride=m.kv_stride,
        page_stride=pool.page_stride,
        layer_stride=pool.layer_stride,
        tree_keys=0 if tree_mask is None else tree_mask.shape[2],
    )
    tree = None if tree_mask is None else _tree_words(tree_mask, m)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    q = q.astype(pool.dtype).reshape(tokens * heads, spec.head_dim)
    arrays = (q, pool.k, pool.v, m.page_table, layer.reshape(1), work, tree, sinks)
    out, lse, partial, partial_lse = gqa_decode(*arrays, call=call, plan=plan, out_dtype=out_dtype)
    if plan.num_combined:
        out, lse = combine(work, partial, partial_lse, out, lse, plan=plan)
    return out.reshape(shape), lse.reshape(tokens, heads)


def _tree_words(tree_mask, m):
    """The tree mask's bits for every token. Tokens of unsound requests get some other's, which nothing reads."""
    tokens = m.slots.shape[0]
    sound = sound_requests(m.q_starts, m.q_lens, num_tokens=tokens, max_q_len=m.max_q_len)
    owner, _ = row_owners(m.q_starts, jnp.where(sound, m.q_lens, 0), tokens)
    row = jnp.clip(jnp.arange(tokens, dtype=jnp.int32) - m.q_starts[owner], 0, m.max_q_len - 1)
    return tree_words(tree_mask, owner, row, heads=1, extra_rows=0)
