"""The contract of a paged attention op: a mixin of tests for each part of it.

``Contract`` says what a subclass gives: the op, its batches and their oracle, and what an implementation supports; what
it does not must raise NotImplementedError with the reason of its ``supports``. Results are held against a float64
oracle, on batches in which everything that must not be read is poisoned. ``ops/base.py`` is that of ``mla_attention``.
"""

import dataclasses
import functools
import typing

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
from mla_attn.dispatch import Implementation, current_device
from ops.batches import INT32, decode_rows, moved, random_tree

POISONS = {"nan": np.nan, "inf": np.inf, "3e38": 3e38, "zero": 0.0}


class Contract:
    """One implementation of an op. Subclass with the mixins below as ``Test...``, and set and define what follows.

    A batch has ``spec``, ``pool``, ``metadata``, ``layer``, ``queries`` (a tuple of arrays, [T, H, ...] each),
    ``out_shape`` ([T, H, V]) and ``expected(layer=, causal=, tree_mask=)``, the oracle's ``(out, lse, largest visible
    |v|)``; it is a dataclass, so that a test can replace its metadata, and ``with_queries`` replaces its queries. Its
    ``dtype`` is what the op computes in, and ``q_scale`` belongs to float8 queries.
    """

    implementation: str
    kernel = False  # held to the tolerances of a GPU kernel

    # The sizes and the dtype of a call that is about something else, and those of a real model.
    sizes: typing.ClassVar[dict]
    real_sizes: typing.ClassVar[dict]

    # What the implementation supports; None for any value.
    dtypes: tuple[str, ...] | None = None
    cache_dtypes: tuple[str, ...] | None = None  # float8 formats of caches
    float8_queries = True
    page_sizes: tuple[int, ...] | None = None
    head_counts: tuple[int, ...] | None = None
    window = soft_cap = sinks = non_causal = offsets = strides = tree = batch_invariant = True

    # Given by the contract of an op

    @staticmethod
    def op(queries, pool, metadata, spec, **options):
        """The op under test, or a program that calls it: ``out``, or ``(out, lse)`` with ``return_lse=True``."""
        raise NotImplementedError

    def make_batch(self, seed, **sizes):
        """A poisoned batch; ``sizes`` as ``helpers.poisoned_batch`` takes them, with those of ``self.sizes``."""
        raise NotImplementedError

    def implementations(self) -> tuple[Implementation, ...]:
        """Those of the op."""
        raise NotImplementedError

    def described(self, batch, **options):
        """The call as ``Implementation.supports`` takes it."""
        raise NotImplementedError

    # Tools

    def batch(self, seed=0, *, most=57, **changes):
        """A batch with lengths 0, 1, and around a page's end, and rows as in decode, verify and extend.

        Dense and packed batches, and all lengths up to ``most``, share their shapes: one compilation serves them.
        """
        sizes = {"num_layers": 3, "layer": 1, **self.sizes, **changes}
        page = sizes["page_size"]
        most = max(most, 2 * page + 3)
        sizes.setdefault("kv_lens", [0, 1, page - 1, page, page + 1, 2 * page + 3, most, page + 2])
        sizes.setdefault("q_lens", [1, 1, 2, 1, 4, 6, 4, 0])
        batch, rows = len(sizes["kv_lens"]), sizes.setdefault("max_q_len", 6)
        width = -(-most // page) + 2
        shapes = {"table_width": width, "num_pages": max(batch, 1) * width, "num_rows": batch * rows}
        if sizes.get("layout", "dense") == "dense":
            del shapes["num_rows"]
        return self.make_batch(seed, **{**shapes, **sizes})

    def attend(
        self, batch, *, layer=None, causal=True, tree_mask=None, sinks=None, batch_invariant=False, out_dtype=None
    ):
        """``(out, lse)``, jitted; None for the lse with sinks."""
        return _compiled(type(self), promised=batch_invariant)(
            batch.queries,
            batch.pool,
            batch.metadata,
            np.int32(batch.layer if layer is None else layer),
            tree_mask,
            sinks,
            batch.q_scale,
            spec=batch.spec,
            causal=causal,
            batch_invariant=batch_invariant,
            out_dtype=out_dtype,
        )

    def reason(self, batch, *, causal=True, tree_mask=None, sinks=None, batch_invariant=False, **_):
        """Why the implementation refuses a call, by its own predicate."""
        (implementation,) = (i for i in self.implementations() if i.name == self.implementation)
        flags = {"tree": tree_mask is not None, "sinks": sinks is not None, "batch_invariant": batch_invariant}
        call = self.described(batch, causal=causal, q_dtype=batch.queries[0].dtype, **flags)
        return implementation.supports(call, current_device())

    def check(self, batch, *, served=True, layer=None, causal=True, tree_mask=None, sinks=None, **options):
        """Holds a call against the oracle or, where it is not served, expects the refusal and its reason."""
        seen = {"layer": layer, "causal": causal, "tree_mask": tree_mask, "sinks": sinks}
        reason = self.reason(batch, **seen, **options)
        if not served:
            assert reason is not None
            with pytest.raises(NotImplementedError) as error:
                self.attend(batch, **seen, **options)
            assert f"{self.implementation}: {reason}" in str(error.value)
            return
        assert reason is None
        out, lse = self.attend(batch, **seen, **options)
        q_dtype = batch.queries[0].dtype
        assert out.dtype == options.get("out_dtype", jnp.bfloat16 if q_dtype == jnp.float8_e4m3fn else q_dtype)
        self.close(out, lse, batch, **seen)

    def close(self, out, lse, batch, **seen):
        want, want_lse, v_max = batch.expected(**seen)
        helpers.assert_attention_close(
            out, lse, want, want_lse, visible_v_max=v_max, dtype=batch.dtype, kernel=self.kernel
        )

    def same_bits(self, *results):
        """All results, sequences of arrays, are equal byte for byte."""
        first, *others = ([np.asarray(x).tobytes() for x in result] for result in results)
        for other in others:
            assert other == first


class Lengths:
    """Lengths of requests and rows: none, one, around a page's end, mixed, at random."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("layout", ["dense", "packed"])
    def test_lengths_and_mixed_rows(self, dtype, layout):
        """Every layer of three, in both layouts."""
        batch = self.batch(1, dtype=dtype, layout=layout)
        for layer in range(3):
            self.check(batch, layer=layer, served=supported(dtype, self.dtypes))

    def test_any_lengths(self):
        """Lengths, rows, contents and layer at random, in one compiled shape."""
        lengths = st.lists(st.tuples(st.integers(0, 57), st.integers(0, 6)), min_size=8, max_size=8)

        @hypothesis.settings(deadline=None, max_examples=25)
        @hypothesis.given(
            seed=st.integers(0, 2**32 - 1),
            lengths=lengths,
            layout=st.sampled_from(["dense", "packed"]),
            layer=st.integers(0, 2),
            poison=st.sampled_from([np.nan, -np.inf, 3e38]),
            shift=st.integers(0, 9),
        )
        def run(seed, lengths, layout, layer, poison, shift):
            kv_lens, q_lens = np.transpose(lengths)
            offsets = np.where(np.arange(8) % 2, np.maximum(kv_lens - q_lens - shift, 0), 0) if self.offsets else None
            batch = self.batch(
                seed,
                kv_lens=kv_lens,
                q_lens=q_lens,
                layout=layout,
                num_layers=3,
                poison=poison,
                kv_offsets=offsets,
            )
            self.check(batch, layer=layer)

        run()

    def test_requests_without_rows_start_anywhere(self):
        """Also in the middle of another's rows."""
        batch = self.batch(4, q_lens=[6, 0, 4, 0, 6, 0, 4, 0], layout="packed")
        starts = batch.metadata.q_starts.at[jnp.arange(1, 8, 2)].set(jnp.asarray([3, 8, 14, 47]))
        metadata = dataclasses.replace(batch.metadata, q_starts=starts)
        self.check(dataclasses.replace(batch, metadata=metadata))

    def test_bucket_of_padding(self):
        batch = self.batch(4, kv_lens=[0] * 8, q_lens=[0] * 8)
        out, lse = self.attend(batch)
        assert (np.asarray(out) == 0).all() and np.isneginf(lse).all()

    @pytest.mark.parametrize("requests", [0, 2])
    def test_no_rows_at_all(self, requests):
        batch = self.batch(
            5, kv_lens=[0] * requests, q_lens=[0] * requests, num_rows=2 * (2 - requests), layout="packed"
        )
        out, lse = self.attend(batch)
        assert (out.shape, lse.shape) == (batch.out_shape, batch.out_shape[:2])
        assert (np.asarray(out) == 0).all() and np.isneginf(lse).all()


class Layers:
    """The layer that a call reads, and where its pages lie."""

    def test_one_layer_read_by_a_number(self):
        batch = self.batch(2, kv_lens=[5, 9], q_lens=[1, 2], num_layers=1, layer=0)
        call = functools.partial(self.op, spec=batch.spec, layer=0, implementation=self.implementation)
        out = jax.jit(call)(batch.queries, batch.pool, batch.metadata)
        self.close(out, None, batch)

    def test_layer_scanned_over(self):
        batch = self.batch(3)

        def step(_, layer):
            return None, self.op(
                batch.queries,
                batch.pool,
                batch.metadata,
                batch.spec,
                layer=layer,
                return_lse=True,
                implementation=self.implementation,
            )

        _, (outs, lses) = jax.jit(lambda layers: jax.lax.scan(step, None, layers))(jnp.arange(3))
        for layer in range(3):
            self.close(outs[layer], lses[layer], batch, layer=layer)

    def test_pages_of_a_shared_pool(self):
        """``page * page_stride + layer * layer_stride``, as where layers or models take turns."""
        batch = self.batch(20, page_stride=5, layer_stride=2)
        for layer in (0, 2):
            self.check(batch, layer=layer, served=self.strides)


class Poison:
    """What must not be read has no influence, and what is invalid touches no other request."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_poison_changes_no_bit(self, dtype):
        served = supported(dtype, self.dtypes)
        batches = [self.batch(6, dtype=dtype, layout="packed", poison=p) for p in POISONS.values()]
        for batch in batches if served else ():
            assert jnp.isfinite(self.attend(batch)[0]).all()
        if served:
            self.same_bits(*(self.attend(batch) for batch in batches))

    def test_moving_pages_changes_no_bit(self):
        batch = self.batch(7)
        self.same_bits(*(self.attend(moved(batch, seed)) for seed in (None, 0, 1)))

    @pytest.mark.parametrize("field", ["page_table", "q_starts", "q_lens", "kv_lens", "kv_offsets"])
    def test_invalid_values_touch_no_other_request(self, field):
        """Whatever one request's ids and lengths are, the rows of the others keep their results."""
        batch = self.batch(8, kv_lens=[7, 8, 9, 12, 33, 40, 57, 21], q_lens=[6] * 8, layout="packed")
        want, want_lse, v_max = batch.expected()
        clean = self.attend(batch)
        pages, rows = batch.pool.num_pages, batch.out_shape[0]
        bad = {
            "page_table": (-1, -pages, pages, 3 * pages, INT32.max, INT32.min),
            "q_starts": (-7, -rows, rows, 10**6, INT32.max, INT32.min),
        }.get(field, (-5, -1, 7, 58, 10**6, INT32.max, INT32.min))
        others = np.delete(np.arange(rows), np.s_[30:36])
        for value in bad:
            values = np.asarray(getattr(batch.metadata, field)).copy()
            values[5] = value
            metadata = dataclasses.replace(batch.metadata, **{field: jnp.asarray(values)})
            out, lse = (x[others] for x in self.attend(dataclasses.replace(batch, metadata=metadata)))
            if field == "page_table":
                self.same_bits((out, lse), (clean[0][others], clean[1][others]))
            helpers.assert_attention_close(
                out,
                lse,
                want[others],
                want_lse[others],
                visible_v_max=v_max[others],
                dtype=batch.dtype,
                kernel=self.kernel,
            )


class Sizes:
    """Page sizes and numbers of heads."""

    @pytest.mark.parametrize("page_size, dtype", [(1, "float32"), (16, "bfloat16"), (48, "float32")])
    def test_page_sizes(self, page_size, dtype):
        served = supported(page_size, self.page_sizes) and supported(dtype, self.dtypes)
        self.check(self.batch(9, page_size=page_size, dtype=dtype, layout="packed"), served=served)

    @pytest.mark.parametrize("heads", [1, 3, 16, 20])
    def test_head_counts(self, heads):
        self.check(self.batch(10, heads=heads), served=supported(heads, self.head_counts))


class Softmax:
    """Scores: their scale, their size, their cap."""

    def test_scale_and_large_scores(self):
        """Scores of hundreds neither overflow nor lose the softmax."""
        batch = self.batch(12, scale=7.0, layout="packed")
        out, lse = self.attend(batch)
        assert np.abs(batch.expected()[1][np.isfinite(lse)]).max() > 100
        # A score's rounding error grows with it, and the output follows: no tolerance of the table fits.
        want, want_lse, _ = batch.expected()
        assert (np.isneginf(want_lse) == np.isneginf(lse)).all()
        np.testing.assert_allclose(out, want, atol=2e-3)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5)

    def test_soft_cap(self):
        self.check(self.batch(16, soft_cap=0.8, scale=1.0), served=self.soft_cap)

    def test_sinks(self):
        """Of each head its own, none and infinite ones among them; rows without keys are still 0."""
        batch = self.batch(31, soft_cap=0.8 if self.soft_cap else None, layout="packed")
        sinks = np.resize(np.asarray([1.5, -np.inf, np.inf, -2.0], np.float32), batch.out_shape[1])
        self.check(batch, sinks=jnp.asarray(sinks), served=self.sinks)


