"""Steps and ops on one device of a mesh, inside ``jax.shard_map``."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mla_attn import steps
from mla_attn.cache import move_rows, write_kv
from mla_attn.ops import gqa_attention, mla_attention, plan_gqa, plan_mla
from mla_attn.ops.checks import result_dtype
from mla_attn.ops.expanded import fresh_rows
from mla_attn.ops.ragged import ragged_attention
from mla_attn.parallel.context import gather_heads, merge_over
from mla_attn.parallel.layout import Layout
from mla_attn.specs import GQASpec
from mla_attn.steps.scaling import scaled

_PAGED = {  # attend to the cache, so that partial results over its shards are merged; with their queries
    **dict.fromkeys((steps.decode, steps.target_verify, steps.draft_extend), ("q_latent", "q_rope")),
    **dict.fromkeys((steps.draft_decode, steps.absorbed_extend, mla_attention), ("q_latent", "q_rope")),
    **dict.fromkeys((steps.gqa_decode, steps.gqa_target_verify, steps.gqa_draft_extend), ("q",)),
    **dict.fromkeys((steps.gqa_draft_decode, steps.gqa_extend, gqa_attention), ("q",)),
}
_PLANS = (plan_mla, plan_gqa)
_OTHERS = (steps.prefill, steps.extend, steps.gqa_prefill, move_rows, *_PLANS)


@functools.lru_cache(maxsize=256)
def in_shard(function: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """Returns a function of ``sharded`` as one device runs it, inside a ``jax.shard_map`` over the layout's axes.

    Arrays, pool and metadata are the device's, ``spec`` is that of all devices. If there are fewer KV heads than
    devices, ``k`` and ``v`` have all of them.

    Raises:
        ValueError: another function.
    """
    if function not in _PAGED and function not in _OTHERS:
        raise ValueError(
            f"function={function!r} must be a step of mla_attn.steps, mla_attention, gqa_attention or move_rows"
        )
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return _run(function, layout, dict(signature.bind(*args, **kwargs).arguments))

    return call


def _run(function, layout: Layout, given: dict[str, Any]):
    contexts = layout.context if jax.lax.axis_size(layout.context) > 1 else ()
    if function is move_rows:
        return move_rows(**given, context_axes=contexts)
    spec, devices = given.pop("spec"), jax.lax.axis_size(layout.heads)
    if function in _PLANS:
        merged = {"sinks": False, "out_dtype": jnp.dtype(jnp.float32)} if contexts else {}
        return function(**{**given, **merged}, spec=spec.shard(heads=devices))
    if isinstance(spec, GQASpec) and "k" in given and spec.num_kv_heads % devices:
        head = jax.lax.axis_index(layout.heads) * spec.num_kv_heads // devices
        given |= {name: jax.lax.dynamic_slice_in_dim(given[name], head, 1, axis=1) for name in ("k", "v")}
    if not contexts:
        return function(**given, spec=spec.shard(heads=devices))
    if function in _PAGED:
        return _merged(function, contexts, given, spec.shard(heads=devices))
    if function is steps.gqa_prefill:
        return _prefill(contexts, given, spec.shard(heads=devices))
    if function is steps.extend:
        given["context_axes"] = contexts
    return function(**given, spec=spec.shard(heads=devices * jax.lax.axis_size(contexts)))


def _merged(function, contexts: tuple[str, ...], given: dict[str, Any], spec):
    """Attention of all devices' heads to this device's keys, merged over the devices."""
    names, sinks = _PAGED[function], given.pop("sinks", None)
    return_lse, out_dtype = given.pop("return_lse", False), given.pop("out_dtype", None)
    if sinks is not None and return_lse:
        raise ValueError("sinks with return_lse=True: merge partial results first, with merge_states(sinks=)")
    out_dtype = result_dtype(given[names[0]].dtype, out_dtype)
    given |= dict(zip(names, gather_heads(*(given[name] for name in names), axes=contexts), strict=True))
    if getattr(scale := given.get("q_scale"), "ndim", 0):
        given["q_scale"] = jax.lax.all_gather(scale, contexts, axis=1, tiled=True)
    out, lse, *pools = function(**given, spec=spec, return_lse=True, out_dtype=jnp.dtype(jnp.float32))
    out, lse = merge_over(out, lse, contexts, sinks=sinks, out_dtype=out_dtype)
    results = (out, *((lse,) if return_lse else ()), *pools)
    return results if len(results) > 1 else out


def _prefill(contexts: tuple[str, ...], given: dict[str, Any], spec: GQASpec):
    """``gqa_prefill`` with this device's query heads, and the KV heads that they read; all KV heads are cached."""
    q, k, v, pool, metadata = (given.pop(name) for name in ("q", "k", "v", "pool", "metadata"))
    pool = write_kv(pool, k, v, metadata.slots, layer=given.pop("layer", 0))
    q = scaled(q, metadata, given.pop("query_scaling", None))
    heads, group = q.shape[1], spec.num_heads // spec.num_kv_heads
    first = jax.lax.axis_index(contexts) * heads
    if heads % group and group % heads:  # a KV head for each query head
        read = (first + jnp.arange(heads, dtype=jnp.int32)) // group
        k, v = (jnp.take(x, read, axis=1) for x in (k, v))
    else:
        k, v = (jax.lax.dynamic_slice_in_dim(x, first // group, max(1, heads // group), axis=1) for x in (k, v))
    rules = {"scale": spec.scale, "window": spec.window, "soft_cap": spec.soft_cap}
    result = ragged_attention(q, k, v, fresh_rows(metadata), **rules, **given)
    return (*result, pool) if isinstance(result, tuple) else (result, pool)
