"""Llama, Mistral, Qwen, Gemma 2 and gpt-oss over paged keys and values.

Shapes: T rows of the call, H query heads, K key and value heads, D channels of a head. ``dtype`` means the same as in
``deepseek``: float32 throughout, or parameters and activations of 16 bits with float32 sums, norms, softmax, router and
rope. Layers with a window and layers without are two cache groups, "window" and "full".
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mla_attn import steps
from mla_attn.dispatch import Order
from mla_attn.models.base import (
    CacheGroup,
    Metadata,
    Pools,
    check_dtype,
    check_groups,
    check_step,
)
from mla_attn.models.causal import CausalModel, once_for_equal_layers
from mla_attn.models.decoder_config import DecoderConfig
from mla_attn.models.layers import MLP, Linear, RMSNorm, capped
from mla_attn.models.moe import ClampedMoE
from mla_attn.models.rope import rotate, rotation
from mla_attn.ops import plan_gqa

FULL, WINDOW = "full", "window"  # the cache groups


@dataclasses.dataclass(frozen=True)
class Step:
    """The attention of every layer of a call.

    Attributes:
        mode, tree_mask, implementation, skip_threshold: the model's arguments.
        local: function that gives a step as a device runs it.
    """

    mode: str
    tree_mask: Bool[Array, "B S M"] | None
    implementation: Order
    skip_threshold: float | None
    local: Callable[..., Any]

    def attend(self, *arguments, **options):
        """Calls the mode's function of ``mla_attn.steps``."""
        if self.mode != "prefill":  # prefill reads no cache and has no tree mask
            options["tree_mask"] = self.tree_mask
        step = self.local(getattr(steps, f"gqa_{self.mode}"))
        options |= {"implementation": self.implementation, "skip_threshold": self.skip_threshold}
        return step(*arguments, **options)


class DecoderForCausalLM(CausalModel[DecoderConfig, "DecoderLayer"]):
    """A decoder with its output head. It is a ``CausalLM`` with the cache groups "full" and "window", as far as it has
    such layers; a layer's index in its group is its index among the layers of that kind.

    Args:
        config: the checkpoint's config.
        dtype: bfloat16, float16 or float32, of parameters and activations.
        rngs: stream ``params`` initialises the weights; ``load_checkpoint`` makes a model without running this.
    """

    can_draft = False
    draft_refusal = "the model has no MTP layer to draft with: its family has none"

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        dtype = check_dtype(dtype)
        norm = _norm(config, config.hidden_size, dtype)
        super().__init__(config, DecoderLayer, norm, dtype=dtype, rngs=rngs)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        groups = []
        for name, window in ((FULL, None), (WINDOW, self.config.sliding_window)):
            if count := self._group_names.count(name):
                facts = {"spec": self.config.spec(window), "dtype": self.dtype, "sinks": self.config.sinks}
                groups.append(CacheGroup(name=name, num_layers=count, **facts, scales=self._scales_of(name)))
        return tuple(groups)

    @property
    def _group_names(self) -> list[str]:
        """The cache group of each layer."""
        layers = range(self.config.num_hidden_layers)
        return [FULL if self.config.window(layer) is None else WINDOW for layer in layers]

    def _scales_of(self, name: str) -> dict[str, tuple[float, ...]]:
        """The scales of the layers of a cache group."""
        if self.cache_scales is None:
            return {}
        own = [scales for scales, group in zip(self.cache_scales, self._group_names, strict=True) if group == name]
        k_scale, v_scale = zip(*own, strict=True)
        return {"k_scale": k_scale, "v_scale": v_scale}

    def __call__(
        self,
        tokens: Int[Array, "T"],
        pools: Pools,
        metadata: Metadata,
        *,
        mode: str,
        tree_mask: Bool[Array, "B S M"] | None = None,
        implementation: Order = None,
        skip_threshold: float | None = None,
    ) -> tuple[Float[Array, "T dim"], Pools]:
        """Runs the rows of this call through all layers, which write their keys and values.

        Args:
            tokens: token ids; padding rows may hold any value, and their results are finite but meaningless.
            pools: pools from ``create_pools``; donate them at the outermost jit.
            metadata: metadata of each cache group, from the mode's builder.
            mode: name, without "gqa_", of the function of ``mla_attn.steps`` that attends: prefill, extend, decode,
                target_verify, draft_extend or draft_decode.
            tree_mask: mask of a draft tree; not with prompts.
            implementation: attention implementation; None for the default choice.
            skip_threshold: as in ``gqa_attention``.

        Returns:
            Hidden states after the final norm, and the pools.

        Raises:
            ValueError: an unknown mode, a tree mask with prompts, or pools or metadata without the names of the cache
                groups.
        """
        groups = self.cache_groups
        for name, value in (("pools", pools), ("metadata", metadata)):
            check_groups(name, value, groups)
        check_step(mode, tree_mask)
        x = self._embed(tokens)
        step, held = Step(mode, tree_mask, implementation, skip_threshold, self._local), dict[str, Any](pools)
        if mode != "prefill":
            facts = {"tree": tree_mask is not None, "sinks": self.config.sinks, "out_dtype": x.dtype}
            facts["skip"] = skip_threshold is not None
            metadata = {
                group.name: self._local(plan_gqa)(
                    metadata[group.name],
                    held[group.name],
                    self.config.spec(group.window),
                    **facts,
                    implementation=implementation,
                )
                for group in groups
            }
        config, positions = self.config, metadata[groups[0].name].positions  # the same in all groups
        cos_sin = rotation(positions, config.head_dim, config.rope_theta, config.rope_scaling)

        def run_over(m):
            return lambda block, x, pool, layer: block(x, cos_sin, pool, m, step, layer=layer)

        run = {name: once_for_equal_layers(run_over(m)) for name, m in metadata.items()}
        names = self._group_names
        for layer, (block, name) in enumerate(zip(self.layers, names, strict=True)):
            x, held[name] = run[name](block, x, held[name], names[:layer].count(name))
        return self.norm(x), held

    def logits(self, hidden: Float[Array, "*rows dim"]) -> Float[Array, "*rows vocab"]:
        return capped(super().logits(hidden), self.config.logits_soft_cap)

    def draft(self, *arguments, **options):
        """Raises ValueError: there is no draft layer."""
        raise ValueError(self.draft_refusal)

    def draft_logits(self, draft_hidden: Float[Array, "*rows dim"]) -> Float[Array, "*rows vocab"]:
        """Raises ValueError: there is no draft layer."""
        raise ValueError(self.draft_refusal)

    def _embed(self, tokens):
        x = self.embed_tokens(tokens)
        # In the dtype of x, as Gemma was trained, which rounds the factor to bfloat16.
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype) if self.config.gemma else x


