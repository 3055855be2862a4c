# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A paged cache for your own model
#
# You have a decoder in Flax, and want to serve it: several requests at once, each new token computed once, memory taken
# by the tokens that there are. This notebook does that for a small decoder, in NNX and again in Linen. It runs on a CPU
# in a minute.
#
# Your model needs one change. Where it calls `jax.nn.dot_product_attention(q, k, v, is_causal=True)`, it calls a *step*
# of `mla_attn.steps` instead, which stores `k` and `v` in the cache and attends to everything cached so far:
#
# ```python
# out, pool = steps.gqa_extend(q, k, v, pool, metadata, spec, layer=layer)
# ```
#
# | argument | what | where it comes from |
# | --- | --- | --- |
# | `q`, `k`, `v` | rows of all requests in one array `[tokens, heads, channels]`, with no batch axis | your model |
# | `pool` | keys and values of all layers and requests, in pages; a pytree | made once, returned by each step |
# | `metadata` | the request and position of each row, the pages of each request | a builder, once per pass |
# | `spec` | heads, channels, scale, window: what never changes | written once |
#
# There are no other requirements: everything is a function of arrays, for use inside your `jax.jit`.

# %%
import dataclasses
import functools

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mla_attn
from mla_attn import steps
from mla_attn.buckets import Buckets, ladder, warm_up
from mla_attn.cache import PageAllocator

# %% [markdown]
# ## The model
#
# A decoder with grouped-query attention and rotary embeddings, as in Llama. It takes `attend` as an argument, so that
# the same weights run with the cache and, to check the results, without it. `cache` is what `attend` needs and gives
# back; the model only passes it on. Rows have no batch axis, so each row's position is an input.


# %%
@dataclasses.dataclass(frozen=True)
class Config:
    vocabulary: int = 97
    dim: int = 64
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 128


def rotate(x, positions):
    """Rotary embedding of rows [tokens, heads, channels]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / 10_000 ** (jnp.arange(half) / half)
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Block(nnx.Module):
    def __init__(self, c, *, rngs):
        linear = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.q = linear(c.dim, (c.heads, c.head_dim))
        self.k = linear(c.dim, (c.kv_heads, c.head_dim))
        self.v = linear(c.dim, (c.kv_heads, c.head_dim))
        self.o = linear((c.heads, c.head_dim), c.dim, axis=(-2, -1))
        self.gate, self.up, self.down = linear(c.dim, c.hidden), linear(c.dim, c.hidden), linear(c.hidden, c.dim)
        self.before_attention, self.before_mlp = nnx.RMSNorm(c.dim, rngs=rngs), nnx.RMSNorm(c.dim, rngs=rngs)

    def __call__(self, x, positions, attend, layer, cache):
        y = self.before_attention(x)
        q, k = rotate(self.q(y), positions), rotate(self.k(y), positions)
        attended, cache = attend(q, k, self.v(y), layer, cache)
        x = x + self.o(attended)
        y = self.before_mlp(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y)), cache


class Decoder(nnx.Module):
    def __init__(self, c, *, rngs):
        self.embed = nnx.Embed(c.vocabulary, c.dim, rngs=rngs)
        self.blocks = nnx.List([Block(c, rngs=rngs) for _ in range(c.layers)])
        self.norm = nnx.RMSNorm(c.dim, rngs=rngs)
        self.logits = nnx.Linear(c.dim, c.vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens, positions, attend, cache=None):
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            x, cache = block(x, positions, attend, layer, cache)
        return self.logits(self.norm(x)), cache


config = Config()
model = Decoder(config, rngs=nnx.Rngs(0))

# %% [markdown]
# Without a cache, `attend` is JAX's own attention over one whole sequence. This is the model as it was trained, and
# what the results below are compared with.


# %%
def attend_whole(q, k, v, layer, cache):
    return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0], cache


@jax.jit
def whole_logits(weights, tokens):
    return nnx.merge(graph, weights)(tokens, jnp.arange(tokens.shape[0]), attend_whole)[0]


graph, weights = nnx.split(model)

# %% [markdown]
# ## The pool and the pages
#
# The pool is one array for all layers: `num_pages` pages per layer of `page_size` tokens each. A request gets pages as
# it grows, any free ones, and a *page table* lists them in order. `PageAllocator` decides which; you may use your own.
#
# `scale` is what `q · k` is multiplied by, and is never guessed.

# %%
spec = mla_attn.GQASpec(
    num_heads=config.heads, num_kv_heads=config.kv_heads, head_dim=config.head_dim, scale=config.head_dim**-0.5
)
PAGE, PAGES, WIDTH = 8, 32, 8  # tokens of a page, pages, most pages of a request
allocator = PageAllocator(num_pages=PAGES, page_size=PAGE, table_width=WIDTH)


def new_pool():
    sizes = {"num_layers": config.layers, "num_pages": PAGES, "page_size": PAGE}
    return mla_attn.KVPool.create(**sizes, spec=spec, dtype=jnp.float32)


print("keys", new_pool().k.shape, "values", new_pool().v.shape)  # [layers * pages, tokens, KV heads, channels]

# %% [markdown]
# ## One pass
#
# A pass runs some new tokens of each request. Two kinds are enough to begin with: the tokens of prompts (`extend`), any
# number for each request, packed one after the other; and one token of each request (`decode`). They differ in the
# builder that makes the metadata. Both builders take `seq_lens`, which **counts the tokens of this pass**: a decoding
# request with 12 cached tokens has 13.
#
# `inputs` is a pytree of arrays whose shapes are those of the largest pass, and in which zeros are padding: a request
# with no tokens in this pass reads nothing, writes nothing, and costs little.


# %%
def run(metadata, weights, pool, tokens):
    """Runs one pass; returns the logits of each request's last row, and the pool."""
    # The kernels' division of work, once for all layers; without kernels it changes nothing.
    metadata = mla_attn.plan_gqa(metadata, pool, spec, out_dtype=pool.dtype, q_dtype=pool.dtype)

    def attend(q, k, v, layer, pool):
        return steps.gqa_extend(q, k, v, pool, metadata, spec, layer=layer)

    logits, pool = nnx.merge(graph, weights)(tokens, metadata.positions, attend, pool)
    last = jnp.maximum(metadata.q_starts + metadata.q_lens - 1, 0)
    return logits[last], pool


