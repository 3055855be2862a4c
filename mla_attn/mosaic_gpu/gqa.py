"""Adapter to the GQA kernels: what they support, which one runs, and the arrays and work lists that they take."""

import dataclasses
import math

import jax.numpy as jnp

from mla_attn.dispatch import Device, current_device
from mla_attn.metadata import row_owners
from mla_attn.mosaic_gpu import hopper
from mla_attn.pallas_kernels.even_list import EvenPlan, even_list
from mla_attn.pallas_kernels.tree_words import tree_words
from mla_attn.pallas_kernels.work_list import TILE, TILE_ROWS, sound_requests

_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_LAYOUTS = ("nhd", "hnd", "interleaved")
_DIMS = (64, 128, 256)
_COPIED_BYTES = 16  # copies begin at multiples of it
_WIDE_BYTES = 512  # of a key and its value together, above which two KV heads leave no room for stages
_FEW_ROWS = 32  # of a row tile, up to which products are transposed
_FEW_FLOAT8_ROWS = 16  # of a row tile, up to which four KV heads leave enough registers, or two of 256 channels
_WIDE_FLOAT8_ROWS = 32  # of a row tile, if channels are 256: operands take registers too


def supports(call, device: Device) -> str | None:
    """The reason why the kernels do not support a call (``ops.gqa.GQACall``), or None."""
    if (reason := hopper.refuses(device)) is not None:
        return reason
    spec = call.spec
    if call.format.name not in _DTYPES:
        return f"a {call.format.name} pool: must be {', '.join(_DTYPES)}"
    if call.skip:
        return "skip_threshold: must be None"
    if call.layout not in _LAYOUTS:
        return f"layout={call.layout!r}: must be {', '.join(_LAYOUTS)}"
    if call.q_dtype == jnp.float8_e4m3fn:
        return "float8_e4m3fn queries: must be of at least 16 bits"
    for name in ("head_dim", "v_head_dim"):
        if (dim := getattr(spec, name)) not in _DIMS:
            return f"{name}={dim}: must be {', '.join(map(str, _DIMS))}"
    if call.format.scaled and call.q_dtype != jnp.bfloat16:
        return f"{jnp.dtype(call.q_dtype).name} queries of a {call.format.name} pool: must be bfloat16"
    elements = _COPIED_BYTES // call.format.storage_dtype.itemsize
    if any(width % elements for width in call.row_widths):
        return f"pool rows of {call.row_widths} elements: must be multiples of {elements}"
    return None


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a call launches: the plan of its work list, which is of causal rows or not.

    Kept as ``AttentionMetadata.work_plan``: a call whose launch is an equal one takes the list that is there.
    """

    plan: EvenPlan
    causal: bool


def choose_kernel(tile_rows: int, *, float8: bool, batch_invariant: bool) -> str:
    """The faster kernel. (With ``batch_invariant`` always the same one: their roundings differ.)"""
    if float8 or (tile_rows <= _FEW_ROWS and not batch_invariant):
        return "gqa_stream"
    return "gqa_decode"


@dataclasses.dataclass(frozen=True)
class Division:
    """How the heads and rows of a call are divided.

    Attributes:
        kernel: its name.
        parts: sets that the query heads of a KV head are divided into. They read the same keys, each as if it had a KV
            head of its own.
        heads: query heads of a set.
        tile_tokens: query tokens of a row tile.
        block_heads: KV heads (or sets) that a thread block takes at a time.
        sharing: thread blocks that share a multiprocessor.
    """

    kernel: str
    parts: int
    heads: int
    tile_tokens: int
    block_heads: int
    sharing: int


def divide(spec, row_format, *, max_q_len: int, batch_invariant: bool) -> Division:
    """How calls of up to ``max_q_len`` query tokens a request are divided."""
    float8, widest = row_format.scaled, max(spec.head_dim, spec.v_head_dim)
    most = _WIDE_FLOAT8_ROWS if float8 and widest > 128 else TILE_ROWS
    group = spec.num_heads // spec.num_kv_heads
    parts = -(-group // most)
    heads = -(-group // parts)
    tile_tokens = min(max_q_len, most // heads)
    rows, kv_heads = tile_tokens * heads, spec.num_kv_heads * parts
    kernel = choose_kernel(rows, float8=float8, batch_invariant=batch_invariant)
    few = rows <= _FEW_FLOAT8_ROWS
    narrow = few and widest <= 128
    if float8 and narrow and kv_heads % 4 == 0:  # making numbers of bytes takes long, and hides what others wait for
        block_heads = 4
    else:
        wide = (spec.head_dim + spec.v_head_dim) * row_format.storage_dtype.itemsize > _WIDE_BYTES
        wide |= float8 and widest > 128 and not few
        block_heads = 1 if wide or kv_heads % 2 else 2
    sharing = 2 if float8 and narrow and block_heads == 1 else 1
    return Division(kernel, parts, heads, tile_tokens, block_heads, sharing)


def plan_gqa(metadata, pool, spec, *, causal, tree, batch_invariant, out_dtype):
    """The metadata with the work list of calls with these static arguments; as ``ops.gqa.plan_gqa``."""
    del out_dtype  # the list is the same for any
    launch, _ = _launch(metadata, pool, spec, causal=causal, tree=tree, batch_invariant=batch_invariant)
    return dataclasses.replace(metadata, work=_work(metadata, launch), work_plan=launch)


def _launch(metadata, pool, spec, *, causal, tree, batch_invariant) -> tuple[Launch, Division]:
    division = divide(spec, pool.format, max_q_len=metadata.max_q_len, batch_invariant=batch_invariant)
    kv_heads, blocks = spec.num_kv_heads * division.parts, division.sharing * current_device().cores
    lanes = math.gcd(kv_heads // division.block_heads, blocks)
    plan = EvenPlan(
        num_requests=metadata.q_lens.shape[0],
        num_tokens=metadata.slots.shape[0],
        kv_heads=kv_heads,
        heads=division.heads,
        tile_tokens=division.tile_tokens,
        block_heads=division.block_heads,
        lanes=lanes,
        teams=blocks // lanes,
        max_tiles=-(-metadata.page_table.shape[1] * pool.page_size // TILE),
        window=spec.window,
        tree=tree and spec.window is not None,
        invariant=batch_invariant,
    )
    return Launch(plan, causal), division


def _work(m, launch: Launch):
    if m.work_plan == launch:
        return m.work
    lengths = (m.q_starts, m.q_lens, m.kv_lens, m.kv_offsets)
    window = launch.plan.window
    starts = _window_starts(m, window) if window is not None and launch.plan.tree else None
    options = {"max_q_len": m.max_q_len, "causal": launch.causal, "kv_stride": m.kv_stride}
    return even_list(*lengths, starts, plan=launch.plan, **options)


def gqa_attention(q, pool, metadata, layer, tree_mask, sinks, q_scale, *, spec, causal, batch_invariant, out_dtype):
    """Launches a kernel, then the combine if units may be divided: ``(out [T, H, V], lse float32 [T, H])``."""
    from mla_attn.pallas_kernels.mosaic_gpu.combine import combine
    from mla_attn.pallas_kernels.mosaic_gpu.gqa_block import Arrays, Call
    from mla_attn.pallas_kernels.mosaic_gpu.gqa_decode import gqa_decode
    from mla_attn.pallas_kernels.mosaic_gpu.gqa_stream import gqa_stream

    del q_scale  # refused before
    m, (tokens, heads, _) = metadata, q.shape
    if tokens == 0 or m.q_lens.shape[0] == 0:
        return jnp.zeros((tokens, heads, spec.v_head_dim), out_dtype), jnp.full((tokens, heads), -jnp.inf, jnp.float32)
    tree = tree_mask is not None
    launch, division = _launch(m, pool, spec, causal=causal, tree=tree, batch_invariant=batch_invariant)
    plan, work = launch.plan, _work(m, launch)
    k_scale, v_scale = (jnp.float32(1) if x is None else x for x in (pool.k_scale, pool.v_scale))  # read if float8
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
        tree_keys=tree_mask.shape[2] if tree else 0,
        head_parts=division.parts,
        sharing=division.sharing,
        float8=pool.format.name if pool.format.scaled else None,
        scale_dims=(k_scale.ndim, v_scale.ndim),
    )
    arrays = Arrays(
        q=_padded(q if call.float8 else q.astype(pool.dtype), division, spec).reshape(-1, spec.head_dim),
        k=pool.k,
        v=pool.v,
        page_table=m.page_table,
        layer=layer.reshape(1),
        work=work,
        tree=_tree_words(tree_mask, m) if tree else None,
        window_starts=_window_starts(m, spec.window) if spec.window is not None and tree else None,
        positions=_positions(m) if plan.tree else None,
        sinks=None if sinks is None else _padded(sinks.astype(jnp.float32)[None, :, None], division, spec).ravel(),
        k_scale=k_scale.ravel(),
        v_scale=v_scale.ravel(),
    )
    kernel = gqa_decode if division.kernel == "gqa_decode" else gqa_stream
    out, lse, partial, partial_lse = kernel(arrays, call=call, plan=plan, out_dtype=out_dtype)
    if plan.num_combined:
        out, lse = combine(work, partial, partial_lse, out, lse, plan=plan)
    out, lse = (_unpadded(x.reshape(tokens, -1, *x.shape[1:]), division, spec) for x in (out, lse))
    return out, lse


def _padded(rows, division: Division, spec):
    """``rows`` [T, H, ...] with query heads of nobody, so that all sets of those of a KV head are equally large."""
    group, wanted = spec.num_heads // spec.num_kv_heads, division.parts * division.heads
    if group == wanted:
        return rows
    by_kv_head = rows.reshape(rows.shape[0], spec.num_kv_heads, group, *rows.shape[2:])
    padded = jnp.pad(by_kv_head, ((0, 0), (0, 0), (0, wanted - group), *((0, 0) for _ in rows.shape[2:])))
    return padded.reshape(rows.shape[0], -1, *rows.shape[2:])


def _unpadded(rows, division: Division, spec):
    group, padded = spec.num_heads // spec.num_kv_heads, division.parts * division.heads
    if group == padded:
        return rows
    by_kv_head = rows.reshape(rows.shape[0], spec.num_kv_heads, padded, *rows.shape[2:])[:, :, :group]
    return by_kv_head.reshape(rows.shape[0], -1, *rows.shape[2:])


def _window_starts(m, window: int):
    """The first position in any window of a request's rows, counted from its table's first key: int32 [B]."""
    row = jnp.arange(m.max_q_len, dtype=jnp.int32)[None]
    at = jnp.clip(m.q_starts[:, None] + row, 0, m.positions.shape[0] - 1)
    positions = jnp.where(row < m.q_lens[:, None], m.positions[at], jnp.iinfo(jnp.int32).max)
    return jnp.maximum(positions.min(axis=1), 0) - (window - 1) - m.kv_offsets


def _positions(m):
    """Each token's position, counted from its table's first key; of tokens of nobody some other's."""
    owner, _ = row_owners(m.q_starts, m.q_lens, m.slots.shape[0])
    return jnp.maximum(m.positions, 0) - m.kv_offsets[owner]


def _tree_words(tree_mask, m):
    """The tree mask's bits for every token. Tokens of unsound requests get some other's, which nothing reads."""
    tokens = m.slots.shape[0]
    sound = sound_requests(m.q_starts, m.q_lens, num_tokens=tokens, max_q_len=m.max_q_len)
    owner, _ = row_owners(m.q_starts, jnp.where(sound, m.q_lens, 0), tokens)
    row = jnp.clip(jnp.arange(tokens, dtype=jnp.int32) - m.q_starts[owner], 0, m.max_q_len - 1)
    return tree_words(tree_mask, owner, row, heads=1, extra_rows=0)