class Visibility:
    """Windows, calls that are not causal, positions with strides and offsets."""

    @pytest.mark.parametrize("window", [1, 5])
    def test_window(self, window):
        """Also on a pool that has let go of what lies left of every row's window."""
        batch = self.batch(13, window=window, layout="packed")
        self.check(batch, served=self.window)
        if self.window and self.offsets:
            m = batch.metadata
            offsets = np.maximum(np.asarray(m.kv_lens - m.q_lens) - window + 1, 0) // batch.pool.page_size
            self.check(self.batch(14, window=window, kv_offsets=offsets * batch.pool.page_size, layout="packed"))

    def test_window_as_long_as_everything_is_none(self):
        if self.window:
            batch = self.batch(15)
            wide = dataclasses.replace(batch, spec=dataclasses.replace(batch.spec, window=1000))
            out, lse = self.attend(wide)
            self.close(out, lse, batch)

    def test_not_causal(self):
        batch = self.batch(17, layout="packed")
        self.check(batch, causal=False, served=self.non_causal)
        if self.non_causal and self.offsets:
            self.check(self.batch(18, kv_offsets=[0, 0, 1, 2, 0, 4, 31, 3], layout="packed"), causal=False)

    @pytest.mark.parametrize("window", [None, 5])
    def test_strided_positions(self, window):
        """A shard that holds every third key; its first one may stand past the end."""
        batch = self.batch(19, kv_offsets=[2, 1, 0, 2, 1, 0, 2, 1], kv_stride=3, window=window)
        self.check(batch, served=self.offsets and (window is None or self.window))


