"""sglang-jax with this library's ops: ``install()``, or its server by ``python -m mla_attn.integrations.sglang_jax``.

The engine keeps its scheduler, caches, meshes and backends, and is told ``--attention-backend fa`` as on TPUs. Replaced
are the functions that its backends call, which are kernels for TPUs, and what keeps backends from being made elsewhere:

===============================================  ===================================================================
in ``sgl_jax.srt``                               becomes
===============================================  ===================================================================
``mla_ragged_paged_attention``                   ``ragged_paged_mla``
``ragged_paged_attention`` (version 3)           ``ragged_paged_gqa``
``gmm`` of ``layers.moe``                        ``grouped_matmul``; quantised experts keep the engine's own
``get_forward_metadata`` of both backends        the same, with metadata and work list for all layers, once a step
``get_max_running_reqests``                      a large number: the engine's is what a TPU's scalar memory holds
``MLAAttentionBackend.__init__``                 the same, without asking for a TPU, and with pages of one token
``ModelRunner._get_attention_backend``           the same, ``fa`` on CPUs too
===============================================  ===================================================================

``install()`` is needed in every process: the engine starts its scheduler by ``spawn``, which imports the main module
again, so it belongs at the top level of a main module.
"""

import copy
import functools
import importlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from mla_attn.integrations.ragged_paged import ragged_paged_gqa, ragged_paged_mla
from mla_attn.integrations.sglang_metadata import step_metadata, tree_mask
from mla_attn.metadata import AttentionMetadata
from mla_attn.ops.grouped_matmul import grouped_matmul

TESTED = ("cddbf6f of 2026-08-21",)
MOST_REQUESTS = 4096
_runners: dict[int, tuple[Any, Any]] = {}  # references to a backend and its runner, by the id of the backend


def install() -> list[str]:
    """Replaces the engine's functions, unless they are replaced already; returns the names of those that it replaced.

    Raises:
        ImportError: sglang-jax is not installed.
        RuntimeError: a function, or one of the arguments used here, is not where tested versions have it.
    """
    found = {name: _find(name) for name in _REPLACEMENTS}  # all of them, before anything is replaced
    replaced = []
    for name, (owner, attribute, original) in found.items():
        if not getattr(original, "mla_attn", False):
            replacement = _REPLACEMENTS[name][0](original)
            replacement.mla_attn = True
            raw = inspect.getattr_static(owner, attribute)
            setattr(owner, attribute, staticmethod(replacement) if isinstance(raw, staticmethod) else replacement)
            replaced.append(name)
    return replaced


