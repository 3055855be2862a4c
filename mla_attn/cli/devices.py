"""The mesh that the options of a command ask for."""

import argparse
from collections.abc import Callable
from typing import Any

import jax

from mla_attn.models import shard_model
from mla_attn.parallel import Layout, Parallelism
from mla_attn.passes import DraftModel, Drafts

_AXES = ("tensor", "context")


def parallelism_of(options: argparse.Namespace) -> Parallelism | None:
    """The mesh of the first devices, and its layout; None for one device.

    Raises:
        ValueError: there are fewer devices.
    """
    sizes = (options.tensor_parallel, options.context_parallel)
    count = sizes[0] * sizes[1]
    if count == 1:
        return None
    if count > len(jax.devices()):
        raise ValueError(
            f"--tensor-parallel {sizes[0]} and --context-parallel {sizes[1]} need {count} devices, there are "
            f"{len(jax.devices())} of the kind {jax.devices()[0].device_kind!r}"
        )
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(sizes, _AXES, axis_types=kinds, devices=jax.devices()[:count])
    experts = {count: _AXES, sizes[1]: ("context",), sizes[0]: ("tensor",), 1: ()}[options.expert_parallel]
    return Parallelism(mesh, Layout(heads=("tensor",), context=("context",), experts=experts))


def sharded_drafts(load: Callable[[], Drafts], parallelism: Parallelism | None) -> Any:
    """The drafter that ``load`` creates, a draft model on the devices of the model."""
    draft = load()
    if parallelism is not None and isinstance(draft, DraftModel):
        model: Any = draft.model
        shard_model(model, parallelism)
    return draft
