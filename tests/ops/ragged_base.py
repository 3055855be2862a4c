"""The contract of ``ragged_attention`` as one class of tests, which every implementation subclasses."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
import oracle
from mla_attn.metadata import RaggedMetadata
from mla_attn.ops import ragged_attention
from ops.batches import INT32
from ops.contract import POISONS


@dataclasses.dataclass(frozen=True)
class RaggedBatch:
    """Queries, keys, values, and where each request's rows of them lie."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    places: dict  # q_starts, q_lens, kv_starts, kv_lens

    def expected(self, *, scale, causal=True, window=None, soft_cap=None):
        seen = {"causal": causal, "window": window}
        out, lse = oracle.ragged_oracle(self.q, self.k, self.v, **self.places, scale=scale, soft_cap=soft_cap, **seen)
        v_max = oracle.ragged_v_max(out.shape[0], self.v, **self.places, num_heads=out.shape[1], **seen)
        return out, lse, v_max


def ragged_batch(
    seed, *, kv_lens, q_lens, heads=4, kv_heads=2, qk_dim=24, v_dim=16, dtype="float32", poison=np.nan, max_q_len=6,
    max_kv_len=40, layout="dense", window=None,
):  # fmt: skip
    """A batch in which rows nobody owns, and keys that no row sees, hold ``poison``.

    "dense": each request has ``max_q_len`` and ``max_kv_len`` rows, as chunks of a prefix have; "packed": gaps of
    random length lie between the keys of two requests. Both have the same shapes.
    """
    rng = np.random.default_rng(seed)
    kv_lens, q_lens = (np.asarray(x, np.int32).reshape(-1) for x in (kv_lens, q_lens))
    batch = len(kv_lens)
    if layout == "dense":
        q_starts, kv_starts = np.arange(batch) * max_q_len, np.arange(batch) * max_kv_len
    else:
        q_starts = np.cumsum(q_lens) - q_lens
        free = batch * max_kv_len - kv_lens.sum()
        kv_starts = np.cumsum(kv_lens) - kv_lens + np.sort(rng.integers(0, free + 1, batch))
    q = rng.standard_normal((batch * max_q_len, heads, qk_dim), np.float32)
    k = rng.standard_normal((batch * max_kv_len, kv_heads, qk_dim), np.float32)
    v = rng.standard_normal((batch * max_kv_len, kv_heads, v_dim), np.float32)
    owned, seen = np.zeros(q.shape[0], bool), np.zeros(k.shape[0], bool)
    for q_start, q_len, kv_start, kv_len in zip(q_starts, q_lens, kv_starts, kv_lens, strict=True):
        owned[q_start : q_start + q_len] = True
        first = 0 if window is None else max(kv_len - q_len - window + 1, 0)
        seen[kv_start + first : kv_start + kv_len] = q_len > 0
    q[~owned], k[~seen], v[~seen] = poison, poison, poison
    places = {"q_starts": q_starts, "q_lens": q_lens, "kv_starts": kv_starts, "kv_lens": kv_lens}
    places = {name: jnp.asarray(x, jnp.int32) for name, x in places.items()}
    return RaggedBatch(*(jnp.asarray(x, dtype) for x in (q, k, v)), places)


