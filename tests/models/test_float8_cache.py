"""Models over float8 caches: the scales that a checkpoint has, what the rounding costs, and the engine's pools."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints import LLAMA3, V3, read_checkpoint, write_checkpoint
from mla_attn import metadata as build
from mla_attn.engine import Engine, SamplingParams
from mla_attn.generation import generate
from mla_attn.models import load_checkpoint
from mla_attn.models.base import create_pools, stored_as
from mla_attn.models.calibration import measure_scales
from mla_attn.models.files import CheckpointError
from mla_attn.passes import DraftModel, all_groups
from mla_attn.speculative import DraftTree
from traffic import small_model

PAGE = 16


@nnx.jit(static_argnames="mode")
def forward(model, tokens, pools, metadata, *, mode):
    """Logits; the absorbed form reads all keys back from the cache, this call's too."""
    form = {"form": "absorbed"} if "full" in pools and hasattr(pools["full"], "kv_lora_rank") else {}
    return model.logits(model(tokens, pools, metadata, mode=mode, **form)[0])


def logits_of(model, tokens, kv_dtype, kv_scale=None):
    """Of all rows of a text, whose keys are read from a cache."""
    groups = stored_as(model.cache_groups, kv_dtype, kv_scale)
    pages = -(-len(tokens) // PAGE)
    table, length = jnp.arange(pages, dtype=jnp.int32)[None], jnp.asarray([len(tokens)], jnp.int32)
    metadata = build.for_extend(table, length, length, max_q_len=len(tokens), page_size=PAGE)
    pools = create_pools(groups, num_pages=pages, page_size=PAGE)
    by_group = {group.name: metadata for group in groups}
    return np.asarray(forward(model, jnp.asarray(tokens, jnp.int32), pools, by_group, mode="extend"))


@pytest.fixture(scope="module")
def llama():
    with np.load(LLAMA3 / "expected.npz") as file:
        return load_checkpoint(LLAMA3, dtype=jnp.float32), dict(file)


def test_scales_of_a_checkpoint(llama):
    """Each at its place, they cost half a logit; ignored, swapped, or of another layer, twelve."""
    model, expected = llama
    tokens, want = expected["prompt_1"], expected["logits_1"]

    def error(*stored):
        return np.abs(logits_of(model, tokens, *stored) - want).max()

    assert error("float8_e4m3fn") < 0.6
    assert error(None) < 1e-3
    (group,) = model.cache_groups
    k, v = (group.scales[name] for name in ("k_scale", "v_scale"))
    assert len(k) == len(v) == 3 and len({*k, *v}) == 6
    for wrong in (1.0, {"full": {"k_scale": v, "v_scale": k}}, {"full": {"k_scale": k[:1] * 3, "v_scale": v[:1] * 3}}):
        assert error("float8_e4m3fn", wrong) > 5
    assert error("bfloat16", 1e-9) < 1  # no float8 number, no scale


NAMES = [
    ("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", None),
]  # fmt: skip


@pytest.mark.parametrize(("k_name", "v_name"), NAMES)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_names_of_scales(tmp_path, k_name, v_name, shape):
    config, tensors = read_checkpoint(LLAMA3)
    tensors = {name: x for name, x in tensors.items() if not name.endswith("_scale")}
    for layer, scale in ((0, 0.5), (2, 0.02)):
        prefix = f"model.layers.{layer}.self_attn."
        tensors[prefix + k_name] = np.full(shape, scale, np.float32)
        if v_name is not None:
            tensors[prefix + v_name] = np.full(shape, 2 * scale, np.float32)
    model = load_checkpoint(write_checkpoint(tmp_path / "c", config, tensors))
    factor = 1 if v_name is None else 2
    want = [(0.5, 0.5 * factor), (1.0, 1.0), (0.02, 0.02 * factor)]
    np.testing.assert_allclose(model.cache_scales, want, rtol=1e-7)


def test_wrong_scales(tmp_path):
    config, tensors = read_checkpoint(LLAMA3)
    name = "model.layers.1.self_attn.v_scale"
    for value, message in ((np.ones(2, np.float32), r"has shape \(2,\)"), (np.float32(0), "=0.0 must be a positive")):
        folder = write_checkpoint(tmp_path / message[:3].strip("="), config, tensors | {name: np.asarray(value)})
        with pytest.raises(CheckpointError, match=f"model.safetensors: {name}.*{message}"):
            load_checkpoint(folder)


def test_scales_of_latent_rows(tmp_path, caplog):
    """Those of keys; a warning tells of values that differ."""
    config, tensors = read_checkpoint(V3)
    extra = {f"model.layers.{i}.self_attn.k_scale": np.float32(0.1 * (i + 1)).reshape(1) for i in range(4)}
    model = load_checkpoint(write_checkpoint(tmp_path / "one", config, tensors | extra))
    (group,) = model.cache_groups
    np.testing.assert_allclose(group.scales["scale"], [0.1, 0.2, 0.3, 0.4], rtol=1e-6)
    assert not caplog.records
    extra["model.layers.2.self_attn.v_scale"] = np.float32(7).reshape(1)
    model = load_checkpoint(write_checkpoint(tmp_path / "two", config, tensors | extra))
    np.testing.assert_allclose(model.cache_groups[0].scales["scale"], [0.1, 0.2, 0.3, 0.4], rtol=1e-6)
    (record,) = caplog.records
    assert "v_scale differs from k_scale (layer 2)" in record.getMessage()


# Share of positions with the likeliest token of the float32 cache, and error of logits, RMS, each a little worse than
# what was measured; of e4m3 at a scale of 1 and at 0.02, which clips, the least error too.
ROUNDED = {
    ("bfloat16", None): (0.994, 0.11),
    ("float8_e4m3fn:blocks", None): (0.994, 0.12),
    ("float8_e4m3fn", 1.0): (0.955, 0.42),
    ("float8_e5m2", 1.0): (0.935, 0.75),
    ("float8_e4m3fn", 0.02): (0.89, 1.2),
}


@pytest.mark.slow
def test_what_rounding_costs():
    """On prompts and reference tokens of the trained V3 fixture, teacher-forced; ``-s`` prints the figures."""
    model, stored = load_checkpoint(V3, dtype=jnp.float32), np.load(V3 / "expected.npz")
    texts = [np.concatenate([stored[f"prompt_{i}"], stored[f"greedy_{i}"]]) for i in range(4)]
    exact = [logits_of(model, text, None) for text in texts]
    found = {}
    for (kv_dtype, scale), (share, rms) in ROUNDED.items():
        logits = [logits_of(model, text, kv_dtype, scale) for text in texts]
        agree = np.concatenate([a.argmax(-1) == b.argmax(-1) for a, b in zip(logits, exact, strict=True)])
        errors = np.concatenate([(a - b).ravel() for a, b in zip(logits, exact, strict=True)])
        found[kv_dtype, scale] = agree.mean(), np.sqrt(np.mean(errors**2))
        print(
            f"{kv_dtype}, scale {scale}: {agree.mean():.4f} of {len(agree)} tokens, RMS {found[kv_dtype, scale][1]:.4f}"
        )
        assert found[kv_dtype, scale][0] >= share and found[kv_dtype, scale][1] <= rms, found
    assert found["float8_e4m3fn", 0.02][1] > 2 * found["float8_e4m3fn", 1.0][1]


@pytest.mark.parametrize(
    ("kv_dtype", "draft_kv_dtype", "draft"),
    [
        ("float8_e4m3fn", None, None),
        ("float8_e4m3fn:blocks", None, None),
        ("float8_e4m3fn", jnp.float32, None),
        ("float8_e4m3fn", "bfloat16", "a model"),
    ],
)
def test_drafts_change_no_token(kv_dtype, draft_kv_dtype, draft):
    """Of a float8 cache: what is verified is what is decoded, up to ties; whatever the drafter's cache stores."""
    model = small_model(kv_lora_rank=128) if "blocks" in kv_dtype else small_model()
    stored = {"kv_dtype": kv_dtype, **({} if "blocks" in kv_dtype else {"kv_scale": {"full": {"scale": [0.02, 0.5]}}})}
    run = functools.partial(generate, model, [[3, 1, 4, 1, 5], [9]], max_new_tokens=12, page_size=4, ignore_eos=True)
    drafter = {"draft_kv_dtype": draft_kv_dtype, "draft": DraftModel(model) if draft else None}
    plain, drafted = run(**stored), run(**stored, **drafter, num_drafts=2)
    assert plain.tokens == drafted.tokens and drafted.statistics.compiles_after_warm_up == 0
    if draft:  # which has the target's weights
        assert drafted.statistics.acceptance_length > 2


def test_pools_of_a_draft_layer():
    """It computes in a pool of its own what it does in the target's, bit for bit."""
    model, tokens = small_model(), jnp.asarray([3, 1, 4, 1, 5, 9])
    (whole,) = model.cache_groups
    split = stored_as([whole], None, None, "bfloat16")
    assert [(g.name, g.num_layers, g.dtype) for g in split] == [("full", 1, jnp.float32), ("mtp", 1, jnp.bfloat16)]
    split = [dataclasses.replace(group, dtype=whole.dtype) for group in split]
    table, length = jnp.arange(2, dtype=jnp.int32)[None], jnp.asarray([6], jnp.int32)
    m = build.for_extend(table, length, length, max_q_len=6, page_size=4)

    @nnx.jit
    def run(model, pools):
        by_group = dict.fromkeys(pools, m)
        hidden, pools = model(tokens, pools, by_group, mode="extend")
        drafted, pools = model.draft(hidden, jnp.roll(tokens, -1), pools, by_group, mode="draft_extend")
        return hidden, drafted, pools

    first = run(model, create_pools([whole], num_pages=2, page_size=4))
    second = run(model, create_pools(split, num_pages=2, page_size=4))
    for a, b in zip(first[:2], second[:2], strict=True):
        np.testing.assert_array_equal(a, b)
    rows = np.concatenate([second[2][name].data for name in ("full", "mtp")])
    np.testing.assert_array_equal(first[2]["full"].data, rows)
    assert np.abs(rows).max(axis=(1, 2)).all()


def test_formats_and_scales_of_drafters():
    """A group's scales are divided among its parts; the drafter's own format is also that of a draft model."""
    model = small_model()
    groups = all_groups(model, DraftModel(model))
    scale = {"full": {"scale": [0.25, 0.5]}}
    made = stored_as(groups, "float8_e4m3fn", scale, "bfloat16")
    assert [(g.name, g.num_layers, g.dtype.name) for g in made] == [
        ("full", 1, "float8_e4m3fn"),
        ("mtp", 1, "bfloat16"),
        ("draft.full", 2, "bfloat16"),
    ]
    assert made[0].scales == {"scale": [0.25]} and made[1].scales == {"scale": [0.5]}
    (kept,) = stored_as(model.cache_groups, "float8_e4m3fn", scale, jnp.float8_e4m3fn)
    assert (kept.num_layers, kept.scales) == (2, {"scale": [0.25, 0.5]})
    target, drafting = stored_as(model.cache_groups, None, scale, "float8_e5m2")
    assert (target.dtype, drafting.dtype, drafting.scales) == (jnp.float32, jnp.float8_e5m2, {"scale": [0.5]})
    with pytest.raises(ValueError, match=r"kv_scale has the cache groups \['full'\], must be .* 'full', 'draft.full'"):
        stored_as(groups, "float8_e4m3fn", scale)
    with pytest.raises(ValueError, match=r"scale has shape \(3,\), must be"):
        stored_as(model.cache_groups, None, {"full": {"scale": [1.0] * 3}}, "float8_e4m3fn")


@nnx.jit
def first_drafts(model, tokens, following, pools, metadata):
    """The likeliest token after each row, and the draft layer's for the token after that."""
    hidden, pools = model(tokens, pools, metadata, mode="extend", form="absorbed")
    drafted, _ = model.draft(hidden, following, pools, metadata, mode="draft_extend")
    return model.logits(hidden).argmax(axis=-1), model.draft_logits(drafted).argmax(axis=-1)


@pytest.mark.slow
def test_acceptance_in_float8():
    """On the V3 fixture's texts a draft is accepted as often as with a bfloat16 cache: the mean number of tokens a
    step, with one draft, is the same to 3 %; ``-s`` prints it. (Texts that are generated part, and their acceptance
    with them.)"""
    model, stored = load_checkpoint(V3, dtype=jnp.bfloat16), np.load(V3 / "expected.npz")
    texts = [np.concatenate([stored[f"prompt_{i}"], stored[f"greedy_{i}"]]) for i in range(4)]
    scales, lengths = measure_scales(model, [text.tolist() for text in texts]), {}
    for kv_dtype in ("bfloat16", "float8_e4m3fn", "float8_e4m3fn:blocks", "float8_e5m2"):
        accepted = []
        for text in texts:
            pages = -(-len(text) // PAGE)
            table, length = jnp.arange(pages, dtype=jnp.int32)[None], jnp.asarray([len(text)], jnp.int32)
            m = build.for_extend(table, length, length, max_q_len=len(text), page_size=PAGE)
            pools = create_pools(stored_as(model.cache_groups, kv_dtype, scales), num_pages=pages, page_size=PAGE)
            tokens = jnp.asarray(text, jnp.int32)
            likeliest, drafts = first_drafts(model, tokens, jnp.roll(tokens, -1), pools, dict.fromkeys(pools, m))
            accepted.append(np.asarray(likeliest)[1:] == np.asarray(drafts)[:-1])
        lengths[kv_dtype] = 1 + np.concatenate(accepted).mean()
        print(f"{kv_dtype}: acceptance length {lengths[kv_dtype]:.4f}")
    assert lengths["bfloat16"] > 1.4
    assert all(abs(length / lengths["bfloat16"] - 1) < 0.03 for length in lengths.values()), lengths


def test_the_engine_holds_its_pool_in_half_the_bytes():
    model = small_model(dtype=jnp.bfloat16)
    options = {"max_batch": 2, "num_pages": 64, "page_size": 4, "max_len": 32, "speculation": (DraftTree((1,)),)}
    sizes = []
    for stored in ({}, {"kv_dtype": jnp.float8_e4m3fn, "kv_scale": {"full": {"scale": [0.5] * 2}}}):
        engine = Engine(model, **options, **stored)
        (pool,) = engine._device[0].values()
        sizes.append(pool.data.nbytes)
        scale = None if pool.scale is None else pool.scale.tolist()
        request = engine.add_request([1, 2, 3], SamplingParams(max_new_tokens=4))
        tokens = [token for output in engine.run() if output.request_id == request for token in output.tokens]
        assert len(tokens) == 4
    assert sizes[0] == 2 * sizes[1] and scale == [0.5] * 2


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"kv_dtype": "fp8"}, "kv_dtype=fp8 must be one of bfloat16, .*, float8_e4m3fn:blocks|kv_dtype='fp8' must be"),
        ({"kv_dtype": "float8_e4m3fn", "kv_scale": 0.0}, "scale=0.0 must be a finite number above 0"),
        ({"kv_dtype": "float8_e4m3fn", "kv_scale": {"all": 1.0}}, r"kv_scale has the cache groups \['all'\], must be"),
        (
            {"kv_dtype": "float8_e4m3fn", "kv_scale": {"full": {"k_scale": 1.0}}},
            r"kv_scale\['full'\] has \['k_sc",
        ),
        ({"kv_dtype": "float8_e4m3fn", "kv_scale": {"full": {"scale": [1.0]}}}, r"scale has shape \(1,\), must be"),
        ({"draft_kv_dtype": "fp8"}, "draft_kv_dtype=fp8 must be one of|draft_kv_dtype='fp8' must be one of bfloat16"),
        ({"draft_kv_dtype": "float8_e4m3fn:blocks"}, "row_format='blocks' with kv_lora_rank=16: must be a multiple of"),
    ],
)
def test_errors(stored, message):
    with pytest.raises(ValueError, match=message):
        Engine(small_model(), max_batch=1, num_pages=4, page_size=4, max_len=16, **stored)


def test_blocks_are_of_latent_rows(llama):
    with pytest.raises(ValueError, match="kv_dtype=float8_e4m3fn:blocks is of latent rows, but 'full' holds keys and"):
        stored_as(llama[0].cache_groups, "float8_e4m3fn:blocks")


def test_no_drafter_no_format(llama):
    with pytest.raises(ValueError, match="draft_kv_dtype='bfloat16' must be None: there is no draft layer, and no d"):
        stored_as(llama[0].cache_groups, None, None, "bfloat16")
