"""The Hopper kernels without a GPU: every kind of call lowers, and compiles to machine code as it should."""

import dataclasses
import functools
import importlib
import pathlib

import jax
import jax.numpy as jnp
import pytest

import aot
from kernel_calls import (
    CALLS,
    GQA_CALLS,
    MIXED,
    NOTHING,
    PROMPT_CALLS,
    attention_seconds,
    counted_operations,
    lower,
    lowering_seconds,
    make,
    make_gqa,
    make_prompts,
    needs_kernels,
    scanned,
)
from mla_attn import dispatch
from mla_attn.dispatch import compiling_for
from mla_attn.mosaic_gpu import gqa as gqa_adapter
from mla_attn.mosaic_gpu import mla as mosaic_gpu
from mla_attn.pallas_kernels.even_list import EvenPlan
from mla_attn.pallas_kernels.work_list import Plan
from mla_attn.support import H200

pytestmark = needs_kernels

TARGET = "custom_call @mosaic_gpu"
QUICK = ("layers", "stacked", "decode, 128 heads", "GQA: decode", "prompts")  # of layers: 16 heads
ATTENDS = ("gqa_decode", "gqa_stream", "mla_decode", "mla_stream", "mla_float8", "ragged_prefill")
ALL = CALLS | GQA_CALLS | PROMPT_CALLS

# Rows of the tables of the kernels' page, as lists of cells.
PAGE = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in (pathlib.Path(__file__).parents[2] / "pallas_kernels" / "README.md").read_text().splitlines()
]

# What tracing and lowering a call and its work list may take: bytes of text, operations that layouts are inferred for,
# and processor time as a multiple of that of JAX's own attention.
BUDGET = {
    "decode, 128 heads": (1_200_000, 2600, 20),
    "tree, 20 heads, pages of 16, float32 result": (1_390_000, 3080, 34),
    "invariant verify, 64 heads, 512 + 0, pages of 48": (1_200_000, 2050, 20),
    "tree, 4 heads, pages of 1": (540_000, 2370, 16),
    "rows of 640": (1_200_000, 2600, 20),
    "strided, not causal, 3 heads, 256 + 64, pages of 128": (320_000, 2190, 12),
    "float8, tree, 20 heads, pages of 16, float32 result": (800_000, 3100, 40),
    "float8 blocks and queries, invariant verify, 3 heads, pages of 1": (800_000, 3100, 40),
}

GQA_BUDGET = (480_000, 2300, 18)  # the same of every call of GQA
PROMPT_BUDGET = (900_000, 3000, 30)  # and of every call of prompts

# Bytes that a thread may spill, outside the loops over tiles, in branches that few tiles take, or where it loads; none
# where nothing is said. The bits of a tree's mask take registers of their own, as do rows gathered one by one.
SPILLS = {
    "tree": 128,
    "tree of earlier steps, 128 heads": 64,
    "decode, 20 heads": 32,
    "decode, 24 heads": 32,
    "pages of 1, 128 heads": 24,
    "rows of 640, 128 heads, pages of 1": 24,
    "float8 blocks, 128 heads": 24,
    "float8 blocks, pages of 8, 512 + 0": 136,
}


@pytest.fixture
def lists(monkeypatch):
    """A list that grows by one with every work list made."""
    made, work_list = [], mosaic_gpu.work_list
    dispatch._compute.clear_cache()  # a call that was traced before makes none

    def counted(*arguments, **options):
        made.append(options["plan"])
        return work_list(*arguments, **options)

    monkeypatch.setattr(mosaic_gpu, "work_list", counted)
    return made


@pytest.mark.parametrize("name", MIXED | NOTHING)
def test_every_call_lowers(name, lists):
    """To one kernel that attends and one that combines; a planned call makes no work list of its own."""
    plan, attend, arguments = make(**(MIXED | NOTHING)[name])

    def both(pool, metadata, *rest):
        return attend(pool, plan(pool, metadata), *rest)

    unit = attention_seconds()
    with counted_operations() as operations:
        seconds, lowered = lowering_seconds(both, *arguments)
    text = lowered.as_text()
    assert text.count(TARGET) == (0 if name in NOTHING else 2)
    assert len(lists) == 1
    if name in BUDGET:
        most_text, most_operations, most_attentions = BUDGET[name]
        assert len(text) <= most_text
        assert sum(operations) <= most_operations
        assert seconds <= most_attentions * unit


