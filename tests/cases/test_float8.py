"""The cases about float8 caches: C12 and C13, and the float8 parts of C04, C07, C08, C10 and C23. C06: ``cache/``."""

import functools
import mmap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import float8
import helpers
import oracle
from cases.paged import assert_same_bits, by_hand, ints, make_spec, random_rows
from mla_attn import metadata as build
from mla_attn import steps
from mla_attn.cache import KVPool, LatentPool, write_kv, write_latent
from mla_attn.ops import gqa_attention, merge_states, mla_attention, quantize_queries
from mla_attn.specs import GQASpec, MLASpec

E4M3 = "float8_e4m3fn"
# The specification is held to the contract by tests/ops; cases ask it too, in the slow run.
both = pytest.mark.parametrize("implementation", ["xla", pytest.param("reference", marks=pytest.mark.slow)])
LATENT = MLASpec(num_heads=4, kv_lora_rank=32, qk_rope_head_dim=8, scale=0.2)
HEADS = GQASpec(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2)


@functools.partial(jax.jit, static_argnames=("spec", "implementation"))
def attend(queries, pool, metadata, *, spec, implementation):
    op = mla_attention if isinstance(spec, MLASpec) else gqa_attention
    return op(*queries, pool, metadata, spec, return_lse=True, implementation=implementation)


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def stale_pools(page_size, num_pages, own, byte):
    """A pool of latent rows and one of keys and values: random codes where ``own`` is set, ``byte`` elsewhere."""
    rng = np.random.default_rng(0)
    pools = (
        LatentPool.create(num_layers=1, num_pages=num_pages, page_size=page_size, spec=LATENT, dtype=E4M3, scale=0.02),
        KVPool.create(
            num_layers=1, num_pages=num_pages, page_size=page_size, spec=HEADS, dtype=E4M3, k_scale=0.02, v_scale=3.1
        ),
    )

    def filled(array):
        if array.ndim == 0:
            return array
        codes = rng.integers(0, 0x78, array.shape, np.uint8)
        return jnp.asarray(np.where(own.reshape(own.shape + (1,) * (array.ndim - 2)), codes, np.uint8(byte)))

    return [jax.tree.map(filled, pool) for pool in pools]


