"""Slots: a pass reads and writes those of its requests, and padding neither writes nor draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.passes import SAMPLING
from mla_attn.passes.state import SlotPasses, create_slots
from mla_attn.speculative import DraftTree
from traffic import small_model

TREES = (DraftTree((1, 1, 1)), DraftTree((3, 2)))


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def decode():
    """A pass that moves every request on by one, and tells what it was given."""

    def one_on(state, pool, x):
        return {"tokens": x["tokens"] + 1, "lens": x["lens"] + x["active"], "temperature": x["temperature"]}, pool

    options = {name: jax.ShapeDtypeStruct((4,), kind) for name, kind in SAMPLING.items()}
    rung = {"page_table": ints(4, 2), "tokens": ints(4), "lens": ints(4), "active": ints(4), **options}
    return SlotPasses._buckets(None, "decode", one_on, [rung])


def test_slots_hold_what_the_largest_tree_needs():
    slots = create_slots(small_model(), 5, TREES)
    assert slots["drafts"].shape == (5, 9)
    assert slots["hidden"].shape == (5, 3, 16)
    assert {name: slots[name].dtype for name in SAMPLING} == SAMPLING


@pytest.mark.parametrize("own", [[2], [3, 1], [1, 3, 0, 2]])
def test_a_pass_touches_its_requests_slots_alone(own):
    slots = create_slots(small_model(), 5, TREES)
    slots |= {"tokens": jnp.arange(5, dtype=jnp.int32) * 10, "temperature": jnp.full(5, 0.5)}
    before = {name: np.asarray(array) for name, array in slots.items()}
    inputs = {"page_table": np.zeros((len(own), 2), np.int32), "slots": np.array(own, np.int32)}
    inputs["active"] = np.ones(len(own), np.int32)
    outputs, (_, after) = decode()(jnp.float32(0), (jnp.zeros(1), slots), inputs)
    assert outputs["tokens"][: len(own)].tolist() == [10 * slot + 1 for slot in own]
    # Padding draws nothing, whatever slot 0 was left with: a sort of the vocabulary for nobody would cost as much.
    assert outputs["temperature"].tolist() == [0.5] * len(own) + [0.0] * (4 - len(own))
    for name in ("tokens", "lens"):
        want = before[name].copy()
        want[own] += 1
        np.testing.assert_array_equal(after[name], want)
    np.testing.assert_array_equal(after["temperature"], before["temperature"])