@pytest.mark.parametrize("name", GQA_CALLS)
def test_every_gqa_call_lowers(name, monkeypatch):
    """As calls of MLA do; there is nothing to combine where windows leave nothing to divide."""
    made, even_list = [], gqa_adapter.even_list
    dispatch._compute.clear_cache()
    monkeypatch.setattr(gqa_adapter, "even_list", lambda *a, **o: made.append(o["plan"]) or even_list(*a, **o))
    plan, attend, arguments = make_gqa(**GQA_CALLS[name])
    unit = attention_seconds()
    with counted_operations() as operations:
        seconds, lowered = lowering_seconds(lambda pool, m, *rest: attend(pool, plan(pool, m), *rest), *arguments)
    text = lowered.as_text()
    short = "window" in GQA_CALLS[name] and "tree" not in GQA_CALLS[name]
    assert text.count(TARGET) == (1 if short else 2)
    assert len(made) == 1
    assert len(text) <= GQA_BUDGET[0]
    assert sum(operations) <= GQA_BUDGET[1]
    assert seconds <= GQA_BUDGET[2] * unit


@pytest.mark.parametrize("name", PROMPT_CALLS)
def test_every_prompt_call_lowers(name):
    """To one kernel."""
    attend, arguments = make_prompts(**PROMPT_CALLS[name])
    unit = attention_seconds()
    with counted_operations() as operations:
        seconds, lowered = lowering_seconds(attend, *arguments)
    text = lowered.as_text()
    assert text.count(TARGET) == 1
    assert len(text) <= PROMPT_BUDGET[0]
    assert sum(operations) <= PROMPT_BUDGET[1]
    assert seconds <= PROMPT_BUDGET[2] * unit


def test_an_unplanned_call_makes_its_own_list(lists):
    _, attend, arguments = make()
    with compiling_for(H200):
        jax.eval_shape(attend, *arguments)
    assert len(lists) == 1


def test_layers_scanned_over(lists):
    """One list, and one pair of kernels, for all of them."""
    scan, arguments = scanned()
    assert lower(scan, *arguments).as_text().count(TARGET) == 2
    assert len(lists) == 1


@pytest.mark.parametrize("latent, rope", [(512, 64), (256, 64), (512, 0)])
@pytest.mark.parametrize("tile_rows", [8, 16, 24, 32, 64])
def test_shared_memory_is_enough(latent, rope, tile_rows):
    """Counted from the scratch types that a kernel is launched with; the kernels' page says the same."""
    from mla_attn.pallas_kernels.mosaic_gpu import mla_decode, mla_float8, mla_stream
    from mla_attn.pallas_kernels.mosaic_gpu.mla_block import Call
    from mla_attn.pallas_kernels.mosaic_gpu.primitives import SHARED_BYTES, shared_bytes

    plan = Plan(num_requests=1, num_rows=128, heads=8, tile_rows=tile_rows, blocks=132, max_tiles=4)
    call = Call(heads=8, scale=0.1, max_q_len=1, num_pages=4, rope_offset=latent)
    sizes = {"rank": latent, "rope": rope, "page": 64}
    bodies = [mla_stream._Body(call, plan, **sizes)]
    if tile_rows == 64:
        bodies.append(mla_decode._Body(call, plan, mla_decode.Config(), **sizes))
    for body in bodies:
        taken = shared_bytes(body.scratch(), body.reduction_bytes)
        tiles = 2 * 2 * 64 * (latent + max(rope, 64))  # bytes of the key tiles alone
        assert tiles < taken <= SHARED_BYTES
        kernel = f"`{type(body).__module__.rpartition('.')[2]}`"
        (told,) = [row[2:] for row in PAGE if row[:2] == [kernel, str(tile_rows)] and len(row) == 5] or [None]
        assert told is None or int(told[[(512, 64), (256, 64), (512, 0)].index((latent, rope))]) == taken
    for cache in ("float8_e4m3fn", "float8_e4m3fn:blocks") if tile_rows <= mla_float8.MOST_ROWS else ():
        body = mla_float8.Float8Body(dataclasses.replace(call, cache=cache), plan, **sizes)
        taken = shared_bytes(body.scratch())
        assert body.stages * 64 * (latent + rope) < taken <= SHARED_BYTES
        kernel = f"`mla_float8`{', blocks' if body.in_blocks else ''}"
        (told,) = [row[2:] for row in PAGE if row[:2] == [kernel, str(tile_rows)]]
        assert told[[(512, 64), (256, 64), (512, 0)].index((latent, rope))] == f"{taken} ({body.stages})"


