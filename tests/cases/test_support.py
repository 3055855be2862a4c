"""C23 and C24: a call is served right, or refused with a reason; what is refused is known before."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
import oracle
from cases.paged import every_implementation
from mla_attn import supports
from mla_attn.dispatch import NAMES
from mla_attn.metadata import RaggedMetadata
from mla_attn.ops import mla, mla_attention, ragged, ragged_attention


def run(implementation, batch, *, tree_mask=None, **options):
    """A call of the op on a poisoned batch, compiled once for all batches of its shapes."""
    call = _jitted(implementation, batch.spec, batch.layer, tuple(options.items()))
    return call(batch.q_latent, batch.q_rope, batch.pool, batch.metadata, tree_mask)


@functools.cache
def _jitted(implementation, spec, layer, options):
    def call(q_latent, q_rope, pool, metadata, tree_mask):
        return mla_attention(
            q_latent, q_rope, pool, metadata, spec, layer=layer, tree_mask=tree_mask, return_lse=True,
            implementation=implementation, **dict(options),
        )  # fmt: skip

    return jax.jit(call)


def assert_right(got, batch, **visible):
    want, want_lse, v_max = batch.expected(**visible)
    helpers.assert_attention_close(*got, want, want_lse, visible_v_max=v_max, dtype=batch.pool.dtype)


# Every two of the page sizes, the latent's widths and the rope part's meet in one of these.
SIZES = [
    (page, rank, rope)
    for number, page in enumerate((1, 16, 48, 64))
    for rank, rope in (((256, 0), (512, 64)), ((256, 64), (512, 0)))[number % 2]
]


@every_implementation
@pytest.mark.parametrize(("page_size", "rank", "rope"), SIZES)
def test_c23_sizes(implementation, page_size, rank, rope):
    """Served and right, or refused with the reason of ``supports``."""
    sizes = {"page_size": page_size, "kv_lora_rank": rank, "qk_rope_head_dim": rope}
    refusal = supports("mla_attention", **sizes, num_heads=2)[implementation]
    batch = helpers.poisoned_batch(0, kv_lens=[70, 0, 1], q_lens=[1, 1, 1], dtype=jnp.bfloat16, **sizes)
    if refusal is None:
        assert_right(run(implementation, batch), batch)
    else:
        with pytest.raises(NotImplementedError, match=re.escape(refusal)):
            run(implementation, batch)


@pytest.mark.parametrize("implementation", [i.name for i in ragged.IMPLEMENTATIONS])
@pytest.mark.parametrize("dim", [64, 72, 80, 96, 128, 192, 256])
def test_c23_head_dims(implementation, dim):
    """Of the expanded form."""
    rng = np.random.default_rng(dim)
    q, k, v = (jnp.asarray(rng.standard_normal((n, h, dim), np.float32)) for n, h in ((6, 4), (70, 2), (70, 2)))
    rows = {"q_starts": [0, 3], "q_lens": [3, 3], "kv_starts": [0, 5], "kv_lens": [5, 65]}
    facts = {"heads": 4, "kv_heads": 2, "qk_dim": dim, "v_dim": dim, "dtype": "float32"}
    metadata = RaggedMetadata(
        **{name: jnp.asarray(values, jnp.int32) for name, values in rows.items()}, max_q_len=3, max_kv_len=65
    )
    call = jax.jit(functools.partial(ragged_attention, scale=dim**-0.5, return_lse=True, implementation=implementation))
    call = functools.partial(call, q, k, v, metadata)
    refusal = supports("ragged_attention", **facts)[implementation]
    if refusal is not None:
        with pytest.raises(NotImplementedError, match=re.escape(refusal)):
            call()
        return
    want, want_lse = oracle.ragged_oracle(q, k, v, **rows, scale=dim**-0.5)
    v_max = oracle.ragged_v_max(6, v, **rows, num_heads=4)
    helpers.assert_attention_close(*call(), want, want_lse, visible_v_max=v_max, dtype="float32")


def test_c23_heads_that_do_not_divide(unchecked):
    """7 query heads over 2: the argument, what it is, and what is allowed; before anything runs."""
    q, k = jax.ShapeDtypeStruct((6, 7, 64), jnp.float32), jax.ShapeDtypeStruct((70, 2, 64), jnp.float32)
    ints = jax.ShapeDtypeStruct((2,), jnp.int32)
    rows = RaggedMetadata(q_starts=ints, q_lens=ints, kv_starts=ints, kv_lens=ints, max_q_len=3, max_kv_len=65)
    with pytest.raises(ValueError, match="q has 7 heads, must be a multiple of k's 2"):
        jax.eval_shape(functools.partial(ragged_attention, scale=0.1), q, k, k, rows)
    with pytest.raises(ValueError, match="q has 7 heads, must be a multiple of k's 2"):
        supports("ragged_attention", heads=7, kv_heads=2)


# What a call may be in C24. Few enough programs for calls to come again: then only their numbers are new.
CHOICES = {
    "implementation": (*NAMES, "xla"),
    "sizes": ({"page_size": 4, "dtype": "float32", "max_q_len": 4, "num_heads": 3},),  # C23 asks about others
    "visible": (
        {}, {"causal": False}, {"window": 5, "soft_cap": 3.0}, {"tree": True}, {"tree": True, "causal": False},
        {"tree": True, "window": 5}, {"causal": False, "window": 5},
    ),
    "batch_invariant": (False, False, True),
}  # fmt: skip


def test_c24_supports_tells_the_truth():
    """Of 200 random calls: served and right, or refused with the reason foretold, or no call at all."""
    rng = np.random.default_rng(0)
    outcomes = []
    for seed in range(200):
        drawn = {name: values[rng.integers(len(values))] for name, values in CHOICES.items()}
        facts = {**drawn.pop("sizes"), **drawn.pop("visible"), **drawn}
        outcomes.append(check(seed, facts.pop("implementation"), facts))
    counts = {outcome: outcomes.count(outcome) for outcome in ("right", "refused", "malformed")}
    assert sum(counts.values()) == 200 and min(counts.values()) > 10, counts


def check(seed, implementation, facts):
    sizes = {name: facts.get(name) for name in ("page_size", "dtype", "max_q_len", "window", "soft_cap")}
    q_lens = [min(n, facts["max_q_len"]) for n in (1, 1, 4, 2)]
    batch = helpers.poisoned_batch(
        seed, kv_lens=[9, 1, 14, 5], q_lens=q_lens, heads=facts["num_heads"], table_width=6, num_pages=16, **sizes
    )
    rows, causal = facts["max_q_len"], facts.get("causal", True)
    mask = None
    if facts.get("tree"):
        mask = jnp.asarray((np.random.default_rng(seed).random((4, rows, rows)) < 0.5) | np.eye(rows, dtype=bool))
    options = {"causal": causal, "batch_invariant": facts["batch_invariant"]}
    call = functools.partial(run, implementation, batch, tree_mask=mask, **options)
    try:
        answers = supports("mla_attention", **facts)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            call()
        return "malformed"
    assert list(answers) == [i.name for i in mla.IMPLEMENTATIONS]
    reason = answers.get(implementation, f"mla_attention has no {implementation!r} implementation")
    if reason is None:
        assert_right(call(), batch, causal=causal, tree_mask=mask)
        return "right"
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        call()
    return "refused"


def test_c24_questions_that_make_no_sense():
    """Errors name what was asked and what may be."""
    for op, facts, message in (
        (
            "attention",
            {},
            "op='attention' must be one of mla_attention, gqa_attention, ragged_attention, grouped_matmul",
        ),
        ("mla_attention", {"topk": 3}, "facts of mla_attention: .*'topk'"),
        ("ragged_attention", {"page_size": 3}, "facts of ragged_attention: .*'page_size'"),
        ("mla_attention", {"page_size": 0}, "page_size=0 must be an integer of at least 1"),
        ("mla_attention", {"num_heads": 0}, "num_heads=0 must be an integer of at least 1"),
        ("mla_attention", {"window": 3, "causal": False}, "causal=False with window=3"),
        ("mla_attention", {"dtype": "float8_e4m3"}, "dtype=float8_e4m3 must be one of"),
        ("mla_attention", {"row_format": "blocks"}, "row_format='blocks' with dtype=bfloat16"),
        ("gqa_attention", {"q_dtype": "float8_e5m2"}, "q_dtype has dtype float8_e5m2, must be a floating dtype"),
        ("mla_attention", {"platform": "cuda"}, "platform='cuda' must be cpu, gpu or tpu"),
        ("grouped_matmul", {"width": 0}, "width=0 must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            supports(op, **facts)


def test_c24_platforms():
    """A promise that holds on one platform alone."""
    assert supports("mla_attention", batch_invariant=True, platform="cpu")["xla"] is None
    assert "promised on cpu only" in supports("mla_attention", batch_invariant=True, platform="gpu")["xla"]