class Results:
    """Types and shapes of what comes back."""

    def test_result_types(self):
        batch = self.batch(21)
        call = functools.partial(
            self.op,
            batch.queries,
            batch.pool,
            batch.metadata,
            batch.spec,
            implementation=self.implementation,
        )
        like = jax.eval_shape(call)
        assert (like.shape, like.dtype) == (batch.out_shape, batch.queries[0].dtype)
        out, lse = jax.eval_shape(functools.partial(call, return_lse=True, out_dtype=jnp.bfloat16))
        assert (out.shape, out.dtype) == (batch.out_shape, jnp.bfloat16)
        assert (lse.shape, lse.dtype) == (batch.out_shape[:2], jnp.float32)

    def test_out_dtype(self):
        """A float32 result of a bfloat16 cache keeps what rounding to bfloat16 would lose."""
        if not supported("bfloat16", self.dtypes):
            return
        batch = self.batch(22, dtype="bfloat16")
        self.check(batch, out_dtype=jnp.float32)
        out, _ = self.attend(batch, out_dtype=jnp.float32)
        assert (out != out.astype(jnp.bfloat16).astype(jnp.float32)).any()

    def test_queries_of_another_type(self):
        """bfloat16 queries of a float32 cache."""
        if self.dtypes is not None:
            return
        batch = self.batch(30)
        batch = batch.with_queries(*(q.astype(jnp.bfloat16) for q in batch.queries))
        out, lse = self.attend(batch)
        assert out.dtype == jnp.bfloat16
        want, want_lse, v_max = batch.expected()
        helpers.assert_attention_close(out, lse, want, want_lse, visible_v_max=v_max, dtype="bfloat16")


