"""Tests cache groups: the spec's kind decides the pool and the op that is asked."""

import numpy as np
import pytest

from mla_attn import GQASpec, KVPool, LatentPool, MLASpec
from mla_attn.models import CacheGroup

LATENT = MLASpec(num_heads=4, kv_lora_rank=16, qk_rope_head_dim=8, scale=1.0)
HEADS = GQASpec(num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=8, scale=0.25, window=5)


def group(spec, **fields) -> CacheGroup:
    return CacheGroup(name="full", num_layers=3, spec=spec, dtype=np.dtype("float32"), **fields)


def test_latent_group():
    pool = group(LATENT).create_pool(num_pages=2, page_size=4)
    assert isinstance(pool, LatentPool)
    assert (pool.num_layers, pool.num_pages, pool.page_size) == (3, 2, 4)
    assert group(LATENT).window is None


def test_kv_group():
    pool = group(HEADS).create_pool(num_pages=2, page_size=4)
    assert isinstance(pool, KVPool)
    assert pool.k.shape == (6, 4, 2, 16) and pool.v is not None and pool.v.shape == (6, 4, 2, 8)
    assert pool.dtype == np.float32 and pool.num_layers == 3
    assert group(HEADS).window == 5


def test_support_is_that_of_the_specs_op():
    for spec in (LATENT, HEADS):
        group(spec, sinks=True).check_supported(page_size=4, implementation=None)
    with pytest.raises(NotImplementedError, match=r"mla_attention.*mosaic_gpu.*cpu"):
        group(LATENT).check_supported(page_size=4, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match=r"gqa_attention.*mosaic_gpu.*cpu"):
        group(HEADS).check_supported(page_size=4, implementation="mosaic_gpu")
