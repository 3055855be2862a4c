"""Ops registered with ejkernel: with a stand-in of its registry, and, where it can be imported, with itself."""

import importlib
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from integrations import ragged
from mla_attn.integrations import ejkernel as adapter
from mla_attn.integrations import ragged_paged

REASON = "needs ejkernel, which wants an older jax: an environment of its own (mla_attn/integrations/README.md)"
NAMES = ["queries_nope", "queries_pe", "keys_values", "keys_pe"]


def their_mla(
    queries_nope, queries_pe, keys_values, keys_pe, kv_cache, kv_lens, block_tables, query_start_loc, distribution,
    *, softmax_scale=None, sliding_window=None, logits_soft_cap=None, mask_value=-1e30, q_scale=None, k_scale=None,
    v_scale=None, num_queries_per_block=None, shiny=None,
):  # fmt: skip
    raise AssertionError("ours has the higher priority")


def their_gqa(
    queries, keys, values, kv_cache, kv_lens, block_tables, query_start_loc, distribution, softmax_aux=None, *,
    softmax_scale=1.0, sliding_window=None, logits_soft_cap=None, q_scale=None, k_scale=None, v_scale=None,
):  # fmt: skip
    raise AssertionError("ours has the higher priority")


def their_unified(
    queries, key_cache, value_cache, kv_lens, block_tables, query_start_loc, alibi_slopes=None, qq_bias=None,
    softmax_aux=None, *, softmax_scale=None, causal=True, sliding_window=None, logits_soft_cap=None, block_dim=128,
):  # fmt: skip
    raise AssertionError("ours has the higher priority")


def their_grouped(
    lhs, rhs, group_sizes, preferred_element_type=jnp.float32, tiling=(128, 128, 128), group_offset=None,
    existing_out=None, transpose_rhs=False,
):  # fmt: skip
    raise AssertionError("ours has the higher priority")


class Registry:
    """As much of ejkernel's registry as is used."""

    def __init__(self):
        theirs = [their_mla, their_mla, their_gqa, their_unified, their_grouped, their_grouped]
        self.specs = {name: [] for name in adapter._ALGORITHMS}
        for name, function in zip(adapter._ALGORITHMS, theirs, strict=True):
            self.register(name, "xla", "any")(function)

    def register(self, algorithm, platform, backend, priority=0):
        def add(implementation):
            spec = types.SimpleNamespace(
                platform=platform, backend=backend, priority=priority, implementation=implementation
            )
            self.specs[algorithm] = sorted([*self.specs[algorithm], spec], key=lambda spec: -spec.priority)
            return implementation

        return add

    def list_implementations(self, algorithm):
        return list(self.specs.get(algorithm, []))

    def get(self, algorithm, platform):
        return next(spec.implementation for spec in self.specs[algorithm] if spec.platform == platform)


@pytest.fixture
def registry(monkeypatch):
    standin = types.ModuleType("ejkernel")
    standin.__version__, standin.kernel_registry = "0.0.80.3", Registry()
    monkeypatch.setitem(sys.modules, "ejkernel", standin)
    return standin.kernel_registry


def mla_arguments(dtype=jnp.float32, pack=1):
    batch = ragged.make("mla", [(9, 1), (6, 6), (0, 1), (70, 69)], page_size=8, pack=pack, dtype=dtype, unused=1)
    lists = [batch.arrays[name] for name in ("kv_lens", "pages", "cu_q_lens", "distribution")]
    arrays = map(jnp.asarray, (*batch.queries, *batch.new, batch.cache, *lists))
    lists = ["kv_cache", "kv_lens", "block_tables", "query_start_loc", "distribution"]
    return batch, dict(zip([*NAMES, *lists], arrays, strict=True))


def gqa_arguments(dtype=jnp.float32, pack=1):
    batch = ragged.make("gqa", [(9, 1), (6, 6), (12, 2)], page_size=8, pack=pack, dtype=dtype, unused=1)
    lists = [batch.arrays[name] for name in ("kv_lens", "pages", "cu_q_lens", "distribution")]
    arrays = map(jnp.asarray, (*batch.queries, *batch.new, batch.cache, *lists))
    names = ["queries", "keys", "values", "kv_cache", "kv_lens", "block_tables", "query_start_loc", "distribution"]
    return batch, dict(zip(names, arrays, strict=True))


