"""Poisoned paged batches, and the comparison that all attention tests use."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import float8
import layouts
import oracle
from mla_attn.cache import KVPool, LatentPool
from mla_attn.cache.formats import FORMATS, operand_dtype
from mla_attn.metadata import AttentionMetadata
from mla_attn.ops import quantize_queries
from mla_attn.specs import GQASpec, MLASpec

# Compiler options of tests that promise bits, compiled as users' programs are; conftest.py has others compiled quickly.
FUSED = {"xla_backend_extra_options": ""}
OPTIMIZED = FUSED | {"xla_backend_optimization_level": 3}
WIDE = 256  # channels of a row whose cosine has a tolerance of its own


@dataclasses.dataclass(frozen=True)
class PagedBatch:
    """A pool, the metadata of one call, and its queries; ``layer`` is the one the call reads."""

    spec: MLASpec
    pool: LatentPool
    metadata: AttentionMetadata
    q_latent: jax.Array
    q_rope: jax.Array
    layer: int
    q_scale: jax.Array | None = None

    @property
    def queries(self):
        return self.q_latent, self.q_rope

    def with_queries(self, q_latent, q_rope, q_scale=None):
        return dataclasses.replace(self, q_latent=q_latent, q_rope=q_rope, q_scale=q_scale)

    @property
    def dtype(self):
        """What the op computes in, of which tolerances are."""
        return operand_dtype(self.q_latent.dtype) if _is_float8(self.pool) else self.pool.dtype

    @property
    def out_shape(self):
        """Of a result, [T, H, R]."""
        return self.q_latent.shape

    def expected(self, *, layer=None, causal=True, tree_mask=None, sinks=None):
        """``(out [T, H, R], lse [T, H], largest visible |v| [T, 1])`` of the float64 oracle."""
        rows = layer_rows(self.pool, self.layer if layer is None else layer)
        metadata = jax.tree.map(np.asarray, self.metadata)
        visible = {"causal": causal, "tree_mask": tree_mask}
        queries = _unscaled(self.queries, self.q_scale)
        out, lse = oracle.mla_oracle(*queries, rows, metadata, self.spec, sinks=sinks, **visible)
        return out, lse, oracle.mla_v_max(out.shape[0], rows, metadata, self.spec, **visible)


@dataclasses.dataclass(frozen=True)
class KVBatch:
    """A pool of keys and values, the metadata of one call, and its queries."""

    spec: GQASpec
    pool: KVPool
    metadata: AttentionMetadata
    q: jax.Array
    layer: int
    q_scale: jax.Array | None = None

    @property
    def queries(self):
        return (self.q,)

    def with_queries(self, q, q_scale=None):
        return dataclasses.replace(self, q=q, q_scale=q_scale)

    @property
    def dtype(self):
        """What the op computes in, of which tolerances are."""
        return operand_dtype(self.q.dtype) if _is_float8(self.pool) else self.pool.dtype

    @property
    def out_shape(self):
        """Of a result, [T, H, V]."""
        return (*self.q.shape[:2], self.spec.v_head_dim)

    def expected(self, *, layer=None, causal=True, tree_mask=None, sinks=None):
        """``(out [T, H, V], lse [T, H], largest visible |v| [T, H])`` of the float64 oracle."""
        pool, layer = self.pool, self.layer if layer is None else layer
        pages = np.arange(pool.num_pages) * pool.page_stride + layer * pool.layer_stride
        k, v = layouts.rows_of(pool.layout, (x[pages] for x in pool.arrays))
        k, v = k[..., : pool.head_dim], v[..., : pool.v_head_dim]
        if _is_float8(pool):
            scales = (
                np.broadcast_to(np.asarray(s, np.float64)[layer], k.shape[2]) for s in (pool.k_scale, pool.v_scale)
            )
            k, v = (x * s[:, None] for x, s in zip(float8.dequantized(pool.format, k, v), scales, strict=True))
        metadata = jax.tree.map(np.asarray, self.metadata)
        seen = {"causal": causal, "tree_mask": tree_mask, "sinks": sinks}
        (q,) = _unscaled(self.queries, self.q_scale)
        return oracle.gqa_oracle(q, k, v, metadata, self.spec, **seen)


def kv_batch(
    seed, *, heads=4, kv_heads=2, head_dim=8, v_head_dim=None, pool_layout="nhd", scale=None, cache=None, **sizes
):
    """A ``poisoned_batch`` of keys and values; ``sizes`` as it takes them. Float8 keys have scales of each layer and
    head, values of each layer."""
    v_dim = head_dim if v_head_dim is None else v_head_dim
    width, scale = kv_heads * head_dim, head_dim**-0.5 if scale is None else scale
    latent = poisoned_batch(
        seed, heads=heads, kv_lora_rank=width, qk_rope_head_dim=kv_heads * v_dim, scale=scale, **sizes
    )
    rules = {"scale": scale, "window": latent.spec.window, "soft_cap": latent.spec.soft_cap}
    spec = GQASpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, **rules)
    pool, data = latent.pool, latent.pool.data
    k = np.asarray(data[..., :width]).reshape(*data.shape[:2], kv_heads, head_dim)
    v = np.asarray(data[..., width:]).reshape(*data.shape[:2], kv_heads, v_dim)
    stored = {}
    if cache is not None:
        k, v, stored = _in_float8(pool, k, v, cache)
    if pool_layout == "interleaved":  # in rows of others, wider than they need be
        k, v = (_widened(x, max(head_dim, v_dim) + 8) for x in (k, v))
    k, v = (*map(jnp.asarray, layouts.arrays_of(pool_layout, k, v)), None)[:2]
    static = (pool_layout, head_dim, v_dim, pool.page_stride, pool.layer_stride)
    kv_pool = KVPool(k, v, pool.num_layers, pool.num_pages, *static, **stored)
    return KVBatch(spec, kv_pool, latent.metadata, latent.q_latent[..., :head_dim], latent.layer)


def _widened(x, width):
    """Rows with NaN beside them."""
    wide = np.full((*x.shape[:3], width), 0x7F if x.dtype == np.uint8 else np.nan, x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide


def _in_float8(pool, k, v, cache):
    """Rows [pages, P, K, width] in the bytes of float8 numbers, and the fields of a pool that say so."""
    by_layer = float8.layer_scales(pool.num_layers)
    k_scale = by_layer[:, None] * np.linspace(1, 0.6, k.shape[2], dtype=np.float32)
    v_scale = float8.layer_scales(pool.num_layers, seed=1)
    layers = _layers_of_pages(len(k), pool.num_layers, pool.num_pages, pool.page_stride, pool.layer_stride)
    with np.errstate(over="ignore"):
        k = float8.codes(np.asarray(k, np.float32) / k_scale[layers][:, None, :, None], cache)
        v = float8.codes(np.asarray(v, np.float32) / v_scale[layers][:, None, None, None], cache)
    return k, v, {"format": FORMATS[cache], "k_scale": jnp.asarray(k_scale), "v_scale": jnp.asarray(v_scale)}


def _layers_of_pages(size, num_layers, num_pages, page_stride, layer_stride):
    """The layer that each of an array's pages belongs to; 0 of those between."""
    layers = np.zeros(size, int)
    for layer in range(num_layers):
        layers[np.arange(num_pages) * page_stride + layer * layer_stride] = layer
    return layers


