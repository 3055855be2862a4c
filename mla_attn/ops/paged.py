"""What the paged ops have in common: facts of a call, and what the implementations in JAX say of them."""

import dataclasses
from typing import Any

from mla_attn.cache.formats import RowFormat
from mla_attn.checks import check_flag, check_integer
from mla_attn.dispatch import Device


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCall:
    """Static facts of a call over a paged cache, which with the device decide the implementation."""

    spec: Any
    page_size: int
    format: RowFormat
    max_q_len: int
    causal: bool
    tree: bool
    sinks: bool
    batch_invariant: bool


def facts_of(
    pool: Any, spec: Any, *, max_q_len: int, causal: bool, tree: bool, sinks: bool, batch_invariant: bool
) -> dict[str, Any]:
    """The fields of a ``PagedCall`` over ``pool``, which may be abstract (of ``jax.eval_shape``).

    Raises:
        ValueError: a value or a combination that no call may have.
    """
    max_q_len = check_integer("max_q_len", max_q_len, 1)
    flags = {"causal": causal, "tree": tree, "sinks": sinks, "batch_invariant": batch_invariant}
    flags = {name: check_flag(name, value) for name, value in flags.items()}
    if spec.window is not None and not flags["causal"]:
        raise ValueError(f"causal=False with window={spec.window}: a window needs causal=True")
    return {"spec": spec, "page_size": pool.page_size, "format": pool.format, "max_q_len": max_q_len, **flags}


def xla_supports(call: PagedCall, device: Device) -> str | None:
    if call.batch_invariant and device.platform != "cpu":
        return f"batch_invariant=True on {device.platform}: promised on cpu only"
    return None


def reference_supports(call: PagedCall, device: Device) -> str | None:
    return "batch_invariant=True: it specifies values, not bits" if call.batch_invariant else None
