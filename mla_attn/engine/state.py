"""The state of requests on the device, which goes from pass to pass; each request has an index in it, its ``slot``.

A pass takes the slots of its requests, reads their state there, and writes the new state back. So any requests can form
a batch at any step, and the host need not read one step's tokens before it starts the next step.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from mla_attn.engine.pages import CacheSizes, Limits
from mla_attn.models.base import CacheGroup, CausalLM, Pools, create_pools
from mla_attn.parallel import Parallelism
from mla_attn.passes import FIELDS, KEPT, Arrays, Drafts, NgramDrafts, Pass, structs
from mla_attn.speculative import DraftTree

States = dict[str, Array]


def create_states(
    num_slots: int, trees: Iterable[DraftTree], *, hidden_size: int, dtype: Any, text_len: int = 0
) -> States:
    """Creates the state of ``num_slots`` requests with any of these draft trees: the kept fields with B = num_slots.

    ``drafts`` and ``hidden`` have room for the largest tree; each tree uses the leading part. ``hidden_size`` and
    ``text_len`` may be 0 if no pass needs hidden states or texts.
    """
    trees = tuple(trees)
    sizes = {
        "B": num_slots,
        "nodes": max((tree.size - 1 for tree in trees), default=0),
        "width": max((size for tree in trees for size in tree.level_sizes[:-1]), default=0),
        "dim": hidden_size,
        "L": text_len,
    }
    return {name: jnp.zeros(s.shape, s.dtype) for name, s in structs(KEPT, sizes, dtype).items()}


def create_device(
    model: CausalLM,
    draft: Drafts,
    groups: Iterable[CacheGroup],
    trees: Iterable[DraftTree],
    limits: Limits,
    cache: CacheSizes,
    parallelism: Parallelism | None = None,
) -> tuple[Pools, States]:
    """All-zero pools of the cache groups, those of a draft model included, and the states of ``max_batch`` requests.

    With ``parallelism`` the pools are sharded, where a page has the tokens of all context ranks, and states are on
    every device.
    """
    sizes = {"hidden_size": model.hidden_size if draft is None else 0, "dtype": model.dtype}
    sizes["text_len"] = limits.max_len if isinstance(draft, NgramDrafts) else 0
    groups = tuple(groups)
    num_pages = {group.name: cache.pages_of(group.window) for group in groups}
    states = create_states(limits.max_batch, trees, **sizes)
    if parallelism is None:
        return create_pools(groups, num_pages=num_pages, page_size=cache.page_size), states
    page_size = cache.page_size // parallelism.size("context")
    pools = create_pools(groups, num_pages=num_pages, page_size=page_size, parallelism=parallelism)
    return pools, jax.device_put(states, parallelism.sharding(PartitionSpec()))


def on_states(inner: Pass) -> Pass:
    """Makes a pass over a pair ``(pools, states)``, with input ``slots`` instead of the fields that are kept in states.

    Padding requests may have any slot; its state does not change.
    """
    taken = tuple(name for name in inner.inputs if name in KEPT and name not in inner.given)

    def fn(state: Any, pools_and_states: Any, inputs: Arrays) -> tuple[Arrays, Any]:
        pools, states = pools_and_states
        slots = inputs["slots"]
        live = (inputs["active"] if "active" in inputs else inputs["q_lens"]) > 0
        x = {name: value for name, value in inputs.items() if name != "slots"}
        sizes = {**inner.sizes, "B": slots.shape[0]}
        x |= {name: _leading(states[name][slots], FIELDS[name].shape(sizes)) for name in taken}
        if "temperature" in taken:  # padding is greedy, so that it costs nothing
            x["temperature"] = jnp.where(live, x["temperature"], 0.0)
        outputs, pools = inner.fn(state, pools, x)
        left = {name: x[name] for name in inner.given} | outputs
        slots = jnp.where(live, slots, states["lens"].shape[0])  # out of range, so that the write is dropped
        states = states | {name: _store(states[name], slots, left[name]) for name in left if name in KEPT}
        return outputs, (pools, states)

    inputs = ("slots", *(name for name in inner.inputs if name not in taken))
    return Pass(inner.name, fn, inputs, inner.sizes, inner.given)


def _leading(array: Array, shape: tuple[int, ...]) -> Array:
    return array[tuple(map(slice, shape))]


def _store(array: Array, slots: Array, values: Array) -> Array:
    return array.at[(slots, *map(slice, values.shape[1:]))].set(values, mode="drop")
