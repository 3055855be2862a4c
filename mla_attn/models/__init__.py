"""Language models built on the ops of this library."""

from mla_attn.models.base import CacheGroup, CausalLM
from mla_attn.models.calibration import measure_scales
from mla_attn.models.config import DeepseekConfig
from mla_attn.models.decoder import DecoderForCausalLM
from mla_attn.models.decoder_config import DecoderConfig
from mla_attn.models.deepseek import DeepseekForCausalLM
from mla_attn.models.loading import Checkpoint, load_checkpoint, open_checkpoint
from mla_attn.models.random_weights import random_model
from mla_attn.models.safetensors import CheckpointError
from mla_attn.models.sharding import shard_model
from mla_attn.models.sizes import check_model_fits

__all__ = [
    "CacheGroup",
    "CausalLM",
    "Checkpoint",
    "CheckpointError",
    "DecoderConfig",
    "DecoderForCausalLM",
    "DeepseekConfig",
    "DeepseekForCausalLM",
    "check_model_fits",
    "load_checkpoint",
    "measure_scales",
    "open_checkpoint",
    "random_model",
    "shard_model",
]
