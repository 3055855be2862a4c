"""Registers this library's ops with ejkernel (and so with EasyDeL, whose engine calls it): ``register()``, once.

===========================================  =======================================================================
algorithm                                    is
===========================================  =======================================================================
``multi_latent_ragged_page_attention``,      ``ragged_paged_mla``
``multi_latent_ragged_page_attention_v2``
``ragged_page_attention_v3``                 ``ragged_paged_gqa``
``unified_attention``                        ``gqa_attention``; it reads the cache and writes nothing
``grouped_matmul``, ``grouped_matmulv2``     ``grouped_matmul``
===========================================  =======================================================================

Each is registered for the platforms ``xla``, which ejkernel chooses on CPUs, and ``pallas`` on GPUs, which it prefers
for MLA. Whichever it asks for, this library chooses the implementation: its kernels where they support the call, else
XLA. Arguments are ejkernel's own: a function is registered with the signature of ejkernel's XLA implementation, sizes
of blocks and other hints for its kernels are ignored, and an argument that is not known here must have its default.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from mla_attn.cache import KVPool
from mla_attn.integrations.ragged_metadata import ragged_metadata
from mla_attn.integrations.ragged_paged import ragged_paged_gqa, ragged_paged_mla
from mla_attn.ops import gqa_attention
from mla_attn.ops.grouped_matmul import grouped_matmul
from mla_attn.specs import GQASpec

PRIORITY = 100  # ejkernel's own have 0
PLATFORMS = (("xla", "any"), ("pallas", "gpu"))
TESTED = ("0.0.80.3",)
_HINTS = {
    "mask_value", "chunk_prefill_size", "num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes",
    "debug_mode", "seq_threshold_3d", "num_par_softmax_segments", "block_dim", "num_warps", "num_stages", "tiling",
    "interpret", "precision",
}  # fmt: skip


def register(priority: int = PRIORITY) -> list[str]:
    """Registers all algorithms, unless they are registered already; returns the names of those that it registered.

    Args:
        priority: of ejkernel's implementations of an algorithm for a platform, the one of highest priority is chosen.

    Raises:
        ImportError: ejkernel is not installed.
        RuntimeError: ejkernel does not have an algorithm, or an argument of it, any more.
    """
    ejkernel = importlib.import_module("ejkernel")
    kernel_registry = ejkernel.kernel_registry
    registered = []
    for algorithm, function in _ALGORITHMS.items():
        known = kernel_registry.list_implementations(algorithm)
        if any(getattr(spec.implementation, "mla_attn", False) for spec in known):
            continue
        theirs = next((spec.implementation for spec in known if (spec.platform, spec.backend) == PLATFORMS[0]), None)
        missing = [algorithm] if theirs is None else _missing(function, theirs)
        if missing:
            raise RuntimeError(
                f"ejkernel {ejkernel.__version__} has no {missing[0]}, which version {', '.join(TESTED)} has: "
                "this version of ejkernel is not supported"
            )
        adapted = _adapted(function, theirs)
        for platform, backend in PLATFORMS:
            kernel_registry.register(algorithm, platform, backend, priority)(adapted)
        registered.append(algorithm)
    return registered


def _missing(function: Callable[..., Any], theirs: Any) -> list[str]:
    """Arguments of a function here that an implementation of ejkernel does not have."""
    had = inspect.signature(theirs).parameters
    return [
        f"argument {name!r} of {theirs.__name__}" for name in inspect.signature(function).parameters if name not in had
    ]


def _adapted(function: Callable[..., Any], theirs: Any) -> Callable[..., Any]:
    """The function with the signature of an implementation of ejkernel."""
    signature, known = inspect.signature(theirs), inspect.signature(function).parameters

    @functools.wraps(function)
    def adapted(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if name not in known and name not in _HINTS and value is not signature.parameters[name].default:
                raise NotImplementedError(f"{name}={value!r} is not supported")
        bound.apply_defaults()
        return function(**{name: value for name, value in bound.arguments.items() if name in known})

    adapted.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    adapted.mla_attn = True  # pyright: ignore[reportAttributeAccessIssue]
    return adapted


def _mla(
    queries_nope, queries_pe, keys_values, keys_pe, kv_cache, kv_lens, block_tables, query_start_loc, distribution,
    softmax_scale, sliding_window, logits_soft_cap, q_scale, k_scale, v_scale,
):  # fmt: skip
    """MLA; without a scale ``(R + E) ** -0.5``, as in ejkernel, which is wrong for DeepSeek: pass its scale."""
    if softmax_scale is None:
        softmax_scale = (queries_nope.shape[-1] + queries_pe.shape[-1]) ** -0.5
    rows, lists = (queries_nope, queries_pe, keys_values, keys_pe), (kv_lens, block_tables, query_start_loc)
    rules = {"scale": softmax_scale, "window": sliding_window, "soft_cap": logits_soft_cap}
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    return ragged_paged_mla(*rows, kv_cache, *lists, distribution, **rules, **scales)


def _gqa(
    queries, keys, values, kv_cache, kv_lens, block_tables, query_start_loc, distribution, softmax_aux, softmax_scale,
    sliding_window, logits_soft_cap, q_scale, k_scale, v_scale,
):  # fmt: skip
    rows, lists = (queries, keys, values), (kv_lens, block_tables, query_start_loc)
    rules = {"scale": softmax_scale, "window": sliding_window, "soft_cap": logits_soft_cap, "sinks": softmax_aux}
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    return ragged_paged_gqa(*rows, kv_cache, *lists, distribution, **rules, **scales)


def _unified(
    queries, key_cache, value_cache, kv_lens, block_tables, query_start_loc, softmax_aux, softmax_scale, causal,
    sliding_window, logits_soft_cap,
):  # fmt: skip
    rows, heads, dim = queries.shape
    pool = KVPool.of(key_cache, value_cache, layout="nhd")
    spec = GQASpec(
        num_heads=heads,
        num_kv_heads=pool.num_kv_heads,
        head_dim=dim,
        scale=dim**-0.5 if softmax_scale is None else softmax_scale,
        window=sliding_window,
        soft_cap=logits_soft_cap,
    )
    sizes = {"num_rows": rows, "page_size": pool.page_size, "max_q_len": None if causal else max(rows, 1)}
    metadata = ragged_metadata(kv_lens, block_tables.reshape(-1), query_start_loc, **sizes)
    return gqa_attention(queries, pool, metadata, spec, causal=causal, sinks=softmax_aux)


def _grouped(lhs, rhs, group_sizes, preferred_element_type, group_offset, existing_out, transpose_rhs):
    weights = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    first = 0 if group_offset is None else jnp.asarray(group_offset, jnp.int32).reshape(())
    out = grouped_matmul(lhs, weights, group_sizes.astype(jnp.int32), first_group=first).astype(preferred_element_type)
    return out if existing_out is None else out + existing_out.astype(out.dtype)


_ALGORITHMS: dict[str, Callable[..., Any]] = {
    "multi_latent_ragged_page_attention": _mla,
    "multi_latent_ragged_page_attention_v2": _mla,
    "ragged_page_attention_v3": _gqa,
    "unified_attention": _unified,
    "grouped_matmul": _grouped,
    "grouped_matmulv2": _grouped,
}