class RaggedTests:
    """Tests of one implementation of ``ragged_attention``. Subclass as ``Test...`` and name it."""

    implementation: str
    kernel = False  # held to the tolerances of a GPU kernel

    kv_lens = (0, 1, 7, 8, 9, 40, 23, 3)  # around a block's end
    q_lens = (1, 1, 2, 1, 6, 4, 0, 5)

    def batch(self, seed, **changes):
        return ragged_batch(seed, **{"kv_lens": self.kv_lens, "q_lens": self.q_lens, **changes})

    def attend(
        self, batch, *, scale=0.2, max_q_len=6, max_kv_len=40, causal=True, window=None, soft_cap=None, out_dtype=None,
        scales=None,
    ):  # fmt: skip
        """``(out, lse)``, jitted."""
        metadata = RaggedMetadata(**batch.places, max_q_len=max_q_len, max_kv_len=max_kv_len)
        options = {"scale": scale, "causal": causal, "window": window, "soft_cap": soft_cap, "out_dtype": out_dtype}
        arrays = batch.q, batch.k, batch.v, metadata, scales or {}
        return _compiled(type(self))(*arrays, options=tuple(options.items()))

    def check(self, batch, *, scale=0.2, out_dtype=None, max_q_len=6, max_kv_len=40, **rules):
        sizes = {"max_q_len": max_q_len, "max_kv_len": max_kv_len, "out_dtype": out_dtype}
        out, lse = self.attend(batch, scale=scale, **sizes, **rules)
        assert out.dtype == (batch.q.dtype if out_dtype is None else out_dtype)
        want, want_lse, v_max = batch.expected(scale=scale, **rules)
        helpers.assert_attention_close(
            out, lse, want, want_lse, visible_v_max=v_max, dtype=batch.k.dtype, kernel=self.kernel
        )

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("layout", ["dense", "packed"])
    def test_lengths(self, dtype, layout):
        self.check(self.batch(0, dtype=dtype, layout=layout))

    def test_any_lengths(self):
        lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), min_size=8, max_size=8)

        @hypothesis.settings(deadline=None, max_examples=25)
        @hypothesis.given(
            seed=st.integers(0, 2**32 - 1),
            lengths=lengths,
            layout=st.sampled_from(["dense", "packed"]),
            poison=st.sampled_from([np.nan, -np.inf, 3e38]),
        )
        def run(seed, lengths, layout, poison):
            kv_lens, q_lens = np.transpose(lengths)
            self.check(self.batch(seed, kv_lens=kv_lens, q_lens=q_lens, layout=layout, poison=poison))

        run()

    def test_poison_changes_no_bit(self):
        results = [self.attend(self.batch(1, poison=poison, layout="packed")) for poison in POISONS.values()]
        assert all(np.isfinite(out).all() for out, _ in results)
        assert len({(np.asarray(out).tobytes(), np.asarray(lse).tobytes()) for out, lse in results}) == 1

    @pytest.mark.parametrize("field", ["q_starts", "q_lens", "kv_starts", "kv_lens"])
    def test_invalid_values_touch_no_other_request(self, field):
        batch = self.batch(2, kv_lens=[7, 8, 9, 40, 23, 6, 12, 31], q_lens=[6] * 8)
        want, want_lse, v_max = batch.expected(scale=0.2)
        others = np.delete(np.arange(48), np.s_[30:36])
        bad = (
            (-7, -48, 48, 10**6, INT32.max, INT32.min) if field == "q_starts" else (-5, -1, 7, 41, INT32.max, INT32.min)
        )
        for value in bad:
            places = {**batch.places, field: batch.places[field].at[5].set(value)}
            out, lse = (x[others] for x in self.attend(dataclasses.replace(batch, places=places)))
            helpers.assert_attention_close(
                out,
                lse,
                want[others],
                want_lse[others],
                visible_v_max=v_max[others],
                dtype=batch.k.dtype,
                kernel=self.kernel,
            )

    @pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 2), (20, 1)])
    def test_heads_share_keys_in_groups(self, heads, kv_heads):
        self.check(self.batch(3, heads=heads, kv_heads=kv_heads))

    def test_dims_of_deepseek(self):
        self.check(self.batch(4, heads=3, kv_heads=3, qk_dim=192, v_dim=128, dtype="bfloat16"), scale=192**-0.5)

    def test_values_wider_than_keys(self):
        self.check(self.batch(5, qk_dim=8, v_dim=40))

    @pytest.mark.parametrize("window", [1, 5])
    def test_window(self, window):
        self.check(self.batch(6, window=window, layout="packed"), window=window)

    def test_soft_cap(self):
        self.check(self.batch(7), scale=1.0, soft_cap=0.8)

    def test_not_causal(self):
        self.check(self.batch(8, layout="packed"), causal=False)

    def test_out_dtype(self):
        self.check(self.batch(9, dtype="bfloat16"), out_dtype=jnp.float32)

    @pytest.mark.parametrize("queries", ["float8_e4m3fn", "float32"])
    def test_float8(self, queries):
        """Products are exact and weights are not rounded to float8; the cap comes after the scales."""
        batch = self.batch(11, layout="packed")
        k, v = (x.astype(jnp.float8_e4m3fn) for x in (batch.k, batch.v))
        q, scales = batch.q.astype(queries), {"k_scale": 3.1, "v_scale": 0.3}
        if queries != "float32":
            scales["q_scale"] = 0.5
        out, lse = self.attend(dataclasses.replace(batch, q=q, k=k, v=v), soft_cap=0.8, scales=scales)
        assert out.dtype == (jnp.bfloat16 if queries != "float32" else jnp.float32)
        values = {name: np.float64(np.float32(scales.get(f"{name}_scale", 1.0))) for name in "qkv"}
        given = {"q": q, "k": k, "v": v}
        want = {name: np.asarray(x).astype(np.float64) * values[name] for name, x in given.items()}
        want, want_lse, v_max = dataclasses.replace(batch, **want).expected(scale=0.2, soft_cap=0.8)
        dtype = "bfloat16" if queries != "float32" else "float32"
        helpers.assert_attention_close(out, lse, want, want_lse, visible_v_max=v_max, dtype=dtype, kernel=self.kernel)

    def test_bounds_that_exceed_the_arrays(self):
        self.check(self.batch(10, kv_lens=[5, 3], q_lens=[2, 3], max_kv_len=5), max_kv_len=70, max_q_len=9)

    @pytest.mark.parametrize("rows, keys, requests", [(0, 4, 2), (6, 0, 2), (3, 4, 0)])
    def test_nothing_to_attend_to(self, rows, keys, requests):
        nothing = jnp.zeros(requests, jnp.int32)
        q_lens = jnp.full(requests, rows // 2 if requests else 0, jnp.int32)
        places = {"q_starts": jnp.arange(requests, dtype=jnp.int32) * 3, "q_lens": q_lens}
        places |= {"kv_starts": nothing, "kv_lens": nothing}
        sizes = {name: getattr(self.batch(0), name).shape[1:] for name in "qkv"}
        arrays = zip((rows, keys, keys), sizes.values(), strict=True)
        batch = RaggedBatch(*(jnp.full((n, *size), jnp.nan, self.batch(0).k.dtype) for n, size in arrays), places)
        out, lse = self.attend(batch)
        assert (out.shape, lse.shape) == ((rows, sizes["q"][0], sizes["v"][1]), (rows, sizes["q"][0]))
        assert (np.asarray(out) == 0).all() and np.isneginf(lse).all()


@functools.cache
def _compiled(tests):
    """One compilation cache per implementation under test: a subclass may patch what a trace reads."""

    def attend(q, k, v, metadata, scales, *, options):
        return ragged_attention(
            q, k, v, metadata, return_lse=True, implementation=tests.implementation, **scales, **dict(options)
        )  # fmt: skip

    return jax.jit(attend, static_argnames="options")
