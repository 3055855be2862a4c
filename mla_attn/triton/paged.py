"""What the adapters of both paged ops share: the plan of a call, its work list, and the launch."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from mla_attn.dispatch import Device, current_device
from mla_attn.metadata import row_owners
from mla_attn.pallas_kernels.even_list import EvenPlan, even_list
from mla_attn.pallas_kernels.tree_words import tree_words
from mla_attn.pallas_kernels.triton.configs import PagedConfig, PagedFacts, most_rows, paged_config
from mla_attn.pallas_kernels.work_list import TILE, sound_requests
from mla_attn.triton import gpus

_FORMATS = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
_INVARIANT_ROWS = 16  # rows of a tile that serves every number of query tokens
_MOST_LANES = 8  # programs that read the keys of a request at the same time


def refuses(call, device: Device) -> str | None:
    """The reason why no kernel supports a paged call (``ops.paged.PagedCall``) on a device, or None."""
    if (reason := gpus.refuses(device)) is not None:
        return reason
    if call.format.name not in _FORMATS:
        return f"a {call.format.name} pool: must be {', '.join(_FORMATS)}"
    if call.skip:
        return "skip_threshold: must be None"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """What a call launches: the plan of its work list, the sizes of the kernel, and whether rows are causal.

    Kept as ``AttentionMetadata.work_plan``: a call whose launch is an equal one takes the list that is there.

    Attributes:
        plan: plan of the work list; its KV heads are sets of query heads, several of which may read one KV head.
        config: sizes of the kernel.
        causal: whether rows see keys up to their own position only.
        head_sets: sets of the query heads of a KV head.
    """

    plan: EvenPlan
    config: PagedConfig
    causal: bool
    head_sets: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads and channels of a call: KV heads, query heads of each, channels of a key and of a value."""

    kv_heads: int
    group: int
    dim: int
    values: int
    shared_values: bool


