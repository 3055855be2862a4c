"""Checks at trace time, with the argument, its value and what is allowed in the message."""

import jax
import jax.numpy as jnp
import numpy as np


def check_array(name: str, array) -> None:
    if not isinstance(array, jax.Array | np.ndarray):
        raise ValueError(f"{name} is a {type(array).__name__}, must be an array")


def check_shape(name: str, array, shape: tuple[int, ...], meaning: str) -> None:
    check_array(name, array)
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, must be {shape}: {meaning}")


def check_type(name: str, array, kind) -> None:
    if not jnp.issubdtype(array.dtype, kind):
        allowed = "a floating dtype" if kind is jnp.floating else jnp.dtype(kind).name
        raise ValueError(f"{name} has dtype {array.dtype}, must be {allowed}")


def check_out_dtype(out_dtype) -> None:
    if out_dtype is not None and not jnp.issubdtype(out_dtype, jnp.floating):
        raise ValueError(f"out_dtype={jnp.dtype(out_dtype).name} must be a floating dtype")


def check_pool(pool, spec, metadata) -> None:
    if metadata.page_size not in (None, pool.page_size):
        raise ValueError(f"metadata was made for pages of {metadata.page_size}, must be the pool's {pool.page_size}")
    if (pool.kv_lora_rank, pool.latent_dim) != (spec.kv_lora_rank, spec.latent_dim):
        raise ValueError(
            f"pool holds rows of {pool.kv_lora_rank} + {pool.latent_dim - pool.kv_lora_rank} channels, must be spec's "
            f"{spec.kv_lora_rank} + {spec.qk_rope_head_dim}"
        )
