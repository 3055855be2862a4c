"""What the ops hand to the Hopper kernels, without a GPU: work lists and when they are made, bits of tree masks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import helpers
from checkpoints import small_config
from kernel_calls import make
from mla_attn import dispatch
from mla_attn.cache import LatentPool
from mla_attn.dispatch import compiling_for
from mla_attn.models import DeepseekForCausalLM
from mla_attn.mosaic_gpu import mla as mosaic_gpu
from mla_attn.ops import plan_mla
from mla_attn.ops.mla import MLACall
from mla_attn.passes import Passes, Shapes
from mla_attn.specs import MLASpec
from mla_attn.support import H200


@pytest.fixture
def lists(monkeypatch):
    """The plans of the work lists made."""
    made, work_list = [], mosaic_gpu.work_list
    dispatch._compute.clear_cache()  # a call that was traced before makes none

    def counted(*arguments, plan, **options):
        made.append(plan)
        return work_list(*arguments, plan=plan, **options)

    monkeypatch.setattr(mosaic_gpu, "work_list", counted)
    return made


def trace(attend, metadata, arguments):
    with compiling_for(H200):
        return jax.eval_shape(attend, arguments[0], metadata, *arguments[2:])


@pytest.mark.parametrize("heads", [16, 20])
def test_a_planned_call_makes_no_list_of_its_own(heads, lists):
    plan, attend, arguments = make(heads=heads, max_q_len=3)
    with compiling_for(H200):
        planned = plan(*arguments[:2])
    assert planned.work.shape == (lists[0].size,)
    trace(attend, planned, arguments)
    assert len(lists) == 1
    trace(attend, arguments[1], arguments)
    assert len(lists) == 2 and lists[0] == lists[1]


@pytest.mark.parametrize("change", [{"causal": False}, {"batch_invariant": True}, {"out_dtype": jnp.float32}])
def test_a_call_other_than_planned_makes_its_own_list(change, lists):
    plan, _, arguments = make(max_q_len=2)
    with compiling_for(H200):
        planned = plan(*arguments[:2])
    _, attend, _ = make(max_q_len=2, **change)
    trace(attend, planned, arguments)
    assert len(lists) == 2


def test_results_wider_than_the_kernels_are_combined(lists):
    """What a thread block writes is rounded to bfloat16; the combine writes float32."""
    for out_dtype in (jnp.bfloat16, jnp.float32):
        _, attend, arguments = make(out_dtype=out_dtype)
        out, lse = trace(attend, arguments[1], arguments)
        assert (out.dtype, lse.dtype) == (out_dtype, jnp.float32)
    assert [plan.combine_all for plan in lists] == [False, True]


CORES = 132


@pytest.mark.parametrize(
    ("rows", "key_tiles", "kernel", "tile_rows"),
    [
        (8, 999, "mla_stream", 8),
        (24, 999, "mla_stream", 24),
        (32, 999, "mla_stream", 32),
        (40, 999, "mla_stream", 64),
        (64, 999, "mla_stream", 64),
        (72, 999, "mla_decode", 64),
        (128, 999, "mla_decode", 64),
        (40, CORES, "mla_stream", 32),  # a tile of keys for each multiprocessor, and no more: few keys
        (40, CORES + 1, "mla_stream", 64),
        (128, CORES, "mla_stream", 32),
        (128, CORES + 1, "mla_decode", 64),
        (136, CORES, "mla_decode", 64),
        (8, 1, "mla_stream", 8),
    ],
)
def test_which_kernel_and_how_many_rows(rows, key_tiles, kernel, tile_rows):
    """Calls bound by memory stream, in tiles no larger than a request, up to the 32 or 64 rows of a product; and those
    of few keys, in tiles of 32."""
    chosen = mosaic_gpu.choose_kernel(rows, key_tiles=key_tiles, cores=CORES, batch_invariant=False)
    assert chosen == (kernel, tile_rows)
    # Its bits are promised to be those of any mode.
    invariant = mosaic_gpu.choose_kernel(rows, key_tiles=key_tiles, cores=CORES, batch_invariant=True)
    assert invariant == ("mla_decode", 64)


@pytest.mark.parametrize(
    ("heads", "rows", "keys", "kernel", "tile_rows"),
    [
        (20, 1, 8192, "mla_stream", 24),  # heads are padded to a multiple of 8
        (16, 5, 8192, "mla_decode", 64),
        (128, 1, 4096, "mla_stream", 32),  # two tables of 66 tiles each
        (128, 1, 4097, "mla_decode", 64),  # of 67
    ],
)
def test_what_a_call_is_launched_with(heads, rows, keys, kernel, tile_rows):
    plan, _, arguments = make(heads=heads, max_q_len=rows, kv_lens=[65, keys])
    with compiling_for(H200):
        launch = jax.eval_shape(plan, *arguments[:2]).work_plan
    assert (launch.kernel, launch.plan.tile_rows) == (kernel, tile_rows)
    assert launch.plan.blocks == H200.cores == CORES


@pytest.mark.parametrize("implementation", ["xla", "reference", None])
def test_other_implementations_need_no_plan(implementation):
    batch = helpers.poisoned_batch(0, kv_lens=[5], q_lens=[1])
    planned = plan_mla(batch.metadata, batch.pool, batch.spec, implementation=implementation)
    assert planned is batch.metadata


def test_no_plan_for_what_is_not_supported():
    batch = helpers.poisoned_batch(0, kv_lens=[5], q_lens=[1], dtype=jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="mosaic_gpu: cpu"):
        plan_mla(batch.metadata, batch.pool, batch.spec, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "width, rope_offset, refusal",
    [
        (576, 512, None),
        (640, 512, None),
        (640, 576, None),
        (640, 520, "rope_offset=520: must be a multiple of 64"),
        (580, 512, "pool rows of 580 elements: must be a multiple of 8"),
    ],
)
def test_which_rows_the_kernels_can_copy(width, rope_offset, refusal):
    """A copy of part of a row begins at multiples of 16 bytes, and takes 64 channels at a time."""
    array = jax.ShapeDtypeStruct((4, 64, width), jnp.bfloat16)
    pool = jax.eval_shape(lambda a: LatentPool.of(a, kv_lora_rank=512, rope_dim=64, rope_offset=rope_offset), array)
    spec = MLASpec(num_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, scale=0.1)
    reason = mosaic_gpu.supports(MLACall.of(pool, spec), H200)
    assert reason == refusal


@pytest.mark.parametrize(
    "row_format, width, rope_offset, refusal",
    [
        ("plain", 576, 512, None),
        ("plain", 640, 576, None),
        ("plain", 584, 512, "pool rows of 584 elements: must be a multiple of 16"),
        ("plain", 640, 528, "rope_offset=528: must be a multiple of 64"),
        ("blocks", 656, 528, None),
        ("blocks", 704, 528, None),
        ("blocks", 704, 576, "rope_offset=576: must be 528"),
        ("blocks", 664, 528, "pool rows of 664 elements: must be a multiple of 16"),
    ],
)
def test_which_float8_rows_the_kernel_can_copy(row_format, width, rope_offset, refusal):
    """Elements are bytes; what follows the latents of rows in blocks is copied at once."""
    array = jax.ShapeDtypeStruct((4, 64, width), jnp.uint8)
    sizes = {"kv_lora_rank": 512, "rope_dim": 64, "rope_offset": rope_offset}
    pool = jax.eval_shape(lambda a: LatentPool.of(a, **sizes, dtype="float8_e4m3fn", row_format=row_format), array)
    spec = MLASpec(num_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, scale=0.1)
    assert mosaic_gpu.supports(MLACall.of(pool, spec), H200) == refusal


@pytest.mark.parametrize("q_dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float16, jnp.float32])
def test_which_queries_float8_pools_take(q_dtype):
    """Others would be rounded: products of float8 rows run in the dtype of the queries."""
    sizes = {"num_layers": 1, "num_pages": 2, "page_size": 64, "dtype": "float8_e5m2"}
    spec = MLASpec(num_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, scale=0.1)
    pool = jax.eval_shape(lambda: LatentPool.create(**sizes, spec=spec))
    reason = mosaic_gpu.supports(MLACall.of(pool, spec, q_dtype=q_dtype), H200)
    taken = q_dtype in (jnp.bfloat16, jnp.float8_e4m3fn)
    assert (reason is None) == taken
    if not taken:
        assert f"{jnp.dtype(q_dtype).name} queries of a float8_e5m2 pool" in reason


@pytest.mark.parametrize("heads, rows, tile_rows", [(3, 1, 8), (24, 1, 24), (16, 2, 32), (128, 1, 32)])
@pytest.mark.parametrize("invariant", [False, True])
def test_what_a_call_over_float8_is_launched_with(heads, rows, tile_rows, invariant):
    """An item's begin and end take as long as more of its tiles, which have half the bytes."""
    plan, _, arguments = make(heads=heads, max_q_len=rows, cache="float8_e4m3fn", batch_invariant=invariant)
    with compiling_for(H200):
        launch = jax.eval_shape(plan, *arguments[:2]).work_plan
    assert (launch.kernel, launch.plan.tile_rows) == ("mla_float8", 32 if invariant else tile_rows)
    assert launch.plan.overhead > type(launch.plan).overhead