@both
@pytest.mark.parametrize(("page_size", "kv_lens"), [(4, [13]), (64, [1, 63, 65])])
def test_c04_stale_slots(implementation, page_size, kv_lens):
    """Code 0x7F is NaN: in unused slots and in pages of no table it changes no bit."""
    table = np.arange(len(kv_lens) * 4).reshape(len(kv_lens), 4)
    own = np.zeros((table.size + 1, page_size), bool)
    for b, length in enumerate(kv_lens):
        for i in range(length):
            own[table[b, i // page_size], i % page_size] = True
    metadata = build.for_decode(ints(table), ints(kv_lens), page_size=page_size)
    for which, (spec, dims) in enumerate(((LATENT, (32, 8)), (HEADS, (32,)))):
        queries = tuple(random(1 + d, len(kv_lens), 4, d) for d in dims)
        results = [
            attend(queries, stale_pools(page_size, len(own), own, byte)[which], metadata, spec=spec,
                   implementation=implementation)
            for byte in (0x7F, 0x00, 0xFE)
        ]  # fmt: skip
        assert all(np.isfinite(x).all() for x in results[0])
        for other in results[1:]:
            assert_same_bits(other, results[0])


PAGES, PAGE = 116_600, 64
PLACES = ((0, 1), (58_254, 58_255), (116_508, 116_599))


def test_c07_reading():
    """4 GiB of codes: a request of 128 keys around bytes 0, 2 ** 31 and 2 ** 32 has equal bits."""
    if jax.default_backend() != "cpu":
        pytest.skip("sparse memory is the host's")
    shape, no_reserve = (PAGES, PAGE, 576), 0x4000  # MAP_NORESERVE, which Python does not name
    memory = mmap.mmap(-1, int(np.prod(shape)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    data = np.frombuffer(memory, np.uint8).reshape(shape)
    rows = float8.codes(np.asarray(random_rows(0, 2, PAGE)) / np.float32(0.02), E4M3)
    for place in PLACES:
        data[list(place)] = rows
    array = jax.device_put(data)
    if array.unsafe_buffer_pointer() != data.ctypes.data:
        pytest.skip("this JAX copies NumPy arrays, 4 GiB of them")
    pool = LatentPool.of(array, kv_lora_rank=512, dtype=E4M3, scale=0.02)
    q = random_rows(1, 1, 16, dtype="bfloat16")
    results = []
    for place in PLACES:
        metadata = build.for_decode(ints([place]), ints([128]), page_size=PAGE)
        queries = q[..., :512], q[..., 512:]
        results.append(attend(queries, pool, metadata, spec=make_spec(16), implementation="xla"))
    assert np.asarray(results[0][0]).any()
    for other in results[1:]:
        assert_same_bits(other, results[0])


@both
def test_c08_rows_without_keys(implementation):
    """Of lengths 0, 1 and 65: 0 and -inf, the one value as it is read, and an empty part changes no bit of a merge."""
    table, kv_lens = [[4, 4], [2, 4], [0, 3]], [0, 1, 65]
    own = np.zeros((5, 64), bool)
    own[2, 0], own[0], own[3, 0] = True, True, True
    latent, keys = stale_pools(64, 5, own, 0x7F)
    metadata = by_hand(kv_lens, [4, 4, 4], table)
    for pool, spec, dims in ((latent, LATENT, (32, 8)), (keys, HEADS, (32,))):
        queries = tuple(random(3 + d, 12, 4, d) for d in dims)
        out, lse = attend(queries, pool, metadata, spec=spec, implementation=implementation)
        assert (np.asarray(out[:7]) == 0).all() and np.isneginf(lse[:7]).all()
        assert np.isfinite(out[7:]).all() and np.isfinite(lse[7:]).all()
        if spec is LATENT:
            row = helpers.layer_rows(pool, 0)[2, 0]
            key, value = row, np.broadcast_to(row[:32], (4, 32))
        else:
            (key,), (value,) = (float8.dequantized(pool.format, x[2, 0], x[2, 0])[:1] for x in pool.arrays)
            key, value = (
                np.repeat(x, 2, axis=0) * s for x, s in ((key, float(pool.k_scale)), (value, float(pool.v_scale)))
            )
        q = np.concatenate(queries, axis=-1)[7].astype(np.float64)
        np.testing.assert_allclose(out[7], value, rtol=1e-6)
        np.testing.assert_allclose(lse[7], 0.2 * (q * key).sum(axis=-1), rtol=1e-5)
        merged = merge_states([out[:1], out[8:9]], [lse[:1], lse[8:9]])
        assert_same_bits(merged, (out[8:9], lse[8:9]))


def test_c10_heads():
    """Any number of heads: head h is what it is among 128."""
    own = np.ones((6, 64), bool)
    pool = stale_pools(64, 6, own, 0)[0]
    metadata = build.for_target_verify(
        ints([[0, 1, 2, 3, 4], [5, 0, 1, 2, 3]]), ints([61, 296]), num_tokens=4, page_size=64
    )
    queries = tuple(random(5 + d, 8, 128, d).astype(jnp.bfloat16) for d in (32, 8))

    def of(heads):
        spec = MLASpec(num_heads=heads, kv_lora_rank=32, qk_rope_head_dim=8, scale=0.2)
        return attend(tuple(q[:, :heads] for q in queries), pool, metadata, spec=spec, implementation="xla")

    out, lse = of(128)
    for heads in (1, 12, 20):
        got, got_lse = of(heads)
        assert got.shape == (8, heads, 32)
        np.testing.assert_allclose(got.astype(float), out[:, :heads].astype(float), rtol=0, atol=2**-6)
        np.testing.assert_allclose(got_lse, lse[:, :heads], rtol=1e-5, atol=1e-5)


# C12: 48 cached tokens and 16 new ones, 8 heads, pages of 16.

CACHED, NEW, NOPE, VALUE = 48, 16, 8, 12
WIDE = MLASpec(num_heads=8, kv_lora_rank=16, qk_rope_head_dim=4, scale=0.3)


def whole(seed, *shape, most=3):
    """Quarters of whole numbers: their products and sums are exact in float32."""
    return (np.random.default_rng(seed).integers(-4 * most, 4 * most + 1, shape) / 4).astype(np.float32)


def dequantized(x, scale, dtype=E4M3):
    codes = float8.codes(np.asarray(x, np.float32) / np.float32(scale), dtype)
    return codes.view(getattr(ml_dtypes, dtype)).astype(np.float64) * np.float64(np.float32(scale))


class Prefix:
    """A pool with the cached tokens at scale 0.02, the new ones, weights, and the metadata of both."""

    def __init__(self, scale=0.02):
        self.latent, self.rope = whole(0, CACHED + NEW, 16, most=1), whole(1, CACHED + NEW, 4, most=1)
        self.w_uk, self.w_uv = whole(2, 8, NOPE, 16, most=1), whole(3, 8, VALUE, 16, most=1)
        self.q = whole(4, NEW, 8, NOPE + 4)
        self.table = ints([[3, 0, 2, 1]])
        pool = LatentPool.create(
            num_layers=2, num_pages=4, page_size=16, spec=WIDE, dtype=E4M3, scale=jnp.asarray([3.1, scale])
        )
        first = build.for_extend(self.table, ints([CACHED]), ints([CACHED]), max_q_len=CACHED, page_size=16)
        rows = jnp.asarray(self.latent[:CACHED]), jnp.asarray(self.rope[:CACHED])
        self.pool = write_latent(pool, *rows, first.slots, layer=1)
        self.metadata = build.for_extend(self.table, ints([CACHED + NEW]), ints([NEW]), max_q_len=NEW, page_size=16)
        self.rows = {"latent": jnp.asarray(self.latent[CACHED:]), "rope": jnp.asarray(self.rope[CACHED:])}

    def keys(self, latent, rope):
        """Expanded, float64."""
        rope = np.repeat(rope[:, None].astype(np.float64), 8, axis=1)
        nope = np.einsum("nr,hdr->nhd", latent.astype(np.float64), self.w_uk)
        return np.concatenate([nope, rope], axis=-1), np.einsum("nr,hvr->nhv", latent.astype(np.float64), self.w_uv)

    def extend(self, chunk_size, **options):
        k, v = (jnp.asarray(x, jnp.float32) for x in self.keys(self.latent[CACHED:], self.rope[CACHED:]))
        q, w_uk, w_uv = (jnp.asarray(x) for x in (self.q, self.w_uk, self.w_uv))
        pool = jax.tree.map(jnp.copy, self.pool)
        arrays = {"q": q, "k": k, "v": v, **self.rows, "w_uk": w_uk, "w_uv": w_uv, "pool": pool}
        return steps.extend(**arrays, metadata=self.metadata, spec=WIDE, layer=1, chunk_size=chunk_size, **options)[0]

    def expected(self, keys, values, q=None):
        q = self.q if q is None else q
        return np.stack(
            [oracle.attend(q[j], keys[: CACHED + j + 1], values[: CACHED + j + 1], scale=0.3)[0] for j in range(NEW)]
        )


def assert_near(got, want, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=tolerance * np.abs(want).max())


def test_c12_prefix_and_new_tokens():
    """Expanded: the prefix as cached, the new tokens as given, in one chunk and in three. Absorbed: all as cached."""
    case = Prefix()
    cached = dequantized(case.latent, 0.02), dequantized(case.rope, 0.02)
    given = (np.concatenate([c[:CACHED], x[CACHED:]]) for c, x in zip(cached, (case.latent, case.rope), strict=True))
    want = case.expected(*case.keys(*given))
    for chunk_size in (64, 16):
        assert_near(case.extend(chunk_size), want)
    absorbed = case.expected(*case.keys(*cached))
    assert np.abs(absorbed - want).max() > 1e-3 * np.abs(want).max()
    q_latent = np.einsum("thd,hdr->thr", case.q[..., :NOPE], case.w_uk)
    arrays = jnp.asarray(q_latent), jnp.asarray(case.q[..., NOPE:]), *case.rows.values(), case.pool
    out, _ = steps.absorbed_extend(*arrays, case.metadata, WIDE, layer=1)
    assert_near(np.einsum("thr,hvr->thv", np.asarray(out, np.float64), case.w_uv), absorbed)


def test_c12_keys_and_values():
    """k_scale 0.02 and v_scale 0.05: in one pass, and the prefix's part merged with that of the new tokens."""
    spec = GQASpec(num_heads=8, num_kv_heads=2, head_dim=16, scale=0.3)
    q, k, v = (random(20 + i, n, h, 16) for i, (n, h) in enumerate(((NEW, 8), (CACHED + NEW, 2), (CACHED + NEW, 2))))
    pool = KVPool.create(num_layers=1, num_pages=4, page_size=16, spec=spec, dtype=E4M3, k_scale=0.02, v_scale=0.05)
    table = ints([[3, 0, 2, 1]])
    first = build.for_extend(table, ints([CACHED]), ints([CACHED]), max_q_len=CACHED, page_size=16)
    pool = write_kv(pool, k[:CACHED], v[:CACHED], first.slots)
    metadata = build.for_extend(table, ints([CACHED + NEW]), ints([NEW]), max_q_len=NEW, page_size=16)
    one, pool = steps.gqa_extend(q, k[CACHED:], v[CACHED:], pool, metadata, spec)
    keys, values = (np.repeat(dequantized(x, s), 4, axis=1) for x, s in ((k, 0.02), (v, 0.05)))
    rows = (np.asarray(q, np.float64)[j] for j in range(NEW))
    seen = [slice(CACHED + j + 1) for j in range(NEW)]
    want = np.stack([oracle.attend(row, keys[s], values[s], scale=0.3)[0] for row, s in zip(rows, seen, strict=True)])
    assert_near(one, want)
    prefix = by_hand([CACHED], [NEW], np.asarray(table))
    options = {"return_lse": True, "causal": False}
    parts = [gqa_attention(q, pool, prefix, spec, **options)]
    later = by_hand([CACHED + NEW], [NEW], np.asarray(table[:, 3:]), kv_offsets=[CACHED])
    parts.append(gqa_attention(q, pool, later, spec, return_lse=True))
    assert_near(merge_states(*zip(*parts, strict=True))[0], want)


@both
def test_c13_one_scale_of_a_latent_row(implementation):
    """Latents of 1 at scale 0.25 are stored as 4, and attend to exactly 1."""
    spec = make_spec(16)
    pool = LatentPool.create(num_layers=1, num_pages=2, page_size=64, spec=spec, dtype=E4M3, scale=0.25)
    pool = write_latent(pool, jnp.ones((70, 512)), jnp.ones((70, 64)), jnp.arange(70))
    assert (np.asarray(pool.data).reshape(128, 576)[:70].view(ml_dtypes.float8_e4m3fn) == 4).all()
    q = random_rows(2, 1, 16, dtype="bfloat16")
    metadata = build.for_decode(ints([[0, 1]]), ints([70]), page_size=64)
    out, _ = attend((q[..., :512], q[..., 512:]), pool, metadata, spec=spec, implementation=implementation)
    assert (out == 1).all()


@both
def test_c13_scales_of_a_bfloat16_cache(implementation):
    """No bit depends on them, though a pool made by hand holds one."""
    batch = helpers.poisoned_batch(0, kv_lens=[5, 9], q_lens=[1, 2], dtype=jnp.bfloat16)
    pool = batch.pool.__class__(batch.pool.data, 1, batch.pool.num_pages, 32, rope_dim=16, scale=jnp.float32(7))
    run = functools.partial(
        attend, batch.queries, metadata=batch.metadata, spec=batch.spec, implementation=implementation
    )
    assert_same_bits(run(pool=pool), run(pool=batch.pool))


@pytest.mark.parametrize(("page_size", "rank", "rope"), [(1, 256, 0), (48, 512, 64), (64, 256, 64)])
@pytest.mark.parametrize("cache", float8.CACHES)
def test_c23_sizes(cache, page_size, rank, rope):
    sizes = {"page_size": page_size, "kv_lora_rank": rank, "qk_rope_head_dim": rope, "cache": cache}
    batch = helpers.poisoned_batch(0, kv_lens=[70, 0, 1], q_lens=[1, 1, 1], dtype=jnp.bfloat16, **sizes)
    got = attend(batch.queries, batch.pool, batch.metadata, spec=batch.spec, implementation="xla")
    want, want_lse, v_max = batch.expected()
    helpers.assert_attention_close(*got, want, want_lse, visible_v_max=v_max, dtype=batch.dtype)


def test_float8_operands():
    """Queries, keys and values are divided, clipped and cast, those of the expanded prefix too."""
    case = Prefix(scale=1.0)  # which stores these numbers as they are
    assert (dequantized(case.latent, 1.0) == case.latent).all()
    scales = 0.02, 0.5, 0.3
    keys, values = case.keys(case.latent, case.rope)
    keys, values, q = dequantized(keys, 0.5), dequantized(values, 0.3), dequantized(case.q, 0.02)
    want = case.expected(keys, values, q)
    options = {"operand_dtype": jnp.float8_e4m3fn, "operand_scales": scales}
    assert_near(case.extend(16, **options), want, 2**-8)  # weights are rounded to bfloat16
    k, v = (jnp.asarray(x, jnp.float32) for x in case.keys(case.latent[:NEW], case.rope[:NEW]))
    metadata = build.for_extend(case.table, ints([NEW]), ints([NEW]), max_q_len=NEW, page_size=16)
    rows = jnp.asarray(case.latent[:NEW]), jnp.asarray(case.rope[:NEW])
    for implementation in ("xla", "reference"):
        pool = jax.tree.map(jnp.copy, case.pool)
        arrays = jnp.asarray(case.q), k, v, *rows, pool, metadata, WIDE
        out, _ = steps.prefill(*arrays, layer=1, implementation=implementation, **options)
        want = [oracle.attend(q[j], keys[: j + 1], values[: j + 1], scale=0.3)[0] for j in range(NEW)]
        assert out.dtype == jnp.float32
        assert_near(out, np.stack(want), 2**-8 if implementation == "xla" else 1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operand_dtype": "float8_e5m2"}, "operand_dtype=float8_e5m2 must be float8_e4m3fn or None"),
        ({"operand_scales": (1.0, 1.0, 1.0)}, "operand_scales= with operand_dtype=None: must be None"),
        ({"operand_dtype": E4M3, "operand_scales": (1.0, 1.0)}, "must be three: of queries, keys and values"),
        (
            {"operand_dtype": E4M3, "operand_scales": (jnp.ones(2), 1.0, 1.0)},
            r"operand_scales\[0\] has shape \(2,\), must be \[\]",
        ),
    ],
)
def test_errors_of_operands(unchecked, options, message):
    with pytest.raises(ValueError, match=message):
        Prefix().extend(16, **options)


def test_quantized_queries(unchecked):
    """The largest number of a row and head is stored as 448; position-dependent scaling comes before."""
    q, rope = random(30, 3, 4, 32), random(31, 3, 4, 8) * 9
    q, rope = q.at[0, 0].set(0).at[1, 1, 0].set(np.nan), rope.at[0, 0].set(0)
    latent, other, scale = quantize_queries(q, rope)
    assert latent.dtype == other.dtype == jnp.float8_e4m3fn and scale.shape == (3, 4)
    both = np.concatenate([q, rope], axis=-1)
    want = np.nanmax(np.abs(both), axis=-1) / 448
    want[0, 0] = 1
    np.testing.assert_allclose(scale, want, rtol=2e-7)
    codes = float8.codes(both / np.asarray(scale)[..., None], E4M3)
    assert np.concatenate([latent, other], axis=-1).view(np.uint8).tobytes() == codes.tobytes()
    assert np.abs(np.asarray(latent[2], np.float32)).max() <= 448
    for parts, message in (((), "needs the parts"), ((q, rope[:2]), r"parts\[1\] has shape"), ((latent,), "floating")):
        with pytest.raises(ValueError, match=message):
            quantize_queries(*parts)


def test_steps_take_float8_queries(unchecked):
    case, q_latent = Prefix(), random(32, NEW, 8, 16)
    latent, rope, scale = quantize_queries(q_latent, jnp.asarray(case.q[..., NOPE:]))
    call = functools.partial(
        steps.absorbed_extend, latent, rope, *case.rows.values(), metadata=case.metadata, spec=WIDE
    )
    out, pool = call(pool=jax.tree.map(jnp.copy, case.pool), layer=1, q_scale=scale)
    want, _ = mla_attention(latent, rope, pool, case.metadata, WIDE, layer=1, q_scale=scale, return_lse=True)
    assert out.dtype == jnp.bfloat16 and (out == want).all()
    with pytest.raises(ValueError, match="query_scaling with float8_e4m3fn queries: must be None"):
        scaling = steps.QueryScaling(beta=0.1, original_max_position=8)
        call(pool=case.pool, layer=1, q_scale=scale, query_scaling=scaling)