def make_launch(metadata, pool, heads: Heads, *, q_dtype, causal, window, tree, batch_invariant) -> Launch:
    """Chooses row tiles, sizes and lanes of a call, from static facts alone."""
    device = current_device()
    target, wide = gpus.target(device), pool.format.operand_dtype(q_dtype) == jnp.float32
    assert target is not None  # refused before
    most = most_rows(target, heads=heads.group, dim=heads.dim, wide=wide)
    head_sets = -(-heads.group // most)
    set_heads = -(-heads.group // head_sets)
    tokens = max(_INVARIANT_ROWS // set_heads, 1) if batch_invariant else min(metadata.max_q_len, most // set_heads)
    facts = PagedFacts(
        target=target,
        rows=tokens * set_heads,
        dim=heads.dim,
        values=heads.values,
        shared_values=heads.shared_values,
        wide=wide,
        float8=pool.format.scaled,
    )
    config, sets = paged_config(facts), heads.kv_heads * head_sets
    lanes = max(n for n in range(1, _MOST_LANES + 1) if sets % n == 0)
    plan = EvenPlan(
        num_requests=metadata.q_lens.shape[0],
        num_tokens=metadata.slots.shape[0],
        kv_heads=sets,
        heads=set_heads,
        tile_tokens=tokens,
        block_heads=1,
        lanes=lanes,
        teams=max(device.cores * config.resident // lanes, 1),
        max_tiles=-(-metadata.page_table.shape[1] * pool.page_size // TILE),
        window=None if tree else window,  # siblings of a tree see keys left of the window of the row's number
        invariant=batch_invariant,
    )
    return Launch(plan=plan, config=config, causal=causal, head_sets=head_sets)


def work_of(m, launch: Launch):
    """The work list of a call: that of the metadata if it was planned for such calls."""
    if m.work_plan == launch:
        return m.work
    lengths = (m.q_starts, m.q_lens, m.kv_lens, m.kv_offsets)
    return even_list(*lengths, plan=launch.plan, max_q_len=m.max_q_len, causal=launch.causal, kv_stride=m.kv_stride)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """How the heads of a query token become packed rows: those of each KV head padded to whole sets."""

    kv_heads: int
    group: int
    padded: int

    @classmethod
    def of(cls, heads: Heads, launch: Launch) -> "Packing":
        return cls(kv_heads=heads.kv_heads, group=heads.group, padded=launch.head_sets * launch.plan.heads)

    def pack(self, x):
        """Packed rows [T * padded heads, ...] of [T, H, ...]."""
        x = x.reshape(x.shape[0], self.kv_heads, self.group, *x.shape[2:])
        padding = ((0, 0), (0, 0), (0, self.padded - self.group)) + ((0, 0),) * (x.ndim - 3)
        x = jnp.pad(x, padding) if self.padded > self.group else x
        return x.reshape(-1, *x.shape[3:])

    def unpack(self, x, tokens: int):
        """[T, H, ...] of packed rows."""
        x = x.reshape(tokens, self.kv_heads, self.padded, *x.shape[1:])[:, :, : self.group]
        return x.reshape(tokens, self.kv_heads * self.group, *x.shape[3:])


def launch_kernel(
    queries,
    k,
    v,
    pool,
    m,
    layer,
    tree_mask,
    sinks,
    factors,
    *,
    heads: Heads,
    launch: Launch,
    window,
    out_dtype,
    **facts,
):
    """Launches the kernel on queries [T, H, ...], one array or both parts: ``(out [T, H, V], lse [T, H])``.

    ``facts`` are those fields of the kernel's ``Call`` that this function does not know.
    """
    from mla_attn.pallas_kernels.triton import attention

    plan, tokens, packing = launch.plan, queries[0].shape[0], Packing.of(heads, launch)
    call = attention.Call(
        dim=queries[0].shape[2],
        rope=queries[1].shape[2] if len(queries) > 1 else 0,
        values=heads.values,
        head_sets=launch.head_sets,
        format=pool.format.name,
        page_size=pool.page_size,
        num_pages=pool.num_pages,
        num_layers=pool.num_layers,
        page_stride=pool.page_stride,
        layer_stride=pool.layer_stride,
        max_q_len=m.max_q_len,
        causal=launch.causal,
        window=window,
        kv_stride=m.kv_stride,
        tree_keys=0 if tree_mask is None else tree_mask.shape[2],
        **facts,
    )
    dtype = pool.format.operand_dtype(queries[0].dtype)
    q, *q_rope = (packing.pack(x.astype(dtype)) for x in queries if x.shape[2])
    tree, begins = (None, None) if tree_mask is None else _of_tree(tree_mask, m, window)
    sinks = None if sinks is None else packing.pack(sinks.astype(jnp.float32)[None])
    factors = None if factors is None else packing.pack(factors)
    arrays = (q, q_rope[0] if q_rope else None, k, v, m.page_table, layer.reshape(1), work_of(m, launch))
    out, lse = attention.paged_attention(
        *arrays, tree, begins, sinks, factors, call=call, plan=plan, config=launch.config, out_dtype=out_dtype
    )
    return packing.unpack(out, tokens), packing.unpack(lse, tokens)


def nothing(shape, out_dtype):
    """The result of a call without rows or without requests."""
    return jnp.zeros(shape, out_dtype), jnp.full(shape[:2], -jnp.inf, jnp.float32)


def score_factors(shape, *scales):
    """The product of the scales of operands, [T, H] each or broadcast to it; None if all are."""
    given = [jnp.broadcast_to(scale, shape[:2]) for scale in scales if scale is not None]
    return functools.reduce(jnp.multiply, given) if given else None


def _of_tree(tree_mask, m, window):
    """The tree mask's bits for every token, and with a window the number of the first key in each token's.

    Tokens of unsound requests get some other's, which nothing reads.
    """
    tokens = m.slots.shape[0]
    sound = sound_requests(m.q_starts, m.q_lens, num_tokens=tokens, max_q_len=m.max_q_len)
    owner, _ = row_owners(m.q_starts, jnp.where(sound, m.q_lens, 0), tokens)
    row = jnp.clip(jnp.arange(tokens, dtype=jnp.int32) - m.q_starts[owner], 0, m.max_q_len - 1)
    words = tree_words(tree_mask, owner, row, heads=1, extra_rows=0)
    if window is None:
        return words, None
    first = jnp.maximum(m.positions, 0) - window + 1  # a position; it would wrap from below 0
    distance = jnp.maximum(first, m.kv_offsets[owner]) - m.kv_offsets[owner]
    distance = jnp.where(distance < 0, np.iinfo(np.int32).max, distance)  # it wrapped, with a negative offset
    return words, -(-distance // m.kv_stride)