def test_register_twice(registry):
    assert adapter.register() == list(adapter._ALGORITHMS)
    assert adapter.register() == []
    assert all(len(specs) == 3 for specs in registry.specs.values())  # theirs, and ours for two platforms


@pytest.mark.parametrize("platform", ["xla", "pallas"])
def test_ours_is_called(registry, platform):
    adapter.register()
    batch, arguments = mla_arguments()
    out, cache = registry.get("multi_latent_ragged_page_attention", platform)(
        **arguments, softmax_scale=0.3, sliding_window=20, mask_value=None, num_queries_per_block=8
    )
    ragged.check(out, *batch.expected(scale=0.3, window=20), jnp.float32)
    ragged.check_cache(cache, batch)


def test_scale_that_ejkernel_documents(registry):
    adapter.register()
    batch, arguments = mla_arguments()
    out, _ = registry.get("multi_latent_ragged_page_attention_v2", "xla")(**arguments)
    ragged.check(out, *batch.expected(scale=(ragged.RANK + ragged.ROPE) ** -0.5), jnp.float32)


def test_gqa(registry):
    adapter.register()
    batch, arguments = gqa_arguments()
    sinks = jnp.linspace(-1, 1, ragged.HEADS)
    function = registry.get("ragged_page_attention_v3", "xla")
    out, cache = function(**arguments, softmax_aux=sinks, softmax_scale=0.5)
    ragged.check(out, *batch.expected(scale=0.5, sinks=sinks), jnp.float32)
    ragged.check_cache(cache, batch)


def unified_arguments():
    batch, arguments = gqa_arguments()
    pages = batch.stored[..., : ragged.HEAD_DIM].reshape(*batch.stored.shape[:2], ragged.KV_HEADS, 2, -1)
    arguments = {name: arguments[name][:3] for name in ("kv_lens",)} | {
        "queries": arguments["queries"],
        "key_cache": jnp.asarray(pages[..., 0, :]),
        "value_cache": jnp.asarray(pages[..., 1, :]),
        "block_tables": arguments["block_tables"].reshape(4, -1)[:3],
        "query_start_loc": arguments["query_start_loc"][:4],
    }
    return batch, arguments


def test_unified(registry):
    adapter.register()
    batch, arguments = unified_arguments()
    function = registry.get("unified_attention", "xla")
    out = function(**arguments, logits_soft_cap=3.0)
    ragged.check(out, *batch.expected(scale=ragged.HEAD_DIM**-0.5, soft_cap=3.0), jnp.float32)
    out = function(**arguments, softmax_scale=0.4, causal=False)
    ragged.check(out, *batch.expected(scale=0.4, mask=lambda *_: True), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"alibi_slopes=.* is not supported"):
        function(**arguments, alibi_slopes=jnp.zeros(4))


def grouped(function, **options):
    """Groups 2 and 3 of five have matrices here."""
    rng = np.random.default_rng(0)
    lhs, rhs = rng.standard_normal((12, 6)).astype(np.float32), rng.standard_normal((2, 6, 5)).astype(np.float32)
    sizes, owner = np.array([3, 0, 4, 2, 1], np.int32), np.repeat([-1, 0, 1, -1], [3, 4, 2, 3])
    expected = np.where(owner[:, None] < 0, 0, np.einsum("mk,mkn->mn", lhs, rhs[owner]))
    given = {"lhs": lhs, "rhs": rhs.swapaxes(1, 2), "group_sizes": sizes, "group_offset": np.array([2], np.int32)}
    out = function(**{name: jnp.asarray(x) for name, x in given.items()}, transpose_rhs=True, **options)
    return np.asarray(out), expected


