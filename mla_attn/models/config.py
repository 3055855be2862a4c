"""What a DeepSeek checkpoint is: the part of its ``config.json`` that changes the computation, checked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mla_attn.models.rope import Yarn

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
_YARN_KEYS = tuple(field.name for field in dataclasses.fields(Yarn))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekConfig:
    """Shapes and constants of a DeepSeek-V2/V3 model, named as in ``config.json``; hashable, hence static under jit.

    Attributes that differ from the file:
        rope_theta, yarn: both spellings of the rope keys, read; ``yarn`` is None for plain rope.
        topk_method, scoring_func: filled in for files that leave them out, by ``model_type``.
        n_routed_experts: 0 for a model without experts.
        eos_token_ids: always a tuple.
        weight_block_size: rows and columns that share one scale in FP8 weights, None for unquantised ones.
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
    yarn: Yarn | None = None
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
        """Read the dict that ``config.json`` holds.

        Raises:
            ValueError: a required key is missing, a value makes no sense, or the file asks for something this
                implementation does not serve. A setting that would change results is never skipped over.
        """
        if data.get("model_type") not in MODEL_TYPES:
            raise ValueError(f"model_type={data.get('model_type')!r} is not served; served: {', '.join(MODEL_TYPES)}")
        _require_only_served(data)
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        sizes += ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "max_position_embeddings")
        eos = data.get("eos_token_id")
        theta, yarn = _read_rope(data)
        return cls(
            model_type=data["model_type"],
            **{name: _integer(data, name, least=1) for name in sizes},
            q_lora_rank=None if _given(data, "q_lora_rank") is None else _integer(data, "q_lora_rank", least=1),
            rms_norm_eps=_number({"rms_norm_eps": 1e-6, **data}, "rms_norm_eps"),
            rope_theta=theta,
            yarn=yarn,
            **_read_experts(data),
            num_nextn_predict_layers=_integer({"num_nextn_predict_layers": 0, **data}, "num_nextn_predict_layers"),
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            bos_token_id=data.get("bos_token_id"),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            weight_block_size=_read_block_size(data.get("quantization_config")),
        )

    def __post_init__(self):
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim={self.qk_rope_head_dim} must be even: rope turns pairs")
        if self.num_nextn_predict_layers > 1:
            raise ValueError(f"num_nextn_predict_layers={self.num_nextn_predict_layers} is not served; served: 0, 1")
        if self.n_routed_experts:
            self._check_routing()

    def _check_routing(self):
        experts, chosen, method = self.n_routed_experts, self.num_experts_per_tok, self.topk_method
        scoring = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}
        if method not in scoring:
            raise ValueError(f"topk_method={method!r} is not served; served: {', '.join(scoring)}")
        if self.scoring_func != scoring[method]:
            raise ValueError(
                f"scoring_func={self.scoring_func!r} is not served with topk_method={method!r}; "
                f"served: {scoring[method]!r}"
            )
        if self.moe_intermediate_size < 1:
            raise ValueError(f"moe_intermediate_size={self.moe_intermediate_size} must be at least 1 with experts")
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
        """Width of a query or key head before absorption, nope and rope together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Scale of the scores, in the absorbed form too: the trained width counts, times YaRN's temperature."""
        return self.qk_head_dim**-0.5 * (1.0 if self.yarn is None else self.yarn.softmax_factor)

    def is_moe(self, layer: int) -> bool:
        """Whether layer ``layer`` (the draft layer is ``num_hidden_layers``) has experts."""
        return self.n_routed_experts > 0 and layer >= self.first_k_dense_replace


def _require_only_served(data: Mapping[str, Any]) -> None:
    served = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "rope_interleave": True,
    }
    for name, value in served.items():
        if data.get(name, value) != value:
            raise ValueError(f"{name}={data[name]!r} is not served; served: {value!r}")


def _read_experts(data: Mapping[str, Any]) -> dict[str, Any]:
    if _given(data, "n_routed_experts") is None:
        return {}
    # Files written by transformers leave these two out, its model classes imply them.
    method, scoring = ("greedy", "softmax") if data["model_type"] == "deepseek_v2" else ("noaux_tc", "sigmoid")
    method = data.get("topk_method", method)
    groups = {} if method == "greedy" else {name: _integer(data, name, least=1) for name in ("n_group", "topk_group")}
    sizes = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    return {
        **{name: _integer(data, name, least=1) for name in sizes},
        **groups,
        "n_shared_experts": 0 if _given(data, "n_shared_experts") is None else _integer(data, "n_shared_experts"),
        "first_k_dense_replace": _integer(data, "first_k_dense_replace"),
        "topk_method": method,
        "scoring_func": data.get("scoring_func", scoring),
        "norm_topk_prob": bool(_given(data, "norm_topk_prob")),
        "routed_scaling_factor": _number(data, "routed_scaling_factor"),
    }


def _read_rope(data: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """rope_theta and YaRN, from ``rope_scaling`` (``type`` or ``rope_type``) or the newer ``rope_parameters``."""
    names = [name for name in ("rope_scaling", "rope_parameters") if data.get(name) is not None]
    if len(names) > 1:
        raise ValueError("rope_scaling and rope_parameters are two spellings of one thing; give one")
    name = names[0] if names else "rope_scaling"
    rope = dict(data.get(name) or {})
    theta = _number({"rope_theta": rope.pop("rope_theta", None) or data.get("rope_theta") or 10000.0}, "rope_theta")
    kinds = {rope.pop(key) for key in ("rope_type", "type") if key in rope} or {"default"}
    if kinds not in ({"default"}, {"yarn"}):
        raise ValueError(f"{name} type={' and '.join(sorted(map(repr, kinds)))} is not served; served: default, yarn")
    # Keys some writers add with the value that means "as usual".
    usual = {"truncate": True, "attention_factor": None, "partial_rotary_factor": 1.0}
    for key, value in usual.items():
        if rope.pop(key, value) != value:
            raise ValueError(f"{name} {key}={data[name][key]!r} is not served; served: {value!r}")
    if unknown := sorted(set(rope) - set(_YARN_KEYS)):
        raise ValueError(f"{name} has keys that are not served: {', '.join(unknown)}; served: {', '.join(_YARN_KEYS)}")
    if kinds == {"default"}:
        return theta, None
    rope = {key: value for key, value in rope.items() if value is not None}  # null is as good as absent
    numbers = {key: _number(rope, key) for key in {*rope, "factor", "original_max_position_embeddings"}}
    for key in ("factor", "original_max_position_embeddings"):
        if not numbers[key] > 0:
            raise ValueError(f"{name} {key}={numbers[key]!r} must be positive")
    trained = int(numbers.pop("original_max_position_embeddings"))
    return theta, Yarn(original_max_position_embeddings=trained, **numbers)


def _read_block_size(quantization: Mapping[str, Any] | None) -> tuple[int, int] | None:
    if quantization is None:
        return None
    served = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    for name, value in served.items():
        found = quantization.get(name, None if name == "quant_method" else value)
        if found != value:
            raise ValueError(f"quantization_config {name}={found!r} is not served; served: {value!r}")
    block = quantization.get("weight_block_size")
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ValueError(f"quantization_config weight_block_size={block!r} must be two positive integers")
    return block[0], block[1]


def _given(data: Mapping[str, Any], name: str) -> Any:
    if name not in data:
        raise ValueError(f"{name} is missing")
    return data[name]


def _integer(data: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    value = _given(data, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
    return value


def _number(data: Mapping[str, Any], name: str) -> float:
    value = _given(data, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r} must be a number")
    return float(value)
