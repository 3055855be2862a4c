"""DeepSeek-V2 and V3 over paged latent attention (arXiv:2405.04434, arXiv:2412.19437).

Shapes: T rows of the call, H heads, Dn and E the nope and rope widths of a query or key head, V of a value head, R the
latent rank. ``dtype`` float32 means float32 throughout: every product runs at the highest precision (no TF32). With
bfloat16, parameters and activations are bfloat16, products accumulate in float32, and norms, softmax, router and rope
are computed in float32.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mla_attn import steps
from mla_attn.metadata import AttentionMetadata
from mla_attn.models.base import MODES, CacheGroup, Metadata, Pool, Pools, create_pools
from mla_attn.models.config import DeepseekConfig
from mla_attn.models.rope import rotate, rotation
from mla_attn.ops import plan_mla
from mla_attn.ops.grouped_matmul import grouped_matmul
from mla_attn.specs import MLASpec

PROMPT_MODES = ("prefill", "extend")  # the only ones with a choice of form, the others run absorbed
GROUP = "full"  # the one cache group
Form = Literal["expanded", "absorbed"]  # attention over per-head keys and values, or over the latent itself
DTYPES = ("bfloat16", "float32")
_LEAST_ROWS = 8  # of a product


@dataclasses.dataclass(frozen=True)
class Step:
    """How every layer of a call attends.

    Attributes:
        mode, tree_mask, implementation: as given to the model.
        form: of the attention.
    """

    mode: str
    form: Form
    tree_mask: Bool[Array, "B S M"] | None
    implementation: str | None

    @property
    def entry_point(self):
        """The function of ``mla_attn.steps``. An absorbed prompt takes the one with the same metadata as ``extend``."""
        absorbed_prompt = self.form == "absorbed" and self.mode in PROMPT_MODES
        return getattr(steps, "draft_extend" if absorbed_prompt else self.mode)


class DeepseekForCausalLM(nnx.Module):
    """A decoder with its output head and, where the checkpoint has one, the draft (MTP) layer. It is a ``CausalLM``
    with one cache group, "full": the decoder layers, then the draft layer.

    Args:
        config: what the checkpoint is.
        dtype: bfloat16 or float32, of parameters and activations.
        rngs: stream ``params`` initialises the weights; ``load_checkpoint`` makes a model without running this.
    """

    def __init__(self, config: DeepseekConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        dtype = jnp.dtype(dtype)
        if dtype.name not in DTYPES:
            raise ValueError(f"dtype={dtype.name} must be one of {', '.join(DTYPES)}")
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, layer, dtype=dtype, rngs=rngs) for layer in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)
        if config.num_nextn_predict_layers:
            self.mtp = DraftLayer(config, dtype=dtype, rngs=rngs)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def max_position_embeddings(self) -> int:
        return self.config.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.embed_tokens.embedding.dtype)

    @property
    def can_draft(self) -> bool:
        return self.config.num_nextn_predict_layers > 0

    @property
    def attention_spec(self) -> MLASpec:
        """Static facts of the attention, the same in every layer."""
        return attention_spec(self.config)

    @property
    def cache_groups(self) -> tuple[CacheGroup]:
        layers = self.config.num_hidden_layers + self.config.num_nextn_predict_layers
        return (CacheGroup(name=GROUP, num_layers=layers, spec=self.attention_spec, dtype=self.dtype),)

    def create_pools(self, *, num_pages: int | Mapping[str, int], page_size: int) -> Pools:
        """An all-zero pool under "full"; ValueError for sizes that ``LatentPool.create`` refuses."""
        return create_pools(self.cache_groups, num_pages=num_pages, page_size=page_size)

    def __call__(
        self,
        tokens: Int[Array, "T"],
        pools: Pools,
        metadata: Metadata,
        *,
        mode: str,
        form: Form | None = None,
        tree_mask: Bool[Array, "B S M"] | None = None,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T dim"], Pools]:
        """Run the rows of this call through all layers, writing their cache rows.

        Args:
            tokens: token ids; padding rows may hold anything, their results mean nothing but are finite.
            pools: of ``create_pools``; donate them at the outermost jit.
            metadata: under "full", what the rows' positions are, what they see and where they are written.
            mode: the function of ``mla_attn.steps`` that attends: prefill, extend, decode, target_verify, draft_extend
                or draft_decode.
            form: "expanded" (to per-head keys and values; prompts only) or "absorbed" attention. None takes expanded
                for prompts that no kernel supports in absorbed form: that takes about three times the operations, but
                expanded keys and values go through XLA, in loops over keys whose ends the host must wait for.
            tree_mask: which tokens of a draft tree each row sees; not with prompts.
            implementation: of the attention ops, None for the best available.

        Returns:
            Hidden states after the final norm, and the pools.

        Raises:
            ValueError: a mode or form that does not exist or do not go together.
        """
        pool, m = pools[GROUP], metadata[GROUP]
        x = self.embed_tokens(tokens)
        step, m = self._step(pool, m, x.dtype, mode, form, tree_mask, implementation)
        cos_sin = _rotation(self.config, m)
        for layer, block in enumerate(self.layers):
            x, pool = block(x, cos_sin, pool, m, step, layer=layer)
        return self.norm(x), {GROUP: pool}

    def logits(self, hidden: Float[Array, "*rows dim"]) -> Float[Array, "*rows vocab"]:
        """Float32 logits of hidden states that ``__call__`` returned."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens.attend(hidden)
        return self.lm_head.float32(hidden)

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
        implementation: str | None = None,
    ) -> tuple[Float[Array, "T dim"], Pools]:
        """Run the draft layer: the row at position t predicts token t + 2 (arXiv:2412.19437, section 2.2).

        Args:
            hidden: what ``__call__`` returned for position t or, drafting further, what ``draft`` returned.
            next_tokens: the token at position t + 1.
            pools: the same pools; the draft layer's rows are layer ``num_hidden_layers`` of "full".
            metadata: rows at positions t.
            mode, form, tree_mask, implementation: as in ``__call__``.

        Returns:
            Hidden states after the draft head's norm, for ``draft_logits`` or another draft step, and the pools.

        Raises:
            ValueError: as ``__call__``, or the model has no draft layer.
        """
        self._require_mtp()
        pool, m = pools[GROUP], metadata[GROUP]
        step, m = self._step(pool, m, hidden.dtype, mode, form, tree_mask, implementation)
        cos_sin = _rotation(self.config, m)
        hidden, pool = self.mtp(hidden, next_tokens, cos_sin, pool, m, step, layer=self.config.num_hidden_layers)
        return hidden, {GROUP: pool}

    def draft_logits(self, draft_hidden: Float[Array, "*rows dim"]) -> Float[Array, "*rows vocab"]:
        """Float32 logits of hidden states that ``draft`` returned."""
        self._require_mtp()
        return self.mtp.head.float32(draft_hidden)

    def _step(
        self, pool: Pool, m: AttentionMetadata, dtype, mode, form, tree_mask, implementation
    ) -> tuple[Step, AttentionMetadata]:
        """How the layers attend, and the metadata with what their attention shares, where there is such a thing."""
        _check_step(mode, form, tree_mask)
        if form == "expanded":
            return Step(mode, form, tree_mask, implementation), m
        tree = tree_mask is not None
        planned = plan_mla(m, pool, self.attention_spec, tree=tree, out_dtype=dtype, implementation=implementation)
        if form is None and mode in PROMPT_MODES and planned.work_plan is None:  # only kernels have one
            return Step(mode, "expanded", tree_mask, implementation), m
        return Step(mode, "absorbed", tree_mask, implementation), planned

    def _require_mtp(self):
        if not self.config.num_nextn_predict_layers:
            raise ValueError("num_nextn_predict_layers=0: this model has no draft layer; draft needs 1")


