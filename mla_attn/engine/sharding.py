"""The passes of an engine over several devices: every device runs a pass on its share of the model and of the cache.

Tokens, states of requests, inputs and outputs are the same on every device, so that one scheduler serves all.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from mla_attn.checks import check_integer
from mla_attn.engine.state import on_states
from mla_attn.models.base import CacheGroup, CausalLM, layout_of
from mla_attn.parallel import Parallelism
from mla_attn.parallel.layout import place, pool_specs
from mla_attn.passes import DraftModel, Drafts, Pass


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """Makes a pass over ``(pools, states)``, as ``on_states`` does, that runs on every device of a mesh.

    Attributes:
        parallelism: mesh and layout.
        state: partition specs of the model's arrays.
    """

    parallelism: Parallelism
    state: tuple[PartitionSpec, ...]

    @classmethod
    def of(cls, parallelism: Parallelism, *models: CausalLM | None) -> "OnMesh":
        """For passes whose ``state`` has the arrays of these models."""
        arrays = [array for model in models if model is not None for array in jax.tree.leaves(nnx.state(model))]
        return cls(parallelism, tuple(array.sharding.spec for array in arrays))

    def __call__(self, inner: Pass) -> Pass:
        made, mesh, everywhere = on_states(inner), self.parallelism.mesh, PartitionSpec()

        def fn(state: Any, pools_and_states: Any, inputs: Any) -> tuple[Any, Any]:
            pools, states = pools_and_states
            # XLA (jaxlib 0.11.2, CPU) crashes over arrays without elements.
            empty = {name: x for name, x in states.items() if x.size == 0}
            states = {name: x for name, x in states.items() if name not in empty}

            def run(state, pools, states, inputs):
                none = {name: jnp.zeros(x.shape, x.dtype) for name, x in empty.items()}
                outputs, (pools, states) = made.fn(state, (pools, states | none), inputs)
                return outputs, pools, {name: x for name, x in states.items() if name not in empty}

            specs = {name: pool_specs(pool, self.parallelism.layout) for name, pool in pools.items()}
            given = (self.state, specs, everywhere, everywhere)
            # Outputs are equal on all devices, which JAX cannot know: they come from gathered logits.
            shard = jax.shard_map(
                run, mesh=mesh, in_specs=given, out_specs=(everywhere, specs, everywhere), check_vma=False
            )
            outputs, pools, states = shard(*place((state, pools, states, inputs), given, mesh))
            return outputs, (pools, states | empty)

        return dataclasses.replace(made, fn=fn)


def wrapper(parallelism: Parallelism | None, *models: CausalLM | None) -> Callable[[Pass], Pass]:
    """The function that makes the passes of these models, one after the other, passes over states of requests."""
    return on_states if parallelism is None else OnMesh.of(parallelism, *models)


def check_sharding(model: CausalLM, draft: Drafts, parallelism: Parallelism | None, page_size: int) -> None:
    """Raises unless the models are sharded over the mesh, and pages can be shared by its devices.

    Raises:
        ValueError: a model is not sharded by this layout over this mesh, or context ranks do not divide ``page_size``.
        NotImplementedError: the layout shards requests.
    """
    layout = None if parallelism is None else parallelism.layout
    for name, each in (("model", model), ("draft", draft.model if isinstance(draft, DraftModel) else None)):
        if each is not None and layout_of(each) != layout:
            raise ValueError(
                f"{name} is sharded by {layout_of(each)}, must be by {layout}, the parallelism's: load it with "
                "load_checkpoint(parallelism=), or shard it with shard_model"
            )
    if parallelism is None:
        return
    if parallelism.size("batch") > 1:
        raise NotImplementedError(f"an engine over batch={parallelism.layout.batch} is not supported: run one on each")
    for array in jax.tree.leaves(nnx.state(model)):
        if array.sharding.mesh != parallelism.mesh:
            raise ValueError(f"model is on the mesh {array.sharding.mesh}, must be on that of parallelism")
    if check_integer("page_size", page_size, 1) % (ranks := page_parts(parallelism)):
        raise ValueError(f"page_size={page_size} must be a multiple of the {ranks} context ranks")


def groups_on_device(groups: Iterable[CacheGroup], parallelism: Parallelism | None) -> tuple[CacheGroup, ...]:
    """The cache groups with the heads of one device."""
    if parallelism is None:
        return tuple(groups)
    heads = parallelism.size("heads")
    return tuple(dataclasses.replace(group, spec=group.spec.shard(heads=heads)) for group in groups)


def page_parts(parallelism: Parallelism | None) -> int:
    """Devices that have equal parts of a page's tokens."""
    return 1 if parallelism is None else parallelism.size("context")
