"""Code that the paged ops share: the facts of a call, plans, and ``supports`` of the implementations in plain JAX."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from mla_attn.cache.formats import RowFormat
from mla_attn.checks import check_dtype, check_flag, check_integer, check_out_dtype
from mla_attn.dispatch import Device, Implementation
from mla_attn.metadata import AttentionMetadata
from mla_attn.ops.checks import check_paged_metadata


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCall:
    """Static facts of a call over a paged cache, from which (with the device) the implementation is chosen."""

    spec: Any
    page_size: int
    format: RowFormat
    q_dtype: np.dtype
    max_q_len: int
    causal: bool
    tree: bool
    sinks: bool
    batch_invariant: bool
    skip: bool


def facts_of(
    pool: Any,
    spec: Any,
    *,
    max_q_len: int,
    causal: bool,
    tree: bool,
    sinks: bool,
    batch_invariant: bool,
    skip: bool,
    q_dtype: DTypeLike,
) -> dict[str, Any]:
    """The fields of a ``PagedCall`` over ``pool``, which may be abstract (from ``jax.eval_shape``).

    Raises:
        ValueError: a value or combination of values is invalid.
    """
    max_q_len = check_integer("max_q_len", max_q_len, 1)
    flags = {"causal": causal, "tree": tree, "sinks": sinks, "batch_invariant": batch_invariant}
    flags["skip"] = skip
    flags = {name: check_flag(name, value) for name, value in flags.items()}
    if spec.window is not None and not flags["causal"]:
        raise ValueError(f"causal=False with window={spec.window}: a window needs causal=True")
    dtypes = {"format": pool.format, "q_dtype": check_dtype("q_dtype", q_dtype)}
    return {"spec": spec, "page_size": pool.page_size, **dtypes, "max_q_len": max_q_len, **flags}


def plan_calls(
    metadata: AttentionMetadata,
    pool: Any,
    spec: Any,
    kind: Any,
    choose: Callable[[Any], Implementation],
    *,
    out_dtype: DTypeLike,
    q_dtype: DTypeLike,
    **flags: bool,
) -> AttentionMetadata:
    """Adds a work list to the metadata; arguments and errors are those of ``plan_mla``.

    Args:
        kind: the op's subclass of ``PagedCall``.
        choose: function that picks the implementation of such a call.
    """
    metadata = check_paged_metadata(metadata)
    check_out_dtype(out_dtype)
    call = kind.of(pool, spec, max_q_len=metadata.max_q_len, q_dtype=q_dtype, **flags)
    chosen = choose(call)
    if chosen.plan is None:
        return metadata
    metadata = dataclasses.replace(metadata, work_plan=None)  # drop an older list, which may be for other lengths
    flags = {"causal": call.causal, "tree": call.tree, "batch_invariant": call.batch_invariant}
    return chosen.plan(metadata, pool, spec, **flags, out_dtype=np.dtype(out_dtype))


def xla_supports(call: Any, device: Device) -> str | None:
    if call.batch_invariant and device.platform != "cpu":
        return f"batch_invariant=True on {device.platform}: promised on cpu only"
    return None


def reference_supports(call: Any, device: Device) -> str | None:
    return "batch_invariant=True: it specifies values, not bits" if call.batch_invariant else None
