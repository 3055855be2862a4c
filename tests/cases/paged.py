"""Small calls with chosen contents, for every implementation: what the fault cases are built from.

Unless a case says otherwise rows have DeepSeek's 512 + 64 channels, and what nobody wrote holds NaN.
"""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
import oracle
from mla_attn import metadata as build
from mla_attn import supports
from mla_attn.cache import LatentPool
from mla_attn.ops import mla, mla_attention, ragged_attention
from mla_attn.specs import MLASpec

RANK, ROPE = 512, 64
WIDTH = RANK + ROPE

# The specification is held to the contract by tests/ops; cases ask it too, in the slow run.
every_implementation = pytest.mark.parametrize(
    "implementation",
    [pytest.param(i.name, marks=pytest.mark.slow if i.name == "reference" else ()) for i in mla.IMPLEMENTATIONS],
)
both_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


def make_spec(heads, **changes):
    return MLASpec(
        **{"num_heads": heads, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "scale": 192**-0.5, **changes}
    )


def make_pool(requests, table, *, page_size, num_pages, dtype="bfloat16", fill=np.nan):
    """One layer in which row i of ``requests[b]`` [n, 576] is token i of request b; the rest holds ``fill``."""
    data = np.full((num_pages, page_size, WIDTH), fill, np.float32)
    for rows, pages in zip(requests, table, strict=True):
        for i, row in enumerate(rows):
            data[pages[i // page_size], i % page_size] = row
    return LatentPool(jnp.asarray(data, dtype), 1, num_pages, RANK, 1, num_pages)


def counting_rows(length):
    """Token t holds t in every channel: with queries of 0 the output is the mean position of the keys seen."""
    return np.broadcast_to(np.arange(length, dtype=np.float32)[:, None], (length, WIDTH))


def random_rows(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((*shape, WIDTH), np.float32), dtype)


def ints(*values):
    return jnp.asarray(*values, jnp.int32)


def by_hand(kv_lens, q_lens, table, *, max_q_len=None, kv_offsets=None, kv_stride=1):
    """A dense block of rows that writes nothing; unlike those of the builders, rows may be there that see no key."""
    max_q_len = max(q_lens) if max_q_len is None else max_q_len
    batch, rows = len(kv_lens), len(kv_lens) * max_q_len
    offsets = [0] * batch if kv_offsets is None else kv_offsets
    return build.AttentionMetadata(
        q_starts=ints(np.arange(batch) * max_q_len),
        q_lens=ints(q_lens),
        kv_lens=ints(kv_lens),
        page_table=ints(table),
        kv_offsets=ints(offsets),
        slots=jnp.full(rows, -1, jnp.int32),
        positions=jnp.zeros(rows, jnp.int32),
        work=jnp.zeros(0, jnp.int32),
        max_q_len=max_q_len,
        kv_stride=kv_stride,
    )


def reason(implementation, pool, metadata, spec, *, causal=True, tree_mask=None, batch_invariant=False, **_):
    """Why an implementation refuses a call; None if it serves it."""
    return supports(
        "mla_attention",
        page_size=pool.page_size,
        dtype=pool.dtype,
        row_width=pool.row_width,
        rope_offset=pool.rope_offset,
        max_q_len=metadata.max_q_len,
        causal=causal,
        tree=tree_mask is not None,
        batch_invariant=batch_invariant,
        **dataclasses.asdict(spec),
    )[implementation]


@contextlib.contextmanager
def as_claimed(implementation, pool, metadata, spec, **options):
    """Around a call: one that the implementation does not claim to serve must raise its reason; the test ends there."""
    refusal = reason(implementation, pool, metadata, spec, **options)
    if refusal is None:
        yield
        return
    with pytest.raises(NotImplementedError, match=re.escape(refusal)):
        yield
    pytest.skip(f"{implementation} does not claim it: {refusal}")


def attend(implementation, q, pool, metadata, spec, *, optimized=False, tree_mask=None, **options):
    """``(out, lse)`` of queries [T, H, 576] in NumPy, ``as_claimed``.

    With ``optimized`` it is compiled as users' programs are.
    """
    call = functools.partial(
        _jitted(optimized), q, pool, metadata, tree_mask, spec=spec, implementation=implementation,
        options=tuple(sorted(options.items())),
    )  # fmt: skip
    with as_claimed(implementation, pool, metadata, spec, tree_mask=tree_mask, **options):
        return tuple(np.asarray(x) for x in call())


@functools.cache
def _jitted(optimized):
    def call(q, pool, metadata, tree_mask, *, spec, implementation, options):
        q_latent, q_rope = q[..., : spec.kv_lora_rank], q[..., spec.kv_lora_rank :]
        return mla_attention(
            q_latent, q_rope, pool, metadata, spec, tree_mask=tree_mask, return_lse=True,
            implementation=implementation, **dict(options),
        )  # fmt: skip

    compiler_options = helpers.OPTIMIZED if optimized else None
    return jax.jit(call, static_argnames=("spec", "implementation", "options"), compiler_options=compiler_options)


def attend_unpaged(implementation, q, k, v, *, q_lens, kv_lens, causal=True):
    """``(out float32, lse)`` of packed queries, keys and values, with DeepSeek's scale of expanded heads."""
    q_lens, kv_lens = np.asarray(q_lens), np.asarray(kv_lens)
    metadata = build.RaggedMetadata(
        q_starts=ints(np.cumsum(q_lens) - q_lens),
        q_lens=ints(q_lens),
        kv_starts=ints(np.cumsum(kv_lens) - kv_lens),
        kv_lens=ints(kv_lens),
        max_q_len=int(q_lens.max()),
        max_kv_len=int(kv_lens.max()),
    )
    got = _jitted_unpaged()(q, k, v, metadata, causal, implementation)
    return tuple(np.asarray(x) for x in got)


@functools.cache
def _jitted_unpaged():
    def call(q, k, v, metadata, causal, implementation):
        return ragged_attention(
            q, k, v, metadata, scale=192**-0.5, causal=causal, return_lse=True, out_dtype=jnp.float32,
            implementation=implementation,
        )  # fmt: skip

    return jax.jit(call, static_argnums=(4, 5))


def expected(q, pool, metadata, spec, **visible):
    """``(out, lse, largest visible |v|)`` of the float64 oracle."""
    rows, m = helpers.layer_rows(pool, 0), jax.tree.map(np.asarray, metadata)
    q = np.asarray(q).astype(np.float64)
    out, lse = oracle.mla_oracle(q[..., : spec.kv_lora_rank], q[..., spec.kv_lora_rank :], rows, m, spec, **visible)
    return out, lse, oracle.mla_v_max(len(q), rows, m, spec, **visible)


def assert_close(got, want, dtype):
    """``got`` (out, lse) against ``want`` (out, lse, largest visible |v|), as everywhere (``helpers``)."""
    out, lse, v_max = (np.asarray(x).astype(np.float64) for x in want)
    helpers.assert_attention_close(*got, out, lse, visible_v_max=v_max, dtype=dtype)


def assert_expected(got, q, pool, metadata, spec, **visible):
    """``got`` against the oracle."""
    assert_close(got, expected(q, pool, metadata, spec, **visible), pool.dtype)


def assert_same_bits(got, want):
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()
