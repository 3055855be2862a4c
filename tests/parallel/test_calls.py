"""Every mode over a mesh beside one device: heads, requests and contexts, axes of both types, either ``check_vma``."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import ranks as r
from kernel_calls import needs_kernels
from mla_attn import parallel, steps
from mla_attn.cache import LatentPool, move_rows
from mla_attn.dispatch import compiling_for, current_device
from mla_attn.metadata import for_decode, for_extend, for_target_verify
from mla_attn.ops import gqa_attention, mla_attention, quantize_queries
from mla_attn.specs import MLASpec
from mla_attn.speculative import path_moves
from mla_attn.support import H200
from ranks import CONTEXTS, GQA, LAYER, MLA, MODES, PAGE, Ranks, compare, gqa_rows, gqa_step, mla_rows, mla_step

LAYOUTS = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 2, 4)]
WAYS = [(kind, check) for kind in (AxisType.Auto, AxisType.Explicit) for check in (True, False)]
each_way = pytest.mark.parametrize(("kind", "check_vma"), WAYS, ids=lambda x: getattr(x, "name", f"vma={x}"))


@each_way
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode, kind, check_vma):
    compare(Ranks(2, 2, 2, kind, check_vma), MLA, mode, return_lse=True)


@pytest.mark.parametrize("edges", [0, 1])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_layouts(sizes, edges):
    """At the edges of what a rank's page, and a page of every rank, hold."""
    ranks = Ranks(*sizes)
    compare(ranks, MLA, "decode", prefix=r.lengths(ranks, edges=edges), longest=16, return_lse=True)
    compare(ranks, MLA, "extend", prefix=r.lengths(ranks, edges=edges), longest=16)


@pytest.mark.parametrize("mode", ["prefill", "extend"])
@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 1, 2), (1, 2, 4), (2, 2, 2)], ids=str)
def test_expanded(mode, sizes):
    """Over per-head keys and values; ``extend`` gathers a sharded prefix in chunks, of which the last is short."""
    ranks = Ranks(*sizes)
    prefix, lens = np.zeros(4, int) if mode == "prefill" else np.asarray([0, 1, 9, 13]), np.asarray([3, 1, 2, 3])
    c = r.cached(ranks, prefix, MLA, longest=16)
    shapes = {"q": (8, 12 + 8), "k": (8, 12 + 8), "v": (8, 6), "latent": (16,), "rope": (8,)}
    arrays = {name: r.random(i, 12, *shape) for i, (name, shape) in enumerate(shapes.items())}
    options = {"chunk_size": 6} if mode == "extend" else {}
    if mode == "extend":
        arrays |= {"w_uk": r.random(6, 8, 12, 16), "w_uv": r.random(7, 8, 6, 16)}
    step = getattr(steps, mode)
    wanted, one = r.on_one_device(step, c, MLA, "extend", prefix, arrays, return_lse=True, **options)
    metadata = ranks.plan(for_extend, c.sharded_table, jnp.asarray(prefix + lens), jnp.asarray(lens), max_q_len=3)
    run = ranks.sharded(step)
    *got, many = run(
        **arrays, pool=c.sharded_pool, metadata=metadata, spec=MLA, layer=LAYER, return_lse=True, **options
    )
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, **CONTEXTS)
    r.assert_same_cache(c, one, many, prefix + lens)


@each_way
def test_gqa_modes(kind, check_vma):
    compare(Ranks(2, 2, 2, kind, check_vma), GQA, "ragged_verify", return_lse=True)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("layout", ["hnd", "interleaved"])
def test_gqa_layouts(sizes, layout):
    compare(Ranks(*sizes), GQA, "decode", pool={"layout": layout}, return_lse=True)


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2), (1, 1, 4), (4, 1, 1), (4, 1, 2)], ids=str)
def test_gqa_prompts(sizes):
    """The keys of the call alone, as given: each device reads the KV heads of its own query heads."""
    compare(Ranks(*sizes), GQA, "extend", step=steps.gqa_prefill, prefix=[0, 0, 0, 0], return_lse=True)


