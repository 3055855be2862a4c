"""Trace-time checks that the paged ops share."""

import dataclasses
import numbers

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mla_attn.cache.scales import check_scale
from mla_attn.checks import (
    INT32_MAX,
    check_array,
    check_integer,
    check_number,
    check_out_dtype,
    check_shape,
    check_type,
)
from mla_attn.metadata.structure import check_requests

_ONE_SCALE: dict[str, tuple[int, ...]] = {"[]": ()}


def check_pool(pool, spec, metadata, kind: type) -> None:
    """Raises ValueError unless the pool is of this kind, fits the spec, and has the metadata's page size."""
    if not isinstance(pool, kind):
        raise ValueError(f"pool is a {type(pool).__name__}, must be a {kind.__name__}")
    pool.check()
    if metadata.page_size not in (None, pool.page_size):
        raise ValueError(
            f"metadata was built with page_size={metadata.page_size}, but the pool has page_size={pool.page_size}"
        )
    pool.check_spec(spec)


def check_paged_metadata(metadata):
    """Checks metadata, which may be made by hand; returns it with its static fields as Python integers."""
    if metadata.ranks != 1:
        raise ValueError(
            f"metadata has the arrays of {metadata.ranks} devices, of parallel.plan: call through parallel.sharded"
        )
    check_requests(metadata)
    return static_integers(metadata, "max_q_len", "kv_stride", "page_size")


def static_integers(metadata, *names: str):
    """The metadata with these static fields as Python integers, because sums of NumPy integers wrap; None is kept."""
    given = {name: getattr(metadata, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None or name != "page_size"}
    checked = {name: check_integer(f"metadata.{name}", value, 1, INT32_MAX) for name, value in given.items()}
    changed = {name: value for name, value in checked.items() if value is not given[name]}
    return dataclasses.replace(metadata, **changed) if changed else metadata


def check_sinks(sinks, num_heads: int, return_lse: bool) -> None:
    """Raises ValueError unless ``sinks`` is None, or floating [H] without ``return_lse``: the log-sum-exp excludes
    sinks, and partial results with sinks would count them once per partial."""
    if sinks is None:
        return
    check_shape("sinks", sinks, (num_heads,), "[H], query heads")
    check_type("sinks", sinks, jnp.floating)
    if return_lse:
        raise ValueError("sinks with return_lse=True: merge partial results first, with merge_states(sinks=)")


def check_operand_scale(name: str, scale, dtype: DTypeLike, shapes: dict[str, tuple[int, ...]] = _ONE_SCALE):
    """Checks the scale of an operand: None, or float32 of one of these shapes if ``dtype`` is float8; returns it."""
    if scale is None:
        return None
    if dtype != jnp.float8_e4m3fn:
        raise ValueError(
            f"{name}= with an operand of {jnp.dtype(dtype).name}: must be None, float8_e4m3fn alone has one"
        )
    if isinstance(scale, numbers.Real):
        return jnp.asarray(check_number(name, scale, above=0), jnp.float32)
    check_scale(name, scale, shapes)
    return jnp.asarray(scale)


def check_q_scale(q_scale, q):
    """Checks the scale of queries [T, H, ...]: None, or float32 [] or [T, H] if they are float8; returns it."""
    return check_operand_scale("q_scale", q_scale, q.dtype, {"[]": (), "[T, H]": tuple(q.shape[:2])})


def result_dtype(q_dtype: DTypeLike, out_dtype: DTypeLike | None) -> np.dtype:
    """The dtype of a result: ``out_dtype`` if given, else that of the queries, or bfloat16 if they are float8."""
    check_out_dtype(out_dtype)
    if out_dtype is None:
        out_dtype = jnp.bfloat16 if q_dtype == jnp.float8_e4m3fn else q_dtype
    return np.dtype(out_dtype)


def check_tree_mask(tree_mask, metadata, window: int | None) -> None:
    """Raises ValueError unless ``tree_mask`` is None or bool [B, S, M] with the metadata's B and S, M at least S, and
    M at most the window."""
    if tree_mask is None:
        return
    check_array("tree_mask", tree_mask)
    if tree_mask.ndim != 3:
        raise ValueError(f"tree_mask has shape {tree_mask.shape}, must be [B, S, M]")
    batch, rows = metadata.q_lens.shape[0], metadata.max_q_len
    if tree_mask.dtype != jnp.bool_ or tree_mask.shape[:2] != (batch, rows) or not tree_mask.shape[2] >= rows:
        raise ValueError(
            f"tree_mask is {tree_mask.dtype}{list(tree_mask.shape)}, must be bool [B, S, M] = "
            f"[{batch}, {rows}, at least {rows}]"
        )
    if window is not None and window < tree_mask.shape[2]:
        raise ValueError(f"window={window} with tree_mask {list(tree_mask.shape)}: must be at least M")