class Float8:
    """Float8 caches, whose layers have scales of 3.1 and 0.02 in turn, and float8 queries."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("cache", ["float8_e4m3fn", "float8_e5m2"])
    def test_float8_cache(self, cache, dtype):
        """Every layer of three, each by its scale."""
        served = supported(cache, self.cache_dtypes) and supported(dtype, self.dtypes)
        batch = self.batch(40, cache=cache, dtype=dtype, layout="packed")
        for layer in range(3):
            self.check(batch, layer=layer, served=served)

    @pytest.mark.parametrize("what", ["window", "soft cap, sinks", "not causal", "strides", "tree"])
    def test_float8_options(self, what):
        """Scores are scaled before they are capped, results after sinks have entered; pages lie anywhere."""
        served = supported("float8_e4m3fn", self.cache_dtypes)
        make = functools.partial(self.batch, 41, cache="float8_e4m3fn", layout="packed")
        if what == "window":
            self.check(make(window=5), served=served and self.window)
        elif what == "soft cap, sinks":
            sinks = np.resize(np.asarray([1.5, -np.inf, np.inf, -2.0], np.float32), make().out_shape[1])
            served = served and self.soft_cap and self.sinks
            self.check(make(soft_cap=0.8), sinks=jnp.asarray(sinks), served=served)
        elif what == "not causal":
            self.check(make(page_stride=5, layer_stride=2), causal=False, served=served and self.non_causal)
        elif what == "strides":
            batch = make(kv_offsets=[2, 1, 0, 2, 1, 0, 2, 1], kv_stride=3)
            self.check(batch, layer=2, served=served and self.offsets)
        else:
            batch = make()
            mask = jnp.asarray(random_tree(np.random.default_rng(41), batch, 3))
            self.check(batch, tree_mask=mask, served=served and self.tree)

    @pytest.mark.parametrize("cache", ["float8_e4m3fn", None])
    def test_float8_queries(self, cache):
        """With a scale of each row and head, or one of all; NaN in rows of padding."""
        served = self.float8_queries and (cache is None or supported(cache, self.cache_dtypes))
        batch = helpers.quantized(self.batch(42, cache=cache, layout="packed", dtype="bfloat16"))
        self.check(batch, served=served)
        if served:
            self.check(batch.with_queries(*batch.queries, q_scale=jnp.float32(0.02)), out_dtype=jnp.float32)

    def test_float8_poison_changes_no_bit(self):
        """NaN codes, and the largest numbers."""
        if not supported("float8_e4m3fn", self.cache_dtypes):
            return
        batches = [self.batch(43, cache="float8_e4m3fn", layout="packed", poison=p) for p in POISONS.values()]
        results = [self.attend(batch) for batch in (*batches, moved(batches[0], 1))]
        assert all(jnp.isfinite(out).all() for out, _ in results)
        self.same_bits(*results)

    def test_float8_scales_of_layers(self):
        """A layer's bits are those of a pool whose scale is that layer's alone, in a scan over layers too."""
        if not supported("float8_e4m3fn", self.cache_dtypes):
            return
        batch = self.batch(44, cache="float8_e4m3fn", layout="packed")
        call = functools.partial(self.op, batch.queries, metadata=batch.metadata, spec=batch.spec, return_lse=True)
        attend = functools.partial(call, implementation=self.implementation)

        def scale_of_all(layer, x):  # [L] becomes [], the heads of [L, K] stay
            if x.ndim > 2:
                return x
            return x[layer] if x.ndim == 1 else jnp.broadcast_to(x[layer], x.shape)

        @jax.jit
        def scanned(pool, layers):
            return jax.lax.scan(lambda _, layer: (None, attend(pool=pool, layer=layer)), None, layers)[1]

        together = scanned(batch.pool, jnp.arange(3))
        for layer in range(3):
            one = scanned(jax.tree.map(functools.partial(scale_of_all, layer), batch.pool), jnp.arange(3))
            self.same_bits([x[layer] for x in together], [x[layer] for x in one])
            self.close(*(x[layer] for x in one), batch, layer=layer)

    def test_float8_batch_invariant(self):
        served = self.batch_invariant and supported("float8_e4m3fn", self.cache_dtypes)
        self.check_invariant({"dtype": "bfloat16", "cache": "float8_e4m3fn"}, served=served)


class Trees:
    """Masks of draft trees."""

    @pytest.mark.parametrize("earlier", [0, 3])
    def test_tree(self, earlier):
        """Random masks over this call's tokens, or over those of earlier draft steps too."""
        rng = np.random.default_rng(23)
        for layout in ("dense", "packed"):
            batch = self.batch(23, layout=layout)
            self.check(batch, tree_mask=jnp.asarray(random_tree(rng, batch, earlier)), served=self.tree)

    def test_tree_with_a_window(self):
        """The prefix is seen from the row's own position, which siblings share; the mask's columns by their bits."""
        rng = np.random.default_rng(32)
        batch = self.batch(32, window=9, layout="packed")
        m, positions = batch.metadata, np.asarray(batch.metadata.positions).copy()
        for start, q_len, kv_len in zip(*(np.asarray(x) for x in (m.q_starts, m.q_lens, m.kv_lens)), strict=True):
            positions[start : start + q_len] = np.maximum(kv_len - q_len + np.array([0, 1, 1, 2, 2, 3])[:q_len], 0)
        batch = dataclasses.replace(batch, metadata=dataclasses.replace(m, positions=jnp.asarray(positions)))
        self.check(batch, tree_mask=jnp.asarray(random_tree(rng, batch, 3)), served=self.tree and self.window)

    def test_tree_that_hides_everything(self):
        """Rows of a request without prefix, with no bit set, see no key."""
        if not self.tree:
            return
        batch = self.batch(24, kv_lens=[4, 6, 4, 1, 0, 0, 0, 9], q_lens=[4, 4, 0, 1, 0, 0, 0, 6])
        mask = jnp.zeros((8, batch.metadata.max_q_len, batch.metadata.max_q_len), bool)
        self.check(batch, tree_mask=mask)
        assert np.isneginf(batch.expected(tree_mask=mask)[1][:4]).all()

    def test_tree_of_a_chain_is_causal(self):
        if not self.tree:
            return
        batch = self.batch(25)
        rows = batch.metadata.max_q_len
        chain = jnp.asarray(np.broadcast_to(np.tri(rows, dtype=bool), (8, rows, rows)))
        out, lse = self.attend(batch, tree_mask=chain)
        self.close(out, lse, batch)


