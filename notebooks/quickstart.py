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
# # Paged latent attention in a Flax model
#
# This notebook runs on a CPU in a few minutes, in a checkout of the repository (`pip install -e '.[bench,notebooks]'`).
# It shows
#
# 1. what multi-head latent attention (MLA) caches, and why that is small;
# 2. a Flax NNX layer with a paged cache, under `jax.jit`;
# 3. decoding, and verifying several tokens in one call, over the same cache;
# 4. how many drafted tokens a small model accepts per verify step.

# %%
import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import mla_attn
from mla_attn import steps
from mla_attn.generation import generate
from mla_attn.models import load_checkpoint
from mla_attn.speculative import DraftTree

# %% [markdown]
# ## What MLA caches, and why it is small
#
# A model that generates text caches every past token in every layer, so that it need not compute it again. Multi-head
# attention caches a key and a value per head. In grouped-query attention (GQA) several query heads share them. MLA
# caches one row for *all* heads: a latent `c`, from which the keys and values of every head can be computed, and one
# rotary key `r`, which is separate because a rotation that depends on the position cannot be part of a fixed matrix.
#
# A decode step does not expand the latent. The score of head h is `(q_nope @ W_UK[h]) . c + q_rope . r`: the matrix
# that would expand the key is applied to the query instead (it is "absorbed"). The result is a weighted sum of latents,
# from which `W_UV[h]` computes the weighted sum of values. So all heads read the same small row, and its latent is both
# key and value. The size of the row determines how many bytes a step reads per token of context, and how many requests
# fit in memory.

# %%
cached = {  # channels of a token in one layer
    "keys and values of 128 heads\n(DeepSeek-V3, not compressed)": 128 * ((128 + 64) + 128),
    "GQA: 8 key and value heads of 128": 8 * (128 + 128),
    "MLA: latent 512 + rotary key 64\n(DeepSeek-V3)": 512 + 64,
}
size = [2 * channels for channels in cached.values()]
figure, axis = plt.subplots(figsize=(7, 2.4))
bars = axis.barh(list(cached), size, color=["C0", "C1", "C2"])
axis.bar_label(bars, labels=[f"{n} bytes" for n in size], padding=4)
axis.set(xlim=(0, 110_000), xlabel="bytes per token and layer, bfloat16")
axis.invert_yaxis()
figure.tight_layout()
plt.show()

# %% [markdown]
# ## A layer with a paged cache
#
# The cached rows of a request are stored in *pages* of a fixed number of tokens, anywhere in a *pool* of pages; a *page
# table* lists the pages of each request in order. The layer below omits rotary embeddings to stay short;
# `mla_attn.models` has the real one.


# %%
class LatentAttention(nnx.Module):
    def __init__(self, dim, heads, nope, rope, rank, *, rngs):
        self.spec = mla_attn.MLASpec(
            num_heads=heads, kv_lora_rank=rank, qk_rope_head_dim=rope, scale=(nope + rope) ** -0.5
        )
        self.query = nnx.LinearGeneral(dim, (heads, nope + rope), use_bias=False, rngs=rngs)
        self.compress = nnx.Linear(dim, rank + rope, use_bias=False, rngs=rngs)
        self.norm = nnx.RMSNorm(rank, rngs=rngs)
        self.w_uk = nnx.Param(0.1 * jax.random.normal(rngs.params(), (heads, nope, rank)))
        self.w_uv = nnx.Param(0.1 * jax.random.normal(rngs.params(), (heads, nope, rank)))
        self.out = nnx.LinearGeneral((heads, nope), dim, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x, pool, metadata, step):
        q_nope, q_rope = jnp.split(self.query(x), [self.w_uk.shape[1]], axis=-1)
        latent, rope = jnp.split(self.compress(x), [self.spec.kv_lora_rank], axis=-1)
        q_latent = jnp.einsum("thd,hdr->thr", q_nope, self.w_uk[...])
        attended, pool = step(
            q_latent, q_rope, self.norm(latent), rope, pool, metadata, self.spec, batch_invariant=True
        )
        return self.out(jnp.einsum("thr,hvr->thv", attended, self.w_uv[...])), pool


layer = LatentAttention(dim=64, heads=4, nope=16, rope=8, rank=32, rngs=nnx.Rngs(0))
graph, weights = nnx.split(layer)

# %% [markdown]
# The whole step is one jitted function. A builder (`for_decode`, `for_target_verify`) computes the metadata from the
# page table and the lengths: the position of each new row, the slot where it is cached, and the keys that it sees. The
# pool is donated, so the step writes in place: the input array is deleted, and nothing of its size is copied.

# %%
PAGE = 4


