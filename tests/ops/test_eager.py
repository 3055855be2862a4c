"""Ops called outside of ``jax.jit``: compiled once for their shapes, and for the device of the call."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import helpers
from mla_attn.buckets import backend_compiles
from mla_attn.dispatch import Device, compiling_for, current_device
from mla_attn.metadata import RaggedMetadata
from mla_attn.ops import merge_states, mla_attention, ragged_attention
from mla_attn.ops.grouped_matmul import grouped_matmul


def mla(step, **options):
    batch = helpers.poisoned_batch(0, kv_lens=[5, 9], q_lens=[1, 2], num_layers=4)
    metadata = dataclasses.replace(batch.metadata, kv_lens=batch.metadata.kv_lens - step)
    arrays = (batch.q_latent, batch.q_rope, batch.pool, metadata)
    return lambda: mla_attention(*arrays, batch.spec, layer=step, **options)


def ragged(step, **options):
    rows = jnp.asarray([2, 3], jnp.int32)
    metadata = RaggedMetadata(
        q_starts=jnp.asarray([0, 2], jnp.int32),
        q_lens=rows,
        kv_starts=jnp.asarray([0, 4], jnp.int32),
        kv_lens=rows + step,
        max_q_len=3,
        max_kv_len=8,
    )
    q, k, v = (jnp.ones((n, 2, 4)) for n in (5, 12, 12))
    return lambda: ragged_attention(q, k, v, metadata, scale=0.5, **options)


def merge(step):
    outs, lses = [jnp.full((3, 2, 4), float(step))] * 2, [jnp.ones((3, 2))] * 2
    return lambda: merge_states(outs, lses)


def grouped(step, **options):
    arrays = jnp.ones((6, 8)), jnp.ones((2, 8, 5)), jnp.asarray([step, 2], jnp.int32)
    return lambda: grouped_matmul(*arrays, **options)


CALLS = {
    f"{make.__name__} {name}": (make, {"implementation": name})
    for make in (mla, ragged, grouped)
    for name in ("xla", "reference")
}


@pytest.mark.parametrize(("make", "options"), [*CALLS.values(), (merge, {})], ids=[*CALLS, "merge"])
def test_nothing_is_compiled_after_the_first_call(make, options):
    """Nor kept: what JAX caches does not grow."""
    calls = [make(step, **options) for step in range(4)]
    jax.block_until_ready(calls[0]())
    before = backend_compiles()
    for call in calls[1:]:
        jax.block_until_ready(call())
    assert backend_compiles() == before


def test_programs_of_one_device_are_not_taken_for_another():
    """The caches of ``jax.jit`` know what is compiled for."""
    traced = jax.jit(lambda x: x if current_device().platform == "cpu" else x + 1)
    there = Device("tpu")
    assert traced(0) == 0
    with compiling_for(there):
        assert traced(0) == 1
    assert traced(0) == 0
