"""DeepSeek-V2 and V3 over paged latent attention (arXiv:2405.04434, arXiv:2412.19437).

Shapes: T rows of the call, H heads, Dn and E the nope and rope widths of a query or key head, V of a value head, R the
latent rank. ``dtype`` float32 means float32 throughout: every product runs at the highest precision (no TF32). With
bfloat16 or float16, parameters and activations are of that dtype, products accumulate in float32, and norms, softmax,
router and rope are computed in float32.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mla_attn import steps
from mla_attn.cache import LatentPool
from mla_attn.dispatch import Order
from mla_attn.metadata import AttentionMetadata
from mla_attn.models.base import (
    DRAFT_LAYER,
    PROMPT_MODES,
    CacheGroup,
    Metadata,
    Pools,
    check_dtype,
    check_groups,
    check_step,
)
from mla_attn.models.causal import CausalModel, once_for_equal_layers
from mla_attn.models.config import DeepseekConfig
from mla_attn.models.layers import MLP, Embedding, Linear, RMSNorm, einsum, weight
from mla_attn.models.moe import MoE
from mla_attn.models.rope import rotate, rotation
from mla_attn.ops import plan_mla
from mla_attn.ops.ragged import has_kernel
from mla_attn.specs import MLASpec

GROUP = "full"  # the one cache group, unless the draft layer has its own
Form = Literal["expanded", "absorbed"]  # attention over per-head keys and values, or over the latent itself


@dataclasses.dataclass(frozen=True)
class Step:
    """The attention of every layer of a call.

    Attributes:
        mode, tree_mask, implementation, skip_threshold: the model's arguments.
        form: form of the attention.
        local: function that gives a step as a device runs it.
    """

    mode: str
    form: Form
    tree_mask: Bool[Array, "B S M"] | None
    implementation: Order
    skip_threshold: float | None
    local: Callable[..., Any]

    @property
    def entry_point(self):
        """The function of ``mla_attn.steps``."""
        absorbed_prompt = self.form == "absorbed" and self.mode in PROMPT_MODES
        return self.local(getattr(steps, "absorbed_extend" if absorbed_prompt else self.mode))


class DeepseekForCausalLM(CausalModel[DeepseekConfig, "DecoderLayer"]):
    """A decoder with its output head and, where the checkpoint has one, the draft (MTP) layer. It is a ``CausalLM``
    with one cache group, "full": the decoder layers, then the draft layer. If the pools have one more, "mtp", the draft
    layer is that pool's one layer instead.

    Args:
        config: what the checkpoint is.
        dtype: bfloat16, float16 or float32, of parameters and activations.
        rngs: stream ``params`` initialises the weights; ``load_checkpoint`` makes a model without running this.
        draft_layer: False leaves out the draft layer that the config promises, for checkpoints without its weights.
    """

    def __init__(self, config: DeepseekConfig, *, dtype: DTypeLike, rngs: nnx.Rngs, draft_layer: bool = True):
        dtype = check_dtype(dtype)
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        super().__init__(config, DecoderLayer, norm, dtype=dtype, rngs=rngs)
        if config.num_nextn_predict_layers and draft_layer:
            self.mtp = DraftLayer(config, dtype=dtype, rngs=rngs)

    @property
    def can_draft(self) -> bool:
        return self.draft_refusal is None

    @property
    def draft_refusal(self) -> str | None:
        if hasattr(self, "mtp"):
            return None
        if self.config.num_nextn_predict_layers:
            return "the model has no MTP layer to draft with: its config.json promises one, its checkpoint lacks it"
        return "the model has no MTP layer to draft with: num_nextn_predict_layers=0"

    @property
    def attention_spec(self) -> MLASpec:
        """Static facts of the attention, the same in every layer."""
        return attention_spec(self.config)

    @property
    def cache_groups(self) -> tuple[CacheGroup]:
        layers = self.config.num_hidden_layers + self.can_draft
        scales = {} if self.cache_scales is None else {"scale": tuple(k for k, _ in self.cache_scales)}
        facts = {"spec": self.attention_spec, "dtype": self.dtype, "scales": scales}
        return (CacheGroup(name=GROUP, num_layers=layers, draft_layers=int(self.can_draft), **facts),)

    def __call__(
        self,
        tokens: Int[Array, "T"],
        pools: Pools,
        metadata: Metadata,
        *,
        mode: str,
        form: Form | None = None,
        tree_mask: Bool[Array, "B S M"] | None = None,
        implementation: Order = None,
        skip_threshold: float | None = None,
    ) -> tuple[Float[Array, "T dim"], Pools]:
        """Runs the rows of this call through all layers, which write their cache rows.

        Args:
            tokens: token ids; padding rows may hold any value, and their results are finite but meaningless.
            pools: pools from ``create_pools``; donate them at the outermost jit.
            metadata: metadata under "full", from the mode's builder.
            mode: name of the function of ``mla_attn.steps`` that attends: prefill, extend, decode, target_verify,
                draft_extend or draft_decode.
            form: "expanded" (to per-head keys and values; prompts only) or "absorbed" attention. None takes expanded
                for whole prompts ("prefill") if a kernel supports them so, for absorbed takes about three times the
                operations; and for all prompts if no kernel supports them absorbed. "extend" expands a cached prefix in
                a loop whose end the host must wait for.
            tree_mask: mask of a draft tree; not with prompts.
            implementation: attention implementation; None for the default choice.
            skip_threshold: as in ``mla_attention``.

        Returns:
            Hidden states after the final norm, and the pools.

        Raises:
            ValueError: an unknown mode or form, or a combination that is not allowed; pools or metadata without the
                name of the cache group.
        """
        pool, m = self._group(GROUP, pools, metadata)
        x = self.embed_tokens(tokens)
        step, m = self._step(pool, m, x.dtype, mode, form, tree_mask, implementation, skip_threshold)
        cos_sin = _rotation(self.config, m)

        @once_for_equal_layers
        def run(block, x, pool, layer):
            return block(x, cos_sin, pool, m, step, layer=layer)

        for layer, block in enumerate(self.layers):
            x, pool = run(block, x, pool, layer)
        return self.norm(x), {**pools, GROUP: pool}

    def draft(
        self,
        hidden: Float[Array, "T dim"],
        next_tokens: Int[Array, "T"],
        pools: Pools,
        metadata: Metadata,
        *,
        mode: str,
        form: Form | None = None,
        tree_mask: Bool[Array, "B S M"] | None = None,
        implementation: Order = None,
        skip_threshold: float | None = None,
    ) -> tuple[Float[Array, "T dim"], Pools]:
        """Runs the draft layer: the row at position t predicts token t + 2 (arXiv:2412.19437, section 2.2).

        Args:
            hidden: hidden states from ``__call__`` for position t or, in later draft steps, from ``draft``.
            next_tokens: the token at position t + 1.
            pools: the same pools; the draft layer's rows are layer ``num_hidden_layers`` of "full", or layer 0 of
                "mtp" if there is such a pool.
            metadata: metadata of rows at positions t.
            mode, form, tree_mask, implementation, skip_threshold: as in ``__call__``.

        Returns:
            Hidden states after the draft head's norm, for ``draft_logits`` or another draft step, and the pools.

        Raises:
            ValueError: as in ``__call__``, or the model has no draft layer.
        """
        self._require_mtp()
        own = isinstance(pools, Mapping) and DRAFT_LAYER in pools
        name, layer = (DRAFT_LAYER, 0) if own else (GROUP, self.config.num_hidden_layers)
        pool, m = self._group(name, pools, metadata)
        step, m = self._step(pool, m, hidden.dtype, mode, form, tree_mask, implementation, skip_threshold)
        cos_sin = _rotation(self.config, m)
        hidden, pool = self.mtp(hidden, next_tokens, cos_sin, pool, m, step, layer=layer)
        return hidden, {**pools, name: pool}

    def draft_logits(self, draft_hidden: Float[Array, "*rows dim"]) -> Float[Array, "*rows vocab"]:
        """Float32 logits of hidden states that ``draft`` returned."""
        self._require_mtp()
        return self.mtp.head.float32(draft_hidden)

    def _group(self, name: str, pools: Pools, metadata: Metadata) -> tuple[Any, AttentionMetadata]:
        """The pool and the metadata of a cache group, after a check of both."""
        groups = self.cache_groups
        if self.can_draft and isinstance(pools, Mapping) and DRAFT_LAYER in pools:
            groups = (*groups, dataclasses.replace(groups[0], name=DRAFT_LAYER))
        for argument, value in (("pools", pools), ("metadata", metadata)):
            check_groups(argument, value, groups)
        return pools[name], metadata[name]

    def _step(
        self, pool: LatentPool, m: AttentionMetadata, dtype, mode, form, tree_mask, implementation, skip_threshold=None
    ) -> tuple[Step, AttentionMetadata]:
        """The attention of the layers, and the metadata with the work list that they share, if they need one."""
        check_step(mode, tree_mask)
        _check_form(mode, form)
        rest = (tree_mask, implementation, skip_threshold, self._local)
        facts = {"skip": skip_threshold is not None, "implementation": implementation}
        if form == "expanded" or (form is None and mode == "prefill" and self._expands(pool, m, dtype, **facts)):
            return Step(mode, "expanded", *rest), m
        facts |= {"tree": tree_mask is not None, "out_dtype": dtype}
        planned = self._local(plan_mla)(m, pool, self.attention_spec, **facts)
        if form is None and mode in PROMPT_MODES and planned.work_plan is None:  # only kernels have one
            return Step(mode, "expanded", *rest), m
        return Step(mode, "absorbed", *rest), planned

    def _expands(self, pool: LatentPool, m: AttentionMetadata, dtype, **facts: Any) -> bool:
        """Whether a kernel attends to whole prompts in the expanded form, which takes a third of the operations."""
        if pool.dtype != dtype:
            # Absorbed rows read what the cache stores, expanded ones what they are given. Whether a pass has whole
            # prompts alone depends on other requests, which must not change a token.
            return False
        c, rows = self.config, (m.slots.shape[0], self.config.num_attention_heads)
        q, v = (jax.ShapeDtypeStruct((*rows, dim), dtype) for dim in (c.qk_head_dim, c.v_head_dim))
        return has_kernel(q, q, v, **facts)

    def _require_mtp(self):
        if self.draft_refusal is not None:
            raise ValueError(self.draft_refusal)


def attention_spec(config: DeepseekConfig) -> MLASpec:
    """The spec of a checkpoint's attention."""
    return MLASpec(
        num_heads=config.num_attention_heads,
        kv_lora_rank=config.kv_lora_rank,
        qk_rope_head_dim=config.qk_rope_head_dim,
        scale=config.softmax_scale,
    )


