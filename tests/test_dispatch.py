"""Which implementation serves a call: order, names, the environment variable, and what errors say."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from jaxlib import gpu_triton

import helpers
from mla_attn import support
from mla_attn.dispatch import (
    ENVIRONMENT_VARIABLE,
    NAMES,
    Device,
    Implementation,
    choose,
    compiling_for,
    current_device,
)
from mla_attn.metadata import RaggedMetadata
from mla_attn.mosaic_gpu import hopper
from mla_attn.ops import mla, mla_attention, ragged_attention
from mla_attn.ops.grouped_matmul import grouped_matmul
from mla_attn.support import A100, H200, supports
from mla_attn.triton import gpus


def refusing(reason):
    return lambda call, device: reason if call == "hard" else None


FAST = Implementation("mosaic_gpu", refusing("only easy calls"), lambda: "fast")
XLA = Implementation("xla", refusing(None), lambda: "xla")
REFERENCE = Implementation("reference", refusing(None), lambda: "reference")
ALL = (FAST, XLA, REFERENCE)
MLA_CALL = support._mla_call()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


def test_the_first_that_serves():
    assert choose("op", "easy", ALL, None) is FAST
    assert choose("op", "hard", ALL, None) is XLA


def test_a_named_one_never_falls_back():
    assert choose("op", "easy", ALL, "xla") is XLA
    with pytest.raises(NotImplementedError, match="op is not supported here: mosaic_gpu: only easy calls"):
        choose("op", "hard", ALL, "mosaic_gpu")


def test_the_reference_is_never_taken_unless_named():
    assert choose("op", "hard", ALL, "reference") is REFERENCE
    with pytest.raises(NotImplementedError, match="mosaic_gpu: only easy calls"):
        choose("op", "hard", (FAST, REFERENCE), None)


def test_all_reasons_are_told():
    second = Implementation("triton", refusing("not on this GPU"), lambda: None)
    with pytest.raises(NotImplementedError, match="mosaic_gpu: only easy calls; triton: not on this GPU"):
        choose("op", "hard", (FAST, second), None)


@pytest.mark.parametrize("name", ["cuda", "XLA", ""])
def test_unknown_names(name):
    with pytest.raises(ValueError, match=f"implementation='{name}' must be one of {', '.join(NAMES)}"):
        choose("op", "easy", ALL, name)


def test_a_name_that_exists_but_not_for_this_op():
    with pytest.raises(NotImplementedError, match="op has no 'triton' implementation, only mosaic_gpu, xla, reference"):
        choose("op", "easy", ALL, "triton")


def test_the_environment_is_read_at_every_call(monkeypatch):
    assert choose("op", "easy", ALL, None) is FAST
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    assert choose("op", "easy", ALL, None) is REFERENCE
    assert choose("op", "easy", ALL, "xla") is XLA  # an argument goes first
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    assert choose("op", "easy", ALL, None) is FAST
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "fastest")
    with pytest.raises(ValueError, match=f"{ENVIRONMENT_VARIABLE}='fastest' must be one of"):
        choose("op", "easy", ALL, None)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "mosaic_gpu")
    with pytest.raises(NotImplementedError, match="only easy calls"):
        choose("op", "hard", ALL, None)


def test_an_order_of_the_callers_own(monkeypatch):
    """Names are tried in their order and no others; an op passes over one that it does not have."""
    assert choose("op", "hard", ALL, ("mosaic_gpu", "reference")) is REFERENCE
    assert choose("op", "easy", ALL, ("reference", "mosaic_gpu")) is REFERENCE
    assert choose("op", "easy", ALL, ("triton", "xla")) is XLA
    with pytest.raises(NotImplementedError, match="mosaic_gpu: only easy calls; op has no 'triton' implementation"):
        choose("op", "hard", ALL, ("mosaic_gpu", "triton"))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "mosaic_gpu, reference")
    assert choose("op", "hard", ALL, None) is REFERENCE


@pytest.mark.parametrize("wrong", [(), ("xla", "cuda"), ("xla", 3), 3, ["xla"]])
def test_an_order_that_is_none(wrong, unchecked):
    with pytest.raises(ValueError, match=r"implementation=.* must be one of mosaic_gpu, .* or several in order"):
        choose("op", "easy", ALL, wrong)


def test_predicates_are_told_the_device():
    def on_gpus(call, device):
        return None if device.platform == "gpu" else f"{device.platform}: needs a GPU"

    only = (Implementation("mosaic_gpu", on_gpus, lambda: None), XLA)
    with compiling_for(H200):
        assert choose("op", "easy", only, None).name == "mosaic_gpu"
    with compiling_for(Device("tpu")):
        assert choose("op", "easy", only, None) is XLA


@pytest.fixture
def batch():
    return helpers.poisoned_batch(0, kv_lens=[5], q_lens=[1])


def test_the_ops_ask_the_dispatcher(monkeypatch, batch):
    """They run what the argument or, as it is at the call, the environment names; also what was compiled before."""
    args = (batch.q_latent, batch.q_rope, batch.pool, batch.metadata, batch.spec)
    spies = tuple(dataclasses.replace(i, run=spy(NAMES.index(i.name))) for i in mla.IMPLEMENTATIONS)
    monkeypatch.setattr(mla, "IMPLEMENTATIONS", spies)

    def ran(**options):
        return NAMES[int(mla_attention(*args, **options)[0, 0, 0])]

    assert ran() == "xla"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    assert ran() == "reference"
    assert ran(implementation="xla") == ran(implementation=("triton", "xla")) == "xla"
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    assert ran() == "xla"
    one, ones = jnp.zeros((1, 1, 1)), jnp.ones(1, jnp.int32)
    rows = RaggedMetadata(q_starts=0 * ones, q_lens=ones, kv_starts=0 * ones, kv_lens=ones, max_q_len=1, max_kv_len=1)
    for op in (
        lambda name: mla_attention(*args, implementation=name),
        lambda name: ragged_attention(one, one, one, rows, scale=1.0, implementation=name),
        lambda name: grouped_matmul(one[0], one, ones, implementation=name),
    ):
        with pytest.raises(ValueError, match="implementation='cuda' must be one of"):
            op("cuda")
        with pytest.raises(NotImplementedError, match=r"no 'triton' implementation|triton: cpu: must be a GPU of"):
            op("triton")


def spy(number):
    def run(q_latent, *args, **options):
        return jnp.full(q_latent.shape, number, jnp.float32), jnp.zeros(q_latent.shape[:2])

    return run


@pytest.fixture
def software(monkeypatch):
    """Sets what of jax-triton's needs is there: versions, modules, a GPU plugin of jaxlib."""

    def present(*modules, version=(0, 11, 2), plugin=True):
        gpus.missing.cache_clear()
        monkeypatch.setattr(jax, "__version_info__", version)
        monkeypatch.setattr(jax, "__version__", ".".join(map(str, version)))
        monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: name if name in modules else None)
        monkeypatch.setattr(gpu_triton, "TritonKernel", object, raising=False)
        if not plugin:
            monkeypatch.delattr(gpu_triton, "TritonKernel")

    yield present
    gpus.missing.cache_clear()