@pytest.mark.parametrize("rows", [1, 8, 24, 64])
@pytest.mark.parametrize("block_heads", [1, 2])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_shared_memory_of_gqa(dim, block_heads, rows):
    """At least two stages, for any number of rows and kind of copy; the kernels' page says how many."""
    if (dim, block_heads) == (256, 2):
        return  # no call has them
    for page in (1, 8, 64):
        body = gqa_body("gqa_decode", dim, block_heads, rows, page)
    assert told("`gqa_decode`", dim, block_heads) == [str(body.slots), str(body.stages), *taken(body)]


@pytest.mark.parametrize("float8, dim, block_heads, rows", [
    (None, 64, 2, 8), (None, 128, 1, 8), (None, 128, 2, 8), (None, 128, 2, 32), (None, 256, 1, 8),
    ("float8_e4m3fn", 64, 4, 8), ("float8_e4m3fn", 128, 1, 8), ("float8_e4m3fn", 128, 4, 8),
    ("float8_e4m3fn", 128, 4, 16), ("float8_e4m3fn", 128, 2, 64), ("float8_e4m3fn", 256, 1, 32),
])  # fmt: skip
def test_shared_memory_of_transposed_gqa(float8, dim, block_heads, rows):
    for page in (1, 8, 64):
        body = gqa_body("gqa_stream", dim, block_heads, rows, page, float8)
    name = f"`gqa_stream`, {rows} rows, {float8 or 'bfloat16'}"
    assert told(name, dim, block_heads) == [str(body.slots), str(body.stages), *taken(body)]


def gqa_body(kernel, dim, block_heads, rows, page, float8=None):
    """A thread block, which has at least two stages, and no more than there is room for."""
    module = importlib.import_module(f"mla_attn.pallas_kernels.mosaic_gpu.{kernel}")
    from mla_attn.pallas_kernels.mosaic_gpu.gqa_block import Call

    sizes = {"num_requests": 1, "num_tokens": 8, "kv_heads": block_heads, "lanes": 1, "teams": 132, "max_tiles": 4}
    plan = EvenPlan(**sizes, heads=rows, tile_tokens=1, block_heads=block_heads)
    dims = {"head_dim": dim, "v_head_dim": dim}
    sharing = 2 if float8 and block_heads == 1 and dim < 256 else 1
    call = Call(scale=1.0, **dims, layout="nhd", max_q_len=1, num_pages=4, float8=float8, sharing=sharing)
    body = module._Body(call, plan, dtype=jnp.bfloat16, page=page, widths=[dim, dim], has_sinks=False)
    from mla_attn.pallas_kernels.mosaic_gpu.primitives import SHARED_BYTES

    assert body.stages >= 2 and int(*taken(body)) <= SHARED_BYTES // sharing
    return body


def taken(body) -> list[str]:
    from mla_attn.pallas_kernels.mosaic_gpu.primitives import shared_bytes

    return [str(shared_bytes(body.scratch(body.stages)))]


def told(kernel, dim, block_heads) -> list[str]:
    """Query buffers, stages and bytes on the kernels' page."""
    (found,) = [row[3:] for row in PAGE if row[:3] == [kernel, str(dim), str(block_heads)]] or [None]
    return found