def test_scales_of_float8_queries_follow_their_rows():
    """Of one for all or one a row and head; heads are padded, and rows of a whole tile follow."""
    batch = helpers.quantized(helpers.poisoned_batch(0, kv_lens=[9, 5], q_lens=[2, 1], heads=3, dtype=jnp.bfloat16))
    plan, _, (pool, metadata, *_) = make(kv_lens=[9, 5], q_lens=[2, 1], heads=3, cache="float8_e4m3fn")
    with compiling_for(H200):
        plan = jax.eval_shape(plan, pool, metadata).work_plan.plan
    for q_scale in (batch.q_scale, jnp.float32(0.5)):
        scales = np.asarray(mosaic_gpu._row_scales(q_scale, batch.q_latent, plan))
        tokens = batch.q_latent.shape[0]
        assert scales.shape == (tokens * 8 + plan.tile_rows,)
        want = np.broadcast_to(np.asarray(q_scale), (tokens, 3))
        np.testing.assert_array_equal(scales[: tokens * 8].reshape(tokens, 8)[:, :3], want)
    assert mosaic_gpu._row_scales(None, batch.q_latent, plan) is None


@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("keys", [4, 32, 70])
def test_tree_words(layout, keys):
    """Bit c % 32 of word c // 32 says whether a row, that is, all heads of a query token, sees key c."""
    batch = helpers.poisoned_batch(0, kv_lens=[9, 0, 30, 7], q_lens=[4, 0, 2, 3], max_q_len=4, heads=3, layout=layout)
    m, mask = batch.metadata, np.random.default_rng(0).random((4, 4, keys)) < 0.5
    with compiling_for(H200):
        options = {"causal": True, "batch_invariant": False, "out_dtype": jnp.bfloat16}
        plan = mosaic_gpu._launch(m, batch.pool, batch.spec, **options).plan
    words = np.asarray(mosaic_gpu._tree_words(jnp.asarray(mask), m, plan)).view(np.uint32)
    assert words.shape == (-(-keys // 32), plan.num_rows + plan.tile_rows)
    for b, (start, length) in enumerate(zip(m.q_starts, m.q_lens, strict=True)):
        for j in range(length):
            for row in range((start + j) * plan.heads, (start + j + 1) * plan.heads):
                bits = [bool(words[c // 32, row] >> np.uint32(c % 32) & np.uint32(1)) for c in range(keys)]
                assert bits == mask[b, j].tolist()


def test_lengths_replaced_are_planned_again(lists):
    """The list holds for the lengths it was made from: ``plan_mla`` of new ones makes another."""
    plan, _, (pool, metadata, *_) = make()
    with compiling_for(H200):
        first = plan(pool, metadata)
        longer = dataclasses.replace(first, kv_lens=first.kv_lens + 60)
        second = plan(pool, longer)
    assert len(lists) == 2
    assert (first.work != second.work).any()


@pytest.mark.parametrize("mode", ["prefill", "extend"])
@pytest.mark.parametrize(
    ("dtype", "implementation", "absorbed"),
    [(jnp.bfloat16, None, True), (jnp.bfloat16, "xla", False), (jnp.float32, None, False)],
)
def test_prompts_are_absorbed_where_a_kernel_takes_them(mode, dtype, implementation, absorbed):
    """Of heads that the kernel of whole prompts refuses: expanded, they go through XLA, in loops over keys."""
    config = dataclasses.replace(small_config(32), kv_lora_rank=512, qk_rope_head_dim=64)
    with compiling_for(H200):
        model = DeepseekForCausalLM(config, dtype=dtype, rngs=nnx.Rngs(0))
        shapes = Shapes((2,), (16,), table_width=4, page_size=64, max_len=256)
        passes = Passes(model, shapes, implementation=implementation)
        pools = model.create_pools(num_pages=8, page_size=64)
        buckets = getattr(passes, mode)
        text = str(jax.make_jaxpr(buckets._step.jitted)(passes.state, pools, buckets._rungs[0]))
    assert ("mla_combine" in text, "name=absorbed_extend" in text) == (absorbed, absorbed)
