"""What a DeepSeek checkpoint is: the part of its ``config.json`` that changes the computation, checked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mla_attn.models.rope import Yarn
from mla_attn.models.settings import (
    LARGEST_INT32,
    Setting,
    boolean,
    integer,
    is_integer,
    nullable,
    number,
    only,
    read_settings,
    section,
    token_ids,
)
from mla_attn.steps import QueryScaling
from mla_attn.text import shown

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")

_SIZE = Setting(integer(1))
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
SETTINGS = {
    **dict.fromkeys(SIZES, _SIZE),
    "max_position_embeddings": Setting(integer(1, LARGEST_INT32)),
    "q_lora_rank": Setting(nullable(integer(1))),
    "rms_norm_eps": Setting(number(above=0.0), 1e-6),
    "rope_interleave": Setting(boolean, True),
    "num_nextn_predict_layers": Setting(integer(), 0),
    "tie_word_embeddings": Setting(boolean, False),
    "bos_token_id": Setting(integer(0, LARGEST_INT32), None),
}
END_TOKENS = {"eos_token_id": Setting(token_ids, ())}
EXPERTS = {
    "n_routed_experts": Setting(integer(1)),
    "num_experts_per_tok": _SIZE,
    "moe_intermediate_size": _SIZE,
    "n_shared_experts": Setting(nullable(integer())),
    "first_k_dense_replace": Setting(integer()),
    "norm_topk_prob": Setting(nullable(boolean)),
    "routed_scaling_factor": Setting(number(above=0.0)),
}
GROUPS = {"n_group": _SIZE, "topk_group": _SIZE}
ROUTINGS = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}  # with their scoring_func
# Settings of which one value is supported, that of a file which leaves them out.
FIXED = {
    "hidden_act": Setting(only("silu"), "silu"),
    "attention_bias": Setting(only(False), False),
    "mlp_bias": Setting(only(False), False),
    "moe_layer_freq": Setting(only(1), 1),
    "llama_4_scaling": Setting(only(None), None),
}
# Of rope_scaling and rope_parameters.
_TRAINED = {"original_max_position_embeddings": Setting(integer(1, LARGEST_INT32))}
YARN = {
    "factor": Setting(number(least=1.0)),
    **_TRAINED,
    "beta_fast": Setting(number(above=0.0), 32.0),
    "beta_slow": Setting(number(above=0.0), 1.0),
    "mscale": Setting(number(least=0.0), 1.0),
    "mscale_all_dim": Setting(number(least=0.0), 0.0),
}
FIXED_ROPE = {
    "truncate": Setting(only(True), True),
    "attention_factor": Setting(only(None), None),
    "partial_rotary_factor": Setting(only(1.0, 1), 1.0),
}
FP8 = {
    "quant_method": Setting(only("fp8")),
    "fmt": Setting(only("e4m3"), "e4m3"),
    "activation_scheme": Setting(only("dynamic"), "dynamic"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekConfig:
    """Shapes and constants of a DeepSeek-V2/V3 model, named as in ``config.json``; hashable, hence static under jit.

    Attributes that differ from the file:
        rope_theta, yarn: both spellings of the rope keys, read; ``yarn`` is None for plain rope.
        query_scaling: of ``llama_4_scaling_beta`` among the rope keys, None without it.
        topk_method, scoring_func: filled in for files that leave them out, by ``model_type``.
        n_routed_experts: 0 for a model without experts.
        eos_token_ids: always a tuple; ``load_checkpoint`` adds those of ``generation_config.json``.
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
        """Read the dict that ``config.json`` holds.

        Raises:
            ValueError: a required key is missing, a value makes no sense, or the file asks for something this
                implementation does not support. A setting that would change results is never skipped over.
        """
        read_settings(data, {"model_type": Setting(only(*MODEL_TYPES))} | FIXED)
        theta, yarn, scaling = _read_rope(data)
        return cls(
            model_type=data["model_type"],
            **read_settings(data, SETTINGS),
            rope_theta=theta,
            yarn=yarn,
            query_scaling=scaling,
            **_read_experts(data),
            eos_token_ids=read_settings(data, END_TOKENS)["eos_token_id"],
            weight_block_size=_read_block_size(data.get("quantization_config")),
        )

    def __post_init__(self):
        if self.yarn is not None:
            for name in ("softmax_factor", "rotation_scale"):  # mscale within float32 may leave it by these
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
        """Width of a query or key head before absorption, nope and rope together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Scale of the scores, in the absorbed form too: the trained width counts, times YaRN's temperature."""
        return self.qk_head_dim**-0.5 * (1.0 if self.yarn is None else self.yarn.softmax_factor)

    def is_moe(self, layer: int) -> bool:
        """Whether layer ``layer`` (the draft layer is ``num_hidden_layers``) has experts."""
        return self.n_routed_experts > 0 and layer >= self.first_k_dense_replace


