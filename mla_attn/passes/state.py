"""The passes over slots: what a request carries from step to step stays on the device, in a slot of its own.

A pass is told which slots its rows belong to, takes their state from there, and leaves the new state there. So a batch
can be made of any requests at any step, and the host need not know one step's tokens to start the next.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from mla_attn.buckets import Buckets
from mla_attn.models.base import CausalLM
from mla_attn.passes.passes import SAMPLING, Arrays, Pass, Passes
from mla_attn.speculative import DraftTree

Slots = dict[str, Array]

# What each pass takes from the slots rather than from the host, and what it leaves there.
_READS = {
    "decode": ("tokens", "lens", *SAMPLING),
    "target_verify": ("tokens", "lens", "drafts", *SAMPLING),
    "draft_extend": ("lens",),
    "draft_decode": ("lens", "drafts", "hidden"),
}
_WRITES = {
    "prefill": ("tokens", "lens", *SAMPLING),
    "extend": ("tokens", "lens", *SAMPLING),
    "draft_prefill": ("drafts", "hidden"),
    "decode": ("tokens", "lens"),
    "target_verify": ("tokens", "lens"),
    "draft_extend": ("drafts", "hidden"),
    "draft_decode": ("drafts", "hidden"),
}


def create_slots(model: CausalLM, num_slots: int, trees: tuple[DraftTree, ...]) -> Slots:
    """Empty slots for requests of any of these draft trees.

    Returns:
        ``tokens`` int32 [M], last token of each request, whose row is not cached yet; ``lens`` int32 [M], rows cached;
        the options of ``sampling.sample`` [M]; ``drafts`` int32 [M, nodes], drafts of the next verify step; ``hidden``
        [M, width, dim], hidden states of the draft layer that the next drafts come from. Of the last two each tree uses
        the leading part.
    """
    nodes = max((tree.size - 1 for tree in trees), default=0)
    width = max((size for tree in trees for size in tree.level_sizes[:-1]), default=0)
    return {
        "tokens": jnp.zeros(num_slots, jnp.int32),
        "lens": jnp.zeros(num_slots, jnp.int32),
        "drafts": jnp.zeros((num_slots, nodes), jnp.int32),
        "hidden": jnp.zeros((num_slots, width, model.hidden_size), model.dtype),
        **{name: jnp.zeros(num_slots, kind) for name, kind in SAMPLING.items()},
    }


class SlotPasses(Passes):
    """``Passes`` whose pool is a pair ``(pool, slots)`` and whose inputs hold ``slots`` int32 [B], the slot of each
    request, in place of what is kept there. Padding requests may name any slot: theirs is left as it is."""

    def _buckets(self, name: str, fn: Pass, rungs: list[Arrays]) -> Buckets:
        reads, writes = _READS.get(name, ()), _WRITES[name]

        def on_slots(state: Any, pool_and_slots: Any, inputs: Arrays) -> tuple[Arrays, Any]:
            pool, slots = pool_and_slots
            own = inputs["slots"]
            live = (inputs["active"] if "active" in inputs else inputs["q_lens"]) > 0
            taken = {field: _leading(slots[field][own], inner(field)) for field in reads}
            if "temperature" in taken:  # padding draws nothing, and costs nothing
                taken["temperature"] = jnp.where(live, taken["temperature"], 0.0)
            given = {field: value for field, value in inputs.items() if field != "slots"} | taken
            outputs, pool = fn(state, pool, given)
            own = jnp.where(live, own, slots["lens"].shape[0])  # out of range: dropped
            left = given | outputs
            slots = slots | {field: _store(slots[field], own, left[field]) for field in writes}
            return outputs, (pool, slots)

        def inner(field: str) -> tuple[int, ...]:
            return rungs[0][field].shape[1:]

        outer = [
            {field: shape for field, shape in rung.items() if field not in reads}
            | {"slots": jax.ShapeDtypeStruct(rung["page_table"].shape[:1], jnp.int32)}
            for rung in rungs
        ]
        return Buckets(name, on_slots, outer)


def _leading(array: Array, shape: tuple[int, ...]) -> Array:
    return array[(slice(None), *map(slice, shape))]


def _store(array: Array, rows: Array, values: Array) -> Array:
    return array.at[(rows, *map(slice, values.shape[1:]))].set(values, mode="drop")
