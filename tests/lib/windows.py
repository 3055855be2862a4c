"""A small random decoder with grouped-query attention whose layers have windows of any kind, in a group each."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_attn import steps
from mla_attn.models.base import CacheGroup, create_pools
from mla_attn.models.layers import Embedding, Linear, RMSNorm
from mla_attn.models.rope import rotate, rotation
from mla_attn.specs import GQASpec

HEADS, KV_HEADS, HEAD_DIM, DIM = 2, 1, 8, 16


class WindowedLM(nnx.Module):
    """A ``CausalLM``: one layer for each of ``windows``, None for all keys. It has no draft layer.

    Args:
        windows: of the layers; those of one window are a cache group.
        vocab_size: tokens.
        invariant: whether attention over the cache gives the same bits whatever is beside a row.
        rngs: stream ``params`` draws the weights.
    """

    can_draft, draft_refusal, eos_token_ids = False, "the model has no draft layer", ()
    hidden_size, dtype = DIM, np.dtype("float32")
    max_position_embeddings = 4096

    def __init__(self, windows, vocab_size: int, *, invariant: bool = False, rngs: nnx.Rngs):
        self.windows, self.vocab_size, self.invariant = tuple(windows), vocab_size, invariant
        options = {"dtype": jnp.float32, "rngs": rngs}
        self.embed_tokens = Embedding(vocab_size, DIM, **options)
        self.layers = nnx.List([Layer(**options) for _ in windows])
        self.norm = RMSNorm(DIM, 1e-6, dtype=jnp.float32)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        def group(window):
            spec = GQASpec(
                num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5, window=window
            )
            layers = self.windows.count(window)
            return CacheGroup(name=name_of(window), num_layers=layers, spec=spec, dtype=self.dtype)

        return tuple(map(group, dict.fromkeys(self.windows)))

    def create_pools(self, *, num_pages, page_size):
        return create_pools(self.cache_groups, num_pages=num_pages, page_size=page_size)

    def __call__(self, tokens, pools, metadata, *, mode, tree_mask=None, implementation=None):
        specs, pools = {group.name: group.spec for group in self.cache_groups}, dict(pools)
        x = self.embed_tokens(tokens)
        cos_sin = rotation(next(iter(metadata.values())).positions, HEAD_DIM, 1e4)
        options: dict[str, Any] = {"implementation": implementation}
        if mode not in ("prefill", "extend"):
            options["tree_mask"] = tree_mask
        if mode != "prefill":
            options["batch_invariant"] = self.invariant
        seen = dict.fromkeys(specs, 0)
        for layer, window in zip(self.layers, self.windows, strict=True):
            name = name_of(window)
            step = functools.partial(getattr(steps, f"gqa_{mode}"), **options, layer=seen[name])
            x, pools[name] = layer(x, cos_sin, step, pools[name], metadata[name], specs[name])
            seen[name] += 1
        return self.norm(x), pools

    def logits(self, hidden):
        return self.embed_tokens.attend(hidden)

    def draft(self, *arguments, **options):
        raise ValueError(self.draft_refusal)

    draft_logits = draft


class Layer(nnx.Module):
    def __init__(self, **options):
        self.norm = RMSNorm(DIM, 1e-6, dtype=jnp.float32)
        self.q, self.k, self.v, self.o = (
            Linear(dim_in, dim_out, **options)
            for dim_in, dim_out in [
                (DIM, HEADS * HEAD_DIM), (DIM, KV_HEADS * HEAD_DIM), (DIM, KV_HEADS * HEAD_DIM), (HEADS * HEAD_DIM, DIM)
            ]
        )  # fmt: skip

    def __call__(self, x, cos_sin, step, pool, metadata, spec):
        rows = self.norm(x)
        q, k, v = (f(rows).reshape(len(rows), -1, HEAD_DIM) for f in (self.q, self.k, self.v))
        q, k = (rotate(part, *cos_sin, interleaved=False) for part in (q, k))
        out, pool = step(q, k, v, pool, metadata, spec)
        return x + self.o(out.reshape(len(rows), -1)), pool


def name_of(window) -> str:
    return "full" if window is None else f"window{window}"


@functools.cache
def windowed_model(windows=(None, 6), vocab_size: int = 13, *, seed: int = 0, invariant: bool = False) -> WindowedLM:
    """With weights large enough that tokens differ in likelihood."""
    model = WindowedLM(windows, vocab_size, invariant=invariant, rngs=nnx.Rngs(seed))
    nnx.update(model, jax.tree.map(lambda w: 20 * w if w.ndim > 1 else w, nnx.state(model)))
    return model


class _WholeGroup(CacheGroup):
    """Keeps all rows, whatever a row sees."""

    window = None


class WholeLM(WindowedLM):
    """The same model in a cache that keeps all rows."""

    @property
    def cache_groups(self):
        return tuple(_WholeGroup(**vars(group)) for group in super().cache_groups)


def whole(model: WindowedLM) -> WholeLM:
    """A model of these weights whose cache keeps all rows."""
    made = WholeLM(model.windows, model.vocab_size, invariant=model.invariant, rngs=nnx.Rngs(0))
    nnx.update(made, nnx.state(model))
    return made
