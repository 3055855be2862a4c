"""The config of grouped-query models: the part of ``config.json`` that affects the computation, checked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mla_attn.models import keys
from mla_attn.models.config import read_block_size
from mla_attn.models.rope import Llama3, RopeScaling, Yarn
from mla_attn.models.rope_settings import read_rope
from mla_attn.models.settings import Setting, read_settings
from mla_attn.specs import GQASpec

_OWN = {
    "llama": keys.LLAMA | keys.UNTIED,
    "mistral": keys.MISTRAL | keys.UNTIED,
    "qwen2": keys.QWEN2 | keys.UNTIED,
    "qwen3": keys.QWEN3 | keys.UNTIED,
    "gemma2": keys.GEMMA2 | keys.TIED,
    "gpt_oss": keys.GPT_OSS | keys.UNTIED,
}
_ALTERNATING = ("gemma2", "gpt_oss")  # layers 0, 2, ... have the window


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shapes and constants of a Llama, Mistral, Qwen, Gemma 2 or gpt-oss model; hashable, hence static under jit.

    Attributes are named as in ``config.json`` except:
        rope_scaling: YaRN's or Llama 3's scaling; None for plain rope.
        softmax_scale: scale of the scores.
        sliding_window, layer_types, max_window_layers: determine ``window`` of a layer; without a window None, None, 0.
        soft_cap, logits_soft_cap: caps of scores and logits; None for no cap.
        qkv_bias, output_bias: whether the projections of attention have biases.
        qk_norms: whether each head's queries and keys are normed.
        sinks: whether each head has a sink.
        gemma: norms scale by 1 + weight and follow attention and MLP too, embeddings are scaled, the MLP is GeGLU.
        num_experts: experts per layer, 0 for MLPs.
        eos_token_ids: always a tuple; ``load_checkpoint`` adds those of ``generation_config.json``.
        weight_block_size: rows and columns that share one scale in FP8 weights; None if not FP8.
        mxfp4: whether experts are stored in MXFP4.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    softmax_scale: float
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    max_window_layers: int = 0
    soft_cap: float | None = None
    logits_soft_cap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norms: bool = False
    sinks: bool = False
    gemma: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    swiglu_limit: float = 7.0
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    weight_block_size: tuple[int, int] | None = None
    mxfp4: bool = False

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> "DecoderConfig":
        """Reads the dict of a ``config.json``.

        Raises:
            ValueError: a required key is missing, or a value is invalid or not supported. A setting that would change
                results is never ignored.
        """
        family = read_settings(data, keys.DECODER_FAMILY)["model_type"]
        table = keys.DECODER | keys.ROPE_THETA | _OWN[family]
        read = read_settings(data, {name: each for name, each in table.items() if name != "rope_theta"})
        heads, head_dim = read["num_attention_heads"], read["head_dim"] or _head_dim(read)
        theta, scaling = _read_rope(data, {"rope_theta": table["rope_theta"]})
        bias = read.get("attention_bias", False)
        fields = {field.name for field in dataclasses.fields(cls)}
        derived = {
            "model_type": family,
            "num_key_value_heads": read["num_key_value_heads"] or heads,
            "head_dim": head_dim,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "softmax_scale": read.get("query_pre_attn_scalar", head_dim) ** -0.5,
            "soft_cap": read.get("attn_logit_softcapping"),
            "logits_soft_cap": read.get("final_logit_softcapping"),
            "qkv_bias": bias or family == "qwen2",
            "output_bias": bias,
            "qk_norms": family == "qwen3",
            "sinks": family == "gpt_oss",
            "gemma": family == "gemma2",
            "num_experts": read.get("num_local_experts", 0),
            "eos_token_ids": read["eos_token_id"],
        }
        derived |= _read_windows(read) | _read_quantization(read["quantization_config"], family)
        return cls(**{name: value for name, value in read.items() if name in fields} | derived)

    def __post_init__(self):
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rope turns pairs")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.layer_types is not None:
            if len(self.layer_types) != self.num_hidden_layers:
                raise ValueError(
                    f"layer_types has {len(self.layer_types)} layers, must have "
                    f"num_hidden_layers={self.num_hidden_layers}"
                )
            if self.sliding_window is None and "sliding_attention" in self.layer_types:
                raise ValueError("layer_types has layers of type 'sliding_attention', but the model has no window")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be 1 to num_local_experts={self.num_experts}"
            )
        if self.mxfp4 and (self.hidden_size % 32 or self.intermediate_size % 32):
            raise ValueError(
                f"hidden_size={self.hidden_size} and intermediate_size={self.intermediate_size} must be multiples of "
                "32, the numbers of a block of MXFP4"
            )
        self.spec(None)  # raises if scale or cap overflow float32

    def window(self, layer: int) -> int | None:
        """Number of visible keys per row of a layer, its own included; None for all."""
        if self.layer_types is not None:
            slides = self.layer_types[layer] == "sliding_attention"
        elif self.model_type in _ALTERNATING:
            slides = layer % 2 == 0
        else:
            slides = layer >= self.max_window_layers
        return self.sliding_window if slides else None

    def spec(self, window: int | None) -> GQASpec:
        """Static facts of the attention of layers with this window."""
        return GQASpec(
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            scale=self.softmax_scale,
            window=window,
            soft_cap=self.soft_cap,
        )


def _head_dim(read: Mapping[str, Any]) -> int:
    heads, hidden = read["num_attention_heads"], read["hidden_size"]
    if hidden % heads:
        raise ValueError(f"head_dim is missing, and num_attention_heads={heads} does not divide hidden_size={hidden}")
    return hidden // heads


def _read_windows(read: Mapping[str, Any]) -> dict[str, Any]:
    window, first = read["sliding_window"], 0
    if "use_sliding_window" in read:
        if read["use_sliding_window"]:
            needed = ("sliding_window",) if read["layer_types"] else ("sliding_window", "max_window_layers")
            if missing := [name for name in needed if read[name] is None]:
                raise ValueError(f"use_sliding_window=True, but {missing[0]} is missing")
            first = read["max_window_layers"] or 0
        else:
            window = None
    return {"sliding_window": window, "max_window_layers": first}


def _read_rope(data: Mapping[str, Any], theta: Mapping[str, Setting]) -> tuple[float, RopeScaling | None]:
    kinds = {"default": {}, "llama3": keys.LLAMA3, "yarn": keys.DECODER_YARN}
    rope = read_rope(data, theta=theta, common=keys.DECODER_ROPE, kinds=kinds)
    values = read_settings(rope.keys, kinds[rope.kind], within=rope.name)
    if rope.kind == "llama3":
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        if low >= high:
            raise ValueError(f"{rope.name} low_freq_factor={low} must be below high_freq_factor={high}")
        return rope.theta, Llama3(**values)
    return rope.theta, Yarn(**values) if rope.kind == "yarn" else None


def _read_quantization(quantization: dict[str, Any] | None, family: str) -> dict[str, Any]:
    if quantization is None:
        return {}
    method = read_settings(quantization, keys.QUANTIZED, within="quantization_config")["quant_method"]
    if method == "fp8":
        return {"weight_block_size": read_block_size(quantization)}
    if method == "mxfp4" and family != "gpt_oss":
        raise ValueError(f"quantization_config quant_method='mxfp4' with model_type={family!r}: for 'gpt_oss' alone")
    return {"mxfp4": method == "mxfp4"}
