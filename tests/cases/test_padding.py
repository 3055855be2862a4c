"""C04, C05, C08, C09 and C15: what must not be read, must not be written, and is not there at all."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import fresh_process
from cases.paged import (
    RANK,
    WIDTH,
    as_claimed,
    assert_close,
    assert_same_bits,
    attend,
    attend_unpaged,
    both_dtypes,
    by_hand,
    every_implementation,
    expected,
    ints,
    make_pool,
    make_spec,
    random_rows,
)  # fmt: skip
from mla_attn import metadata as build
from mla_attn import steps, supports
from mla_attn.buckets import Buckets, backend_compiles, warm_up
from mla_attn.cache import LatentPool, write_latent
from mla_attn.cache.allocator import PageAllocator
from mla_attn.ops import merge_states, ragged
from mla_attn.speculative import accept_greedy


@every_implementation
@pytest.mark.parametrize(
    ("page_size", "lens", "table"), [(4, [13], [[5, 2, 7, 0]]), (64, [1, 63, 65], [[4, 8], [1, 8], [6, 3]])]
)
def test_c04_stale_slots(implementation, page_size, lens, table):
    """Unused slots of last pages and pages of nobody hold NaN, infinity or huge numbers, and change no bit."""
    spec, metadata = make_spec(2), build.for_decode(ints(table), ints(lens), page_size=page_size)
    rows = np.split(np.asarray(random_rows(0, sum(lens))), np.cumsum(lens)[:-1])
    q = random_rows(1, len(lens), 2, dtype="bfloat16")
    results = []
    for fill in (0.0, np.nan, np.inf, -np.inf, 3e38):
        pool = make_pool(rows, table, page_size=page_size, num_pages=9, fill=fill)
        assert np.isfinite(fill) == bool(jnp.isfinite(pool.data).all())
        results.append(attend(implementation, q, pool, metadata, spec, optimized=True))
    assert np.isfinite(results[0][0].astype(float)).all() and np.isfinite(results[0][1]).all()
    for result in results[1:]:
        assert_same_bits(result, results[0])


@both_dtypes
@pytest.mark.parametrize("jitted", [True, False])
def test_c05_slot_minus_one(dtype, jitted):
    """Of 64 slots two are written; -1 is not the last one, nor is it the last one of the layer before."""
    before = random_rows(2, 8, 16, dtype=dtype)
    rows = jnp.full((4, WIDTH), 7.0, dtype)
    for layer in (0, 1):
        pool = LatentPool(jnp.copy(before), 2, 4, RANK, 1, 4)
        write = jax.jit(write_latent, donate_argnums=0) if jitted else write_latent
        pool = write(pool, rows[:, :RANK], rows[:, RANK:], ints([0, 17, -1, -1]), layer=ints(layer))
        want = np.array(before).reshape(2, 64, WIDTH)
        want[layer, [0, 17]] = 7.0
        assert np.asarray(pool.data).tobytes() == want.tobytes()


# C08: requests of 0, 1 and 65 keys.
LENS8, TABLE8 = [0, 1, 65], [[4, 4], [2, 4], [0, 3]]


def pool8(dtype):
    rows = np.asarray(random_rows(3, 66))
    return make_pool([rows[:0], rows[:1], rows[1:]], TABLE8, page_size=64, num_pages=5, dtype=dtype)


@every_implementation
@pytest.mark.parametrize(("q_len", "dtype"), [(1, "float32"), (1, "bfloat16"), (4, "bfloat16")])
def test_c08_rows_without_keys(implementation, q_len, dtype):
    """Rows that see no key are 0 and -inf; those that see one show it; a merge with the former changes no bit."""
    pool, spec, q = pool8(dtype), make_spec(16), random_rows(4, 3 * q_len, 16, dtype=dtype)
    metadata = by_hand(LENS8, [q_len] * 3, TABLE8)
    out, lse = attend(implementation, q, pool, metadata, spec, out_dtype=jnp.float32)
    want = expected(q, pool, metadata, spec)
    assert_close((out, lse), want, dtype)
    empty = np.isneginf(want[1][:, 0])
    assert empty.tolist() == [True] * (2 * q_len - 1) + [False] * (q_len + 1)
    assert (out[empty] == 0).all() and (lse[empty] == -np.inf).all()
    one, key = 2 * q_len - 1, np.asarray(pool.data[2, 0]).astype(np.float32)
    assert (out[one] == key[:RANK]).all()
    score = spec.scale * (np.asarray(q[one]).astype(np.float64) @ key)
    np.testing.assert_allclose(lse[one], score, rtol=1e-5, atol=1e-5)

    state = np.asarray(random_rows(5, 3 * q_len, 16))[..., :RANK], np.asarray(random_rows(6, 3 * q_len, 16))[..., 0]
    for pair in ([(out, lse), state], [state, (out, lse)]):
        merged = merge_states(*(tuple(map(jnp.asarray, x)) for x in zip(*pair, strict=True)))
        assert_same_bits([x[empty] for x in merged], [x[empty] for x in state])


@every_implementation
def test_c08_builders(implementation):
    """A length of 0 is a padding row to the builders; the rest of the bucket is not disturbed."""
    pool, spec = pool8("bfloat16"), make_spec(16)
    q = random_rows(4, 3, 16, dtype="bfloat16")
    metadata = build.for_decode(ints(TABLE8), ints(LENS8), page_size=64)
    got = attend(implementation, q, pool, metadata, spec, out_dtype=jnp.float32)
    assert (got[0][0] == 0).all() and (got[1][0] == -np.inf).all()
    assert_close(got, expected(q, pool, metadata, spec), "bfloat16")


@pytest.mark.parametrize("implementation", [i.name for i in ragged.IMPLEMENTATIONS])
@pytest.mark.parametrize("q_len", [1, 4])
def test_c08_unpaged(implementation, q_len):
    """The same over keys and values of 16 heads, as of a prompt."""
    rng = np.random.default_rng(7)
    q, k = (jnp.asarray(rng.standard_normal((n, 16, 192), np.float32), jnp.bfloat16) for n in (3 * q_len, 66))
    v = jnp.asarray(rng.standard_normal((66, 16, 128), np.float32), jnp.bfloat16)
    attend = functools.partial(attend_unpaged, implementation, q, k, v, q_lens=[q_len] * 3, kv_lens=LENS8)
    refusal = supports("ragged_attention", heads=16, kv_heads=16)[implementation]
    if refusal is not None:
        with pytest.raises(NotImplementedError, match=re.escape(refusal)):
            attend()
        pytest.skip(f"{implementation} does not claim it: {refusal}")
    out, lse = attend()
    empty = 2 * q_len - 1
    assert (out[:empty] == 0).all() and (lse[:empty] == -np.inf).all()
    assert (out[empty] == np.asarray(v[0]).astype(np.float32)).all()
    score = 192**-0.5 * (np.asarray(q[empty]).astype(float) * np.asarray(k[0]).astype(float)).sum(axis=-1)
    np.testing.assert_allclose(lse[empty], score, rtol=1e-5, atol=1e-5)
    assert np.isfinite(out).all() and np.isfinite(lse[empty:]).all()


SIZES9 = {"page_size": 16, "max_len": 64}


def speculative_round(implementation):
    """A verify and a draft-extend call over one cache, as buckets of 4 requests run them; the query is the key."""
    spec = make_spec(2)

    def run(state, pool, x):
        verify = build.for_target_verify(x["page_table"], x["lens"], num_tokens=4, q_lens=4 * x["active"], **SIZES9)
        extend = build.for_draft_extend(x["page_table"], x["lens"], x["accepted"], max_q_len=4, **SIZES9)
        outputs = {}
        for name, metadata in (("target_verify", verify), ("draft_extend", extend)):
            latent, rope = state["rows"][:, :RANK], state["rows"][:, RANK:]
            q = jnp.broadcast_to(state["rows"][:, None], (16, 2, WIDTH))
            out, pool = getattr(steps, name)(
                q[..., :RANK], q[..., RANK:], latent, rope, pool, metadata, spec, implementation=implementation
            )
            outputs[name] = (out, metadata.slots)
        outputs["accepted"] = accept_greedy(x["drafts"], state["targets"], verify.q_lens)
        return outputs, pool

    shapes = {"page_table": (4, 4), "lens": (4,), "active": (4,), "accepted": (4,), "drafts": (4, 3)}
    return Buckets("round", run, [{k: jax.ShapeDtypeStruct(v, jnp.int32) for k, v in shapes.items()}])


@every_implementation
def test_c09_idle_rank(implementation):
    """A bucket of 4 requests without one: nothing computed, written or compiled; the same from empty host arrays."""
    bucket = speculative_round(implementation)
    state = {"rows": random_rows(8, 16, dtype="bfloat16"), "targets": jnp.zeros((4, 4), jnp.int32)}
    before = random_rows(9, 16, 16, dtype="bfloat16")
    pool = LatentPool(jnp.copy(before), 1, 16, RANK, 1, 16)
    pages = PageAllocator(16, 16, table_width=4)
    zeros = np.zeros(4, np.int32)
    verify = build.for_target_verify(ints(pages.table([], batch=4)), ints(zeros), num_tokens=4, **SIZES9)
    with as_claimed(implementation, pool, verify, make_spec(2)):
        warm_up([bucket], state, pool, progress=False)
    compiled = backend_compiles()
    for inputs in (
        {"page_table": pages.table([], batch=4), "lens": zeros, "active": zeros, "accepted": zeros,
         "drafts": np.full((4, 3), -1, np.int32)},
        {"page_table": pages.table([]), "lens": zeros[:0], "active": zeros[:0], "accepted": zeros[:0],
         "drafts": np.zeros((0, 3), np.int32)},
    ):  # fmt: skip
        outputs, pool = bucket(state, pool, inputs)
        outputs = jax.tree.map(np.asarray, outputs)
        for name in ("target_verify", "draft_extend"):
            out, slots = outputs[name]
            assert (out == 0).all() and (slots == -1).all()
        accepted = outputs["accepted"]
        assert not accepted.num_emitted.any() and not accepted.accepted_drafts.any() and (accepted.emitted == -1).all()
        assert np.asarray(pool.data).tobytes() == np.asarray(before).tobytes()
    assert backend_compiles() == compiled

    # A rank that gets work in the next round: the same program.
    pages.create("a", 30)
    one = np.ones(1, np.int32)
    outputs, pool = bucket(state, pool, {
        "page_table": pages.table("a"), "lens": 20 * one, "active": one, "accepted": 2 * one,
        "drafts": np.zeros((1, 3), np.int32),
    })  # fmt: skip
    assert np.asarray(outputs["target_verify"][0])[:4].any() and not np.asarray(outputs["target_verify"][0])[4:].any()
    assert backend_compiles() == compiled


@every_implementation
@pytest.mark.parametrize("mode", ["decode", "target_verify", "draft_extend"])
def test_c09_no_requests(implementation, mode):
    """A literal batch of 0, with rows (a packed bucket) and without."""
    none, table = jnp.zeros(0, jnp.int32), jnp.zeros((0, 2), jnp.int32)
    metadata = {
        "decode": lambda: build.for_decode(table, none, page_size=16),
        "target_verify": lambda: build.for_target_verify(table, none, num_tokens=4, num_rows=8, page_size=16),
        "draft_extend": lambda: build.for_draft_extend(table, none, none, max_q_len=4, page_size=16),
    }[mode]()
    rows = {"target_verify": 8}.get(mode, 0)
    assert metadata.slots.tolist() == [-1] * rows
    build.check_metadata(metadata, num_pages=2, page_size=16)
    pool = LatentPool(jnp.full((2, 16, WIDTH), jnp.nan, jnp.bfloat16), 1, 2, RANK, 1, 2)
    out, lse = attend(implementation, random_rows(0, rows, 2, dtype="bfloat16"), pool, metadata, make_spec(2))
    assert out.shape == (rows, 2, RANK) and (out == 0).all() and (lse == -np.inf).all()
    assert accept_greedy(jnp.zeros((0, 3), jnp.int32), jnp.zeros((0, 4), jnp.int32), none).emitted.shape == (0, 4)


def test_c15_tails(tmp_path):
    """Even weights over ones give exactly 1, whatever the length; the first call of a process equals its second."""
    tests = pathlib.Path(fresh_process.__file__).parents[1]
    subprocess.run(
        [sys.executable, fresh_process.__file__, tmp_path / "results.npz"],
        check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests / "lib")])},
    )  # fmt: skip
    with np.load(tmp_path / "results.npz") as stored:
        results = dict(stored)
    paged = supports("mla_attention", page_size=fresh_process.PAGE, num_heads=2)
    unpaged = supports("ragged_attention", heads=fresh_process.HEADS, kv_heads=fresh_process.HEADS)
    assert results.keys() == {
        name
        for name, (call, implementation, _) in fresh_process.CALLS.items()
        if (unpaged if call is fresh_process.unpaged_ones else paged)[implementation] is None
    }
    for name, (first, second) in results.items():
        assert first.tobytes() == second.tobytes(), name
        if "ones" in name:
            assert (first == 1).all(), name
    for causal in (True, False):
        want = long_expected(causal)
        for name in (n for n in results if n.startswith("random") and fresh_process.CALLS[n][2] == causal):
            assert_close((results[name][0], None), want, "bfloat16")


def long_expected(causal):
    """All rows and heads at once, in float64."""
    q, pool, metadata, spec = fresh_process.long()
    keys = np.asarray(pool.data)[np.asarray(metadata.page_table)[0]].reshape(-1, WIDTH).astype(float)
    scores = spec.scale * np.einsum("thc,nc->thn", np.asarray(q).astype(float), keys)
    at = np.arange(len(keys) - len(q), len(keys))
    if causal:
        scores = np.where(np.arange(len(keys)) <= at[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = np.einsum("thn,nr->thr", weights / weights.sum(axis=-1, keepdims=True), keys[:, :RANK])
    return out, np.zeros(out.shape[:2]), np.full((len(q), 1), np.abs(keys[: -len(q), :RANK]).max())
