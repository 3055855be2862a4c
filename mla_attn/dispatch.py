"""Which implementation serves a call.

Every op has an ordered tuple of implementations that ends in ``xla`` (serves all there is) and ``reference`` (only when
named). Each has one predicate, ``supports(call) -> str | None``: a reason for refusing, or nothing. The dispatcher, the
error a user sees, the tests that expect a refusal and ``mla-attn supports`` all read that one predicate.
"""

import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax

NAMES = ("mosaic_gpu", "triton", "xla", "reference")
ENVIRONMENT_VARIABLE = "MLA_ATTN_IMPLEMENTATION"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op. ``plan`` makes what all layers of a step share, where there is such a thing."""

    name: str
    supports: Callable[[Any], str | None]
    run: Callable[..., Any]
    plan: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class Device:
    """What programs are made for.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        compute_capability: of an NVIDIA GPU, such as "9.0"; else None.
        cores: streaming multiprocessors of a GPU; else 1.
    """

    platform: str
    compute_capability: str | None = None
    cores: int = 1

    @property
    def facts(self) -> dict[str, Any]:
        """What an implementation's ``supports`` asks of it."""
        return {"platform": self.platform, "compute_capability": self.compute_capability}


H200 = Device("gpu", "9.0", 132)
_TARGET: contextvars.ContextVar[Device | None] = contextvars.ContextVar("target", default=None)


def current_device() -> Device:
    """The default backend's first device, unless ``compiling_for`` says otherwise."""
    if (target := _TARGET.get()) is not None:
        return target
    device = jax.devices()[0]
    capability, cores = (getattr(device, name, None) for name in ("compute_capability", "core_count"))
    return Device(jax.default_backend(), capability, cores or 1)


@contextlib.contextmanager
def compiling_for(device: Device) -> Iterator[None]:
    """Choices inside are made for ``device``: for lowering and compiling ahead of time where it is not.

    The caches of ``jax.jit`` do not know of it: trace a function for one device only.
    """
    token = _TARGET.set(device)
    try:
        yield
    finally:
        _TARGET.reset(token)


def choose(op: str, call: Any, implementations: tuple[Implementation, ...], name: str | None) -> Implementation:
    """The first implementation that serves ``call``, or the named one.

    Args:
        op: the op's name, for messages.
        call: static facts of the call, whatever the op's predicates take.
        implementations: in order of preference; "reference" is never taken unless named.
        name: None, or one of ``NAMES``. The environment variable ``MLA_ATTN_IMPLEMENTATION`` stands in for None; it is
            read at every call.

    Raises:
        ValueError: a name that does not exist.
        NotImplementedError: the named implementation, or every one, refuses; with the reasons.
    """
    source = "implementation"
    if name is None:
        source, name = ENVIRONMENT_VARIABLE, named_by_environment()
    elif name not in NAMES:
        raise ValueError(f"{source}={name!r} must be one of {', '.join(NAMES)}")
    if name is None:
        candidates = [i for i in implementations if i.name != "reference"]
    else:
        candidates = [i for i in implementations if i.name == name]
        if not candidates:
            raise NotImplementedError(
                f"{op} has no {name!r} implementation; {source} may be {_listed(implementations)}"
            )
    reasons = []
    for candidate in candidates:
        reason = candidate.supports(call)
        if reason is None:
            return candidate
        reasons.append(f"{candidate.name}: {reason}")
    raise NotImplementedError(f"{op} is not served here: {'; '.join(reasons)}")


def named_by_environment() -> str | None:
    """What ``MLA_ATTN_IMPLEMENTATION`` asks for, if anything; ValueError for a name that does not exist."""
    name = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if name is not None and name not in NAMES:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}={name!r} must be one of {', '.join(NAMES)}")
    return name


def _listed(implementations: tuple[Implementation, ...]) -> str:
    return ", ".join(i.name for i in implementations)
