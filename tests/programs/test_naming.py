"""Names of values: equal where the values are, and nowhere else."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints import small_config
from mla_attn.models import DeepseekForCausalLM
from mla_attn.passes import Passes, Shapes
from mla_attn.passes.functions import Method
from mla_attn.programs import Unknown, identity
from mla_attn.programs.naming import surroundings
from mla_attn.specs import MLASpec
from mla_attn.speculative import DraftTree

SPEC = MLASpec(num_heads=4, kv_lora_rank=8, qk_rope_head_dim=8, scale=0.5)
DIFFERENT = [
    None,
    True,
    1,
    1.0,
    "1",
    b"1",
    "",
    (),
    [],
    {},
    (1, 2),
    (1, (2,)),
    ((1,), 2),
    ("1", "2"),
    ("12",),
    ("1 2",),
    [1, 2],
    {1: 2},
    {2: 1},
    -0.0,
    0.0,
    float("nan"),
    np.float32(1),
    np.float64(1),
    np.ones(1),
    np.ones((1, 1)),
    np.dtype("float32"),
    np.dtype("bfloat16"),
    jax.ShapeDtypeStruct((1,), jnp.float32),
    jax.ShapeDtypeStruct((1,), jnp.bfloat16),
    jax.tree.structure((0, {"a": 0})),
    jax.tree.structure((0, {"b": 0})),
    jax.tree.structure([0, {"a": 0}]),
    SPEC,
    dataclasses.replace(SPEC, scale=0.25),
    dataclasses.replace(SPEC, window=7),
    DraftTree((1, 2)),
    DraftTree((2, 1)),
    MLASpec,
    type(None),
    jax.nn.silu,
    jax.nn.gelu,
    functools.partial(jax.nn.gelu, approximate=True),
    functools.partial(jax.nn.gelu, approximate=False),
]


def test_names_differ_where_values_do():
    names = [identity(value) for value in DIFFERENT]
    assert len(set(names)) == len(names)
    assert names == [identity(value) for value in DIFFERENT]
    assert identity(1, 2) != identity((1, 2))


@pytest.mark.parametrize("value", [object(), jnp.ones(1), itertools.count(), identity.__get__(1), pytest.approx, {1}])
def test_what_is_not_known_in_full_has_no_name(value):
    with pytest.raises(Unknown):
        identity((1, [value]))


def made(seed=0, layers=1, **options):
    config = dataclasses.replace(small_config(32), num_hidden_layers=layers)
    model = DeepseekForCausalLM(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    shapes = Shapes(batches=(1,), prompt_rows=(8,), table_width=2, page_size=4, max_len=8)
    return identity(Method(Passes(model, shapes, **options).functions, "decode"))


def test_models_that_differ_in_their_arrays_alone_share_a_name():
    assert made() == made(seed=1)
    assert len({made(), made(layers=2), made(implementation="xla"), made(implementation="reference")}) == 4


@pytest.mark.parametrize("name", ["XLA_FLAGS", "MOSAIC_GPU_DUMP_PTX", "MLA_ATTN_IMPLEMENTATION"])
def test_the_environment_is_in_names(monkeypatch, name):
    before = identity(surroundings())
    monkeypatch.setenv(name, "--xla_other=1")
    assert identity(surroundings()) != before


@pytest.mark.parametrize("name", ["MLA_ATTN_CACHE_DIR", "MOSAIC_GPU_RUNTIME_LIB_PATH", "MOSAIC_GPU_CUDA_ROOT"])
def test_what_jax_sets_while_it_lowers_is_not(monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    before = identity(surroundings())
    monkeypatch.setenv(name, "/elsewhere")
    assert identity(surroundings()) == before