class DecoderLayer(nnx.Module):
    """Attention, then a dense MLP or experts, each after a norm and added to the residual stream."""

    def __init__(self, config: DeepseekConfig, layer: int, *, dtype, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        if config.is_moe(layer):
            self.mlp = MoE(config, dtype=dtype, rngs=rngs)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(self, x, cos_sin, pool, metadata, step: Step, *, layer: int | Int[Array, ""]):
        attended, pool = self.self_attn(self.input_layernorm(x), cos_sin, pool, metadata, step, layer=layer)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), pool


class DraftLayer(nnx.Module):
    """The multi-token-prediction layer. It keeps its own copies of the embedding and the head, as checkpoints do."""

    def __init__(self, config: DeepseekConfig, *, dtype, rngs: nnx.Rngs):
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = Embedding(config.vocab_size, dim, dtype=dtype, rngs=rngs)
        self.enorm = RMSNorm(dim, eps, dtype=dtype)
        self.hnorm = RMSNorm(dim, eps, dtype=dtype)
        self.eh_proj = Linear(2 * dim, dim, dtype=dtype, rngs=rngs)
        self.block = DecoderLayer(config, config.num_hidden_layers, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(dim, eps, dtype=dtype)
        self.head = Linear(dim, config.vocab_size, dtype=dtype, rngs=rngs)

    def __call__(self, hidden, next_tokens, cos_sin, pool, metadata, step: Step, *, layer: int | Int[Array, ""]):
        embedded = self.enorm(self.embed_tokens(next_tokens))
        x = self.eh_proj(jnp.concatenate([embedded, self.hnorm(hidden)], axis=-1))
        x, pool = self.block(x, cos_sin, pool, metadata, step, layer=layer)
        return self.norm(x), pool


class Attention(nnx.Module):
    """Multi-head latent attention, which caches one latent row and one rope key per token for all heads.

    ``w_uk`` [H, Dn, R] and ``w_uv`` [H, V, R] are the two halves of the checkpoint's ``kv_b_proj``: they expand a
    latent row to per-head keys and values, or are absorbed into the query and the output. The norms of the latents take
    ``rms_norm_eps`` like all others, as in serving engines; DeepSeek's own code and transformers always use 1e-6 there.
    """

    def __init__(self, config: DeepseekConfig, *, dtype, rngs: nnx.Rngs):
        self.spec = attention_spec(config)
        self.nope_dim, self.interleaved = config.qk_nope_head_dim, config.rope_interleave
        self.query_scaling = config.query_scaling
        dim, heads, rank, eps = config.hidden_size, config.num_attention_heads, config.kv_lora_rank, config.rms_norm_eps
        queries = heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = Linear(dim, queries, dtype=dtype, rngs=rngs)
        else:
            self.q_a_proj = Linear(dim, config.q_lora_rank, dtype=dtype, rngs=rngs)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps, dtype=dtype)
            self.q_b_proj = Linear(config.q_lora_rank, queries, dtype=dtype, rngs=rngs)
        self.kv_a_proj = Linear(dim, self.spec.latent_dim, dtype=dtype, rngs=rngs)
        self.kv_a_layernorm = RMSNorm(rank, eps, dtype=dtype)
        self.w_uk = weight(rngs, (heads, config.qk_nope_head_dim, rank), dtype)
        self.w_uv = weight(rngs, (heads, config.v_head_dim, rank), dtype)
        self.o_proj = Linear(heads * config.v_head_dim, dim, dtype=dtype, rngs=rngs)

    def __call__(self, x, cos_sin, pool, metadata, step: Step, *, layer: int | Int[Array, ""]):
        q_nope, q_rope = self._queries(x, cos_sin)
        latent, rope = self._latent(x, cos_sin)
        options = {"layer": layer, "query_scaling": self.query_scaling, "implementation": step.implementation}
        options["skip_threshold"] = step.skip_threshold
        if step.form == "absorbed":
            q_latent = einsum("thd,hdr->thr", q_nope, self.w_uk[...])
            options["tree_mask"] = step.tree_mask
            out, pool = step.entry_point(q_latent, q_rope, latent, rope, pool, metadata, self.spec, **options)
            out = einsum("thr,hvr->thv", out, self.w_uv[...])
        else:
            q = jnp.concatenate([q_nope, q_rope], axis=-1)
            k_nope = einsum("tr,hdr->thd", latent, self.w_uk[...])
            k = jnp.concatenate([k_nope, jnp.broadcast_to(rope[:, None], q_rope.shape)], axis=-1)
            v = einsum("tr,hvr->thv", latent, self.w_uv[...])
            # A cached prefix holds latent rows: extend expands them with the same two weights, chunk by chunk.
            expand = (self.w_uk[...], self.w_uv[...]) if step.mode == "extend" else ()
            out, pool = step.entry_point(q, k, v, latent, rope, *expand, pool, metadata, self.spec, **options)
        return self.o_proj(out.reshape(out.shape[0], -1)), pool

    def _queries(self, x, cos_sin):
        q = self.q_proj(x) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(q.shape[0], -1, self.nope_dim + self.spec.qk_rope_head_dim)  # a device has some of the heads
        return q[..., : self.nope_dim], rotate(q[..., self.nope_dim :], *cos_sin, interleaved=self.interleaved)

    def _latent(self, x, cos_sin):
        latent, rope = jnp.split(self.kv_a_proj(x), [self.spec.kv_lora_rank], axis=-1)
        return self.kv_a_layernorm(latent), rotate(rope, *cos_sin, interleaved=self.interleaved)


def _rotation(config: DeepseekConfig, metadata: AttentionMetadata):
    return rotation(metadata.positions, config.qk_rope_head_dim, config.rope_theta, config.yarn)


def _check_form(mode: str, form: str | None) -> None:
    """Only prompts have a choice, all else runs absorbed."""
    if form not in (None, "expanded", "absorbed"):
        raise ValueError(f"form={form!r} must be None, 'expanded' or 'absorbed'")
    if form == "expanded" and mode not in PROMPT_MODES:
        raise ValueError(f"form='expanded' with mode={mode!r}: must be one of {', '.join(PROMPT_MODES)}")