def attention_spec(config: DeepseekConfig) -> MLASpec:
    """The spec of a checkpoint's attention."""
    return MLASpec(
        num_heads=config.num_attention_heads,
        kv_lora_rank=config.kv_lora_rank,
        qk_rope_head_dim=config.qk_rope_head_dim,
        scale=config.softmax_scale,
    )


class DecoderLayer(nnx.Module):
    """Attention, then a dense MLP or experts, each normed before and added to the residual stream."""

    def __init__(self, config: DeepseekConfig, layer: int, *, dtype, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = Attention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        if config.is_moe(layer):
            self.mlp = MoE(config, dtype=dtype, rngs=rngs)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)

    def __call__(self, x, cos_sin, pool, metadata, step: Step, *, layer: int):
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

    def __call__(self, hidden, next_tokens, cos_sin, pool, metadata, step: Step, *, layer: int):
        embedded = self.enorm(self.embed_tokens(next_tokens))
        x = self.eh_proj(jnp.concatenate([embedded, self.hnorm(hidden)], axis=-1))
        x, pool = self.block(x, cos_sin, pool, metadata, step, layer=layer)
        return self.norm(x), pool


class Attention(nnx.Module):
    """Multi-head latent attention: what is cached is one latent row and one rope key per token, for all heads.

    ``w_uk`` [H, Dn, R] and ``w_uv`` [H, V, R] are the two halves of the checkpoint's ``kv_b_proj``: they expand a
    latent row to per-head keys and values, or are absorbed into the query and the output.
    """

    def __init__(self, config: DeepseekConfig, *, dtype, rngs: nnx.Rngs):
        self.spec = attention_spec(config)
        self.nope_dim = config.qk_nope_head_dim
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
        self.w_uk = _weight(rngs, (heads, config.qk_nope_head_dim, rank), dtype)
        self.w_uv = _weight(rngs, (heads, config.v_head_dim, rank), dtype)
        self.o_proj = Linear(heads * config.v_head_dim, dim, dtype=dtype, rngs=rngs)

    def __call__(self, x, cos_sin, pool, metadata, step: Step, *, layer: int):
        q_nope, q_rope = self._queries(x, cos_sin)
        latent, rope = self._latent(x, cos_sin)
        options = {"layer": layer, "implementation": step.implementation}
        if step.form == "absorbed":
            q_latent = _einsum("thd,hdr->thr", q_nope, self.w_uk[...])
            options["tree_mask"] = step.tree_mask
            out, pool = step.entry_point(q_latent, q_rope, latent, rope, pool, metadata, self.spec, **options)
            out = _einsum("thr,hvr->thv", out, self.w_uv[...])
        else:
            q = jnp.concatenate([q_nope, q_rope], axis=-1)
            k_nope = _einsum("tr,hdr->thd", latent, self.w_uk[...])
            k = jnp.concatenate([k_nope, jnp.broadcast_to(rope[:, None], q_rope.shape)], axis=-1)
            v = _einsum("tr,hvr->thv", latent, self.w_uv[...])
            # A cached prefix holds latent rows: extend expands them with the same two weights, chunk by chunk.
            expand = (self.w_uk[...], self.w_uv[...]) if step.mode == "extend" else ()
            out, pool = step.entry_point(q, k, v, latent, rope, *expand, pool, metadata, self.spec, **options)
        return self.o_proj(out.reshape(out.shape[0], -1)), pool

    def _queries(self, x, cos_sin):
        q = self.q_proj(x) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(q.shape[0], self.spec.num_heads, -1)
        return q[..., : self.nope_dim], rotate(q[..., self.nope_dim :], *cos_sin)

    def _latent(self, x, cos_sin):
        latent, rope = jnp.split(self.kv_a_proj(x), [self.spec.kv_lora_rank], axis=-1)
        return self.kv_a_layernorm(latent), rotate(rope, *cos_sin)