@pytest.mark.parametrize("sizes", [(4, 1, 1), (4, 1, 2), (4, 2, 1)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_kv_heads_than_devices(kv_heads, sizes):
    spec, ranks = dataclasses.replace(GQA, num_kv_heads=kv_heads), Ranks(*sizes)
    compare(ranks, spec, "mixed", repeated=4 // kv_heads, return_lse=True)


def test_kv_heads_that_devices_cannot_share():
    with pytest.raises(ValueError, match=r"heads=4 must be a divisor or a multiple of num_kv_heads=3"):
        dataclasses.replace(GQA, num_heads=12, num_kv_heads=3).shard(heads=4)
    with pytest.raises(ValueError, match=r"heads=3 must be a divisor of num_heads=8"):
        MLA.shard(heads=3)


@pytest.mark.parametrize("spec", [MLA, GQA], ids=["mla", "gqa"])
@pytest.mark.parametrize("rules", [{"window": 4}, {"soft_cap": 2.0}], ids=["window", "soft_cap"])
def test_rules(spec, rules):
    """A window hides all keys of some ranks; a tree mask needs one of at least its columns."""
    spec = dataclasses.replace(spec, **rules)
    for mode in ("decode", "tree_verify"):
        compare(Ranks(1, 1, 4), spec, mode, prefix=[0, 1, 9, 12], return_lse=True)


@pytest.mark.parametrize("spec", [MLA, GQA], ids=["mla", "gqa"])
def test_sinks_count_once(spec):
    """After the merge; with the log-sum-exp, partial results are to be merged first."""
    sinks = jnp.linspace(-2.0, 3.0, 8)
    compare(Ranks(2, 1, 2), spec, "decode", sinks=sinks)
    with pytest.raises(ValueError, match="sinks with return_lse=True"):
        compare(Ranks(2, 1, 2), spec, "decode", sinks=sinks, return_lse=True)


@pytest.mark.parametrize("spec", [MLA, GQA], ids=["mla", "gqa"])
def test_float8_cache(spec):
    """Scales of layers, of KV heads too, and float8 queries with scales of their own rows and heads."""
    if spec is MLA:
        options = {"scale": jnp.asarray([0.03, 0.02])}
    else:
        options = {"k_scale": jnp.asarray([[0.01, 0.02, 0.03, 0.04]] * 2), "v_scale": jnp.asarray([0.5, 0.02])}
    compare(Ranks(2, 1, 2), spec, "target_verify", pool={"dtype": "float8_e4m3fn", **options}, return_lse=True)


@pytest.mark.parametrize("spec", [MLA, GQA], ids=["mla", "gqa"])
def test_float8_queries(spec):
    """Their scales, of rows and heads, go with them."""
    ranks, lens = Ranks(2, 1, 2), jnp.asarray([3, 0, 9, 1], jnp.int32)
    c = r.cached(ranks, lens.tolist(), spec)
    rows = (mla_rows if spec is MLA else gqa_rows)(4)
    q = [(x * jnp.arange(1.0, 9.0)[None, :, None]).astype("bfloat16") for n, x in rows.items() if n.startswith("q")]
    op, (*q, q_scale) = (mla_attention if spec is MLA else gqa_attention), quantize_queries(*q)
    options = {"spec": spec, "layer": LAYER, "q_scale": q_scale, "out_dtype": jnp.dtype("float32")}
    metadata = for_decode(c.table, lens, page_size=PAGE)
    got = ranks.sharded(op)(*q, c.sharded_pool, ranks.plan(for_decode, c.sharded_table, lens), **options)
    np.testing.assert_allclose(got, op(*q, c.pool, metadata, **options), **CONTEXTS)


def test_ranks_without_keys():
    """Case C19: eight ranks, lengths 3, 0 and 9, so that some have no key of a request, and none has one of another."""
    ranks, lens = Ranks(1, 1, 8), jnp.asarray([3, 0, 9, 1], jnp.int32)
    c = r.cached(ranks, [3, 0, 9, 1], MLA)
    rows = mla_rows(4)
    queries = rows["q_latent"], rows["q_rope"]
    attend = ranks.sharded(mla_attention)
    metadata = ranks.plan(for_decode, c.sharded_table, lens)
    out, lse = attend(*queries, c.sharded_pool, metadata, MLA, layer=LAYER, return_lse=True)
    wanted = mla_attention(
        *queries, c.pool, for_decode(c.table, lens, page_size=PAGE), MLA, layer=LAYER, return_lse=True
    )
    np.testing.assert_allclose(out, wanted[0], **CONTEXTS)
    np.testing.assert_allclose(lse, wanted[1], **CONTEXTS)
    assert (out[1] == 0).all() and (lse[1] == -np.inf).all()


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_a_batch_rank_without_requests_goes_along(sizes):
    """Case C09: its rows give 0 and -inf, its cache stays."""
    ranks = Ranks(*sizes)
    c = r.cached(ranks, [5, 2, 4, 1], MLA)
    arrays, q_lens = mla_rows(12), jnp.asarray([3, 2, 0, 0], jnp.int32)
    metadata = ranks.plan(for_target_verify, c.sharded_table, jnp.asarray([5, 2, 0, 0]), num_tokens=3, q_lens=q_lens)
    before = np.asarray(c.sharded_pool.data)
    verify = ranks.sharded(steps.target_verify)
    out, lse, many = verify(**arrays, pool=c.sharded_pool, metadata=metadata, spec=MLA, layer=LAYER, return_lse=True)
    assert (out[6:] == 0).all() and (lse[6:] == -np.inf).all() and np.isfinite(lse[:5]).all()
    half = len(before) // 2
    np.testing.assert_array_equal(np.asarray(many.data)[half:], before[half:])


@pytest.mark.parametrize("spec", [MLA, GQA], ids=["mla", "gqa"])
def test_batch_invariant_over_contexts(spec):
    """A decode row has the bits of the same row of a verify call, over the same ranks."""
    ranks = Ranks(1, 1, 4)
    prefix = jnp.asarray([0, 5, 9, 12], jnp.int32)
    op, rows = (mla_attention, mla_rows(12)) if spec is MLA else (gqa_attention, gqa_rows(12))
    queries = [x for name, x in rows.items() if name.startswith("q")]
    c = r.cached(ranks, [3, 8, 12, 15], spec)
    attend = ranks.sharded(op)
    options = {"spec": spec, "layer": LAYER, "return_lse": True, "batch_invariant": True}
    verify = attend(
        *queries, c.sharded_pool, ranks.plan(for_target_verify, c.sharded_table, prefix, num_tokens=3), **options
    )
    for row in range(3):
        metadata = ranks.plan(for_decode, c.sharded_table, prefix + row + 1)
        decode = attend(*(q[row::3] for q in queries), c.sharded_pool, metadata, **options)
        for a, b in zip(decode, verify, strict=True):
            np.testing.assert_array_equal(a, b[row::3])


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_accepted_branch_moves_between_ranks(layout):
    """The rows of a draft tree's accepted branch, of which each may be on another rank than its new place."""
    ranks = Ranks(2, 1, 4)
    prefix = np.asarray([0, 5, 9, 12])
    c = r.cached(ranks, prefix + 3, GQA, layout=layout)
    metadata = ranks.plan(for_target_verify, c.sharded_table, jnp.asarray(prefix), num_tokens=3)
    path = jnp.asarray([[0, 2], [0, 1], [0, 2], [0, -1]], jnp.int32)
    slots = metadata.slots.reshape(4, 4, 3)  # of every rank, and request
    pairs = [path_moves(own, path) for own in slots]
    src, dst = (jnp.concatenate(x) for x in zip(*pairs, strict=True))
    many = ranks.sharded(move_rows)(c.sharded_pool, src, dst)
    m = for_target_verify(c.table, jnp.asarray(prefix), num_tokens=3, page_size=PAGE)
    one = move_rows(c.pool, *path_moves(m.slots.reshape(4, 3), path))
    r.assert_same_cache(c, one, many, prefix + 3)


def test_pools_are_made_in_place():
    """Every device has its own part, zeros of the right size, and the scales of its heads."""
    ranks = Ranks(4, 1, 2)
    spec = dataclasses.replace(GQA, num_kv_heads=2)
    scales = {"k_scale": jnp.asarray([[0.1, 0.2], [0.3, 0.4]]), "v_scale": 0.5}
    sizes = {"num_layers": 2, "num_pages": 3, "page_size": PAGE}
    pool = parallel.create_pool(spec, **sizes, dtype="float8_e4m3fn", **scales, **ranks.over)
    assert pool.k.shape == (2 * 6, PAGE, 4, 8) and pool.num_pages == 3
    assert {shard.data.shape for shard in pool.k.addressable_shards} == {(6, PAGE, 1, 8)}
    np.testing.assert_allclose(pool.k_scale, [[0.1, 0.1, 0.2, 0.2], [0.3, 0.3, 0.4, 0.4]], rtol=1e-6)


def compiled(ranks, spec, mode="decode", **options):
    """The compiled program of a step over ranks, and its pools."""
    c = r.cached(ranks, [5, 2, 9, 1], spec, **options)
    builder, lens, built, rows, _ = r.call(mode, np.asarray([5, 2, 9, 1]))
    arrays = mla_rows(rows) if spec is MLA else gqa_rows(rows)
    step = ranks.sharded((mla_step if spec is MLA else gqa_step)(mode))
    metadata = ranks.plan(builder, c.sharded_table, *lens, **built)
    run = jax.jit(functools.partial(step, spec=spec, layer=LAYER), donate_argnames="pool")
    return run.lower(**arrays, pool=c.sharded_pool, metadata=metadata).compile(), c


def collectives(program) -> dict[str, int]:
    names = re.findall(
        r" (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?\(", program.as_text()
    )
    return {name: names.count(name) for name in names}


@pytest.mark.parametrize("spec", [MLA, GQA], ids=["mla", "gqa"])
@pytest.mark.parametrize("sizes", [(4, 2, 1), (2, 2, 2), (1, 1, 8)], ids=str)
def test_collectives(sizes, spec):
    """None for heads and requests; contexts gather the queries, and exchange two partial results."""
    program, _ = compiled(Ranks(*sizes), spec)
    assert collectives(program) == ({} if sizes[2] == 1 else {"all-gather": 1, "all-to-all": 2})


@pytest.mark.parametrize("mode", ["decode", "extend"])
def test_no_copy_of_a_pool(mode):
    """Pages that a device has more of cost no memory besides their own."""
    small, large = (compiled(Ranks(2, 2, 2), MLA, mode, longest=longest) for longest in (16, 1600))
    shards = [c.sharded_pool.data.addressable_shards[0].data.nbytes for _, c in (small, large)]
    assert shards[1] > 20 * shards[0]
    memory = [program.memory_analysis() for program, _ in (small, large)]
    assert all(m.alias_size_in_bytes >= shard for m, shard in zip(memory, shards, strict=True))
    assert memory[1].temp_size_in_bytes < memory[0].temp_size_in_bytes + shards[1] // 2


@needs_kernels
@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 1, 2), (1, 4, 1)], ids=str)
@each_way
def test_kernels_lower(sizes, kind, check_vma):
    """For four devices, with the work list of ``plan``: a call without makes its own."""
    ranks = Ranks(*sizes, kind, check_vma)
    spec = MLASpec(num_heads=64, kv_lora_rank=512, qk_rope_head_dim=64, scale=0.1)
    pool = jax.eval_shape(lambda: parallel.create_pool(spec, num_layers=2, num_pages=4, page_size=64, **ranks.over))
    X, options = jax.ShapeDtypeStruct, {"page_size": 64, "check_vma": check_vma, **ranks.over}
    plan = functools.partial(parallel.plan, for_decode, pool=pool, spec=spec, **options)
    rows = (X((4, 64, 512), "bfloat16"), X((4, 64, 64), "bfloat16"), X((4, 512), "bfloat16"), X((4, 64), "bfloat16"))
    step = jax.jit(functools.partial(ranks.sharded(steps.decode), spec=spec))
    with compiling_for(H200):
        metadata = jax.eval_shape(plan, X((4, 2), jnp.int32), X((4,), jnp.int32))
        own = dataclasses.replace(metadata, work=X((0,), jnp.int32), work_plan=None)
        texts = [step.trace(*rows, pool, m).lower(lowering_platforms=("cuda",)).as_text() for m in (metadata, own)]
    assert all("custom_call @mosaic_gpu" in text for text in texts)
    assert metadata.work.shape[0] > 0 and len(texts[0]) < len(texts[1])