def layer_rows(pool, layer):
    """Rows of one layer in float64, ``[N, P, C]``, by the rule ``page * page_stride + layer * layer_stride``."""
    pages = [page * pool.page_stride + layer * pool.layer_stride for page in range(pool.num_pages)]
    latent_width, rope_width = pool.format.widths(pool.kv_lora_rank, pool.rope_dim)
    data = np.asarray(pool.data)[pages]
    parts = data[..., :latent_width], data[..., pool.rope_offset : pool.rope_offset + rope_width]
    if _is_float8(pool):
        scale = (
            1.0 if pool.scale is None else np.broadcast_to(np.asarray(pool.scale, np.float64), pool.num_layers)[layer]
        )
        parts = (part * scale for part in float8.dequantized(pool.format, *parts))
    return np.concatenate([np.asarray(part, np.float64) for part in parts], axis=-1)


def _is_float8(pool):
    return pool.format.storage_dtype == np.uint8


def _unscaled(queries, q_scale):
    """Queries times their scale, in float64."""
    queries = [np.asarray(q).astype(np.float64) for q in queries]
    return queries if q_scale is None else [q * np.asarray(q_scale, np.float64)[..., None] for q in queries]


def quantized(batch):
    """The batch with its queries in float8, by the library's own function; rows of padding hold NaN still."""
    return batch.with_queries(*quantize_queries(*batch.queries))