def run(weights, pool, x, page_table, lengths, *, rows):
    """Runs `rows` new tokens per request after `lengths` cached ones."""
    if rows == 1:
        metadata = mla_attn.for_decode(page_table, lengths + 1, page_size=PAGE)
        step = steps.decode
    else:
        metadata = mla_attn.for_target_verify(page_table, lengths, num_tokens=rows, page_size=PAGE)
        step = steps.target_verify
    return nnx.merge(graph, weights)(x, pool, metadata, step)


run = jax.jit(run, static_argnames="rows", donate_argnames="pool")


def new_pool():
    return mla_attn.LatentPool.create(num_layers=1, num_pages=16, page_size=PAGE, spec=layer.spec, dtype=jnp.float32)


page_table = jnp.array([[3, 9, 1, 14], [7, 0, 12, 5]], jnp.int32)  # pages of two requests, in any order
tokens = jax.random.normal(jax.random.key(1), (2, 9, 64))  # nine token states per request

# %%
pool, lengths, decoded = new_pool(), jnp.zeros(2, jnp.int32), []
for t in range(9):
    before = pool.data
    y, pool = run(weights, pool, tokens[:, t], page_table, lengths + t, rows=1)
    decoded.append(y)
print("decoded one by one:", jnp.stack(decoded, axis=1).shape, "| input pool donated:", before.is_deleted())

# %% [markdown]
# ## Verify: several rows at once
#
# Speculative decoding drafts several tokens cheaply, then verifies them in one call of the model. The rows of that call
# are the last token and its drafts, and each row sees the rows before it. Here the last four of the nine tokens run in
# one call, after five cached ones. With `batch_invariant=True` the bits of a row depend only on its query and its
# visible keys, so attention gives the same bits as decoding one by one. (The dense layers may round differently.)

# %%
pool = new_pool()
for t in range(5):
    _, pool = run(weights, pool, tokens[:, t], page_table, lengths + t, rows=1)
verified, pool = run(weights, pool, tokens[:, 5:].reshape(8, 64), page_table, lengths + 5, rows=4)
verified, one_by_one = np.asarray(verified).reshape(2, 4, 64), np.stack(decoded[5:], axis=1)
print("largest difference, dense layers included:", np.abs(verified - one_by_one).max())

# %% [markdown]
# ## How many drafts are accepted?
#
# `tests/fixtures/deepseek-v3-tiny` is a small trained model in the format of DeepSeek-V3, with its
# multi-token-prediction (MTP) layer, which drafts. A chain "1x1x1" is three drafts, one after the other; a tree "2x2"
# has two candidates after the last token, and two after each of them. Drafting never changes the tokens, only how many
# of them each pass of the model gives.

# %%
here = pathlib.Path(__file__).parent if "__file__" in globals() else pathlib.Path.cwd()
checkpoint = here.parent / "tests" / "fixtures" / "deepseek-v3-tiny"
model = load_checkpoint(checkpoint, dtype=jnp.float32)
texts = ("This program is free software", "Permission is hereby granted")
prompts = [[256, *text.encode()] for text in texts]  # token ids are bytes; 256 is the begin token

shapes = {"chain": ["1", "1x1", "1x1x1", "1x1x1x1"], "tree": ["2", "2x2", "4x1x1"]}
plain = generate(model, prompts, max_new_tokens=64)
results = {}
for kind, trees in shapes.items():
    for text in trees:
        results[kind, text] = generate(model, prompts, max_new_tokens=64, tree=DraftTree.parse(text))
        assert results[kind, text].tokens == plain.tokens
        statistics = results[kind, text].statistics
        print(f"{kind:5} {text:8} {statistics.acceptance_length:.2f} tokens a step, {statistics.target_steps} steps")

# %%
figure, axis = plt.subplots(figsize=(6, 4))
for kind, marker in (("chain", "o-"), ("tree", "s--")):
    texts = shapes[kind]
    depths = [DraftTree.parse(text).depth for text in texts]
    lengths_ = [results[kind, text].statistics.acceptance_length for text in texts]
    axis.plot(depths, lengths_, marker, label=kind)
    if kind == "tree":
        for text, x, y in zip(texts, depths, lengths_, strict=True):
            axis.annotate(text, (x, y), textcoords="offset points", xytext=(6, 6))
axis.plot([1, 4], [2, 5], color="0.8", label="every draft accepted")
axis.set(xlabel="draft length (depth of the tree)", ylabel="tokens per verify step", xticks=[1, 2, 3, 4], ylim=(1, 4))
axis.set_title("Acceptance length, deepseek-v3-tiny")
axis.legend()
figure.tight_layout()
plt.show()
