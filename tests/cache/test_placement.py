"""Pools: sizes, placement, and what is refused of both. Writing, reading and moving: ``test_latent.py``."""

import dataclasses
import itertools
from typing import ClassVar

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.cache import LatentPool, move_rows
from mla_attn.cache.placement import PagedPool, Placement
from mla_attn.specs import MLASpec

SPEC = MLASpec(num_heads=2, kv_lora_rank=5, qk_rope_head_dim=2, scale=1.0)
SIZES = {"num_layers": 3, "num_pages": 4, "page_size": 8}


def test_a_new_pool():
    pool = LatentPool.create(**SIZES, spec=SPEC)
    assert pool.data.shape == (12, 8, 7) and pool.dtype == jnp.bfloat16 and not pool.data.any()
    assert (pool.page_size, pool.latent_dim, pool.kv_lora_rank, pool.num_pages) == (8, 7, 5, 4)
    assert LatentPool.create(**SIZES, spec=SPEC, dtype="float32").dtype == np.float32


def test_one_leaf_and_static_facts():
    pool = LatentPool.create(**SIZES, spec=SPEC)
    leaves, tree = jax.tree.flatten(pool)
    assert len(leaves) == 1
    assert tree == jax.tree.structure(LatentPool.create(**SIZES, spec=SPEC))
    assert tree != jax.tree.structure(LatentPool.create(**{**SIZES, "num_layers": 4}, spec=SPEC))


@pytest.mark.parametrize("kind", [int, jnp.int32])
def test_placement(kind):
    layer = kind(2)
    pool = LatentPool.create(**SIZES, spec=SPEC)
    assert pool.placement.physical_pages(jnp.asarray([0, 3]), layer).tolist() == [8, 11]
    shared = LatentPool(jnp.zeros((30, 8, 7)), 3, 4, 5, 6, 2)
    assert shared.placement.physical_pages(jnp.asarray([0, 3]), layer).tolist() == [4, 22]


def test_layers_are_one_after_the_other_unless_said():
    """Also where a pool is made by hand: a layer that began where the one before does would be written over it."""
    pool = LatentPool(jnp.zeros((12, 8, 7)), 3, 4, 5)
    assert (pool.page_stride, pool.layer_stride) == (1, 4)
    assert jax.tree.structure(pool) == jax.tree.structure(LatentPool.create(**SIZES, spec=SPEC, dtype="float32"))


@hypothesis.given(
    pages=st.integers(1, 5), layers=st.integers(1, 5), page_stride=st.integers(0, 7), layer_stride=st.integers(0, 7)
)
def test_pages_in_one_place_are_refused(pages, layers, page_stride, layer_stride):
    """Every page of every layer has a place of its own, or the strides are refused."""
    places = [p * page_stride + i * layer_stride for p, i in itertools.product(range(pages), range(layers))]
    try:
        placement = Placement(layers, pages, 4, page_stride, layer_stride)
    except ValueError as error:
        assert "must not share pages" in str(error) and len(set(places)) < len(places)
    else:
        assert len(set(places)) == len(places) and placement.num_physical_pages == max(places) + 1


def test_rows_of_any_pool_move():
    """Two arrays of which one has an axis more, as keys and values have."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Pool(PagedPool):
        k: jax.Array
        v: jax.Array
        PAGED: ClassVar = ("k", "v")
        placement = Placement(2, 3, 4, 1, 3)

        def check(self):
            pass

    k, v = (np.arange(24 * n, dtype=np.float32).reshape(6, 4, *tail) for n, tail in ((10, (2, 5)), (3, (3,))))
    got = move_rows(Pool(jnp.asarray(k), jnp.asarray(v)), jnp.asarray([5, 12]), jnp.asarray([11, 0]))
    for before, after in ((k, got.k), (v, got.v)):
        want = before.reshape(2, 12, *before.shape[2:]).copy()
        want[:, 11] = want[:, 5]
        np.testing.assert_array_equal(after, want.reshape(before.shape))


def test_pools_without_room_are_refused(unchecked):
    slots = jnp.asarray([1])
    for pool, message in (
        (LatentPool(jnp.zeros((11, 8, 7)), 3, 4, 5), "must have 12 pages for num_layers=3, num_pages=4"),
        (
            LatentPool(jnp.zeros((12, 8, 7)), 3, 4, 5, 1, 0),
            "layer_stride=0: 3 layers of 4 pages must not",
        ),
        (LatentPool(jnp.zeros((12, 8)), 3, 4, 5), r"pool.data has shape \(12, 8\), must be \[pages, P, row_width\]"),
        (LatentPool(None, 3, 4, 5), "pool.data is a NoneType, must be an array"),
    ):
        with pytest.raises(ValueError, match=message):
            move_rows(pool, slots, slots)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_layers": 0}, "num_layers=0 must be an integer of at least 1"),
        ({"num_pages": -1}, "num_pages=-1 must be an integer of at least 1"),
        ({"page_size": 0}, "page_size=0 must be an integer of at least 1"),
        (
            {"dtype": jnp.float8_e4m3},
            "dtype=float8_e4m3 must be one of bfloat16, float16, float32, float8_e4m3fn, float",
        ),
        ({"dtype": "floaty"}, "dtype='floaty' must be a dtype"),
        ({"dtype": None}, "dtype=None must be a dtype"),
        ({"num_pages": 4.0}, "num_pages=4.0 must be an integer of at least 1"),
        ({"num_pages": 2**30}, "num_pages=1073741824, page_size=8: .* at most 2147483647"),
        ({"num_layers": 2**30, "page_size": 1}, "num_layers=1073741824, .* at most 2147483647"),
    ],
)
def test_errors(unchecked, change, message):
    with pytest.raises(ValueError, match=message):
        LatentPool.create(**{**SIZES, "spec": SPEC, **change})


def test_parts_of_a_pool_on_several_devices():
    """Equal parts of the pages of every layer, where equal parts of the arrays are those."""
    pool = LatentPool(jnp.zeros((6, 4, 8)), 1, 24, 8)  # a quarter of the array, inside shard_map
    local = pool.local(ranks=4)
    local.check()
    assert (local.num_pages, local.layer_stride) == (6, 6)
    pages_first = LatentPool(jnp.zeros((12, 4, 8)), 2, 12, 8, page_stride=2, layer_stride=1).local(ranks=2)
    pages_first.check()
    assert (pages_first.num_pages, pages_first.page_stride, pages_first.layer_stride) == (6, 2, 1)
    with pytest.raises(ValueError, match="ranks=5 must be a divisor of num_pages=24"):
        pool.local(ranks=5)
    with pytest.raises(ValueError, match="ranks=2 with page_stride=1 and layer_stride=12: a part of the arrays"):
        LatentPool(jnp.zeros((24, 4, 8)), 2, 12, 8).local(ranks=2)