@pytest.mark.parametrize(
    "modules, options, reason",
    [
        (("triton", "jax_triton"), {}, None),
        (("triton", "jax_triton"), {"version": (0, 12, 0)}, "jax 0.12.0: must be below 0.12, with which jax-triton"),
        (("triton",), {}, "jax-triton is not installed"),
        (("jax_triton",), {}, "triton is not installed"),
        (("triton", "jax_triton"), {"plugin": False}, "jaxlib without a GPU plugin"),
    ],
)
def test_what_triton_kernels_need(modules, options, reason, software):
    """What is missing is the reason, and the next implementation is taken; a named one is refused."""
    software(*modules, **options)
    told = supports("mla_attention", compute_capability="8.0")["triton"]
    assert told is None if reason is None else told.startswith(reason)
    with compiling_for(A100):
        chosen = choose("mla_attention", MLA_CALL, mla.IMPLEMENTATIONS, None)
        assert chosen.name == ("xla" if reason else "triton")
        if reason is not None:
            with pytest.raises(NotImplementedError, match=f"triton: {reason}"):
                choose("mla_attention", MLA_CALL, mla.IMPLEMENTATIONS, "triton")


@pytest.mark.parametrize(
    "facts, reason",
    [
        ({"compute_capability": "7.5"}, "sm_75: must be a GPU of sm_80"),
        ({"arch": "gfx1100"}, "gfx1100: must be a GPU of sm_80"),
        ({"platform": "gpu"}, "gpu: must be a GPU of sm_80"),
        ({"platform": "tpu"}, "tpu: must be a GPU of sm_80"),
        ({"arch": "gfx942"}, None),
        ({"compute_capability": "8.9"}, None),
    ],
)
def test_which_gpus_triton_kernels_are_for(facts, reason, software):
    software("triton", "jax_triton")
    told = supports("gqa_attention", **facts)
    assert told["triton"] is None if reason is None else told["triton"].startswith(reason)
    assert told["mosaic_gpu"] is not None


