"""Which implementation serves a call.

Every op has an ordered tuple of implementations that ends in ``xla`` (serves all there is) and ``reference`` (only when
named). Each has one predicate, ``supports(call) -> str | None``: a reason for refusing, or nothing. The dispatcher, the
error a user sees, the tests that expect a refusal and ``mla-attn supports`` all read that one predicate.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

NAMES = ("mosaic_gpu", "triton", "xla", "reference")
ENVIRONMENT_VARIABLE = "MLA_ATTN_IMPLEMENTATION"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op."""

    name: str
    supports: Callable[[Any], str | None]
    run: Callable[..., Any]


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
    if name is None and os.environ.get(ENVIRONMENT_VARIABLE):
        source, name = ENVIRONMENT_VARIABLE, os.environ[ENVIRONMENT_VARIABLE]
    if name is not None and name not in NAMES:
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


def _listed(implementations: tuple[Implementation, ...]) -> str:
    return ", ".join(i.name for i in implementations)
