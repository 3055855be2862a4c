"""The attention kernels in Triton as machine code of every architecture: they fit its limits, as configs promise."""

import pytest

import triton_host
import triton_launches
from mla_attn.pallas_kernels.triton.configs import RULES, PagedConfig, PagedFacts, paged_config
from mla_attn.pallas_kernels.triton.limits import LIMITS
from mla_attn.pallas_kernels.triton.prefill_configs import SIZES, PrefillConfig
from triton_launches import DEVICES, GQA_CALLS, MLA_CALLS, RAGGED_CALLS

# Bytes of a thread that are spilled at most, where registers do not hold the results of 64 or 32 rows and all else.
SPILLS = {"float8": 512, "other": 128}
QUICK = ("decode", "verify", "prompt")
CALLS = {"mla": MLA_CALLS, "gqa": GQA_CALLS, "ragged": RAGGED_CALLS}


def calls():
    for op, of_op in CALLS.items():
        for name in of_op:
            for target in LIMITS:
                yield pytest.param(op, name, target, marks=() if name in QUICK else pytest.mark.slow)


@triton_host.needs_triton
@pytest.mark.parametrize("op, name, target", list(calls()))
def test_machine_code(op, name, target):
    """Shared memory and registers are within the limits, few are spilled, no float32 product is made of TF32."""
    from triton_code import compiled

    make, sizes = getattr(triton_launches, f"{op}_launches"), CALLS[op][name]
    attention, *merge = make(target, **sizes)
    divided = op != "ragged" and ("window" not in sizes or "tree" in sizes)
    assert [launch.kernel.__name__ for launch in merge] == ["merge_splits"] * divided
    for launch in (attention, *merge):
        taken = compiled(launch.kernel, launch.target, **launch.options)
        assert taken.shared <= LIMITS[target].shared
        assert taken.registers <= LIMITS[target].registers
        assert taken.spills <= SPILLS["float8" if "cache" in sizes or "stored" in sizes else "other"]
        assert "tf32" not in taken.assembly and "xf32" not in taken.assembly


@triton_host.needs_triton
@pytest.mark.parametrize("op", ["mla", "gqa"])
def test_hopper_multiplies_out_of_shared_memory(op):
    """Tiles of 64 rows by warpgroup products, of which each warp computes rows or columns of its own."""
    from triton_code import compiled

    launch, *_ = {"mla": triton_launches.mla_launches, "gqa": triton_launches.gqa_launches}[op](
        "sm_90", **({} if op == "mla" else GQA_CALLS["verify"])
    )
    assembly = compiled(launch.kernel, launch.target, **launch.options).assembly
    products = assembly.count("wgmma.mma_async")
    rows, keys, dim = (
        launch.options["constants"]["ROWS"],
        launch.options["constants"]["KEYS"],
        576 if op == "mla" else 128,
    )
    assert rows == keys == 64
    # Scores: steps of 16 channels. Results: steps of 16 keys, of 256 columns for each of two groups of warps, or 128.
    assert products == dim // 16 + keys // 16


def test_every_architecture_is_compiled_for():
    assert DEVICES.keys() == LIMITS.keys() == RULES.keys() == SIZES.keys()


@pytest.mark.parametrize("target", LIMITS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("shared_values", [False, True])
def test_every_call_has_a_config(target, wide, shared_values):
    from mla_attn.pallas_kernels.triton.configs import most_rows

    for dim in (16, 96, 256) if not shared_values else (40, 320, 576):
        for heads in (1, 16, 128):
            most = most_rows(target, heads=heads, dim=dim, wide=wide)
            for rows in range(1, most + 1):
                for float8 in (False, True):
                    kind = {"shared_values": shared_values, "wide": wide, "float8": float8}
                    config = paged_config(PagedFacts(target=target, rows=rows, dim=dim, values=dim, **kind))
                    assert rows <= config.rows < max(2 * rows, 17)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"target": "sm_70"}, "target='sm_70' must be one of sm_80"),
        ({"rows": 128}, "rows=128 must be one of 16, 32, 64"),
        ({"keys": 48}, "keys=48 must be one of 16, 32, 64"),
        ({"warps": 3}, "warps=3 must be one of"),
        ({"stages": 0}, "stages=0 must be 1 to 8"),
        ({"resident": 9}, "resident=9 must be 1 to 4"),
        ({"keys": 32, "transposed": True}, "keys=32 with transposed products: must be 64"),
    ],
)
def test_configs_that_there_are_not(change, message):
    with pytest.raises(ValueError, match=message):
        PagedConfig(**{"target": "sm_90", "rows": 64, "keys": 64, "warps": 8, "stages": 2} | change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"target": "sm_70"}, "target='sm_70' must be one of sm_80"),
        ({"rows": 256}, "rows=256 must be one of 16, 32, 64, 128"),
        ({"warps": 2}, "warps=2 must be one of 4, 8"),
        ({"stages": 5}, "stages=5 must be one of 1"),
    ],
)
def test_configs_of_prompts_that_there_are_not(change, message):
    with pytest.raises(ValueError, match=message):
        PrefillConfig(**{"target": "sm_90", "rows": 64, "keys": 64, "warps": 8, "stages": 2} | change)
