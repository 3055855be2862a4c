"""The same as ``test_memory.py`` for CUDA, without a GPU: the programs are compiled for an H200 and looked at."""

import functools
import sys

import pytest

import aot
from footprint import CUDA_PASSES, PROGRAMS, Footprint, assert_in_place

pytestmark = aot.needs_compiler

FLOAT32 = ("decode", "extend")  # what the other programs are made of
CALLS = [
    *((name, "bfloat16") for name in PROGRAMS),
    *(pytest.param(name, "float32", marks=pytest.mark.slow) for name in FLOAT32),
]


@functools.cache
def _compiled(group: str) -> dict:
    """What ``cuda_aot.py`` prints, from one process for all tests of a group."""
    return aot.run("cuda_aot.py", group)


def footprints(group: str, name: str) -> list[Footprint]:
    found = _compiled(group)[name]
    assert isinstance(found, list), found
    return [Footprint(**each) for each in found]


@pytest.mark.parametrize(("name", "dtype"), CALLS)
def test_scratch_depends_neither_on_the_pool_nor_on_the_width_of_the_table(name, dtype):
    assert_in_place(*footprints(dtype, name))


def test_one_row_times_a_matrix_is_a_product():
    """Not all their products, which are then summed up."""
    [found] = footprints("bfloat16", "one_row")
    assert found.temp < found.layer / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CUDA_PASSES)
def test_whole_models_hold_one_pool(name):
    [found] = footprints("passes", name)
    assert found.unaliased == 0
    assert found.temp < found.layer / 2
    assert not found.copies


@pytest.mark.parametrize("name", ["copied_layer", "stacked_layers"])
def test_these_tests_notice(name):
    [large] = footprints("bfloat16", name)
    with pytest.raises(AssertionError):
        assert_in_place(large)


def test_this_process_does_not_see_the_plugin():
    assert str(aot.FOLDER) not in sys.path
