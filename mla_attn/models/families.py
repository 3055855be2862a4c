"""The config and the model of each ``model_type``."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from mla_attn.models.config import DeepseekConfig
from mla_attn.models.decoder import DecoderForCausalLM
from mla_attn.models.decoder_config import DecoderConfig
from mla_attn.models.deepseek import DeepseekForCausalLM
from mla_attn.models.keys import DECODER_TYPES, KNOWN_TYPE
from mla_attn.models.settings import read_settings

Config = DeepseekConfig | DecoderConfig
Model = DeepseekForCausalLM | DecoderForCausalLM


def read_model_config(data: Mapping[str, Any]) -> Config:
    """Reads the dict of a ``config.json``; raises ValueError as ``DeepseekConfig.from_hf`` does."""
    family = read_settings(data, KNOWN_TYPE)["model_type"]
    return (DecoderConfig if family in DECODER_TYPES else DeepseekConfig).from_hf(data)


def make_model(config: Config, *, dtype: DTypeLike, rngs: nnx.Rngs, draft_layer: bool = True) -> Model:
    """Creates a model with initial weights; arguments and errors are those of ``DeepseekForCausalLM``."""
    if isinstance(config, DecoderConfig):
        return DecoderForCausalLM(config, dtype=dtype, rngs=rngs)
    return DeepseekForCausalLM(config, dtype=dtype, rngs=rngs, draft_layer=draft_layer)