@pytest.mark.parametrize(
    "told, capability, arch",
    [("9.0", "9.0", None), ("gfx942", None, "gfx942"), ("gfx90a:sramecc+:xnack-", None, "gfx90a"), (None, None, None)],
)
def test_amd_gpus_are_told_from_those_of_nvidia(told, capability, arch, monkeypatch):
    """JAX calls what it tells of either a compute capability."""
    device = types.SimpleNamespace(platform="gpu", compute_capability=told, core_count=304)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    found = current_device()
    assert (found.compute_capability, found.arch, found.cores) == (capability, arch, 304)


@pytest.mark.parametrize("wrong", ["mi300", 942, "sm_90"])
def test_architectures_that_are_none(wrong, unchecked):
    with pytest.raises(ValueError, match=r"arch=.* must be a string such as 'gfx942'"):
        supports("mla_attention", arch=wrong)
    with pytest.raises(ValueError, match="must be of an AMD gpu"):
        supports("mla_attention", arch="gfx942", compute_capability="9.0")


@pytest.mark.parametrize(
    "platform, capability, who",
    [("cpu", None, ["xla"]), ("gpu", "9.0", ["mosaic_gpu"]), ("gpu", "8.0", []), ("gpu", None, []), ("tpu", None, [])],
)
def test_who_promises_batch_invariance(platform, capability, who, monkeypatch):
    monkeypatch.setattr(hopper, "_JAX", (0, 0, 0))
    reasons = supports("mla_attention", platform=platform, compute_capability=capability, batch_invariant=True)
    assert [name for name, reason in reasons.items() if reason is None] == who
    assert "batch_invariant" in reasons["reference"]
    assert reasons["xla"] is None or platform in reasons["xla"]


def test_programs_for_another_device():
    """What ``compiling_for`` says holds inside, also of another one, and no longer."""
    here = current_device()
    with compiling_for(H200):
        assert current_device() == H200
        with pytest.raises(RuntimeError), compiling_for(Device("tpu")):
            assert current_device().platform == "tpu"
            raise RuntimeError
        assert current_device() == H200
    assert current_device() == here and here.platform == jax.default_backend()


@pytest.mark.parametrize("op", ["grouped_matmul", "mla_attention"])
def test_kernels_say_which_jax_they_need(op, monkeypatch):
    """The other implementations run on older ones."""
    monkeypatch.setattr(hopper, "_JAX", (99, 1, 2))
    answers = supports(op, compute_capability="9.0")
    answers.pop("triton", None)
    assert answers == {"mosaic_gpu": f"jax {jax.__version__}: must be at least 99.1.2", "xla": None, "reference": None}