class Invariance:
    """``batch_invariant=True``: a row's bits depend on nothing but its query and its visible keys."""

    def test_batch_invariant(self):
        """A row's bits are those of the decode row at its place, whatever the batch, its order and table width.

        One head: the product of a tile of one row is then of another kind than that of several.
        """
        self.check_invariant({"dtype": "bfloat16", "heads": 1}, in_any_batch=True)

    def test_batch_invariant_at_real_sizes(self):
        self.check_invariant(self.real_sizes)

    def check_invariant(self, sizes, *, in_any_batch=False, served=None):
        served = self.batch_invariant if served is None else served
        verify = self.batch(26, **sizes, kv_lens=[4, 5, 8, 9, 23, 40, 57, 33], q_lens=[4, 4, 4, 4, 5, 6, 4, 4])
        self.check(verify, batch_invariant=True, served=served)
        if not served:
            return
        want = [np.asarray(x).reshape(8, 6, *x.shape[1:]) for x in self.attend(verify, batch_invariant=True)]
        calls = [(np.arange(8), j, 0) for j in range(4)]
        if in_any_batch:
            calls += [(np.random.default_rng(26).permutation(8), 1, 0), *(([b], 2, 40) for b in range(8))]
        for requests, j, extra_columns in calls:
            decode = decode_rows(verify, j, requests, extra_columns=extra_columns)
            self.same_bits(self.attend(decode, batch_invariant=True), [x[requests, j] for x in want])


@functools.cache
def _compiled(tests, *, promised):
    """One compilation cache per implementation under test: a subclass may patch what a trace reads."""

    def attend(queries, pool, metadata, layer, tree_mask, sinks, q_scale, *, spec, causal, batch_invariant, out_dtype):
        scaled = {} if q_scale is None else {"q_scale": q_scale}
        result = tests.op(
            queries,
            pool,
            metadata,
            spec,
            **scaled,
            layer=layer,
            causal=causal,
            tree_mask=tree_mask,
            sinks=sinks,
            return_lse=sinks is None,
            out_dtype=out_dtype,
            implementation=tests.implementation,
            batch_invariant=batch_invariant,
        )
        return result if sinks is None else (result, None)

    return jax.jit(
        attend,
        static_argnames=("spec", "causal", "batch_invariant", "out_dtype"),
        compiler_options=helpers.OPTIMIZED if promised else None,
    )


def supported(value, values):
    return values is None or value in values
