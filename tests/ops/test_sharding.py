"""The ops inside ``jax.shard_map`` over two CPU devices, with and without JAX's check of what varies over the mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import helpers
from mla_attn import steps
from mla_attn.cache import LatentPool, move_rows, read_latent, write_latent
from mla_attn.dispatch import compiling_for
from mla_attn.metadata import (
    RaggedMetadata,
    for_decode,
    for_draft_decode,
    for_draft_extend,
    for_extend,
    for_mixed,
    for_target_verify,
)
from mla_attn.ops import gqa_attention, merge_states, mla_attention, ragged_attention
from mla_attn.ops.grouped_matmul import grouped_matmul
from mla_attn.specs import MLASpec
from mla_attn.speculative import (
    DraftTree,
    accept_greedy,
    accept_sampled,
    accept_tree,
    mask_of_parents,
    path_moves,
    prune,
)
from mla_attn.support import H200
from ops.lanes import shrink

HEADS = P(None, "heads")
every_check = pytest.mark.parametrize("check_vma", [False, True])
both = pytest.mark.parametrize("implementation", ["xla", "reference"])


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((2,), ("heads",), axis_types=(kind,), devices=jax.devices("cpu")[:2])


def sharded(function, in_specs, out_specs, check_vma):
    return jax.jit(jax.shard_map(function, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma))


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def assert_near(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@both
@every_check
@pytest.mark.parametrize("max_lanes", [1, 256])
def test_mla_attention_over_heads(implementation, check_vma, max_lanes, monkeypatch):
    """Every device attends with its heads over the same pool; one lane, and several that are merged."""
    from mla_attn.ops import mla

    shrink(monkeypatch, mla, block_keys=8, max_lanes=max_lanes)
    batch = helpers.poisoned_batch(0, kv_lens=[9, 0, 30], q_lens=[2, 1, 3], heads=4)

    def attend(q_latent, q_rope, pool, metadata):
        spec = dataclasses.replace(batch.spec, num_heads=q_latent.shape[1])
        return mla_attention(q_latent, q_rope, pool, metadata, spec, return_lse=True, implementation=implementation)

    arrays = batch.q_latent, batch.q_rope, batch.pool, batch.metadata
    run = sharded(attend, (HEADS, HEADS, P(), P()), (HEADS, HEADS), check_vma)
    assert_near(run(*arrays), attend(*arrays))


@both
@every_check
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_gqa_attention_over_heads(implementation, check_vma, layout):
    """Every device has a pool of its KV heads, and their query heads."""
    sizes = {"kv_lens": [9, 0, 30], "q_lens": [2, 1, 3], "heads": 8, "kv_heads": 2}
    batch = helpers.kv_batch(0, **sizes, pool_layout=layout, window=12)

    def attend(q, sinks, pool, metadata):
        spec = dataclasses.replace(batch.spec, num_heads=q.shape[1], num_kv_heads=pool.num_kv_heads)
        return gqa_attention(q, pool, metadata, spec, sinks=sinks, implementation=implementation)

    arrays = batch.q, random(0, 8), batch.pool, batch.metadata
    pages = P(None, "heads") if layout == "hnd" else P(None, None, "heads")
    run = sharded(attend, (HEADS, P("heads"), pages, P()), HEADS, check_vma)
    assert_near(run(*arrays), attend(*arrays))


@every_check
def test_mla_attention_over_pages(check_vma):
    """Every device attends over a pool of its own with the same queries, and the partials are merged."""
    batches = [helpers.poisoned_batch(seed, kv_lens=[9, 17], q_lens=[1, 2], num_pages=9) for seed in range(2)]
    q_latent, q_rope = batches[0].q_latent, batches[0].q_rope
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *((b.pool, b.metadata) for b in batches))
    spec = batches[0].spec

    def attend(q_latent, q_rope, pool_and_metadata):
        pool, metadata = jax.tree.map(lambda x: x[0], pool_and_metadata)
        part = mla_attention(q_latent, q_rope, pool, metadata, spec, return_lse=True, implementation="xla")
        outs, lses = (jax.lax.all_gather(x, "heads") for x in part)
        return jax.tree.map(lambda x: x[None], merge_states(list(outs), list(lses)))

    got = sharded(attend, (P(), P(), P("heads")), P("heads"), check_vma)(q_latent, q_rope, stacked)
    parts = [mla_attention(q_latent, q_rope, b.pool, b.metadata, spec, return_lse=True) for b in batches]
    want = merge_states(*map(list, zip(*parts, strict=True)))
    for device in range(2):
        assert_near(jax.tree.map(lambda x, device=device: x[device], got), want)


@both
@every_check
def test_ragged_attention_over_heads(implementation, check_vma):
    metadata = RaggedMetadata(
        q_starts=jnp.asarray([0, 3], jnp.int32),
        q_lens=jnp.asarray([3, 1], jnp.int32),
        kv_starts=jnp.asarray([0, 9], jnp.int32),
        kv_lens=jnp.asarray([9, 4], jnp.int32),
        max_q_len=3,
        max_kv_len=9,
    )
    arrays = random(0, 5, 4, 8), random(1, 13, 2, 8), random(2, 13, 2, 6), metadata

    def attend(*arrays):
        return ragged_attention(*arrays, scale=0.3, return_lse=True, implementation=implementation)

    run = sharded(attend, (HEADS, HEADS, HEADS, P()), (HEADS, HEADS), check_vma)
    assert_near(run(*arrays), attend(*arrays))


@every_check
@pytest.mark.parametrize("mode", ["prefill", "extend", "absorbed_extend"])
def test_prompts_over_heads(mode, check_vma):
    """Write, attend, also to a cached prefix; the pool stays the same on every device."""
    batch = helpers.poisoned_batch(0, kv_lens=[12, 3], q_lens=[3, 1], heads=4, poison=0.0)
    prefix = [0, 0] if mode == "prefill" else [9, 2]
    lens, rows = jnp.asarray(prefix, jnp.int32), jnp.asarray([3, 1], jnp.int32)
    metadata = for_extend(batch.metadata.page_table, lens + rows, rows, max_q_len=3, page_size=4)
    rank, rope = batch.spec.kv_lora_rank, batch.spec.qk_rope_head_dim
    latent, fresh = (random(0, 6, rank), random(1, 6, rope)), (random(2, 6, 4, 8 + rope), random(3, 6, 4, 8 + rope))
    weights = (random(4, 4, 8, rank), random(5, 4, 6, rank)) if mode == "extend" else ()
    queries = (*fresh, random(6, 6, 4, 6)) if mode != "absorbed_extend" else (batch.q_latent, batch.q_rope)

    def step(queries, latent, weights, pool, metadata):
        spec = dataclasses.replace(batch.spec, num_heads=queries[0].shape[1])
        out, _ = getattr(steps, mode)(*queries, *latent, *weights, pool, metadata, spec)
        return out

    arrays = queries, latent, weights
    run = sharded(step, (HEADS, P(), P("heads"), P(), P()), HEADS, check_vma)
    got = run(*arrays, batch.pool, metadata)
    assert_near(got, step(*arrays, jax.tree.map(jnp.copy, batch.pool), metadata))


@both
@every_check
def test_grouped_matmul_over_columns(implementation, check_vma):
    arrays = random(0, 6, 8), random(1, 3, 8, 4), jnp.asarray([2, 0, 3], jnp.int32)

    def multiply(*arrays):
        return grouped_matmul(*arrays, implementation=implementation)

    run = sharded(multiply, (P(), P(None, None, "heads"), P()), P(None, "heads"), check_vma)
    assert_near(run(*arrays), multiply(*arrays))


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PAGES = {"page_size": 4}
PACKED = PAGES | {"max_q_len": 3, "num_rows": 5}
KEYS = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
AROUND_THE_OPS = {  # a function of B = 2 requests, and its arguments after the pool
    "accept_greedy": (lambda pool, *x: accept_greedy(*x), ints(2, 3), ints(2, 4), ints(2)),
    "accept_sampled": (lambda _, *x: accept_sampled(*x), KEYS, ints(2, 3), floats(2, 3, 5), floats(2, 4, 5), ints(2)),
    "chosen drafts": (lambda _, k, d, *x: accept_sampled(k, d, None, *x), KEYS, ints(2, 3), floats(2, 4, 5), ints(2)),
    "accept_tree": (lambda pool, *x: accept_tree(*x, max_depth=2), ints(2, 3), ints(2, 3), ints(2, 3), ints(2)),
    "path_moves": (lambda pool, *x: path_moves(*x), ints(2, 3), ints(2, 2)),
    "mask_of_parents": (lambda pool, *x: mask_of_parents(*x), ints(2, 3)),
    "prune": (lambda pool, *x: prune(*x, DraftTree((2, 2)), budget=3), ints(2, 7), floats(2, 7)),
    "for_decode": (lambda pool, *x: for_decode(*x, **PAGES), ints(2, 2), ints(2)),
    "for_target_verify": (
        lambda pool, *x: for_target_verify(*x, num_tokens=3, depths=jnp.arange(3), **PAGES), ints(2, 2), ints(2),
    ),
    "for_draft_extend": (lambda pool, *x: for_draft_extend(*x, **PACKED), ints(2, 2), ints(2), ints(2)),
    "for_draft_decode": (lambda pool, *x: for_draft_decode(*x, 1, num_tokens=3, **PAGES), ints(2, 2), ints(2)),
    "for_mixed": (lambda pool, *x: for_mixed(*x, **PACKED), ints(2, 2), ints(2), ints(2)),
    "read_latent": (lambda pool, *x: read_latent(pool, *x, 3), ints(2, 2), ints(2)),
    "write_latent": (lambda pool, *x: write_latent(pool, *x).data, floats(2, 4), floats(2, 2), ints(2)),
    "move_rows": (lambda pool, *x: move_rows(pool, *x).data, ints(2), ints(2)),
}  # fmt: skip


@pytest.mark.parametrize("varying", ["the first", "the last", "all"])
@pytest.mark.parametrize("case", AROUND_THE_OPS)
def test_what_surrounds_the_ops_is_traced(case, varying):
    """Whichever of its arguments differ between devices; nothing is compiled."""
    function, *arrays = AROUND_THE_OPS[case]
    chosen = {"the first": {0}, "the last": {len(arrays) - 1}, "all": set(range(len(arrays)))}[varying]
    spec = MLASpec(num_heads=1, kv_lora_rank=4, qk_rope_head_dim=2, scale=1.0)
    pool = jax.eval_shape(lambda: LatentPool.create(num_layers=1, num_pages=4, page_size=4, spec=spec, dtype="float32"))
    differ = P("heads")

    def run(pool, *arrays):
        return jax.tree.map(
            lambda x: x[None], function(pool, *(x[0] if i in chosen else x for i, x in enumerate(arrays)))
        )

    stacked = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) if i in chosen else x for i, x in enumerate(arrays)]
    specs = (P(), *(differ if i in chosen else P() for i in range(len(arrays))))
    jax.eval_shape(sharded(run, specs, differ, check_vma=True), pool, *stacked)


@pytest.mark.parametrize("op", ["mla_attention", "grouped_matmul"])
def test_results_of_kernels_vary(op):
    """So that JAX's check refuses to take those of one device for everybody's."""
    sizes = {"heads": 16, "kv_lora_rank": 256, "qk_rope_head_dim": 64, "page_size": 64, "dtype": jnp.bfloat16}
    batch = helpers.poisoned_batch(0, kv_lens=[5, 70], q_lens=[1, 1], **sizes)
    if op == "mla_attention":
        arrays, specs = (batch.q_latent, batch.q_rope, batch.pool, batch.metadata), (HEADS, HEADS, P(), P())
    else:
        arrays = (
            jnp.ones((8, 64), jnp.bfloat16),
            jnp.ones((3, 64, 256), jnp.bfloat16),
            jnp.asarray([3, 0, 5], jnp.int32),
        )
        specs = (P(), P(None, None, "heads"), P())

    def run(*arrays):
        if op == "grouped_matmul":
            return grouped_matmul(*arrays, implementation="mosaic_gpu")
        spec = dataclasses.replace(batch.spec, num_heads=arrays[0].shape[1])
        return mla_attention(*arrays, spec, implementation="mosaic_gpu")

    with compiling_for(H200):
        out = jax.eval_shape(sharded(run, specs, HEADS, True), *arrays)
        assert out.shape == ((2, 16, 256) if op == "mla_attention" else (8, 256))
        with pytest.raises(ValueError, match="out_specs"):
            jax.eval_shape(sharded(run, specs, P(), True), *arrays)


def test_explicit_axes_are_refused():
    """Sharding in types would need one for every intermediate: ``jax.shard_map`` has none of them."""
    batch = helpers.poisoned_batch(0, kv_lens=[9], q_lens=[1])
    explicit = mesh(AxisType.Explicit)
    q_latent, q_rope = (jax.device_put(x, NamedSharding(explicit, HEADS)) for x in (batch.q_latent, batch.q_rope))
    attend = jax.jit(lambda *q: mla_attention(*q, batch.pool, batch.metadata, batch.spec))
    with jax.set_mesh(explicit), pytest.raises(NotImplementedError, match=r"mla_attention .* call it inside jax.shard"):
        attend(q_latent, q_rope)
