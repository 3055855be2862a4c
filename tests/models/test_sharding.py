"""Models over a mesh, inside ``jax.shard_map``: the logits of independent models, with requests and experts shared."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from checkpoints import GPT_OSS, V2, V3
from mla_attn import metadata as build
from mla_attn.models import load_checkpoint
from mla_attn.models.base import create_pools
from mla_attn.parallel import Layout, Parallelism
from mla_attn.parallel.layout import pool_specs

PAGE, WIDTH, ROWS = 16, 3, 41
REQUESTS = P("requests")
LAYOUTS = {
    "tokens of two ranks, experts of four": Layout(batch="requests", heads="heads", experts=("requests", "heads")),
    "experts over the ranks of requests": Layout(batch="requests", heads="heads", experts="requests"),
    "experts beside requests": Layout(batch="requests", heads="heads", experts="heads"),
}


def sharded(path, layout):
    """A model over two ranks of requests and two of heads, and the program of a pass over one prompt of each rank."""
    kinds, devices = (AxisType.Auto,) * 2, jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("requests", "heads"), axis_types=kinds, devices=devices)
    parallelism = Parallelism(mesh, layout)
    model = load_checkpoint(path, dtype=jnp.float32, parallelism=parallelism)
    graphdef, state = nnx.split(model)
    specs = jax.tree.map(lambda x: x.sharding.spec, state)
    pools = create_pools(model.cache_groups, num_pages=WIDTH + 1, page_size=PAGE, parallelism=parallelism)
    pool_parts = {name: pool_specs(pool, layout) for name, pool in pools.items()}

    def run(state, pools, tokens, table, lens, news):
        options = {"max_q_len": ROWS, "num_rows": ROWS, "page_size": PAGE}
        metadata = dict.fromkeys(pools, build.for_extend(table, lens, news, **options))
        model = nnx.merge(graphdef, state)
        hidden, pools = model(tokens, pools, metadata, mode="extend")
        return model.logits(hidden), pools

    given = (specs, pool_parts, *(REQUESTS,) * 4)
    shard = jax.shard_map(run, mesh=mesh, in_specs=given, out_specs=(REQUESTS, pool_parts), check_vma=False)
    return state, pools, jax.jit(shard, donate_argnums=1)


@pytest.mark.parametrize("path", [V2, GPT_OSS], ids=["v2", "gpt-oss"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_and_experts_over_the_same_devices(layout, path):
    """Each rank has a prompt of its own, in two chunks: first the other rank has no request."""
    state, pools, run = sharded(path, LAYOUTS[layout])
    with np.load(path / "expected.npz") as file:
        prompt, wanted = file["prompt_0"][:ROWS], file["logits_0"][:ROWS]
    length = len(prompt)
    table = jnp.asarray([[2, 0, 3], [1, 2, 0]], jnp.int32)
    tokens = np.zeros((2, ROWS), np.int32)
    tokens[0, :length] = prompt
    begin = jnp.asarray([length, 0], jnp.int32)
    logits, pools = run(state, pools, jnp.asarray(tokens.reshape(-1)), table, begin, begin)
    np.testing.assert_allclose(logits[:length], wanted, atol=2e-3)
    tokens[:] = 0
    tokens[1, :length] = prompt
    tokens[0, 0] = prompt[-1]  # the last row of the first prompt again, over its cached rows
    lens, news = (jnp.asarray(x, jnp.int32) for x in ([length, length], [1, length]))
    logits, pools = run(state, pools, jnp.asarray(tokens.reshape(-1)), table, lens, news)
    np.testing.assert_allclose(logits[0], wanted[-1], atol=2e-3)
    np.testing.assert_allclose(logits[ROWS : ROWS + length], wanted, atol=2e-3)


def test_collectives_of_a_pass():
    """Sums after attention and after each MLP; of experts the tokens are gathered, and their results scattered."""
    layout = LAYOUTS["tokens of two ranks, experts of four"]
    state, pools, run = sharded(V3, layout)
    X = jax.ShapeDtypeStruct
    tokens, table, lens = X((2 * ROWS,), jnp.int32), X((2, WIDTH), jnp.int32), X((2,), jnp.int32)
    text = run.lower(state, pools, tokens, table, lens, lens).as_text()
    config = load_checkpoint(V3, dtype=jnp.float32).config
    dense, moe = config.first_k_dense_replace, 1  # equal layers are one function of the program
    layers = dense + moe
    names = re.findall(r"stablehlo\.(all_reduce|all_gather|reduce_scatter)\W", text)
    found = {name: names.count(name) for name in names}
    # The embedding, o_proj of every layer, its MLP or shared experts, and the experts; the head's logits are gathered.
    assert found == {"all_reduce": 1 + 2 * layers + moe, "all_gather": 3 * moe + 1, "reduce_scatter": moe}