def test_the_mesh_says_which_device():
    """A mesh of CPU devices gets no kernels of a GPU that is the default device."""
    seen = []

    def ask(x):
        seen.append(current_device())
        return x

    jax.eval_shape(jax.shard_map(ask, mesh=Ranks(2).mesh, in_specs=jax.P(), out_specs=jax.P()), jnp.ones(2))
    assert seen[0].platform == "cpu"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": ("x", "x")}, r"heads=\('x', 'x'\) must not repeat an axis"),
        ({"heads": 3}, "heads=3 must be a tuple of names"),
        ({"heads": "x", "context": ("x",)}, "an axis must be in one of them"),
    ],
)
def test_layouts_that_are_wrong(fields, message):
    with pytest.raises(ValueError, match=message):
        parallel.Layout(**fields)


def test_errors():
    ranks = Ranks(2, 2)
    with pytest.raises(ValueError, match=r"experts has the axis 'other', must be axes of the mesh: \('batch', "):
        parallel.sharded(steps.decode, mesh=ranks.mesh, layout=parallel.Layout(experts="other"))
    with pytest.raises(ValueError, match=r"must be a step of mla_attn\.steps"):
        ranks.sharded(jnp.sum)
    metadata = ranks.plan(for_decode, jnp.zeros((2, 3), jnp.int32), jnp.ones(2, jnp.int32))
    rows = mla_rows(2)
    one = LatentPool.create(num_layers=2, num_pages=4, page_size=PAGE, spec=MLA, dtype="float32")
    with pytest.raises(ValueError, match=r"metadata has the arrays of 2 devices, of parallel\.plan"):
        steps.decode(**rows, pool=one, metadata=metadata, spec=MLA)
    with pytest.raises(ValueError, match=r"metadata has the arrays of 1 device\(s\), must be of 2"):
        made = for_decode(jnp.zeros((2, 3), jnp.int32), jnp.ones(2, jnp.int32), page_size=PAGE)
        ranks.sharded(steps.decode)(**rows, pool=one, metadata=made, spec=MLA)
    with pytest.raises(ValueError, match="num_rows=7 must be a multiple of the 2 batch ranks"):
        ranks.plan(
            for_extend, jnp.zeros((2, 3), jnp.int32), jnp.ones(2, int), jnp.ones(2, int), max_q_len=2, num_rows=7
        )
    with pytest.raises(ValueError, match="num_heads=8 must be a multiple of the 6 devices that share them"):
        compare(Ranks(2, 1, 3), GQA, "decode", prefix=[1, 2, 3, 4])