def test_grouped(registry):
    adapter.register()
    function = registry.get("grouped_matmul", "xla")
    out, expected = grouped(function, tiling=None)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    out, expected = grouped(function, existing_out=jnp.ones((12, 5)), preferred_element_type=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), expected + 1, atol=0.05)


def test_what_moved_is_named(registry):
    with pytest.raises(NotImplementedError, match=r"shiny=1 is not supported"):
        adapter.register()
        registry.get("multi_latent_ragged_page_attention", "xla")(**mla_arguments()[1], shiny=1)
    registry.specs["ragged_page_attention_v3"] = []
    with pytest.raises(
        RuntimeError, match=r"ejkernel 0.0.80.3 has no ragged_page_attention_v3, which version 0.0.80.3"
    ):
        adapter.register()

    def renamed(queries, keys):
        return None

    registry.register("ragged_page_attention_v3", "xla", "any")(renamed)
    with pytest.raises(RuntimeError, match=r"has no argument 'values' of renamed"):
        adapter.register()


@pytest.fixture(scope="module")
def ejkernel():
    """The package itself, with ours registered; its own code is not held to this suite's strictness."""
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("ignore")
        package = pytest.importorskip("ejkernel", reason=REASON)
        adapter.register()
        yield package


def spied(monkeypatch, name):
    """Calls that a function of the contract gets."""
    calls, function = [], getattr(ragged_paged, name)

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return function(*args, **kwargs)

    monkeypatch.setattr(adapter, name, spy)
    return calls


@pytest.mark.parametrize("platform", [None, "xla"], ids=["automatic", "xla"])
def test_ejkernel_calls_ours(ejkernel, monkeypatch, platform):
    function = importlib.import_module("ejkernel.modules.operations").multi_latent_ragged_page_attention
    calls = spied(monkeypatch, "ragged_paged_mla")
    batch, arguments = mla_arguments(jnp.bfloat16, 2)
    out, cache = function(*arguments.values(), softmax_scale=0.3, platform=platform)
    assert len(calls) > 0, "another implementation ran"
    ragged.check(out, *batch.expected(scale=0.3), jnp.bfloat16)
    ragged.check_cache(cache, batch)


@pytest.mark.parametrize("name", list(adapter._ALGORITHMS))
def test_ejkernel_finds_signatures_equal(ejkernel, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ejkernel.kernel_registry.validate_signatures(name) is not None


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("kind", ["mla", "gqa"])
def test_as_ejkernel(ejkernel, kind, window):
    """The same numbers as its own implementation for XLA, where both are defined: no padding that holds NaN."""
    name = {"mla": "multi_latent_ragged_page_attention", "gqa": "ragged_page_attention_v3"}[kind]
    specs = ejkernel.kernel_registry.list_implementations(name)
    own = [spec.implementation for spec in specs if spec.platform == "xla" and hasattr(spec.implementation, "mla_attn")]
    other = [spec.implementation for spec in specs if spec.platform == "xla" and spec.implementation not in own]
    _, arguments = mla_arguments() if kind == "mla" else gqa_arguments()
    arguments = {name: jnp.nan_to_num(x) if x.dtype == jnp.float32 else x for name, x in arguments.items()}
    arguments["block_tables"] = jnp.clip(arguments["block_tables"], 0, arguments["kv_cache"].shape[0] - 1)
    live = jnp.arange(arguments["kv_lens"].shape[0]) < arguments["distribution"][2]
    arguments["kv_lens"] = jnp.where(live, arguments["kv_lens"], 0)
    ends = arguments["query_start_loc"]
    arguments["query_start_loc"] = jnp.where(
        jnp.arange(ends.shape[0]) <= arguments["distribution"][2], ends, ends.max()
    )
    results = [f(**jax.tree.map(jnp.copy, arguments), softmax_scale=0.3, sliding_window=window) for f in (*own, *other)]
    rows = int(arguments["query_start_loc"][arguments["distribution"][2]])
    padding = {6 + 1} if kind == "mla" else set()  # row of the request without tokens
    kept = [row for row in range(rows) if row not in padding]
    np.testing.assert_allclose(*(np.asarray(out)[kept] for out, _ in results), atol=2e-5)