def poisoned_batch(
    seed,
    *,
    kv_lens,
    q_lens,
    heads=2,
    page_size=4,
    num_layers=1,
    layer=0,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    scale=None,
    window=None,
    soft_cap=None,
    dtype=jnp.float32,
    cache=None,
    layout="dense",
    poison=np.nan,
    max_q_len=None,
    num_rows=None,
    num_pages=None,
    table_width=None,
    kv_offsets=None,
    kv_stride=1,
    page_stride=1,
    layer_stride=None,
    row_width=None,
    rope_offset=None,
):
    """A batch over shuffled pages in which everything that must not be read holds ``poison``.

    Poisoned: pages in no table, slots past a length, keys no row of their request sees (left of a window; all keys of
    a request without query rows), query rows nobody owns, and whatever strides skip. Other layers hold rows of their
    own in the same places, so that one batch serves every layer. Table entries past a length hold ids that are out of
    range, of free pages, or of other requests. With the same seed and shapes, only these depend on ``poison``.

    Args:
        seed: of everything random.
        kv_lens, q_lens: per request; 0 allowed, and ``q_len > kv_len`` (such rows see no key).
        dtype: of pool and queries.
        cache: the name of a float8 format, if the pool has one; its scales are 3.1 and 0.02 by layer.
        layout: "dense", request b at row ``b * max_q_len``, or "packed", one after the other, then rows of padding.
        max_q_len, num_rows, num_pages, table_width: static sizes; the least that fits and a few to spare if None.
        kv_offsets, kv_stride: position of a request's table slot 0, and step from slot to slot.
        page_stride, layer_stride: placement of pages in the pool; one layer after the other by default.
        row_width, rope_offset: of the pool's rows, what is beside their parts poisoned; no wider than these by default.
    """
    rng = np.random.default_rng(seed)
    spec = MLASpec(
        num_heads=heads,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        scale=(kv_lora_rank + qk_rope_head_dim) ** -0.5 if scale is None else scale,
        window=window,
        soft_cap=soft_cap,
    )
    batch = len(kv_lens)
    kv_lens, q_lens = np.asarray(kv_lens, np.int32).reshape(-1), np.asarray(q_lens, np.int32).reshape(-1)
    kv_offsets = np.zeros(batch, np.int32) if kv_offsets is None else np.asarray(kv_offsets, np.int32)
    slots_held = np.maximum(-(-(kv_lens - kv_offsets) // kv_stride), 0)
    pages_held = -(-slots_held // page_size)
    table_width = int(pages_held.max(initial=0)) + 2 if table_width is None else table_width
    num_pages = int(pages_held.sum()) + 3 if num_pages is None else num_pages
    layer_stride = num_pages * page_stride if layer_stride is None else layer_stride

    table = _tables(rng, pages_held, num_pages, table_width)
    seen = np.zeros((num_pages, page_size), bool)
    for b in range(batch):
        for i in range(slots_held[b]):
            first_row_at = kv_lens[b] - q_lens[b]
            in_window = window is None or kv_offsets[b] + i * kv_stride > first_row_at - window
            seen[table[b, i // page_size], i % page_size] = in_window and q_lens[b] > 0
    rows = rng.standard_normal((num_layers, num_pages, page_size, spec.latent_dim), np.float32)
    rows[:, ~seen] = poison
    placed = np.arange(num_pages) * page_stride + np.arange(num_layers)[:, None] * layer_stride
    data = np.full((max(placed.max() + 1, num_layers * num_pages), page_size, spec.latent_dim), poison, np.float32)
    data[placed] = rows
    if row_width is not None:
        wide = np.full((*data.shape[:2], row_width), poison, np.float32)
        wide[..., :kv_lora_rank] = data[..., :kv_lora_rank]
        wide[..., rope_offset : rope_offset + qk_rope_head_dim] = data[..., kv_lora_rank:]
        data = wide
    stored = {}
    if cache is None:
        data = jnp.asarray(data, dtype)
    elif cache.endswith(":blocks"):
        assert row_width is None
        data = jnp.asarray(float8.blocks(data[..., :kv_lora_rank], data[..., kv_lora_rank:]))
        stored = {"format": FORMATS[cache]}
    else:
        scales = float8.layer_scales(num_layers)
        layers = _layers_of_pages(len(data), num_layers, num_pages, page_stride, layer_stride)
        with np.errstate(over="ignore"):
            data = jnp.asarray(float8.codes(data / scales[layers][:, None, None], cache))
        stored = {"format": FORMATS[cache], "scale": jnp.asarray(scales)}
    pool = LatentPool(
        data, num_layers, num_pages, kv_lora_rank, page_stride, layer_stride,
        rope_dim=qk_rope_head_dim, rope_offset=rope_offset, **stored,
    )  # fmt: skip

    metadata = _metadata(
        kv_lens, q_lens, table, kv_offsets, kv_stride, page_size, layout=layout, max_q_len=max_q_len, num_rows=num_rows
    )
    q = rng.standard_normal((metadata.slots.shape[0], heads, spec.latent_dim), np.float32)
    owned = np.zeros(q.shape[0], bool)
    for start, length in zip(np.asarray(metadata.q_starts), q_lens, strict=True):
        owned[start : start + length] = True
    q[~owned] = poison
    q = jnp.asarray(q, dtype)
    return PagedBatch(spec, pool, metadata, q[..., :kv_lora_rank], q[..., kv_lora_rank:], layer)


def _tables(rng, pages_held, num_pages, table_width):
    """Shuffled pages for each request; hostile ids after them."""
    pages, limits = rng.permutation(num_pages), np.iinfo(np.int32)
    hostile = np.concatenate([[-1, num_pages, limits.max, limits.min], np.arange(num_pages)])
    table = rng.choice(hostile, (len(pages_held), table_width)).astype(np.int32)
    ends = np.cumsum(pages_held)
    for b, (count, end) in enumerate(zip(pages_held, ends, strict=True)):
        table[b, :count] = pages[end - count : end]
    return table


def _metadata(kv_lens, q_lens, table, kv_offsets, kv_stride, page_size, *, layout, max_q_len, num_rows):
    """By hand, not by the builders, which have tests of their own."""
    max_q_len = max(int(q_lens.max(initial=0)), 1) if max_q_len is None else max_q_len
    if layout == "dense":
        q_starts, num_rows = np.arange(len(q_lens)) * max_q_len, len(q_lens) * max_q_len
    elif layout == "packed":
        q_starts, num_rows = np.cumsum(q_lens) - q_lens, int(q_lens.sum()) + 3 if num_rows is None else num_rows
    else:
        raise ValueError(f"layout={layout!r} must be 'dense' or 'packed'")
    slots, positions = np.full(num_rows, -1), np.zeros(num_rows)
    for b, q_len in enumerate(q_lens):
        for j in range(q_len):
            at = kv_lens[b] - q_len + j
            slot, other_shard = divmod(at - kv_offsets[b], kv_stride)
            if at >= 0 and slot >= 0 and not other_shard:
                slots[q_starts[b] + j] = table[b, slot // page_size] * page_size + slot % page_size
            positions[q_starts[b] + j] = max(at, 0)
    leaves = (q_starts, q_lens, kv_lens, table, kv_offsets, slots, positions, np.zeros(0))
    return AttentionMetadata(*(jnp.asarray(leaf, jnp.int32) for leaf in leaves), max_q_len, kv_stride)


def assert_attention_close(out, lse, ref_out, ref_lse, *, visible_v_max, dtype, kernel=False):
    """Holds a result against the oracle's, for each row and head by itself: maxima, never means.

    ======================  ========================================  ====================================
    per row and head        bfloat16                                  float32
    ======================  ========================================  ====================================
    largest ``|error|``     ``2**-8 * (visible |v| max + |out| max)`` ``1e-5 * (...)``
    relative L2 error       ``4e-3``                                  the same, times ``1e-5 / 2**-8``
    ``1 - cosine``          ``5e-6``, of ``WIDE`` channels or more    the same, times ``(1e-5 / 2**-8) ** 2``
    ``|error|`` of the lse  ``1e-5 + 1e-5 * |lse|``                   ``1e-5 + 1e-6 * |lse|``
    ======================  ========================================  ====================================

    L2 and cosine scale as they do because a relative error e moves the first by e, the second by ``e**2 / 2``. So the
    bound of L2 holds the cosine to ``8e-6``, and rows of 16 bits with fewer than ``WIDE`` channels are held to that
    alone: the weights' roundings, of up to 2**-8 each, are relative to the values that they weigh, and in few channels
    the sum of these is now and then so much smaller that exact products and sums exceed ``5e-6`` (of rows of random
    values 4e-4 with 64 channels, 2.5e-5 with 128; ``test_oracle.py`` shows some). A kernel
    has the left tolerance of the lse in float32 as well. Rows that see no key must be exactly 0 and
    -inf, in ``out`` and ``lse`` alike, and no others.

    Args:
        out: [T, H, V]; any float type.
        lse: float32 [T, H], or None if the op was not asked for it.
        ref_out, ref_lse: the oracle's, float64.
        visible_v_max: largest ``|v|`` the row sees, [T, H] or [T, 1].
        dtype: what the op computes and stores in; float16 is held to 2**-11 where bfloat16 is to 2**-8.
        kernel: whether a GPU kernel made it.
    """
    name = jnp.dtype(dtype).name
    units = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 1e-5}
    if name not in units:
        raise ValueError(f"dtype={name} must be one of {', '.join(units)}")
    unit = units[name]
    ratio = unit / 2.0**-8
    got = np.asarray(out).astype(np.float64)
    assert got.shape == ref_out.shape, f"out has shape {got.shape}, must be {ref_out.shape}"
    empty = np.isneginf(ref_lse)
    _require(np.where(empty, np.abs(got).max(axis=-1, initial=0), 0), 0.0, "out of rows that see no key")

    error = got - ref_out
    bound = unit * (np.broadcast_to(visible_v_max, ref_lse.shape) + np.abs(ref_out).max(axis=-1, initial=0))
    _require(np.abs(error).max(axis=-1, initial=0), bound, "largest |error| of out")
    size = np.linalg.norm(ref_out, axis=-1)
    _require(np.linalg.norm(error, axis=-1), 4e-3 * ratio * size, "L2 error of out")
    product = np.linalg.norm(got, axis=-1) * size
    cosine = np.divide((got * ref_out).sum(axis=-1), product, out=np.ones_like(size), where=product > 0)
    if name == "float32" or got.shape[-1] >= WIDE:
        _require(1 - cosine, 5e-6 * ratio**2, "1 - cosine of out")

    if lse is None:
        return
    assert np.asarray(lse).dtype == np.float32, f"lse has dtype {np.asarray(lse).dtype}, must be float32"
    got = np.asarray(lse).astype(np.float64)
    assert got.shape == ref_lse.shape, f"lse has shape {got.shape}, must be {ref_lse.shape}"
    assert (np.isneginf(got) == empty).all(), f"lse is -inf at {np.argwhere(np.isneginf(got) != empty)[:4].tolist()}..."
    slope = 1e-6 if name == "float32" and not kernel else 1e-5
    want = np.where(empty, 0, ref_lse)
    _require(np.abs(np.where(empty, 0, got) - want), 1e-5 + slope * np.abs(want), "|error| of lse")


def _require(values, bounds, what):
    """``values <= bounds`` everywhere, or an error that names the worst row and head; NaN is never within bounds."""
    bounds = np.broadcast_to(bounds, values.shape)
    wrong = ~(values <= bounds)
    if wrong.any():
        excess = np.where(wrong, np.where(np.isnan(values), np.inf, values - bounds), -np.inf)
        t, h = np.unravel_index(excess.argmax(), values.shape)
        raise AssertionError(
            f"{what} is {values[t, h]:.3g} at row {t}, head {h}, must be at most {bounds[t, h]:.3g} "
            f"({wrong.sum()} of {wrong.size} rows and heads)"
        )


def zeros(*shape, dtype=jnp.float32):
    """Zeros for a case of ``parametrize``, which ``made`` makes: a test file that is read should start no backend."""
    return functools.partial(jnp.zeros, shape, dtype)


def made(value):
    """A value, or a dict or list of them, with the arrays of ``zeros`` made."""
    if isinstance(value, dict):
        return {name: made(each) for name, each in value.items()}
    if isinstance(value, list):
        return [made(each) for each in value]
    return value() if isinstance(value, functools.partial) else value
