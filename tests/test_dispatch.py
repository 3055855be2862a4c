"""Which implementation serves a call: order, names, the environment variable, and what errors say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
from mla_attn.dispatch import (
    ENVIRONMENT_VARIABLE,
    H200,
    NAMES,
    Device,
    Implementation,
    choose,
    compiling_for,
    current_device,
)
from mla_attn.ops import mla, mla_attention, ragged_attention
from mla_attn.specs import MLASpec


def refusing(reason):
    return lambda call: reason if call == "hard" else None


FAST = Implementation("mosaic_gpu", refusing("only easy calls"), lambda: "fast")
XLA = Implementation("xla", refusing(None), lambda: "xla")
REFERENCE = Implementation("reference", refusing(None), lambda: "reference")
ALL = (FAST, XLA, REFERENCE)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


def test_the_first_that_serves():
    assert choose("op", "easy", ALL, None) is FAST
    assert choose("op", "hard", ALL, None) is XLA


def test_a_named_one_never_falls_back():
    assert choose("op", "easy", ALL, "xla") is XLA
    with pytest.raises(NotImplementedError, match="op is not served here: mosaic_gpu: only easy calls"):
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
    with pytest.raises(NotImplementedError, match=r"op has no 'triton' implementation; .*mosaic_gpu, xla, reference"):
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


@pytest.fixture
def batch():
    return helpers.poisoned_batch(0, kv_lens=[5], q_lens=[1])


def test_the_ops_ask_the_dispatcher(monkeypatch, batch):
    """Both ops run what the environment names; the choice shows in the name scope of the program."""
    args = (batch.q_latent, batch.q_rope, batch.pool, batch.metadata, batch.spec)
    ran = []
    spies = tuple(Implementation(i.name, i.supports, spy(i, ran)) for i in mla.IMPLEMENTATIONS)
    monkeypatch.setattr(mla, "IMPLEMENTATIONS", spies)
    mla_attention(*args)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    mla_attention(*args)
    mla_attention(*args, implementation="xla")
    assert ran == ["xla", "reference", "xla"]
    for op in (
        lambda name: mla_attention(*args, implementation=name),
        lambda name: ragged_attention(
            *(jnp.zeros((1, 1, 1)),) * 3, q_starts=jnp.zeros(1, int), q_lens=jnp.ones(1, int), scale=1.0, max_q_len=1,
            kv_starts=jnp.zeros(1, int), kv_lens=jnp.ones(1, int), max_kv_len=1, implementation=name,
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="implementation='cuda' must be one of"):
            op("cuda")
        with pytest.raises(NotImplementedError, match="no 'triton' implementation"):
            op("triton")


def spy(implementation, ran):
    def run(q_latent, *args, **options):
        ran.append(implementation.name)
        return jnp.zeros(q_latent.shape), jnp.zeros(q_latent.shape[:2])

    return run


@pytest.mark.parametrize(
    "platform, capability, who",
    [("cpu", None, ["xla"]), ("gpu", "9.0", ["mosaic_gpu"]), ("gpu", "8.0", []), ("gpu", None, []), ("tpu", None, [])],
)
def test_who_promises_batch_invariance(platform, capability, who):
    call = mla.MLACall(
        spec=MLASpec(num_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, scale=0.1),
        page_size=64,
        dtype=np.dtype(jnp.bfloat16),
        max_q_len=1,
        batch_invariant=True,
        platform=platform,
        compute_capability=capability,
    )
    reasons = {i.name: i.supports(call) for i in mla.IMPLEMENTATIONS}
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
