"""The steps against unabsorbed attention in float64: every mode computes the same rows of the same sequences."""

import dataclasses
import functools
import pydoc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from mla_attn import metadata as md
from mla_attn import steps
from mla_attn.cache import LatentPool
from mla_attn.dispatch import ENVIRONMENT_VARIABLE
from mla_attn.specs import MLASpec

HEADS, NOPE, ROPE, RANK, VALUE = 3, 8, 4, 16, 6
LAYERS, PAGES, PAGE, WIDTH = 3, 24, 4, 8
SPEC = MLASpec(num_heads=HEADS, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, scale=(NOPE + ROPE) ** -0.5)
LENGTH = 31  # tokens of every sequence
ABSORBED = {
    "decode": steps.decode,
    "target_verify": steps.target_verify,
    "draft_extend": steps.draft_extend,
    "draft_decode": steps.draft_decode,
    "absorbed_extend": steps.absorbed_extend,
}


def i32(*values):
    return jnp.asarray(values, jnp.int32)


@dataclasses.dataclass
class World:
    """Three sequences, for every layer other ones, whose keys and values come from weights of that layer."""

    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        shape = (LAYERS, 3, LENGTH)
        self.q_nope = rng.standard_normal((*shape, HEADS, NOPE))
        self.q_rope = rng.standard_normal((*shape, HEADS, ROPE))
        # What the pool stores and the oracle reads is the same: float32 numbers.
        self.latent, self.rope = (rng.standard_normal((*shape, n)).astype(np.float32) for n in (RANK, ROPE))
        self.w_uk = (rng.standard_normal((LAYERS, HEADS, NOPE, RANK)) / 4).astype(np.float32)
        self.w_uv = (rng.standard_normal((LAYERS, HEADS, VALUE, RANK)) / 4).astype(np.float32)
        self.table = rng.permutation(PAGES).reshape(3, WIDTH).astype(np.int32)

    def keys(self, layer, b):
        """Expanded keys and values of a sequence, float64 [n, H, D] and [n, H, V]."""
        latent = self.latent[layer, b].astype(np.float64)
        nope = np.einsum("nr,hdr->nhd", latent, self.w_uk[layer])
        rope = np.repeat(self.rope[layer, b][:, None].astype(np.float64), HEADS, axis=1)
        return np.concatenate([nope, rope], axis=-1), np.einsum("nr,hvr->nhv", latent, self.w_uv[layer])

    def expected(self, layer, b, position, *, keys=None, factor=1.0, window=None, soft_cap=None):
        """Attention of the query at ``position`` over the keys before it and its own, [H, V]."""
        k, v = self.keys(layer, b)
        first = 0 if window is None else max(position - window + 1, 0)
        seen = slice(first, position + 1) if keys is None else keys
        q = factor * np.concatenate([self.q_nope[layer, b, position], self.q_rope[layer, b, position]], axis=-1)
        return oracle.attend(q, k[seen], v[seen], scale=SPEC.scale, soft_cap=soft_cap)[0]

    def pool(self, prefix_lens, dtype=jnp.float32):
        """A pool that holds the prefixes in every layer, and NaN everywhere else."""
        data = np.full((LAYERS, PAGES, PAGE, RANK + ROPE), np.nan, np.float32)
        for b, length in enumerate(prefix_lens):
            for p in range(length):
                row = np.concatenate([self.latent[:, b, p], self.rope[:, b, p]], axis=-1)
                data[:, self.table[b, p // PAGE], p % PAGE] = row
        pool = LatentPool.create(num_layers=LAYERS, num_pages=PAGES, page_size=PAGE, spec=SPEC, dtype=dtype)
        return dataclasses.replace(pool, data=jnp.array(data.reshape(pool.data.shape), dtype))

    def rows(self, metadata, layer, prefix_lens, *tensors):
        """Each tensor's rows of this call's tokens, NaN on padding."""
        made = [np.full((metadata.slots.shape[0], *x.shape[3:]), np.nan, np.float32) for x in tensors]
        for b, j, t in row_places(metadata):
            for rows, x in zip(made, tensors, strict=True):
                rows[t] = x[layer, b, prefix_lens[b] + j]
        return made

    def absorbed(self, metadata, layer, prefix_lens, dtype=jnp.float32):
        """``q_latent, q_rope, latent, rope`` of a call."""
        q_latent = np.einsum("lbnhd,lhdr->lbnhr", self.q_nope, self.w_uk)
        made = self.rows(metadata, layer, prefix_lens, q_latent, self.q_rope, self.latent, self.rope)
        return tuple(jnp.asarray(x, dtype) for x in made)

    def expanded(self, metadata, layer, prefix_lens, dtype=jnp.float32):
        """``q, k, v, latent, rope`` of a call."""
        keys = [[self.keys(n, b) for b in range(3)] for n in range(LAYERS)]
        k, v = (np.array([[pair[i] for pair in row] for row in keys]) for i in (0, 1))
        q = np.concatenate([self.q_nope, self.q_rope], axis=-1)
        made = self.rows(metadata, layer, prefix_lens, q, k, v, self.latent, self.rope)
        return tuple(jnp.asarray(x, dtype) for x in made)

    def weights(self, layer):
        return jnp.asarray(self.w_uk[layer]), jnp.asarray(self.w_uv[layer])

    def check(self, out, metadata, layer, prefix_lens, *, absorbed, atol=2e-5, **rules):
        """Holds every row against unabsorbed attention; padding must be exactly 0."""
        assert np.isfinite(out).all()
        out = np.asarray(out, np.float64)
        if absorbed:
            out = np.einsum("thr,hvr->thv", out, self.w_uv[layer])
        padding = np.ones(out.shape[0], bool)
        for b, j, t in row_places(metadata):
            want = self.expected(layer, b, prefix_lens[b] + j, **rules)
            np.testing.assert_allclose(out[t], want, atol=atol, err_msg=f"request {b}, row {j}")
            padding[t] = False
        assert (out[padding] == 0).all()

    def check_pool(self, pool, before, metadata, layer, prefix_lens):
        """This call's rows are in place, and no other byte of any layer has changed."""
        want = before.reshape(LAYERS, PAGES, PAGE, -1).copy()
        for b, j, _ in row_places(metadata):
            p = prefix_lens[b] + j
            row = np.concatenate([self.latent[layer, b, p], self.rope[layer, b, p]])
            want[layer, self.table[b, p // PAGE], p % PAGE] = row
        assert np.asarray(pool.data).tobytes() == want.tobytes()


def row_places(metadata):
    """Request, number and place of every row."""
    for b, (start, length) in enumerate(zip(metadata.q_starts.tolist(), metadata.q_lens.tolist(), strict=True)):
        for j in range(length):
            yield b, j, start + j


def copied(pool):
    """The bytes of a pool, in memory of NumPy's own: a view would keep the pool from being donated."""
    return np.array(jnp.array(pool.data))


@pytest.fixture(scope="module")
def world():
    return World()


def make_metadata(world, mode, prefix_lens, q_lens=(1, 1, 1), step=2):
    table, prefix, rows = jnp.asarray(world.table), i32(*prefix_lens), i32(*q_lens)
    return {
        "decode": lambda: md.for_decode(table, prefix + rows, page_size=PAGE),
        "target_verify": lambda: md.for_target_verify(table, prefix, num_tokens=4, q_lens=rows, page_size=PAGE),
        "draft_extend": lambda: md.for_draft_extend(
            table, prefix + rows, rows, max_q_len=4, num_rows=11, page_size=PAGE
        ),
        "draft_decode": lambda: md.for_draft_decode(table, prefix - step, step, page_size=PAGE),
        "extend": lambda: md.for_extend(table, prefix + rows, rows, max_q_len=9, num_rows=20, page_size=PAGE),
    }["extend" if mode == "absorbed_extend" else mode]()


CALLS = {  # prefix lengths and rows of each request: page ends, an idle request, a full table
    "decode": [((3, 4, 30), (1, 1, 1)), ((8, 0, 7), (1, 0, 1)), ((0, 15, 16), (1, 1, 1))],
    "target_verify": [((3, 5, 27), (4, 4, 4)), ((0, 4, 12), (4, 1, 0))],
    "draft_extend": [((3, 5, 27), (4, 2, 1)), ((0, 7, 12), (1, 4, 0))],
    "draft_decode": [((3, 4, 30), (1, 1, 1)), ((8, 5, 15), (1, 1, 1))],
    "absorbed_extend": [((22, 3, 0), (9, 4, 5)), ((0, 12, 5), (2, 0, 9))],
}


@pytest.mark.parametrize("mode", ABSORBED)
def test_absorbed_modes(world, mode):
    """Write, attend, give back the pool; the donated one is gone. The modes agree, for they agree with one oracle."""
    for layer, (prefix_lens, q_lens) in enumerate(CALLS[mode]):
        metadata = make_metadata(world, mode, prefix_lens, q_lens)
        pool = world.pool(prefix_lens)
        before, data = copied(pool), pool.data
        out, pool = ABSORBED[mode](*world.absorbed(metadata, layer, prefix_lens), pool, metadata, SPEC, layer=layer)
        assert out.dtype == jnp.float32 and data.is_deleted()
        world.check(out, metadata, layer, prefix_lens, absorbed=True)
        world.check_pool(pool, before, metadata, layer, prefix_lens)


def test_prefill(world):
    """Nothing is read from the cache: it holds NaN."""
    for layer, q_lens in ((0, (9, 4, 0)), (2, (1, 8, 3))):
        metadata = make_metadata(world, "extend", (0, 0, 0), q_lens)
        pool = world.pool((0, 0, 0))
        before, data = copied(pool), pool.data
        out, pool = steps.prefill(*world.expanded(metadata, layer, (0, 0, 0)), pool, metadata, SPEC, layer=layer)
        assert out.shape == (20, HEADS, VALUE) and data.is_deleted()
        world.check(out, metadata, layer, (0, 0, 0), absorbed=False)
        world.check_pool(pool, before, metadata, layer, (0, 0, 0))


@pytest.mark.parametrize("chunk_size", [1, 5, 100])
def test_extend_by_chunks(world, chunk_size):
    """Prefixes of several chunks, of part of one, and of none; none at all is prefill."""
    for layer, (prefix_lens, q_lens) in enumerate(
        [((22, 3, 0), (9, 4, 5)), ((0, 0, 0), (9, 4, 5)), ((8, 12, 5), (2, 0, 9))]
    ):
        metadata = make_metadata(world, "extend", prefix_lens, q_lens)
        pool = world.pool(prefix_lens)
        before, data = copied(pool), pool.data
        out, pool = steps.extend(
            *world.expanded(metadata, layer, prefix_lens), *world.weights(layer), pool, metadata, SPEC, layer=layer,
            chunk_size=chunk_size,
        )  # fmt: skip
        assert data.is_deleted()
        world.check(out, metadata, layer, prefix_lens, absorbed=False)
        world.check_pool(pool, before, metadata, layer, prefix_lens)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_extend_by_a_known_number_of_chunks(world, page_size):
    """Prefixes of nothing, of about a chunk, and of three: as many chunks as the longest needs, or more."""
    for prefix_lens in ((0, 1, 7), (8, 9, 24)):
        metadata = make_metadata(world, "extend", prefix_lens, (5, 2, 3))
        pool = world.pool(prefix_lens)
        if page_size != PAGE:  # every page of the world's becomes some, or some become one
            metadata, pool = repaged(metadata, pool, page_size)
        args = *world.expanded(metadata, 1, prefix_lens), *world.weights(1), pool, metadata, SPEC
        for num_chunks in (-(-max(prefix_lens) // 8), 100):
            again = *args[:-3], jax.tree.map(jnp.copy, pool), *args[-2:]
            out, _ = steps.extend(*again, layer=1, chunk_size=8, num_chunks=num_chunks)
            world.check(out, metadata, 1, prefix_lens, absorbed=False)


def repaged(metadata, pool, page_size):
    """The same rows in pages of another size, request after request."""
    rows = pool.data.reshape(LAYERS, PAGES, PAGE, -1)[:, metadata.page_table]  # [layers, B, W, P, width]
    requests, length = metadata.page_table.shape[0], WIDTH * PAGE
    rows = rows.reshape(LAYERS, requests, length, -1)
    pages = -(-length // page_size)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, pages * page_size - length), (0, 0)))
    made = LatentPool.create(
        num_layers=LAYERS, num_pages=requests * pages, page_size=page_size, spec=SPEC, dtype=pool.dtype
    )
    data = rows.reshape(made.data.shape).astype(made.data.dtype)
    table = jnp.arange(requests * pages, dtype=jnp.int32).reshape(requests, pages)
    slots = np.full(metadata.slots.shape, -1, np.int32)
    for b, (start, q_len, kv_len) in enumerate(
        zip(*(np.asarray(x) for x in (metadata.q_starts, metadata.q_lens, metadata.kv_lens)), strict=True)
    ):
        slots[start : start + q_len] = b * pages * page_size + np.arange(kv_len - q_len, kv_len)
    metadata = dataclasses.replace(metadata, page_table=table, slots=jnp.asarray(slots), page_size=page_size)
    return metadata, dataclasses.replace(made, data=data)


def test_a_known_number_of_chunks_leaves_no_loop(world):
    """The host waits for nothing; prefixes of more chunks give NaN, and no other request is touched."""
    prefix_lens, q_lens = (17, 8, 16), (5, 2, 3)
    metadata = make_metadata(world, "extend", prefix_lens, q_lens)
    args = *world.expanded(metadata, 1, prefix_lens), *world.weights(1), world.pool(prefix_lens), metadata, SPEC
    options = {"layer": 1, "chunk_size": 8, "implementation": "reference"}
    texts = [steps.extend.lower(*args, **options, num_chunks=n).as_text() for n in (None, 3)]
    assert ["stablehlo.while" in text for text in texts] == [True, False]
    out, lse, _ = steps.extend(*args, **options, num_chunks=2, return_lse=True)
    assert np.isnan(out[:5]).all() and np.isnan(lse[:5]).all()
    assert np.isfinite(out[5:10]).all() and np.isfinite(lse[5:10]).all()


def test_extend_in_pieces_is_one_pass(world):
    """A prompt of 31 in pieces of 9 leaves the cache, and gives the rows, that a longer pass would."""
    pool = world.pool((0, 0, 0))
    for start in range(0, LENGTH, 9):
        prefix_lens, q_lens = (start,) * 3, (min(9, LENGTH - start), 0, 0)
        metadata = make_metadata(world, "extend", prefix_lens, q_lens)
        args = world.expanded(metadata, 1, prefix_lens)
        out, pool = steps.extend(*args, *world.weights(1), pool, metadata, SPEC, layer=1, chunk_size=5)
        world.check(out, metadata, 1, prefix_lens, absorbed=False)
    written = (
        np.asarray(pool.data).reshape(LAYERS, PAGES, PAGE, -1)[1, world.table[0]].reshape(-1, RANK + ROPE)[:LENGTH]
    )
    assert (written == np.concatenate([world.latent[1, 0], world.rope[1, 0]], axis=-1)).all()


def test_extend_over_a_table_that_begins_later(world):
    """A table that has let go of the first pages holds keys from ``kv_offsets`` on: those alone are the prefix."""
    prefix_lens, q_lens, offsets = (22, 7, 3), (9, 4, 5), (8, 4, 4)  # the last one begins after the prefix
    metadata, pool = make_metadata(world, "extend", prefix_lens, q_lens), world.pool(prefix_lens)
    table = np.full_like(world.table, -1)
    for b, offset in enumerate(offsets):
        table[b, : WIDTH - offset // PAGE] = world.table[b, offset // PAGE :]
    moved = dataclasses.replace(metadata, page_table=jnp.asarray(table), kv_offsets=i32(*offsets))
    args = (*world.expanded(metadata, 1, prefix_lens), *world.weights(1))
    out, lse, _ = steps.extend(*args, pool, moved, SPEC, layer=1, chunk_size=5, return_lse=True)
    for b, j, t in row_places(metadata):
        position = prefix_lens[b] + j
        k, v = world.keys(1, b)
        seen = [p for p in range(position + 1) if p >= min(offsets[b], prefix_lens[b])]
        q = np.concatenate([world.q_nope[1, b, position], world.q_rope[1, b, position]], axis=-1)
        want, want_lse = oracle.attend(q, k[seen], v[seen], scale=SPEC.scale)
        np.testing.assert_allclose(out[t], want, atol=2e-5)
        np.testing.assert_allclose(lse[t], want_lse, atol=2e-5)


@pytest.mark.parametrize("mode", [*ABSORBED, "prefill", "extend"])
def test_no_requests(world, mode):
    """A bucket of nothing: rows that nobody owns, and no request."""
    none = jnp.zeros(0, jnp.int32)
    metadata = md.for_extend(jnp.zeros((0, WIDTH), jnp.int32), none, none, max_q_len=4, num_rows=4, page_size=PAGE)
    latent, rope = jnp.ones((4, RANK)), jnp.ones((4, ROPE))
    if mode in ABSORBED:
        queries, weights = (jnp.ones((4, HEADS, RANK)), jnp.ones((4, HEADS, ROPE))), ()
    else:
        queries = jnp.ones((4, HEADS, 12)), jnp.ones((4, HEADS, 12)), jnp.ones((4, HEADS, VALUE))
        weights = world.weights(0) if mode == "extend" else ()
    pool = world.pool((0, 0, 0))
    before = copied(pool)
    out, lse, pool = getattr(steps, mode)(
        *queries, latent, rope, *weights, pool, metadata, SPEC, return_lse=True
    )  # fmt: skip
    assert (np.asarray(out) == 0).all() and np.isneginf(lse).all()
    assert np.asarray(pool.data).tobytes() == before.tobytes()


def test_log_sum_exps_merge(world):
    """The partials of a call over fresh keys and of one over the prefix are the call over both."""
    prefix_lens, q_lens = (22, 3, 0), (9, 4, 5)
    metadata = make_metadata(world, "extend", prefix_lens, q_lens)
    args = world.expanded(metadata, 1, prefix_lens)
    out, lse, _ = steps.prefill(*args, world.pool(prefix_lens), metadata, SPEC, layer=1, return_lse=True)
    both, both_lse, _ = steps.extend(
        *args, *world.weights(1), world.pool(prefix_lens), metadata, SPEC, layer=1, return_lse=True
    )
    absorbed = world.absorbed(metadata, 1, prefix_lens)
    latent_out, latent_lse, _ = steps.absorbed_extend(
        *absorbed, world.pool(prefix_lens), metadata, SPEC, layer=1, return_lse=True
    )
    world.check(both, metadata, 1, prefix_lens, absorbed=False)
    world.check(latent_out, metadata, 1, prefix_lens, absorbed=True)
    owned = [t for _, _, t in row_places(metadata)]
    np.testing.assert_allclose(np.asarray(both_lse)[owned], np.asarray(latent_lse)[owned], atol=2e-5)
    last = [t for b, _, t in row_places(metadata) if b == 2]  # of the request without a prefix
    np.testing.assert_allclose(np.asarray(lse)[last], np.asarray(both_lse)[last], atol=2e-5)
    assert (np.asarray(lse)[owned] <= np.asarray(both_lse)[owned] + 2e-5).all() and out.shape == both.shape


def test_the_environment_is_read_at_every_call(world, monkeypatch):
    """Also after a call of the same shapes was compiled."""
    metadata = make_metadata(world, "decode", (3, 4, 30))
    args, spec = world.absorbed(metadata, 0, (3, 4, 30)), dataclasses.replace(SPEC, scale=0.123)

    def decode():
        return steps.decode(*args, world.pool((3, 4, 30)), metadata, spec)

    decode()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "triton")
    with pytest.raises(NotImplementedError, match="mla_attention is not supported here: triton: cpu"):
        decode()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fastest")
    with pytest.raises(ValueError, match="MLA_ATTN_IMPLEMENTATION='fastest' must be one of"):
        decode()


def test_bfloat16(world):
    """Rounding of inputs alone makes about a hundredth; the modes must not add to that."""
    prefix_lens, q_lens = (22, 3, 0), (9, 4, 5)
    metadata = make_metadata(world, "extend", prefix_lens, q_lens)
    args, weights = world.expanded(metadata, 1, prefix_lens, jnp.bfloat16), world.weights(1)
    pool = world.pool(prefix_lens, jnp.bfloat16)
    out, pool = steps.extend(*args, *weights, pool, metadata, SPEC, layer=1, chunk_size=5, implementation="reference")
    assert out.dtype == jnp.bfloat16 and pool.dtype == jnp.bfloat16
    world.check(out.astype(jnp.float32), metadata, 1, prefix_lens, absorbed=False, atol=0.03)
    metadata = make_metadata(world, "decode", (22, 3, 0))
    args = world.absorbed(metadata, 1, prefix_lens, jnp.bfloat16)
    out, _ = steps.decode(*args, world.pool(prefix_lens, jnp.bfloat16), metadata, SPEC, layer=1)
    assert out.dtype == jnp.bfloat16
    world.check(out.astype(jnp.float32), metadata, 1, prefix_lens, absorbed=True, atol=0.05)


def test_soft_cap_and_window(world):
    spec = dataclasses.replace(SPEC, soft_cap=0.7)
    prefix_lens, q_lens = (22, 3, 0), (9, 4, 5)
    metadata = make_metadata(world, "extend", prefix_lens, q_lens)
    out, _ = steps.extend(
        *world.expanded(metadata, 0, prefix_lens), *world.weights(0), world.pool(prefix_lens), metadata, spec,
        chunk_size=5, implementation="reference",
    )  # fmt: skip
    world.check(out, metadata, 0, prefix_lens, absorbed=False, soft_cap=0.7)
    spec = dataclasses.replace(spec, window=3)
    none = (0, 0, 0)
    metadata = make_metadata(world, "extend", none, q_lens)
    out, _ = steps.prefill(
        *world.expanded(metadata, 0, none), world.pool(none), metadata, spec, implementation="reference"
    )
    world.check(out, metadata, 0, none, absorbed=False, soft_cap=0.7, window=3)


def test_sinks(world):
    """They take their share once: of each row the share that its keys' sum has of both sums."""
    prefix_lens, sinks = (3, 5, 27), jnp.asarray([0.5, -jnp.inf, 2.0])
    metadata = make_metadata(world, "target_verify", prefix_lens, (4, 4, 4))
    args = world.absorbed(metadata, 0, prefix_lens)
    plain, lse, _ = steps.target_verify(*args, world.pool(prefix_lens), metadata, SPEC, return_lse=True)
    out, _ = steps.target_verify(*args, world.pool(prefix_lens), metadata, SPEC, sinks=sinks)
    share = 1 / (1 + np.exp(np.asarray(sinks) - np.asarray(lse)))
    assert share[:, 1].min() == 1 and share[:, 2].max() < 0.9
    np.testing.assert_allclose(out, np.asarray(plain) * share[:, :, None], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="sinks with return_lse=True"):
        steps.decode(*args, world.pool(prefix_lens), metadata, SPEC, sinks=sinks, return_lse=True)


def test_rows_past_the_limit(world):
    """Drafts past the last page write nothing and give zeros; the rows before them are right."""
    prefix_lens = (30, 29, 2)
    table = jnp.asarray(world.table)
    metadata = md.for_target_verify(table, i32(*prefix_lens), num_tokens=4, page_size=PAGE, max_len=LENGTH)
    assert metadata.q_lens.tolist() == [1, 2, 4]
    pool = world.pool(prefix_lens)
    before = copied(pool)
    args = world.absorbed(metadata, 0, prefix_lens)
    out, pool = steps.target_verify(*(jnp.nan_to_num(x, nan=7.0) for x in args), pool, metadata, SPEC, layer=0)
    world.check(out, metadata, 0, prefix_lens, absorbed=True)
    world.check_pool(pool, before, metadata, 0, prefix_lens)


def test_a_tree_is_verified_along_its_paths(world):
    """Anchor 20, drafts 21 and 22 side by side, 23 below 22: no branch sees the other."""
    prefix_lens = (20, 20, 20)
    metadata = make_metadata(world, "target_verify", prefix_lens, (4, 4, 4))
    mask = jnp.asarray([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]] * 3, bool)
    out, _ = steps.target_verify(
        *world.absorbed(metadata, 1, prefix_lens), world.pool(prefix_lens), metadata, SPEC, layer=1, tree_mask=mask
    )
    out = np.einsum("thr,hvr->thv", out, world.w_uv[1]).reshape(3, 4, HEADS, VALUE)
    for b in range(3):
        for j, seen in enumerate(([20], [20, 21], [20, 22], [20, 22, 23])):
            want = world.expected(1, b, 20 + j, keys=[*range(20), *seen])
            np.testing.assert_allclose(out[b, j], want, atol=2e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="plain JAX promises bits on CPUs alone")
def test_decode_and_verify_agree_bit_for_bit_when_asked(world):
    prefix_lens = (3, 5, 22)
    verify = make_metadata(world, "target_verify", prefix_lens, (4, 4, 4))
    decode = make_metadata(world, "decode", prefix_lens)
    results = [
        step(*world.absorbed(m, 2, prefix_lens), world.pool(prefix_lens), m, SPEC, layer=2, batch_invariant=True)[0]
        for step, m in ((steps.target_verify, verify), (steps.decode, decode))
    ]
    assert np.asarray(results[0][::4]).tobytes() == np.asarray(results[1]).tobytes()


@pytest.mark.parametrize("outer", ["jit", "scan"])
def test_inside_other_programs(world, outer):
    """Steps inline: the outer program donates, and may trace the layer."""
    prefix_lens = (3, 4, 22)
    metadata = make_metadata(world, "decode", prefix_lens)
    args = [world.absorbed(metadata, layer, prefix_lens) for layer in range(LAYERS)]

    @functools.partial(jax.jit, donate_argnums=0)
    def unrolled(pool, args):
        outs = []
        for layer in range(LAYERS):
            out, pool = steps.decode(*args[layer], pool, metadata, SPEC, layer=layer, implementation="reference")
            outs.append(out)
        return outs, pool

    @functools.partial(jax.jit, donate_argnums=0)
    def scanned(pool, args):
        def body(pool, inputs):
            layer, args = inputs
            out, pool = steps.decode(*args, pool, metadata, SPEC, layer=layer)
            return pool, out

        stacked = jax.tree.map(lambda *x: jnp.stack(x), *args)
        pool, outs = jax.lax.scan(body, pool, (jnp.arange(LAYERS), stacked))
        return outs, pool

    pool = world.pool(prefix_lens)
    data = pool.data
    outs, pool = {"jit": unrolled, "scan": scanned}[outer](pool, args)
    assert data.is_deleted()
    want = world.pool([p + 1 for p in prefix_lens])
    assert np.asarray(pool.data).tobytes() == np.asarray(want.data).tobytes()
    for layer in range(LAYERS):
        world.check(outs[layer], metadata, layer, prefix_lens, absorbed=True)


def llama4(position, beta=0.4, original=5):
    return 1 + beta * np.log(1 + np.floor(position / original))


def test_query_scaling_is_the_formula():
    scaling = steps.QueryScaling(beta=0.4, original_max_position=5)
    positions = np.array([0, 4, 5, 9, 10, 31, 10**6, 2**31 - 1], np.int32)
    got = scaling.factors(jnp.asarray(positions))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, llama4(positions), rtol=1e-6)


@pytest.mark.parametrize("mode", ["decode", "target_verify", "prefill", "extend"])
def test_query_scaling(world, mode):
    """The factor of each row's own position, in every form of attention."""
    scaling = steps.QueryScaling(beta=0.4, original_max_position=5)
    prefix_lens = (0, 0, 0) if mode == "prefill" else (22, 3, 9)
    q_lens = {"decode": (1, 1, 1), "target_verify": (4, 1, 3)}.get(mode, (9, 4, 6))
    metadata = make_metadata(world, "extend" if mode in ("prefill", "extend") else mode, prefix_lens, q_lens)
    options = {"layer": 1, "query_scaling": scaling, "implementation": "reference"}
    pool = world.pool(prefix_lens)
    if mode in ABSORBED:
        out, _ = ABSORBED[mode](*world.absorbed(metadata, 1, prefix_lens), pool, metadata, SPEC, **options)
        out = np.einsum("thr,hvr->thv", out, world.w_uv[1])
    elif mode == "prefill":
        out, _ = steps.prefill(*world.expanded(metadata, 1, prefix_lens), pool, metadata, SPEC, **options)
    else:
        args = (*world.expanded(metadata, 1, prefix_lens), *world.weights(1))
        out, _ = steps.extend(*args, pool, metadata, SPEC, chunk_size=5, **options)
    for b, j, t in row_places(metadata):
        position = prefix_lens[b] + j
        want = world.expected(1, b, position, factor=llama4(position))
        np.testing.assert_allclose(out[t], want, atol=2e-5)


def test_query_scaling_refuses_no_length():
    with pytest.raises(ValueError, match="original_max_position=0 must be an integer from 1 to 2147483647"):
        steps.QueryScaling(beta=0.1, original_max_position=0)


FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
EXTEND_ERRORS = [
    ({"chunk_size": 0}, ValueError, "chunk_size=0 must be an integer of at least 1"),
    ({"w_uk": jnp.zeros((HEADS, NOPE + 1, RANK))}, ValueError, r"w_uk has shape \(3, 9, 16\), must be \(3, 8, 16\)"),
    ({"w_uk": jnp.zeros((HEADS, RANK, NOPE))}, ValueError, r"w_uk has shape \(3, 16, 8\), must be \(3, 8, 16\)"),
    ({"w_uv": jnp.zeros((HEADS, VALUE, 1))}, ValueError, r"w_uv has shape \(3, 6, 1\), must be \(3, 6, 16\)"),
    (
        {"spec": dataclasses.replace(SPEC, window=3)},
        NotImplementedError,
        "extend with window=3 is not supported",
    ),
]
ERRORS = [
    ({"q": jnp.zeros((19, HEADS, 12))}, ValueError, r"q has shape \(19, 3, 12\), must be \(20, 3, 12\)"),
    ({"k": jnp.zeros((21, HEADS, 12))}, ValueError, r"k has shape \(21, 3, 12\), must be \(20, 3, 12\)"),
    ({"k": jnp.zeros((20, 1, 12))}, ValueError, r"k has shape \(20, 1, 12\), must be \(20, 3, 12\)"),
    ({"v": jnp.zeros((21, HEADS, 6))}, ValueError, r"v has shape \(21, 3, 6\), must be \(20, 3, 6\)"),
    ({"q": jnp.zeros((20, 36))}, ValueError, r"q has shape \(20, 36\), must be \[T, H, D\]"),
    ({"latent": jnp.zeros((19, RANK))}, ValueError, r"latent has shape \(19, 16\), must be \(20, 16\)"),
    ({"spec": dataclasses.replace(SPEC, num_heads=4)}, ValueError, r"q has shape \(20, 3, 12\), must be \(20, 4, 12\)"),
    ({"spec": dataclasses.replace(SPEC, kv_lora_rank=12)}, ValueError, r"pool stores 16 latent \+ 4 rope channels"),
    ({"implementation": "cuda"}, ValueError, "implementation='cuda' must be one of"),
    ({"return_lse": "no"}, ValueError, "return_lse='no' must be True or False"),
    ({"return_lse": [True]}, ValueError, r"return_lse=\[True\] must be True or False"),
    ({"layer": 0.5}, ValueError, r"layer=0.5 must be an integer"),
]


@pytest.mark.parametrize(
    "step, change, error, message",
    [(steps.extend, *case) for case in EXTEND_ERRORS + ERRORS] + [(steps.prefill, *case) for case in ERRORS],
)
def test_errors_of_expanded_modes(unchecked, world, step, change, error, message):
    metadata = make_metadata(world, "extend", (2, 2, 2), (1, 1, 1))
    names = ("q", "k", "v", "latent", "rope")
    call = dict(zip(names, world.expanded(metadata, 0, (2, 2, 2)), strict=True))
    if step is steps.extend:
        call |= dict(zip(("w_uk", "w_uv"), world.weights(0), strict=True))
    call |= {"pool": world.pool((2, 2, 2)), "metadata": metadata, "spec": SPEC, **change}
    with pytest.raises(error, match=message):
        step.trace(**call)
    with pytest.raises(error, match=message):
        step.eval_shape(**call)


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("mode", [*ABSORBED, "prefill", "extend"])
def test_float8_is_refused_by_name(unchecked, world, mode, dtype):
    """Its numbers need a scale: no product of them as they are is right."""
    metadata = make_metadata(world, mode if mode in ABSORBED else "extend", (3, 4, 5))
    if mode in ABSORBED:
        call = dict(zip(("q_latent", "q_rope", "latent", "rope"), world.absorbed(metadata, 0, (3, 4, 5)), strict=True))
    else:
        call = dict(zip(("q", "k", "v", "latent", "rope"), world.expanded(metadata, 0, (3, 4, 5)), strict=True))
        call |= dict(zip(("w_uk", "w_uv"), world.weights(0), strict=True)) if mode == "extend" else {}
    rest = {"pool": world.pool((3, 4, 5)), "metadata": metadata, "spec": SPEC}
    # Queries may be float8_e4m3fn in absorbed steps, but then both parts are.
    other = "q_rope has dtype .*, must be q_latent's" if mode in ABSORBED and dtype == jnp.float8_e4m3fn else "never"
    for name, array in call.items():
        narrow = jax.ShapeDtypeStruct(array.shape, dtype)
        with pytest.raises(
            ValueError, match=f"{name} has dtype {jnp.dtype(dtype).name}, must be a floating dtype of at|{other}"
        ):
            jax.eval_shape(lambda x, name=name: getattr(steps, mode)(**call | rest | {name: x}), narrow)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"chunk_size": 16.0}, "chunk_size=16.0 must be an integer of at least 1"),
        ({"chunk_size": "16"}, "chunk_size='16' must be an integer of at least 1"),
        ({"chunk_size": jnp.int32(16)}, r"chunk_size=Array\(16.* must be static, not an array"),
        ({"return_lse": jnp.bool_(True)}, "return_lse=.* must be static, not an array"),
        ({"implementation": 3}, "implementation=3 must be one of"),
    ],
)
def test_static_arguments_are_named(unchecked, world, change, message):
    metadata = make_metadata(world, "extend", (2, 2, 2), (1, 1, 1))
    args = (*world.expanded(metadata, 0, (2, 2, 2)), *world.weights(0), world.pool((2, 2, 2)), metadata, SPEC)
    with pytest.raises(ValueError, match=message):
        steps.extend.trace(*args, **change)


def test_a_strided_table_is_refused(unchecked, world):
    """``extend`` reads a prefix as consecutive keys."""
    metadata = dataclasses.replace(make_metadata(world, "extend", (2, 2, 2), (1, 1, 1)), kv_stride=2)
    args = (*world.expanded(metadata, 0, (2, 2, 2)), *world.weights(0), world.pool((2, 2, 2)), metadata, SPEC)
    with pytest.raises(NotImplementedError, match="extend with kv_stride=2 is not supported"):
        steps.extend.trace(*args)


@pytest.mark.parametrize("mode", ABSORBED)
def test_errors_of_absorbed_modes(unchecked, world, mode):
    metadata = make_metadata(world, mode, (3, 4, 5))
    q_latent, q_rope, latent, rope = world.absorbed(metadata, 0, (3, 4, 5))
    pool = world.pool((3, 4, 5))
    with pytest.raises(ValueError, match=r"latent has shape \(2, 16\), must be"):
        ABSORBED[mode](q_latent, q_rope, latent[:2], rope, pool, metadata, SPEC)
    with pytest.raises(ValueError, match=r"q_latent has shape \(2, 3, 16\), must be"):
        ABSORBED[mode](q_latent[:2], q_rope, latent, rope, pool, metadata, SPEC)
    with pytest.raises(NotImplementedError, match="not supported here: triton: cpu"):
        ABSORBED[mode](q_latent, q_rope, latent, rope, pool, metadata, SPEC, implementation="triton")
    # Before it is traced, where its value is no longer known; the pool is by position or by name.
    for layer in (LAYERS, -1, np.int64(LAYERS), i32(LAYERS)[0]):
        with pytest.raises(ValueError, match=f"layer=.*{layer}.* must be .*0 .*{LAYERS - 1}"):
            ABSORBED[mode](q_latent, q_rope, latent, rope, pool, metadata, SPEC, layer=layer)
        with pytest.raises(ValueError, match=f"layer=.*{layer}"):
            ABSORBED[mode](q_latent, q_rope, latent, rope, pool=pool, metadata=metadata, spec=SPEC, layer=layer)


@pytest.mark.parametrize("mode", [*ABSORBED, "prefill", "extend"])
def test_a_pool_of_other_pages_is_refused(unchecked, world, mode):
    """Slots counted with another page size would be other rows."""
    metadata = make_metadata(world, mode if mode in ABSORBED else "extend", (3, 4, 5))
    pool = world.pool((3, 4, 5))
    pool = dataclasses.replace(pool, data=pool.data.reshape(-1, pool.page_size // 2, pool.latent_dim))
    if mode in ABSORBED:
        step, arrays = ABSORBED[mode], world.absorbed(metadata, 0, (3, 4, 5))
    else:
        step, arrays = getattr(steps, mode), world.expanded(metadata, 0, (3, 4, 5))
    arrays = (*arrays, *(world.weights(0) if mode == "extend" else ()))
    with pytest.raises(ValueError, match="metadata was built with page_size=4, but the pool has page_size=2"):
        step.trace(*arrays, pool, metadata, SPEC)


@pytest.mark.parametrize("step", [*ABSORBED.values(), steps.prefill, steps.extend], ids=lambda step: step.__name__)
def test_steps_are_told_apart(step):
    """Profiles and compilation logs show each under its own name, and each says what it takes."""
    assert step.__name__ in (*ABSORBED, "prefill", "extend")
    assert "Args:" in step.__doc__ and getattr(steps, step.__name__) is step
    assert "metadata: " in pydoc.render_doc(step)
