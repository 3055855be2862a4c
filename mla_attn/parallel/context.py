"""Decode context parallelism inside ``jax.shard_map``: each device attends with the queries of all to its own keys, and
the partial results are exchanged and merged (vLLM calls it DCP; Helix parallelism, arXiv:2507.07120)."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mla_attn.ops import merge_states


def gather_heads(*arrays: Array, axes: tuple[str, ...]) -> list[Array]:
    """Gathers arrays [T, H, ...] of one dtype over the devices that share the heads, in one collective."""
    widths = [array.shape[2] for array in arrays]
    gathered = jax.lax.all_gather(jnp.concatenate(arrays, axis=2), axes, axis=1, tiled=True)
    cuts = [sum(widths[:i]) for i in range(1, len(widths))]
    return jnp.split(gathered, cuts, axis=2)


def merge_over(
    out: Float[Array, "T H V"],
    lse: Float[Array, "T H"],
    axes: tuple[str, ...],
    *,
    sinks: Float[Array, "h"] | None = None,
    out_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "T h V"], Float[Array, "T h"]]:
    """Merges the partial results of the devices along ``axes``, and gives each the results of its part of the heads.

    Every device passes the results of all heads over its own keys. Heads are exchanged against partials, in two
    all-to-alls, and merged in the order of the devices by ``merge_states``, whose rules for partials without keys
    apply.

    Args:
        out: partial outputs; H is a multiple of the number of devices.
        lse: their log-sum-exps.
        axes: axes of the enclosing ``jax.shard_map``.
        sinks: raw sink logits of this device's heads.
        out_dtype: dtype of the merged output; None for that of ``out``.
    """
    exchange = functools.partial(jax.lax.all_to_all, axis_name=axes, split_axis=1, concat_axis=0, tiled=True)
    parts = [x.reshape(-1, *shape) for x, shape in ((exchange(x), _own(x, axes)) for x in (out, lse))]
    return merge_states(*parts, sinks=sinks, out_dtype=out_dtype)


def _own(x: Array, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Shape of one device's heads of [T, H, ...]."""
    return (x.shape[0], x.shape[1] // jax.lax.axis_size(axes), *x.shape[2:])
