"""Pools: sizes, placement, and what ``create`` refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.cache import LatentPool
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


@pytest.mark.parametrize("layer", [2, jnp.int32(2)])
def test_placement(layer):
    pool = LatentPool.create(**SIZES, spec=SPEC)
    assert pool.physical_pages(jnp.asarray([0, 3]), layer).tolist() == [8, 11]
    shared = LatentPool(jnp.zeros((30, 8, 7)), 3, 4, 5, 6, 2)
    assert shared.physical_pages(jnp.asarray([0, 3]), layer).tolist() == [4, 22]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_layers": 0}, "num_layers=0 must be an integer of at least 1"),
        ({"num_pages": -1}, "num_pages=-1 must be an integer of at least 1"),
        ({"page_size": 0}, "page_size=0 must be an integer of at least 1"),
        ({"dtype": jnp.float16}, "dtype=float16 must be one of bfloat16, float32"),
        ({"num_pages": 2**30}, "num_pages=1073741824, page_size=8: .* at most 2147483647"),
        ({"num_layers": 2**30, "page_size": 1}, "num_layers=1073741824, .* at most 2147483647"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=message):
        LatentPool.create(**{**SIZES, "spec": SPEC, **change})