def extend(weights, pool, inputs):
    tokens, table, seq_lens, q_lens = inputs
    rows = tokens.shape[0]
    metadata = mla_attn.for_extend(table, seq_lens, q_lens, max_q_len=rows, num_rows=rows, page_size=PAGE)
    return run(metadata, weights, pool, tokens)


def decode(weights, pool, inputs):
    tokens, table, seq_lens = inputs
    return run(mla_attn.for_decode(table, seq_lens, page_size=PAGE), weights, pool, tokens)


# %% [markdown]
# `jax.jit(extend, donate_argnums=1)` would run already. Donating the pool makes the steps write in place; the old pool
# is deleted, so go on with the one that is returned.
#
# ## Compile before the first request
#
# JAX compiles a program for each shape. The sizes that vary are the number of requests and the number of prompt tokens,
# so you round them up to a ladder of sizes, and compile those ahead of time. `Buckets` does both: it pads NumPy inputs
# with zeros, and picks the smallest program that holds them. Lengths are values, not shapes: the page table always has
# `WIDTH` columns, and a pass costs what its lengths say.


# %%
def integers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


BATCH, PROMPT = 4, 32  # most requests and most prompt tokens of a pass
programs = {
    "extend": Buckets(
        "extend",
        extend,
        [(integers(t), integers(BATCH, WIDTH), integers(BATCH), integers(BATCH)) for t in ladder(PROMPT, smallest=16)],
    ),
    "decode": Buckets(
        "decode", decode, [(integers(b), integers(b, WIDTH), integers(b)) for b in ladder(BATCH, smallest=2)]
    ),
}
pool = new_pool()
seconds = warm_up(programs.values(), weights, pool, progress=False)
print({name: program.compiles for name, program in programs.items()}, "programs compiled")

# %% [markdown]
# ## Serve
#
# Three prompts arrive together, then decode together. After that a fourth request joins the others: its prompt is
# computed in two parts, and it begins with the text of the first one, whose full pages it shares (`fork`), so that only
# the rest of it is computed.


# %%
def run_extend(parts, pool):
    """Computes new tokens {request: tokens} of prompts, whose pages are allocated; returns {request: logits}."""
    names = list(parts)
    q_lens = np.array([len(parts[name]) for name in names], np.int32)
    seq_lens = np.array([cached[name] for name in names], np.int32) + q_lens
    tokens = np.concatenate([np.asarray(parts[name], np.int32) for name in names])
    logits, pool = programs["extend"](weights, pool, (tokens, allocator.table(names), seq_lens, q_lens))
    cached.update(zip(names, seq_lens.tolist(), strict=True))
    return dict(zip(names, np.asarray(logits), strict=False)), pool


def run_decode(names, pool):
    """Computes the last token of each request; returns {request: logits}."""
    for name in names:
        cached[name] += 1
        allocator.grow(name, cached[name])
    tokens = np.array([texts[name][-1] for name in names], np.int32)
    seq_lens = np.array([cached[name] for name in names], np.int32)
    logits, pool = programs["decode"](weights, pool, (tokens, allocator.table(names), seq_lens))
    return dict(zip(names, np.asarray(logits), strict=False)), pool


def take(logits):
    """Appends the likeliest token of each request, and keeps the logits to check them."""
    for name, row in logits.items():
        seen.append((name, len(texts[name]), row))
        texts[name].append(int(row.argmax()))


rng = np.random.default_rng(0)
texts = {name: rng.integers(0, config.vocabulary, n).tolist() for name, n in (("a", 17), ("b", 3), ("c", 9))}
cached, seen = dict.fromkeys(texts, 0), []  # tokens in the cache; (request, tokens, logits of the last of them)
for name, text in texts.items():
    allocator.create(name, len(text))