def _read_experts(data: Mapping[str, Any]) -> dict[str, Any]:
    if "n_routed_experts" in data and data["n_routed_experts"] is None:
        return {}
    # Files written by transformers leave these two out, its model classes imply them.
    method, scoring = ("greedy", "softmax") if data["model_type"] == "deepseek_v2" else ("noaux_tc", "sigmoid")
    routing = {
        "topk_method": Setting(only(*ROUTINGS), method),
        "scoring_func": Setting(only("softmax", "sigmoid"), scoring),
    }
    values = read_settings(data, EXPERTS | routing)
    if values["topk_method"] != "greedy":
        values |= read_settings(data, GROUPS)
    return values | {
        "n_shared_experts": values["n_shared_experts"] or 0,
        "norm_topk_prob": values["norm_topk_prob"] or False,
    }


def _read_rope(data: Mapping[str, Any]) -> tuple[float, Yarn | None, QueryScaling | None]:
    """rope_theta, YaRN and scaling of queries, from ``rope_scaling`` or the newer ``rope_parameters``, which has
    ``rope_theta`` inside."""
    names = [name for name in ("rope_scaling", "rope_parameters") if data.get(name) is not None]
    if len(names) > 1:
        raise ValueError("rope_scaling and rope_parameters are two spellings of one thing; give one")
    name = names[0] if names else "rope_scaling"
    rope = section(name, data[name]) if names else {}
    rope = {key: value for key, value in rope.items() if value is not None}  # null is as good as absent
    theta = {"rope_theta": Setting(number(above=1.0), 10000.0)}
    theta = read_settings(rope if "rope_theta" in rope else data, theta, within=name if "rope_theta" in rope else "")
    read_settings(rope, FIXED_ROPE | {"max_position_embeddings": _same(data)}, within=name)
    kind, beta = _rope_type(name, rope), rope.get("llama_4_scaling_beta")
    allowed = {"rope_theta", "rope_type", "type", "max_position_embeddings", "llama_4_scaling_beta", *FIXED_ROPE}
    allowed |= set(YARN) if kind == "yarn" else set() if beta is None else set(_TRAINED)
    if unknown := sorted(rope.keys() - allowed):
        raise ValueError(
            f"{name} of type {kind!r} has keys that are not supported: {', '.join(map(shown, unknown))}; "
            f"supported: {', '.join(sorted(allowed))}"
        )
    yarn = Yarn(**read_settings(rope, YARN, within=name)) if kind == "yarn" else None
    return theta["rope_theta"], yarn, None if beta is None else _read_scaling(name, rope)


def _rope_type(name: str, rope: Mapping[str, Any]) -> str:
    kinds = [rope[key] for key in ("rope_type", "type") if key in rope]
    for kind in kinds:
        only("default", "yarn")(f"{name} type", kind)
    if len(set(kinds)) > 1:
        raise ValueError(f"{name} rope_type={kinds[0]!r} and type={kinds[1]!r} must be the same")
    return kinds[0] if kinds else "default"


def _read_scaling(name: str, rope: Mapping[str, Any]) -> QueryScaling:
    """Queries grow with their position as in Llama 4 and Mistral's models of this architecture."""
    values = read_settings(rope, {"llama_4_scaling_beta": Setting(number(least=0.0))} | _TRAINED, within=name)
    return QueryScaling(
        beta=values["llama_4_scaling_beta"], original_max_position=values["original_max_position_embeddings"]
    )


def _same(data: Mapping[str, Any]) -> Setting:
    """Some writers repeat the file's own ``max_position_embeddings`` among the rope keys."""
    positions = data.get("max_position_embeddings")
    return Setting(only(positions), positions)


def _read_block_size(quantization: Any) -> tuple[int, int] | None:
    if quantization is None:
        return None
    read_settings(section("quantization_config", quantization), FP8, within="quantization_config")
    block = quantization.get("weight_block_size")
    if not (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(is_integer(n) and 0 < n <= LARGEST_INT32 for n in block)
    ):
        raise ValueError(f"quantization_config weight_block_size={shown(block)} must be two positive integers")
    return block[0], block[1]