class MoE(nnx.Module):
    """Routed experts, each token in its own few, plus shared experts that every token passes through."""

    def __init__(self, config: DeepseekConfig, *, dtype, rngs: nnx.Rngs):
        dim, width, count = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        self.gate = Router(config, rngs=rngs)
        self.gate_proj = _weight(rngs, (count, dim, width), dtype)
        self.up_proj = _weight(rngs, (count, dim, width), dtype)
        self.down_proj = _weight(rngs, (count, width, dim), dtype)
        self.has_shared = config.n_shared_experts > 0
        if self.has_shared:
            self.shared_experts = MLP(dim, width * config.n_shared_experts, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T dim"]) -> Float[Array, "T dim"]:
        experts, weights = self.gate(x)
        out = self._experts(x, experts, weights).astype(x.dtype)
        return out + self.shared_experts(x) if self.has_shared else out

    def _experts(self, x, experts: Int[Array, "T k"], weights: Float[Array, "T k"]) -> Float[Array, "T dim"]:
        """Sort the (token, expert) pairs by expert, run each expert over its run of rows, and sum per token."""
        chosen = experts.reshape(-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=self.gate_proj.shape[0]).astype(jnp.int32)
        rows = x[order // experts.shape[1]]
        gate, up = (grouped_matmul(rows, w[...], sizes) for w in (self.gate_proj, self.up_proj))
        hidden = _swiglu(gate, up, x.dtype)
        out = grouped_matmul(hidden, self.down_proj[...], sizes)[jnp.argsort(order)]  # the inverse permutation
        return (out.reshape(*experts.shape, -1) * weights[..., None]).sum(axis=1)


class Router(nnx.Module):
    """Chooses the experts of each token; float32 whatever the model's dtype, because near ties flip experts."""

    def __init__(self, config: DeepseekConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.kernel = _weight(rngs, (config.hidden_size, config.n_routed_experts), jnp.float32)
        if config.topk_method == "noaux_tc":
            self.e_score_correction_bias = nnx.Param(jnp.zeros(config.n_routed_experts, jnp.float32))

    def __call__(self, x: Float[Array, "T dim"]) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
        """Experts of each token and their weights (arXiv:2405.04434 section 2.2.2, arXiv:2412.19437 section 2.1.2).

        ``greedy``: the best k. ``group_limited_greedy``: the best k of the groups with the best expert. ``noaux_tc``:
        the same with groups judged by their best two, a learned bias added for choosing but not for weighing.
        """
        config = self.config
        scores = _dot(x.astype(jnp.float32), self.kernel[...])
        if config.scoring_func == "softmax":
            scores = ranked = jax.nn.softmax(scores, axis=-1)
        else:
            scores = jax.nn.sigmoid(scores)
            ranked = scores + self.e_score_correction_bias[...][None]
        if config.topk_method != "greedy":
            ranked = _keep_groups(
                ranked, config.n_group, config.topk_group, best=2 if config.topk_method == "noaux_tc" else 1
            )
        _, experts = jax.lax.top_k(ranked, config.num_experts_per_tok)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return experts, weights * config.routed_scaling_factor


def _keep_groups(scores: Float[Array, "T experts"], groups: int, kept: int, *, best: int):
    """Scores with -inf outside the ``kept`` groups whose ``best`` highest scores sum highest.

    -inf and not 0: a biased score may be negative, and a dropped expert must never win.
    """
    grouped = scores.reshape(scores.shape[0], groups, -1)
    group_scores = jax.lax.top_k(grouped, best)[0].sum(axis=-1)
    _, chosen = jax.lax.top_k(group_scores, kept)
    keep = jax.nn.one_hot(chosen, groups, dtype=bool).any(axis=1)
    return jnp.where(keep[..., None], grouped, -jnp.inf).reshape(scores.shape)


class MLP(nnx.Module):
    """Dense SwiGLU MLP."""

    def __init__(self, dim: int, width: int, *, dtype, rngs: nnx.Rngs):
        self.gate_proj = Linear(dim, width, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(dim, width, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(width, dim, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(_swiglu(self.gate_proj.float32(x), self.up_proj.float32(x), x.dtype))


class Linear(nnx.Module):
    """``x @ kernel`` without bias, accumulated in float32; ``kernel`` is [in, out].

    Not ``nnx.Linear``, because the precision must follow the dtype and the heads want the float32 accumulator itself.
    """

    def __init__(self, dim_in: int, dim_out: int, *, dtype, rngs: nnx.Rngs):
        self.kernel = _weight(rngs, (dim_in, dim_out), dtype)

    def __call__(self, x):
        return self.float32(x).astype(x.dtype)

    def float32(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        """The product before it is rounded to the dtype of ``x``."""
        return _dot(x, self.kernel[...])


class Embedding(nnx.Module):
    """Token embeddings [vocab, dim]. Ids outside the vocabulary (padding) are clipped, so that rows stay finite."""

    def __init__(self, vocab: int, dim: int, *, dtype, rngs: nnx.Rngs):
        self.embedding = _weight(rngs, (vocab, dim), dtype)

    def __call__(self, tokens: Int[Array, "T"]) -> Float[Array, "T dim"]:
        return jnp.take(self.embedding[...], tokens, axis=0, mode="clip")

    def attend(self, x: Float[Array, "*rows dim"]) -> Float[Array, "*rows vocab"]:
        """Float32 logits of a tied head."""
        return _dot(x, self.embedding[...].T)


class RMSNorm(nnx.Module):
    """``x / rms(x) * scale``, computed in float32."""

    def __init__(self, dim: int, eps: float, *, dtype):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(dim, dtype))

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * jnp.broadcast_to(self.scale[...].astype(jnp.float32), x.shape)).astype(x.dtype)


def _rotation(config: DeepseekConfig, metadata: AttentionMetadata):
    return rotation(metadata.positions, config.qk_rope_head_dim, config.rope_theta, config.yarn)


def _check_step(mode: str, form: str | None, tree_mask) -> None:
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} must be one of {', '.join(MODES)}")
    if form not in (None, "expanded", "absorbed"):
        raise ValueError(f"form={form!r} must be None, 'expanded' or 'absorbed'")
    if form == "expanded" and mode not in PROMPT_MODES:
        raise ValueError(f"form='expanded' with mode={mode!r}: must be one of {', '.join(PROMPT_MODES)}")
    if tree_mask is not None and mode in PROMPT_MODES:
        others = [name for name in MODES if name not in PROMPT_MODES]
        raise ValueError(f"tree_mask with mode={mode!r}: must be one of {', '.join(others)}")


def _weight(rngs: nnx.Rngs, shape: tuple[int, ...], dtype) -> nnx.Param:
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))


def _precision(x: Array) -> jax.lax.Precision:
    # GPUs multiply float32 in TF32 unless told otherwise; for bfloat16 operands there is nothing to gain.
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def _dot(x, kernel):
    """Product over the last axis of ``x`` and the first of ``kernel``, in float32."""
    if x.size == x.shape[-1]:
        # XLA makes a multiplication and a sum of one row times a matrix, and on GPUs writes the numbers in between to
        # memory, in float32. Zeros beside the row keep it a product.
        rows = jnp.pad(x.reshape(1, -1), ((0, _LEAST_ROWS - 1), (0, 0)))
        return _dot(rows, kernel)[:1].reshape(*x.shape[:-1], -1)
    return jnp.matmul(x, kernel, precision=_precision(x), preferred_element_type=jnp.float32)


def _einsum(equation, x, kernel):
    # Asked for in the type of x, not in float32, the type of its sums anyway: XLA on CPUs with bf16 units refuses some
    # batched bf16 products with float32 output.
    return jnp.einsum(equation, x, kernel, precision=_precision(x), preferred_element_type=x.dtype)


def _swiglu(gate, up, dtype):
    return (jax.nn.silu(gate) * up).astype(dtype)
