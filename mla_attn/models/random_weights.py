"""Models with random weights and a real model's sizes, for benchmarks."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from mla_attn.models.base import CausalLM
from mla_attn.models.families import make_model, read_model_config


def random_model(config: Mapping[str, Any], *, dtype: DTypeLike, seed: int = 0) -> CausalLM:
    """A model of random weights.

    Args:
        config: what a checkpoint's ``config.json`` says.
        dtype: bfloat16, float16 or float32, of parameters and activations.
        seed: of the weights.

    Raises:
        ValueError: a config that asks for what is not supported, or a wrong ``dtype``.
    """
    return make_model(read_model_config(config), dtype=dtype, rngs=nnx.Rngs(seed))
