"""What the model families share: the embedding, the final norm and the output head, and what the config says."""

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mla_attn.models.base import CacheGroup, Pools, create_pools
from mla_attn.models.cache_scales import CacheScales
from mla_attn.models.config import DeepseekConfig
from mla_attn.models.decoder_config import DecoderConfig
from mla_attn.models.layers import Embedding, Linear, RMSNorm
from mla_attn.parallel import Layout, in_shard


class CausalModel[Config: DeepseekConfig | DecoderConfig, Layer: nnx.Module](nnx.Module):
    """A decoder with its output head, to subclass: a family adds how it runs its layers, which makes a ``CausalLM``.

    Args:
        config: the checkpoint's config.
        layer: makes a layer from the config and its index.
        norm: the final norm.
        dtype: bfloat16, float16 or float32, of parameters and activations.
        rngs: stream ``params`` initialises the weights.
    """

    cache_scales: CacheScales | None = None  # of a float8 cache, from the checkpoint
    layout: Layout | None = None  # of a model that is sharded, which runs inside ``jax.shard_map``

    def __init__(self, config: Config, layer: Callable[..., Layer], norm: RMSNorm, *, dtype: DTypeLike, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **options)
        self.layers = nnx.List([layer(config, index, **options) for index in range(config.num_hidden_layers)])
        self.norm = norm
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, **options)

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

    def _local(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A step or plan of one device, as this model's devices run it."""
        return function if self.layout is None else in_shard(function, self.layout)

    @property
    @abc.abstractmethod
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups, as a ``CausalLM`` has them."""

    def create_pools(self, *, num_pages: int | Mapping[str, int], page_size: int) -> Pools:
        """Creates an all-zero pool for each cache group; raises ValueError as ``create`` of the pools does."""
        return create_pools(self.cache_groups, num_pages=num_pages, page_size=page_size)

    def logits(self, hidden: Float[Array, "*rows dim"]) -> Float[Array, "*rows vocab"]:
        """Float32 logits of hidden states that ``__call__`` returned."""
        return self.embed_tokens.attend(hidden) if self.config.tie_word_embeddings else self.lm_head.float32(hidden)


def once_for_equal_layers(run: Callable[..., tuple[Array, Any]]) -> Callable[..., tuple[Array, Any]]:
    """Makes ``run(block, x, pool, number)`` trace and lower once for all blocks of equal structure, not once for each.

    XLA inlines the calls first of all, so that it sees the same program. It does not see the number of the layer, for
    it would compile the writes to the pool anew for each.

    The result is for one trace alone, because ``run`` may close over its arrays. Outside a trace ``run`` itself is
    called, operation by operation: a new function would be compiled at every call.

    Args:
        run: function of a block, hidden states, the pool, and the number of the layer in it.
    """

    @functools.partial(jax.jit, static_argnums=0)
    def layer(graphdef, state, x, pool, number):
        return run(nnx.merge(graphdef, state), x, pool, number)

    def call(block: nnx.Module, x: Array, pool: Any, number: int) -> tuple[Array, Any]:
        if not isinstance(x, jax.core.Tracer):
            return run(block, x, pool, number)
        graphdef, state = nnx.split(block)
        return layer(graphdef, state, x, pool, jax.lax.optimization_barrier(np.int32(number)))

    return call
