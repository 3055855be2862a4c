"""Request state: a pass reads and writes that of its requests, and padding neither writes nor draws."""

import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.buckets import Buckets
from mla_attn.engine.state import create_states, on_states
from mla_attn.passes import FIELDS, KEPT, SAMPLING, Pass, structs
from mla_attn.speculative import DraftTree

TREES = (DraftTree((1, 1, 1)), DraftTree((3, 2)))


def states():
    return create_states(5, TREES, hidden_size=16, dtype=jnp.float32)


def decode():
    """A pass that moves every request on by one, and tells what it was given."""

    def one_on(state, pools, x):
        return {"tokens": x["tokens"] + 1, "lens": x["lens"] + x["active"], "told": x["temperature"]}, pools

    inputs = ("page_table", "tokens", "lens", "active", *SAMPLING)
    made = on_states(Pass("decode", one_on, inputs, {"W": 2}))
    assert made.inputs == ("slots", "page_table", "active")
    return Buckets("decode", made.fn, [structs(made.inputs, {**made.sizes, "B": 4}, jnp.float32)])


def test_states_hold_what_the_largest_tree_needs():
    assert set(states()) == set(KEPT)
    assert states()["drafts"].shape == (5, 9)
    assert states()["hidden"].shape == (5, 3, 16)
    assert {name: states()[name].dtype for name in SAMPLING} == {name: FIELDS[name].dtype for name in SAMPLING}


@pytest.mark.parametrize("own", [[2], [3, 1], [1, 3, 0, 2]])
def test_a_pass_touches_the_states_of_its_requests_alone(own):
    kept = states() | {"tokens": jnp.arange(5, dtype=jnp.int32) * 10, "temperature": jnp.full(5, 0.5)}
    before = {name: np.asarray(array) for name, array in kept.items()}
    inputs = {"page_table": np.zeros((len(own), 2), np.int32), "slots": np.array(own, np.int32)}
    inputs["active"] = np.ones(len(own), np.int32)
    outputs, (_, after) = decode()(jnp.float32(0), (jnp.zeros(1), kept), inputs)
    assert outputs["tokens"][: len(own)].tolist() == [10 * slot + 1 for slot in own]
    # Padding draws nothing, whatever slot 0 was left with: a sort of the vocabulary for nobody would cost as much.
    assert outputs["told"].tolist() == [0.5] * len(own) + [0.0] * (4 - len(own))
    for name in ("tokens", "lens"):
        want = before[name].copy()
        want[own] += 1
        np.testing.assert_array_equal(after[name], want)
    np.testing.assert_array_equal(after["temperature"], before["temperature"])


def test_what_begins_a_request_is_left_in_its_state():
    """A pass over prompts is given the sampling options, and keeps them; of a narrow field it writes the first part."""

    def prompt(state, pools, x):
        return {"tokens": x["seq_lens"] + 1, "drafts": jnp.full((2, 3), 7, jnp.int32)}, pools

    made = on_states(Pass("extend", prompt, ("seq_lens", "q_lens", *SAMPLING), {}, given=SAMPLING))
    assert made.inputs == ("slots", "seq_lens", "q_lens", *SAMPLING)
    ones = {name: jnp.ones(2, FIELDS[name].dtype) for name in SAMPLING}
    lengths = {"seq_lens": jnp.array([4, 9]), "q_lens": jnp.array([4, 0])}
    _, (_, after) = made.fn(None, (None, states()), {"slots": jnp.array([3, 1]), **lengths, **ones})
    assert after["tokens"].tolist() == [0, 0, 0, 5, 0]
    assert after["temperature"].tolist() == [0, 0, 0, 1, 0]
    assert after["drafts"][3].tolist() == [7] * 3 + [0] * 6