@pytest.mark.parametrize("qk_dim, v_dim", [(192, 128), (128, 128), (64, 64)])
def test_shared_memory_of_prompts(qk_dim, v_dim):
    """At least two stages; the kernels' page says how many."""
    from mla_attn.pallas_kernels.mosaic_gpu import ragged_prefill
    from mla_attn.pallas_kernels.mosaic_gpu.primitives import SHARED_BYTES, shared_bytes
    from mla_attn.pallas_kernels.prompt_list import PromptPlan

    plan = PromptPlan(num_requests=1, num_tokens=8, num_keys=8, max_q_len=8, max_kv_len=8)
    call = ragged_prefill.Call(scale=1.0, heads=8, kv_heads=8, qk_dim=qk_dim, v_dim=v_dim, near_heads=8)
    body = ragged_prefill._Body(call, plan, dtype=jnp.bfloat16, has_sinks=False)
    taken = shared_bytes(body.scratch(body.stages))
    assert body.stages >= 2 and taken <= SHARED_BYTES
    assert ["`ragged_prefill`", f"{qk_dim}, {v_dim}", str(body.stages), str(taken)] in PAGE


@pytest.mark.parametrize("block_n", [64, 128, 256])
@pytest.mark.parametrize("tile_rows", [64, 128])
def test_shared_memory_of_output_tiles(tile_rows, block_n):
    """As the kernels' page says."""
    from mla_attn.pallas_kernels.mosaic_gpu import grouped_matmul
    from mla_attn.pallas_kernels.mosaic_gpu.primitives import shared_bytes

    config = grouped_matmul.Config(tile_rows=tile_rows, block_n=block_n)
    taken = shared_bytes(grouped_matmul._Body(config, 132, 1024, (4, 1024, 2048)).scratch())
    assert [f"{tile_rows} x {block_n}", str(config.stages), str(taken)] in PAGE


# Compiled to machine code


@functools.cache
def compiled(quick: bool) -> dict:
    """What ``mosaic_aot.py`` prints, from one process for all quick tests and one for the others."""
    names = QUICK if quick else [name for name in ALL if name not in QUICK]
    return aot.run("mosaic_aot.py", *names, LD_PRELOAD=str(aot.standin_driver()))


@aot.needs_compiler
@aot.needs_c_compiler
class TestMachineCode:
    @pytest.mark.parametrize(
        "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in ALL if name not in QUICK)]
    )
    def test_nothing_is_spilled_and_no_product_waits_for_another(self, name):
        found = compiled(name in QUICK)[name]["kernels"]
        assert any(kernel in found[0]["name"] for kernel in ATTENDS)
        for kernel in found:
            most = 0 if "mla_combine" in kernel["name"] else SPILLS.get(name, 0)
            assert max(kernel["spill_stores"], kernel["spill_loads"]) <= most, kernel
            assert not kernel["serialised"]

    def test_a_planned_call_is_two_kernels_and_nothing_else(self):
        found = compiled(True)["decode, 128 heads"]["instructions"]
        assert found.pop("mosaic_gpu_v2") == 2
        assert set(found) <= {"parameter", "constant", "bitcast", "get-tuple-element", "tuple"}, found

    def test_layers_write_and_read_one_pool_in_place(self):
        """Layers scanned over a donated pool: for all of them one pair of kernels and one write, and no copy."""
        found = compiled(True)["layers"]
        assert (found["instructions"]["mosaic_gpu_v2"], found["instructions"]["scatter"]) == (2, 1)
        assert found["footprint"]["unaliased"] == 0
        assert found["footprint"]["temp"] < found["footprint"]["layer"] / 2
        assert not found["footprint"]["copies"]

    def test_stacked_results_are_not_written_by_the_kernels(self):
        """A kernel that works in place, fused with what stacks its results, would lose what was in place before."""
        found = compiled(True)["stacked"]
        assert found["instructions"]["mosaic_gpu_v2"] == 2
        assert found["fused_kernels"] == 0

    @pytest.mark.slow
    def test_a_kept_program_is_the_same(self):
        """Its kernels are in it, and it works in place."""
        found = aot.run("mosaic_aot.py", "kept", LD_PRELOAD=str(aot.standin_driver()))
        assert found["kept"] == found["made"]
        assert found["kept"]["kernels"] > 2 and found["kept"]["footprint"]["unaliased"] == 0
        assert not found["kept"]["footprint"]["copies"]