class DecoderLayer(nnx.Module):
    """Attention, then an MLP or experts, each after a norm and added to the residual stream; Gemma 2 also norms their
    outputs. Norms have their checkpoint names: ``post_attention_layernorm`` precedes the MLP, except in Gemma."""

    def __init__(self, config: DecoderConfig, layer: int, *, dtype, rngs: nnx.Rngs):
        dim = config.hidden_size
        self.input_layernorm = _norm(config, dim, dtype)
        self.self_attn = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = _norm(config, dim, dtype)
        if config.gemma:
            self.pre_feedforward_layernorm = _norm(config, dim, dtype)
            self.post_feedforward_layernorm = _norm(config, dim, dtype)
        if config.num_experts:
            self.mlp = ClampedMoE(config, dtype=dtype, rngs=rngs)
        else:
            activation = "gelu_tanh" if config.gemma else "silu"
            self.mlp = MLP(dim, config.intermediate_size, dtype=dtype, rngs=rngs, activation=activation)

    def __call__(self, x, cos_sin, pool, metadata, step: Step, *, layer: int | Int[Array, ""]):
        attended, pool = self.self_attn(self.input_layernorm(x), cos_sin, pool, metadata, step, layer=layer)
        if not hasattr(self, "post_feedforward_layernorm"):
            x = x + attended
            return x + self.mlp(self.post_attention_layernorm(x)), pool
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))), pool


class Attention(nnx.Module):
    """Grouped-query attention of one layer; ``sinks`` [H] are float32 like the softmax."""

    def __init__(self, config: DecoderConfig, layer: int, *, dtype, rngs: nnx.Rngs):
        self.spec = config.spec(config.window(layer))
        dim, heads, kv_heads = config.hidden_size, self.spec.num_heads, self.spec.num_kv_heads
        options = {"dtype": dtype, "rngs": rngs}
        self.q_proj = Linear(dim, heads * config.head_dim, bias=config.qkv_bias, **options)
        self.k_proj = Linear(dim, kv_heads * config.head_dim, bias=config.qkv_bias, **options)
        self.v_proj = Linear(dim, kv_heads * config.head_dim, bias=config.qkv_bias, **options)
        self.o_proj = Linear(heads * config.head_dim, dim, bias=config.output_bias, **options)
        if config.qk_norms:
            self.q_norm, self.k_norm = (_norm(config, config.head_dim, dtype) for _ in range(2))
        if config.sinks:
            self.sinks = nnx.Param(jnp.zeros(heads, jnp.float32))

    def __call__(self, x, cos_sin, pool, metadata, step: Step, *, layer: int | Int[Array, ""]):
        q, k, v = (self._heads(project, x) for project in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(each, *cos_sin, interleaved=False) for each in (q, k))
        sinks = self.sinks[...] if hasattr(self, "sinks") else None
        out, pool = step.attend(q, k, v, pool, metadata, self.spec, layer=layer, sinks=sinks)
        return self.o_proj(out.reshape(out.shape[0], -1)), pool

    def _heads(self, project, x):
        return project(x).reshape(x.shape[0], -1, self.spec.head_dim)


def _norm(config: DecoderConfig, dim: int, dtype) -> RMSNorm:
    return RMSNorm(dim, config.rms_norm_eps, dtype=dtype, offset=1.0 if config.gemma else 0.0)
