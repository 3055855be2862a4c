"""What ``gqa_attention`` hands to the Hopper kernel, without a GPU: work lists, teams, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import helpers
from kernel_calls import make_gqa
from mla_attn import dispatch
from mla_attn.cache import KVPool
from mla_attn.cache.formats import FORMATS
from mla_attn.dispatch import compiling_for
from mla_attn.mosaic_gpu import gqa as mosaic_gpu
from mla_attn.ops.gqa import GQACall
from mla_attn.specs import GQASpec
from mla_attn.support import H200


@pytest.fixture
def lists(monkeypatch):
    """The plans of the work lists made."""
    made, even_list = [], mosaic_gpu.even_list
    dispatch._compute.clear_cache()  # a call that was traced before makes none

    def counted(*arguments, plan, **options):
        made.append(plan)
        return even_list(*arguments, plan=plan, **options)

    monkeypatch.setattr(mosaic_gpu, "even_list", counted)
    return made


def trace(attend, metadata, arguments):
    with compiling_for(H200):
        return jax.eval_shape(attend, arguments[0], metadata, *arguments[2:])


def test_a_planned_call_makes_no_list_of_its_own(lists):
    plan, attend, arguments = make_gqa(max_q_len=3)
    with compiling_for(H200):
        planned = plan(*arguments[:2])
    assert planned.work.shape == (lists[0].size,)
    trace(attend, planned, arguments)
    trace(make_gqa(max_q_len=3, out_dtype=jnp.float32)[1], planned, arguments)  # one list for results of any type
    assert len(lists) == 1
    trace(attend, arguments[1], arguments)
    assert len(lists) == 2 and lists[0] == lists[1]


@pytest.mark.parametrize("change", [{"causal": False}, {"batch_invariant": True}, {"window": 9}])
def test_a_call_other_than_planned_makes_its_own_list(change, lists):
    plan, _, arguments = make_gqa(max_q_len=2)
    with compiling_for(H200):
        planned = plan(*arguments[:2])
    trace(make_gqa(max_q_len=2, **change)[1], planned, arguments)
    assert len(lists) == 2


def test_lengths_replaced_are_planned_again(lists):
    plan, _, (pool, metadata, *_) = make_gqa()
    with compiling_for(H200):
        first = plan(pool, metadata)
        second = plan(pool, dataclasses.replace(first, kv_lens=first.kv_lens + 60))
    assert len(lists) == 2
    assert (first.work != second.work).any()


@pytest.mark.parametrize(
    "heads, kv_heads, sizes, want",
    [
        (32, 8, {}, ("gqa_stream", 1, 2, 4, 33)),
        (32, 8, {"head_dim": 256}, ("gqa_stream", 1, 1, 4, 33)),
        (4, 1, {}, ("gqa_stream", 1, 1, 1, 132)),
        (28, 7, {}, ("gqa_stream", 1, 1, 1, 132)),
        (64, 16, {}, ("gqa_stream", 1, 2, 4, 33)),
        (24, 6, {}, ("gqa_stream", 1, 2, 3, 44)),
        (48, 12, {}, ("gqa_stream", 1, 2, 6, 22)),
        (32, 8, {"max_q_len": 16}, ("gqa_decode", 1, 2, 4, 33)),
        (32, 8, {"batch_invariant": True}, ("gqa_decode", 1, 2, 4, 33)),
        (128, 1, {}, ("gqa_decode", 2, 2, 1, 132)),
        (71, 1, {}, ("gqa_decode", 2, 2, 1, 132)),
        (32, 8, {"cache": "float8_e4m3fn"}, ("gqa_stream", 1, 4, 2, 66)),
        (32, 8, {"cache": "float8_e5m2", "max_q_len": 5}, ("gqa_stream", 1, 2, 4, 33)),
        (8, 2, {"cache": "float8_e5m2"}, ("gqa_stream", 1, 2, 1, 132)),
        (8, 1, {"cache": "float8_e4m3fn"}, ("gqa_stream", 1, 1, 1, 264)),
        (64, 1, {"cache": "float8_e4m3fn", "head_dim": 256}, ("gqa_stream", 2, 1, 2, 66)),
    ],
)
def test_divisions(heads, kv_heads, sizes, want):
    """Teams together take all KV heads, or the sets of their query heads, and keep all multiprocessors busy."""
    sizes = {"max_q_len": 1, **sizes}
    invariant = sizes.pop("batch_invariant", False)
    plan, _, arguments = make_gqa(heads=heads, kv_heads=kv_heads, batch_invariant=invariant, **sizes)
    with compiling_for(H200):
        launch = jax.eval_shape(plan, *arguments[:2]).work_plan
    options = {"max_q_len": sizes["max_q_len"], "batch_invariant": invariant}
    with compiling_for(H200):
        division = mosaic_gpu.divide(batch_spec(heads, kv_heads, sizes), arguments[0].format, **options)
    made = launch.plan
    assert (division.kernel, division.parts, made.block_heads, made.lanes, made.teams) == want
    assert made.kv_heads == kv_heads * division.parts and made.kv_heads % made.set_heads == 0
    assert made.blocks == division.sharing * H200.cores
    assert 0 <= division.parts * division.heads - heads // kv_heads < division.parts


def batch_spec(heads, kv_heads, sizes):
    return GQASpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=sizes.get("head_dim", 128), scale=0.1)


@pytest.mark.parametrize("heads, rows, tile_tokens", [(8, 1, 1), (8, 6, 6), (32, 64, 16), (24, 64, 21), (512, 3, 1)])
def test_row_tiles_hold_whole_tokens(heads, rows, tile_tokens):
    plan, _, arguments = make_gqa(heads=heads, max_q_len=rows, kv_lens=[65, 300])
    with compiling_for(H200):
        launch = jax.eval_shape(plan, *arguments[:2]).work_plan
    assert launch.plan.tile_tokens == tile_tokens
    assert launch.plan.tile_rows == tile_tokens * heads // 8 <= 64


@pytest.mark.parametrize(
    "width, refusal",
    [(64, None), (72, None), (128, None), (68, "pool rows of (68, 68) elements: must be multiples of 8")],
)
def test_which_rows_the_kernel_can_copy(width, refusal):
    array = jax.ShapeDtypeStruct((4, 16, 8, width), jnp.bfloat16)
    pool = jax.eval_shape(lambda a: KVPool.of(a, a, layout="nhd", head_dim=64, v_head_dim=64), array)
    spec = GQASpec(num_heads=32, num_kv_heads=8, head_dim=64, scale=0.1)
    assert mosaic_gpu.supports(GQACall.of(pool, spec), H200) == refusal


def test_heads_of_nobody():
    """71 query heads of a KV head become two sets of 36, of which the last one is nobody's."""
    spec = batch_spec(142, 2, {})
    division = mosaic_gpu.divide(spec, FORMATS["bfloat16"], max_q_len=1, batch_invariant=False)
    rows = jnp.arange(2 * 142, dtype=jnp.float32).reshape(2, 142)
    padded = mosaic_gpu._padded(rows, division, spec)
    assert padded.shape == (2, 2 * 2 * 36)
    assert padded[0, [0, 70, 71, 72, 142, 143]].tolist() == [0, 70, 0, 71, 141, 0]
    assert (mosaic_gpu._unpadded(padded, division, spec) == rows).all()


def test_where_windows_of_trees_begin():
    """At the least position of the request's own rows, counted from the table's first key."""
    batch = helpers.kv_batch(0, kv_lens=[40, 50, 9], q_lens=[3, 2, 0], max_q_len=4, kv_offsets=[16, 0, 0], window=8)
    m = dataclasses.replace(
        batch.metadata, positions=jnp.asarray([37, 38, 38, 1] + [49, 48, 2, 3] + [4] * 4, jnp.int32)
    )
    assert mosaic_gpu._window_starts(m, 8)[:2].tolist() == [37 - 7 - 16, 48 - 7]
