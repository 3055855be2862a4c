"""The dispatcher, which chooses the implementation of a call and runs it.

Every op has an ordered tuple of implementations that ends in ``xla`` (supports nearly every call) and ``reference``
(taken only if named). Each has one predicate, ``supports(call, device) -> str | None``: the reason for a refusal, or
None. The dispatcher, the error that a user sees, the tests that expect a refusal and ``mla-attn supports`` all read it.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mla_attn.varying import vary_together

NAMES = ("mosaic_gpu", "triton", "xla", "reference")
ENVIRONMENT_VARIABLE = "MLA_ATTN_IMPLEMENTATION"

# The argument ``implementation`` of an op: a name, names in the order to try them, or None for the default choice.
Order = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of device for which programs are compiled.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        compute_capability: compute capability of an NVIDIA GPU, such as "9.0"; else None.
        cores: streaming multiprocessors, or compute units, of a GPU; else 1.
        arch: architecture of an AMD GPU, such as "gfx942"; else None.
    """

    platform: str
    compute_capability: str | None = None
    cores: int = 1
    arch: str | None = None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        name: one of ``NAMES``.
        supports: function that gives the reason for refusing a call on a device, or None.
        run: function that computes the op; takes arrays by position and static arguments by keyword.
        plan: function that computes the metadata that all layers of a step share; None if there is none to compute.
        derivative: "own" if JAX differentiates ``run``, in forward and reverse mode and inside ``jit``; "reference" if
            the derivative of the op's reference is used; None if there is no derivative.
    """

    name: str
    supports: Callable[[Any, Device], str | None]
    run: Callable[..., Any]
    plan: Callable[..., Any] | None = None
    derivative: Literal["own", "reference"] | None = None


# A JAX user context is part of every cache key of ``jax.jit``, so that programs of different devices stay apart.
_target = jax.make_user_context(default_value=None)


def current_device() -> Device:
    """The device of the enclosing ``compiling_for``, else of the enclosing mesh, else the default backend's first.

    The enclosing mesh is that of ``jax.shard_map`` or ``jax.set_mesh``.
    """
    if (target := _target.value) is not None:
        return target
    mesh = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)  # None without a mesh
    if mesh is None:
        return _of(jax.devices()[0])
    try:
        return _of(next(d for d in jax.devices(mesh.platform) if d.device_kind == mesh.device_kind))
    except (RuntimeError, StopIteration):  # a machine without such a device compiles ahead of time
        return Device(mesh.platform, None, mesh.num_cores or 1)


def _of(device: Any) -> Device:
    capability, cores = (getattr(device, name, None) for name in ("compute_capability", "core_count"))
    arch = None
    if capability is not None and capability.startswith("gfx"):  # as JAX calls an AMD GPU's, features after a colon
        capability, arch = None, capability.split(":")[0]
    return Device(device.platform, capability, cores or 1, arch)


@contextlib.contextmanager
def compiling_for(device: Device) -> Iterator[None]:
    """Context in which implementations are chosen for ``device``, to compile ahead of time on a machine without it."""
    with _target(device):
        yield


def requested(implementation: Order) -> tuple[str, ...] | None:
    """The names to try, in order: those of the argument, else those of ``MLA_ATTN_IMPLEMENTATION``, else None.

    The environment variable holds one name, or several separated by commas. It is read at every call.

    Raises:
        ValueError: an unknown name, or an empty order.
    """
    if implementation is None:
        source, value = ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE) or None
        names = None if value is None else tuple(name.strip() for name in value.split(","))
    else:
        source, value = "implementation", implementation
        names = value if isinstance(value, tuple) else (value,)
    if names is not None and (not names or not all(name in NAMES for name in names)):
        raise ValueError(f"{source}={value!r} must be one of {', '.join(NAMES)}, or several in order")
    return names


def choose(op: str, call: Any, implementations: tuple[Implementation, ...], implementation: Order) -> Implementation:
    """Chooses the first implementation that supports ``call`` on the current device.

    Args:
        op: the op's name, for messages.
        call: static facts of the call, the argument of the op's predicates.
        implementations: the op's implementations in order of preference; "reference" is taken only if named.
        implementation: the caller's argument, as in ``requested``; only the named ones are tried.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: no tried implementation supports the call; the message has the reasons.
    """
    names = requested(implementation)
    found = {i.name: i for i in implementations}
    if names is None:
        names = tuple(name for name in found if name != "reference")
    reasons, device = [], current_device()
    for name in names:
        if name not in found:
            reasons.append(f"{op} has no {name!r} implementation, only {', '.join(found)}")
        elif (reason := found[name].supports(call, device)) is None:
            return found[name]
        else:
            reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"{op} is not supported here: {'; '.join(reasons)}")


def compute(op: str, chosen: Implementation, implementations: tuple[Implementation, ...], arrays: tuple, **static: Any):
    """Runs the chosen implementation, compiled once per shapes and static arguments even outside ``jax.jit``.

    Raises:
        NotImplementedError: arrays are sharded over explicit mesh axes, or the implementation is differentiated but has
            no derivative.
    """
    for leaf in jax.tree.leaves(arrays):
        if any(axes is not None for axes in getattr(jax.typeof(leaf).sharding, "spec", ())):
            raise NotImplementedError(
                f"{op} does not divide arrays over mesh axes of type Explicit: call it inside jax.shard_map"
            )
    (reference,) = (i for i in implementations if i.name == "reference")
    return _compute(arrays, op=op, chosen=chosen, reference=reference, static=tuple(sorted(static.items())))


@functools.partial(jax.jit, static_argnames=("op", "chosen", "reference", "static"), inline=True)
def _compute(arrays, *, op: str, chosen: Implementation, reference: Implementation, static: tuple):
    run = functools.partial(chosen.run, **dict(static))
    with jax.named_scope(f"{op}_{chosen.name}"):
        arrays = vary_together(arrays)
        if chosen.derivative == "own":
            return run(*arrays)
        if chosen.derivative == "reference":
            return with_derivative(run, functools.partial(reference.run, **dict(static)), arrays)
        # Pallas marks a kernel's results as varying over no axes, so out_specs=P() would take one device's for all.
        return vary_together(run(*_without_derivative(op, chosen.name, arrays)), like=arrays)


def with_derivative(run, differentiated, arrays):
    """Computes ``run(*arrays)`` with the derivative of ``differentiated``, in forward and reverse mode."""
    leaves, structure = jax.tree.flatten(arrays)
    # XLA (jaxlib 0.11.2, CPU) crashes if shard_map passes an empty array to a function under custom_jvp.
    empty = [jax.ShapeDtypeStruct(x.shape, x.dtype) if x.size == 0 else None for x in leaves]

    def on_leaves(function):
        def call(*some):
            rest = iter(some)
            all_leaves = [next(rest) if x is None else jnp.zeros(x.shape, x.dtype) for x in empty]
            return function(*jax.tree.unflatten(structure, all_leaves))

        return call

    function = jax.custom_jvp(on_leaves(run))

    @function.defjvp
    def _(primals, tangents):
        return function(*primals), jax.jvp(on_leaves(differentiated), primals, tangents)[1]

    return function(*(x for x in leaves if x.size))


def _without_derivative(op: str, name: str, arrays):
    """Passes arrays through an identity whose derivative raises, because custom_jvp around a kernel fails on refs."""

    @jax.custom_jvp
    def identity(x):
        return x

    @identity.defjvp
    def _(primals, tangents):
        raise NotImplementedError(f"{op} has no derivative by {name}: use implementation='xla' or 'reference'")

    return jax.tree.map(lambda x: identity(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, arrays)
