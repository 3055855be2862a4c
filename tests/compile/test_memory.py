"""Writes are in place and scratch memory is bounded: what XLA says of the compiled programs, and what they do.

``compile/test_cuda_aot.py`` asks the same of XLA's compiler for GPUs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from checkpoints import V3
from footprint import (
    BATCH,
    CPU_PROGRAMS,
    LARGE,
    LAYERS,
    MISTAKES,
    PASSES,
    PROGRAMS,
    ROWS,
    SMALL,
    SPEC,
    assert_in_place,
    footprint,
    lower,
    lower_pass,
    prepare,
    sizes_of,
)
from mla_attn.models import load_checkpoint

DTYPES = ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)]
QUICK_PASSES = ("decode", "extend")
NAMES = CPU_PROGRAMS if jax.default_backend() == "cpu" else PROGRAMS


def footprints(name, *sizes):
    return [footprint(lower(name, s), s.layer_bytes) for s in sizes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_scratch_depends_neither_on_the_pool_nor_on_the_width_of_the_table(name, dtype):
    assert_in_place(*footprints(name, *sizes_of(name, dtype)))


@pytest.mark.parametrize("page_size", [1, 16])
def test_scratch_with_other_page_sizes(page_size):
    assert_in_place(*footprints("decode", *(s.with_page_size(page_size) for s in (SMALL, LARGE))))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["write_latent", "write_kv", "move_rows"])
def test_scratch_of_writes_is_that_of_their_rows(name, dtype):
    [large] = footprints(name, dataclasses.replace(LARGE, dtype=dtype))
    row_bytes = SPEC.latent_dim * jnp.dtype(dtype).itemsize
    assert large.temp <= 2 * LAYERS * BATCH * ROWS * row_bytes


@pytest.mark.parametrize("row_format", ["plain", "blocks"])
@pytest.mark.parametrize("name", ["decode", "extend", "scan_layers"])
def test_scratch_of_float8_caches(name, row_format):
    """Rows are decoded block by block; no pool becomes one of other numbers. The scale, 4 bytes, lies in its place."""
    found = footprints(name, *(dataclasses.replace(s, row_format=row_format) for s in (SMALL, LARGE)))
    scale_bytes = 4 if row_format == "plain" else 0
    assert_in_place(*(dataclasses.replace(each, unaliased=each.unaliased + scale_bytes) for each in found))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_donated_pool_is_gone_and_the_new_one_lies_in_its_place(name, dtype):
    pool, run = prepare(name, dataclasses.replace(SMALL, dtype=dtype))
    places = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(pool)]
    result = run()
    assert all(array.is_deleted() for array in jax.tree.leaves(pool))
    new = result[1] if isinstance(result, tuple) else result
    assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(new)] == places


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(V3, dtype=jnp.bfloat16)


@pytest.mark.parametrize("name", [n if n in QUICK_PASSES else pytest.param(n, marks=pytest.mark.slow) for n in PASSES])
def test_whole_models_hold_one_pool(name, model):
    lowered, layer_bytes = lower_pass(name, model)
    found = footprint(lowered, layer_bytes, model.cache_groups[0].num_layers)
    assert found.unaliased == 0
    assert found.temp < layer_bytes / 4
    assert not found.copies


@pytest.mark.parametrize("name", MISTAKES)
def test_these_tests_notice(name):
    [large] = footprints(name, LARGE)
    with pytest.raises(AssertionError):
        assert_in_place(large)