logits, pool = run_extend(texts, pool)
take(logits)
for _ in range(8):
    logits, pool = run_decode(list(texts), pool)
    take(logits)

# %%
texts["d"] = [*texts["a"][:16], 5, 6, 7]
cached["d"] = allocator.fork("a", "d", 16)  # full pages alone are shared
allocator.grow("d", len(texts["d"]))
print("tokens of d that need not be computed:", cached["d"])
for part in (texts["d"][16:18], texts["d"][18:]):
    logits, pool = run_extend({"d": part}, pool)
take(logits)
for _ in range(6):
    logits, pool = run_decode(list(texts), pool)
    take(logits)
assert all(program.cold_compiles == 0 for program in programs.values())

# %% [markdown]
# ## Is it right?
#
# Every logit that the cache gave is compared with the same weights run over the whole text at once with
# `jax.nn.dot_product_attention`. Do this with your model first: it finds wrong positions, a wrong scale, or a length
# that is off by one, at once.


# %%
def largest_difference(logits_of):
    worst = 0.0
    for name in texts:
        whole = np.asarray(logits_of(jnp.array(texts[name])))
        for _, n, row in (x for x in seen if x[0] == name):
            worst = max(worst, np.abs(row - whole[n - 1]).max())
    return worst


worst = largest_difference(functools.partial(whole_logits, weights))
print(f"{len(seen)} rows of logits, largest difference {worst:.1e}, logits up to {np.abs(seen[0][2]).max():.1f}")
assert worst < 1e-4

# %% [markdown]
# ## The same in Linen
#
# Only the model differs. `attend` and the pool go through `apply` as arguments.


# %%
class LinenBlock(linen.Module):
    c: Config

    @linen.compact
    def __call__(self, x, positions, attend, layer, cache):
        c, linear = self.c, functools.partial(linen.DenseGeneral, use_bias=False)
        y = linen.RMSNorm()(x)
        q, k, v = (linear((heads, c.head_dim))(y) for heads in (c.heads, c.kv_heads, c.kv_heads))
        attended, cache = attend(rotate(q, positions), rotate(k, positions), v, layer, cache)
        x = x + linear(c.dim, axis=(-2, -1))(attended)
        y = linen.RMSNorm()(x)
        return x + linear(c.dim)(linen.silu(linear(c.hidden)(y)) * linear(c.hidden)(y)), cache


class LinenDecoder(linen.Module):
    c: Config

    @linen.compact
    def __call__(self, tokens, positions, attend, cache=None):
        x = linen.Embed(self.c.vocabulary, self.c.dim)(tokens)
        for layer in range(self.c.layers):
            x, cache = LinenBlock(self.c)(x, positions, attend, layer, cache)
        return linen.Dense(self.c.vocabulary, use_bias=False)(linen.RMSNorm()(x)), cache


# %%
decoder = LinenDecoder(config)
rows = jnp.arange(12)
parameters = decoder.init(jax.random.key(1), rows, rows, attend_whole)


@functools.partial(jax.jit, donate_argnums=1)
def linen_pass(parameters, pool, tokens, table, seq_lens, q_lens):
    total = tokens.shape[0]
    metadata = mla_attn.for_extend(table, seq_lens, q_lens, max_q_len=total, num_rows=total, page_size=PAGE)

    def attend(q, k, v, layer, pool):
        return steps.gqa_extend(q, k, v, pool, metadata, spec, layer=layer)

    return decoder.apply(parameters, tokens, metadata.positions, attend, pool)


pool, table = new_pool(), jnp.array([[7, 2, 30, 4]])
tokens = jax.random.randint(jax.random.key(2), (12,), 0, config.vocabulary)
got = []
for begin, end in ((0, 7), (7, 8), (8, 12)):  # in three passes
    logits, pool = linen_pass(parameters, pool, tokens[begin:end], table, jnp.array([end]), jnp.array([end - begin]))
    got.append(logits)
whole = decoder.apply(parameters, tokens, rows, attend_whole)[0]
difference = jnp.abs(jnp.concatenate(got) - whole).max()
print(f"largest difference {difference:.1e}")
assert difference < 1e-4

# %% [markdown]
# ## Where to go from here
#
# - **Latent attention** (DeepSeek): `MLASpec`, `LatentPool` and `steps.decode` or `steps.absorbed_extend` in the same
#   places; [quickstart](quickstart.ipynb) has such a layer.
# - **Windows, soft caps**: fields of the spec. **Sinks**: `sinks=` of the step. Layers with and without a window are
#   two specs, and two pools if windowed layers should free old pages.
# - **Speculative decoding**: `for_target_verify` runs an anchor and its drafts in one pass, over the same cache;
#   [speculative decoding](speculative_decoding.ipynb).
# - **Sampling, scheduling, preemption, streams**: `mla_attn.engine` serves models that follow the interface in
#   `mla_attn/models/base.py`; the decoders of `mla_attn.models` are examples of it.
# - **On GPUs** the same calls run kernels where `mla-attn supports` says so; nothing in this notebook changes.
# - What each argument means exactly is in [the contract](../mla_attn/README.md).
