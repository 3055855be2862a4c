"""The config of DeepSeek models: the part of ``config.json`` that affects the computation, checked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mla_attn.models.keys import (
    END_TOKENS,
    EXPERTS,
    FAMILY,
    FP8,
    GROUPS,
    PARTS,
    QUERY_SCALING,
    ROPE,
    ROPE_THETA,
    ROUTINGS,
    SHAPES,
    TRAINED,
    YARN,
)
from mla_attn.models.rope import Yarn
from mla_attn.models.rope_settings import read_rope
from mla_attn.models.settings import number, read_settings
from mla_attn.steps import QueryScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekConfig:
    """Shapes and constants of a DeepSeek-V2/V3 model, named as in ``config.json``; hashable, hence static under jit.

    Attributes that differ from the file:
        rope_theta, yarn: read from either spelling of the rope keys; ``yarn`` is None for plain rope.
        query_scaling: from ``llama_4_scaling_beta`` among the rope keys; None without it.
        topk_method, scoring_func: derived from ``model_type`` if the file does not have them.
        n_routed_experts: 0 for a model without experts.
        eos_token_ids: always a tuple; ``load_checkpoint`` adds those of ``generation_config.json``.
        weight_block_size: rows and columns that share one scale in FP8 weights; None if not quantised.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    max_position_embeddings: int
    q_lora_rank: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_interleave: bool = True
    yarn: Yarn | None = None
    query_scaling: QueryScaling | None = None
    first_k_dense_replace: int = 0
    moe_intermediate_size: int = 0
    n_routed_experts: int = 0
    n_shared_experts: int = 0
    num_experts_per_tok: int = 0
    n_group: int = 1
    topk_group: int = 1
    topk_method: str = "greedy"
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    weight_block_size: tuple[int, int] | None = None

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> "DeepseekConfig":
        """Reads the dict of a ``config.json``.

        Raises:
            ValueError: a required key is missing, or a value is invalid or not supported. A setting that would change
                results is never ignored.
        """
        read_settings(data, FAMILY)
        shapes = read_settings(data, SHAPES)
        theta, yarn, scaling = _read_rope(data)
        quantization = read_settings(data, PARTS)["quantization_config"]
        return cls(
            model_type=data["model_type"],
            **shapes,
            rope_theta=theta,
            yarn=yarn,
            query_scaling=scaling,
            **_read_experts(data),
            eos_token_ids=read_settings(data, END_TOKENS)["eos_token_id"],
            weight_block_size=None if quantization is None else read_block_size(quantization),
        )

    def __post_init__(self):
        if self.yarn is not None:
            for name in ("softmax_factor", "rotation_scale"):  # these may overflow float32 even if mscale does not
                number(above=0.0)(f"rope scaling of {self.yarn}: {name}", getattr(self.yarn, name))
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim={self.qk_rope_head_dim} must be even: rope turns pairs")
        if self.num_nextn_predict_layers > 1:
            raise ValueError(
                f"num_nextn_predict_layers={self.num_nextn_predict_layers} is not supported; supported: 0, 1"
            )
        if self.n_routed_experts:
            self._check_routing()

    def _check_routing(self):
        experts, chosen, method = self.n_routed_experts, self.num_experts_per_tok, self.topk_method
        if self.scoring_func != ROUTINGS[method]:
            raise ValueError(
                f"scoring_func={self.scoring_func!r} is not supported with topk_method={method!r}; "
                f"supported: {ROUTINGS[method]!r}"
            )
        available = experts
        if method != "greedy":
            if self.n_group < 1 or experts % self.n_group:
                raise ValueError(f"n_group={self.n_group} must divide n_routed_experts={experts}")
            if not 1 <= self.topk_group <= self.n_group:
                raise ValueError(f"topk_group={self.topk_group} must be 1 to n_group={self.n_group}")
            if method == "noaux_tc" and experts < 2 * self.n_group:
                raise ValueError(f"n_group={self.n_group} leaves groups of one expert; noaux_tc scores a group by two")
            available = experts // self.n_group * self.topk_group
        if not 1 <= chosen <= available:
            raise ValueError(f"num_experts_per_tok={chosen} must be 1 to {available}, the experts of the kept groups")

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head before absorption, nope and rope parts together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Scale of the scores, also in absorbed form: from the width before absorption, times YaRN's temperature."""
        return self.qk_head_dim**-0.5 * (1.0 if self.yarn is None else self.yarn.softmax_factor)

    def is_moe(self, layer: int) -> bool:
        """Whether layer ``layer`` (the draft layer is ``num_hidden_layers``) has experts."""
        return self.n_routed_experts > 0 and layer >= self.first_k_dense_replace


def _read_experts(data: Mapping[str, Any]) -> dict[str, Any]:
    if "n_routed_experts" in data and data["n_routed_experts"] is None:
        return {}
    values = read_settings(data, EXPERTS)
    # Files written by transformers do not have these two, because its model classes imply them.
    method, scoring = ("greedy", "softmax") if data["model_type"] == "deepseek_v2" else ("noaux_tc", "sigmoid")
    values |= {
        "topk_method": values["topk_method"] or method,
        "scoring_func": values["scoring_func"] or scoring,
        "n_shared_experts": values["n_shared_experts"] or 0,
        "norm_topk_prob": values["norm_topk_prob"] or False,
    }
    return values if values["topk_method"] == "greedy" else values | read_settings(data, GROUPS)


def _read_rope(data: Mapping[str, Any]) -> tuple[float, Yarn | None, QueryScaling | None]:
    """Reads rope_theta, YaRN and the scaling of queries."""
    section = data.get("rope_scaling") or data.get("rope_parameters")
    scaled = isinstance(section, dict) and section.get("llama_4_scaling_beta") is not None
    kinds = {"default": QUERY_SCALING | (TRAINED if scaled else {}), "yarn": QUERY_SCALING | YARN}
    rope = read_rope(data, theta=ROPE_THETA, common=ROPE, kinds=kinds)
    yarn = Yarn(**read_settings(rope.keys, YARN, within=rope.name)) if rope.kind == "yarn" else None
    return rope.theta, yarn, _read_scaling(rope.name, rope.keys) if scaled else None


def _read_scaling(name: str, rope: Mapping[str, Any]) -> QueryScaling:
    """Reads the scaling of queries by position, as in Llama 4 and Mistral's models of this architecture."""
    values = read_settings(rope, QUERY_SCALING | TRAINED, within=name)
    return QueryScaling(
        beta=values["llama_4_scaling_beta"], original_max_position=values["original_max_position_embeddings"]
    )


def read_block_size(quantization: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale in FP8 weights; raises ValueError for other quantisation."""
    return read_settings(quantization, FP8, within="quantization_config")["weight_block_size"]