def _find(name: str) -> tuple[Any, str, Any]:
    """The owner of a function, its attribute, and the function; checks the function's arguments."""
    module, _, path = name.partition(":")
    *owners, attribute = path.split(".")
    try:
        owner = importlib.import_module(f"sgl_jax.srt.{module}")
        for each in owners:
            owner = getattr(owner, each)
        function = getattr(owner, attribute)
        has = inspect.signature(function).parameters
    except (AttributeError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("sgl_jax.srt."):
            raise  # the engine, or something that it needs, is not installed
        raise _moved(f"sgl_jax.srt.{name}") from error
    missing = [argument for argument in _REPLACEMENTS[name][1] if argument not in has]
    if missing and not getattr(function, "mla_attn", False):
        raise _moved(f"argument {missing[0]!r} of sgl_jax.srt.{name}")
    return owner, attribute, function


def _moved(what: str) -> RuntimeError:
    version = getattr(importlib.import_module("sgl_jax.version"), "__version__", "unknown")
    return RuntimeError(f"sglang-jax {version} has no {what}; tested with the commits {', '.join(TESTED)}")


def _mla(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def mla(
        ql_nope, q_pe, new_kv_c, new_k_pe, cache_kv, kv_lens, page_indices, cu_q_lens, cu_kv_lens, distribution, *,
        sm_scale, sliding_window=None, soft_cap=None, q_scale=None, k_scale=None, v_scale=None, **hints,
    ):  # fmt: skip
        rows, lists = (ql_nope, q_pe, new_kv_c, new_k_pe), (kv_lens, page_indices, cu_q_lens, distribution)
        rules: dict[str, Any] = {"scale": _static(sm_scale), "window": sliding_window, "soft_cap": soft_cap}
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return ragged_paged_mla(*rows, cache_kv, *lists, cu_kv_lens=cu_kv_lens, **rules, **scales)

    return mla


def _gqa(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gqa(
        queries, keys, values, kv_cache_fused, kv_lens, page_indices, cu_q_lens, cu_kv_lens, distribution, custom_mask,
        attention_sink=None, *, causal=1, sm_scale=1.0, sliding_window=None, soft_cap=None, q_scale=None, k_scale=None,
        v_scale=None, xai_temperature_len=None, mask_aligned_to_cu_kv=False, **hints,
    ):  # fmt: skip
        if xai_temperature_len is not None:
            raise NotImplementedError(f"xai_temperature_len={xai_temperature_len}: must be None")
        if not causal and isinstance(page_indices, AttentionMetadata):
            raise NotImplementedError(f"causal={causal} in a step without drafts: must be 1")
        if custom_mask is not None and sliding_window is not None:
            raise NotImplementedError(f"a tree of drafts with a window of {sliding_window}: only chains")
        rows, lists = (queries, keys, values), (kv_lens, page_indices, cu_q_lens, distribution)
        rules: dict[str, Any] = {"window": sliding_window, "soft_cap": soft_cap, "sinks": attention_sink}
        rules |= {"scale": _static(sm_scale, queries.shape[2] ** -0.5), "cu_kv_lens": cu_kv_lens}
        if custom_mask is None:
            rules["causal"] = bool(causal)
        else:  # every request has as many drafts
            most = queries.shape[0] // kv_lens.shape[0]
            widths = cu_kv_lens[1:] - cu_kv_lens[:-1] if mask_aligned_to_cu_kv else kv_lens
            mask = tree_mask(custom_mask, kv_lens, cu_q_lens, widths, num_tokens=most)
            rules |= {"tree_mask": mask, "max_q_len": most}
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return ragged_paged_gqa(*rows, kv_cache_fused, *lists, **rules, **scales)

    return gqa


def _static(scale: Any, default: float | None = None) -> float:
    """A softmax scale as a number; layers without one get an array from the engine, which stands for ``default``."""
    if isinstance(scale, jax.core.Tracer):
        if default is None:
            raise NotImplementedError("a layer of MLA without `scaling`: must have one")
        return default
    return float(scale)


def _experts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gmm(lhs, rhs, group_sizes, preferred_element_type=jnp.float32, *args, **kwargs):
        given = (
            inspect.signature(original).bind(lhs, rhs, group_sizes, preferred_element_type, *args, **kwargs).arguments
        )
        if any(given.get(name) is not None for name in ("rhs_scale", "rhs_bias", "activation_quantized_dtype")):
            return original(lhs, rhs, group_sizes, preferred_element_type, *args, **kwargs)
        first = 0 if given.get("group_offset") is None else given["group_offset"].reshape(())
        rows = lhs.astype(rhs.dtype)
        out = grouped_matmul(rows, rhs, group_sizes.astype(jnp.int32), first_group=first).astype(preferred_element_type)
        added = given.get("existing_out")
        return out if added is None else out + added.astype(out.dtype)

    return gmm


def _metadata(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_forward_metadata(self, batch):
        metadata, (backend, runner) = original(self, batch), _runners.get(id(self), (None, None))
        speculation = getattr(batch, "spec_algorithm", None)
        if backend is None or backend() is not self or not (speculation is None or speculation.is_none()):
            return metadata  # programs for drafts change the lists
        for name in ("page_indices", "swa_page_indices"):
            if getattr(metadata, name, None) is not None:
                setattr(metadata, name, step_metadata(self, runner(), batch, metadata, getattr(metadata, name)))
        return metadata

    return get_forward_metadata


def _mla_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        given = inspect.signature(original).bind(self, *args, **kwargs)
        page_size = given.arguments.get("page_size", 1)
        given.arguments |= {
            "page_size": max(page_size, 2),
            "vmem_limit_bytes": given.arguments.get("vmem_limit_bytes") or 1,
        }
        original(*given.args, **given.kwargs)
        self.page_size = page_size

    return __init__


def _backend(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_attention_backend(self):
        given = self.server_args
        if given.device == "cpu" and given.attention_backend in ("fa", "fa_mha"):
            self.server_args = copy.copy(given)
            self.server_args.device = "cuda"  # on CPUs the engine would take another backend
        try:
            backend = original(self)
        finally:
            self.server_args = given
        full = getattr(backend, "full_attn_backend", backend)
        _runners[id(full)] = weakref.ref(full), weakref.ref(self)
        return backend

    return _get_attention_backend


def _most_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(original)(lambda max_context_len, page_size: MOST_REQUESTS)


_LISTS = (
    "kv_lens",
    "page_indices",
    "cu_q_lens",
    "cu_kv_lens",
    "distribution",
    "sm_scale",
    "sliding_window",
    "soft_cap",
)
_MLA, _FA = "layers.attention.mla_backend:", "layers.attention.flashattention_backend:"
_REPLACEMENTS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {  # and the arguments that are used
    f"{_MLA}mla_ragged_paged_attention": (_mla, ("ql_nope", "q_pe", "new_kv_c", "new_k_pe", "cache_kv", *_LISTS)),
    f"{_MLA}MLAAttentionBackend.__init__": (_mla_backend, ("page_size", "vmem_limit_bytes")),
    f"{_MLA}MLAAttentionBackend.get_forward_metadata": (_metadata, ("batch",)),
    f"{_MLA}MLAAttentionBackend.get_max_running_reqests": (_most_requests, ("max_context_len", "page_size")),
    f"{_FA}ragged_paged_attention_v3": (_gqa, ("queries", "keys", "values", "kv_cache_fused", *_LISTS, "custom_mask")),
    f"{_FA}FlashAttention.get_forward_metadata": (_metadata, ("batch",)),
    f"{_FA}FlashAttention.get_max_running_reqests": (_most_requests, ("max_context_len", "page_size")),
    "layers.moe:gmm": (_experts, ("lhs", "rhs", "group_sizes", "preferred_element_type", "rhs_scale", "group_offset")),
    "model_executor.model_runner:ModelRunner._get_attention_backend": (_backend, ()),
}


def main() -> None:
    """Starts the engine's server with the arguments of the command line."""
    importlib.import_module("sgl_jax.launch_server").main()


if __name__ in ("__main__", "__mp_main__"):  # the latter in the processes that the engine starts
    install()
if __name__ == "__main__":
    main()
