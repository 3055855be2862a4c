"""Models over the ops of this library."""

from mla_attn.models.base import CacheGroup, CausalLM
from mla_attn.models.config import DeepseekConfig
from mla_attn.models.deepseek import DeepseekForCausalLM
from mla_attn.models.loading import load_checkpoint
from mla_attn.models.random_weights import random_model
from mla_attn.models.safetensors import CheckpointError

__all__ = [
    "CacheGroup",
    "CausalLM",
    "CheckpointError",
    "DeepseekConfig",
    "DeepseekForCausalLM",
    "load_checkpoint",
    "random_model",
]
