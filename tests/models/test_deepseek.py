"""Logits through the paged steps, in every mode, against what PyTorch and transformers compute (tests/fixtures)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from checkpoints import V2, V3
from kernel_calls import needs_kernels
from mla_attn import dispatch, steps, support
from mla_attn import metadata as build
from mla_attn.bench.configs import CONFIGS
from mla_attn.models import DeepseekConfig, DeepseekForCausalLM, load_checkpoint, random_model
from mla_attn.models.base import create_pools, stored_as
from mla_attn.models.deepseek import GROUP
from mla_attn.mosaic_gpu import mla as mosaic_gpu
from mla_attn.pallas_kernels.work_list import work_list

TOLERANCE = 1e-3  # float32 against float32; a float64 model differs from the expected logits by 2.5e-4
PAGE, WIDTH = 16, 20  # 320 tokens a request
SHORT = 41


@pytest.fixture(scope="module")
def v3():
    return load_checkpoint(V3, dtype=jnp.float32)


@pytest.fixture(scope="module")
def v2():
    return load_checkpoint(V2, dtype=jnp.float32)


@pytest.fixture(scope="module", params=[V3, V2], ids=["v3", "v2"])
def fixture(request, v3, v2):
    """A model and what is expected of it."""
    return v3 if request.param == V3 else v2, np.load(request.param / "expected.npz")


only_v3 = pytest.mark.parametrize("fixture", [V3], indirect=True, ids=["v3"])


def poisoned_pools(model, batch):
    """A pool of NaN, and a table of scattered pages in it: what is read before it is written shows."""
    pages = batch * WIDTH + 3
    pools = model.create_pools(num_pages=pages, page_size=PAGE)
    pools = jax.tree.map(lambda data: jnp.full_like(data, jnp.nan), pools)
    table = np.random.default_rng(0).permutation(pages)[: batch * WIDTH].reshape(batch, WIDTH)
    return pools, jnp.asarray(table, jnp.int32)


@nnx.jit(static_argnames=("mode", "form"), donate_argnames="pools")
def forward(model, tokens, pools, metadata, *, mode, form=None):
    hidden, pools = model(tokens, pools, {GROUP: metadata}, mode=mode, form=form)
    return hidden, model.logits(hidden), pools


@nnx.jit(static_argnames="mode", donate_argnames="pools")
def draft(model, hidden, tokens, pools, metadata, *, mode):
    hidden, pools = model.draft(hidden, tokens, pools, {GROUP: metadata}, mode=mode)
    return hidden, model.draft_logits(hidden), pools


def lens(*values):
    return jnp.asarray(values, jnp.int32)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def prefill_packed(model, expected, padding):
    """All prompts in one call of packed rows, the rows left over filled with the tokens ``padding``."""
    prompts = [expected[f"prompt_{i}"] for i in range(4)]
    lengths = lens(*map(len, prompts))
    tokens = jnp.asarray(np.concatenate([*prompts, padding]))
    pools, table = poisoned_pools(model, 4)
    metadata = build.for_extend(
        table, lengths, lengths, max_q_len=max(map(len, prompts)), num_rows=len(tokens), page_size=PAGE
    )
    hidden, logits, _ = forward(model, tokens, pools, metadata, mode="prefill")
    return hidden, logits


@pytest.fixture(scope="module")
def packed(fixture):
    """Hidden states and logits of all prompts, and the row where each begins."""
    model, expected = fixture
    hidden, logits = prefill_packed(model, expected, np.zeros(5, np.int32))
    return hidden, logits, np.cumsum([0] + [len(expected[f"prompt_{i}"]) for i in range(4)])


def test_prefill_of_all_prompts_together(fixture, packed):
    _, expected = fixture
    hidden, logits, begins = packed
    assert hidden.dtype == logits.dtype == jnp.float32
    for i in range(4):
        close(logits[begins[i] : begins[i + 1]], expected[f"logits_{i}"])


@only_v3
def test_padding_changes_no_bit(fixture, packed):
    hidden, logits, begins = packed
    other = prefill_packed(*fixture, np.array([-7, 10**6, 5, 5, -1], np.int32))
    assert np.isfinite(hidden).all()
    assert np.isfinite(other[0]).all()
    np.testing.assert_array_equal(logits[: begins[-1]], other[1][: begins[-1]])


@only_v3
def test_draft_layer_of_all_prompts_together(fixture, packed):
    model, expected = fixture
    hidden, _, begins = packed
    prompts = [expected[f"prompt_{i}"] for i in range(4)]
    lengths = [len(prompt) - 1 for prompt in prompts]
    count = sum(lengths)
    inputs = np.full((count + 5, hidden.shape[1]), np.nan, np.float32)  # what a caller may leave in padding rows
    inputs[:count] = np.concatenate([hidden[begins[i] : begins[i] + lengths[i]] for i in range(4)])
    following = np.concatenate([*(prompt[1:] for prompt in prompts), np.array([0, -1, 10**6, 5, 5], np.int32)])
    pools, table = poisoned_pools(model, 4)
    metadata = build.for_extend(
        table, lens(*lengths), lens(*lengths), max_q_len=max(lengths), num_rows=count + 5, page_size=PAGE
    )
    _, logits, _ = draft(model, jnp.asarray(inputs), jnp.asarray(following), pools, metadata, mode="prefill")
    begins = np.cumsum([0, *lengths])
    for i in range(3):  # the last prompt has one token, which leaves nothing to draft from
        close(logits[begins[i] : begins[i + 1]], expected[f"mtp_logits_{i}"])


def test_decode_token_by_token(fixture):
    model, expected = fixture
    prompt = expected["prompt_0"]
    pools, table = poisoned_pools(model, 2)
    for t, token in enumerate(prompt):
        metadata = build.for_decode(table, lens(0, t + 1), page_size=PAGE)  # request 0 is padding
        hidden, logits, pools = forward(model, lens(-1, token), pools, metadata, mode="decode")
        assert np.isfinite(hidden).all()
        close(logits[1], expected["logits_0"][t])


@only_v3
def test_drafting_token_by_token(fixture, packed):
    model, expected = fixture
    prompt, hidden = expected["prompt_0"], packed[0]
    pools, table = poisoned_pools(model, 1)
    for t in range(SHORT - 1):
        metadata = build.for_draft_decode(table, lens(0), t, page_size=PAGE)
        _, logits, pools = draft(model, hidden[t : t + 1], lens(prompt[t + 1]), pools, metadata, mode="draft_decode")
        close(logits[0], expected["mtp_logits_0"][t])


# The absorbed ones are one computation under several names, so one model for each is enough.
@pytest.mark.parametrize(
    ("fixture", "mode", "form"),
    [(V3, "extend", None), (V2, "extend", "absorbed"), (V3, "target_verify", None), (V2, "draft_extend", None)],
    indirect=["fixture"],
    ids=["v3-extend", "v2-absorbed-extend", "v3-target_verify", "v2-draft_extend"],
)
def test_continuing_a_cached_prefix(fixture, mode, form):
    """Two requests with the same tokens, cut at different places: 20 + 21 and 33 + 8."""
    model, expected = fixture
    prompt, want, cuts = expected["prompt_0"], expected["logits_0"], (20, 33)
    pools, table = poisoned_pools(model, 2)
    longest, rest = max(cuts), [SHORT - cut for cut in cuts]

    def dense(parts, rows):  # a block of `rows` rows per request
        block = np.zeros((2, rows), np.int32)
        for b, part in enumerate(parts):
            block[b, : len(part)] = part
        return jnp.asarray(block.reshape(-1))

    metadata = build.for_extend(table, lens(*cuts), lens(*cuts), max_q_len=longest, page_size=PAGE)
    _, _, pools = forward(model, dense([prompt[:cut] for cut in cuts], longest), pools, metadata, mode="prefill")
    rows = max(rest)
    if mode == "target_verify":
        metadata = build.for_target_verify(table, lens(*cuts), num_tokens=rows, q_lens=lens(*rest), page_size=PAGE)
    else:
        builder = build.for_extend if mode == "extend" else build.for_draft_extend
        metadata = builder(table, lens(SHORT, SHORT), lens(*rest), max_q_len=rows, page_size=PAGE)
    _, logits, pools = forward(
        model, dense([prompt[cut:] for cut in cuts], rows), pools, metadata, mode=mode, form=form
    )
    for b, cut in enumerate(cuts):
        close(logits.reshape(2, rows, -1)[b, : SHORT - cut], want[cut:])


def test_each_mode_runs_through_its_own_step(v3, monkeypatch):
    """Absorbed modes hand latent queries to the step, the others queries as wide as the heads. Equal layers are traced
    once."""
    calls = []
    for name in ("prefill", "extend", "decode", "target_verify", "draft_extend", "draft_decode"):
        real = getattr(steps, name)

        def watched(*args, name=name, step=real, **kwargs):
            calls.append((name, args[0].shape[-1], kwargs["implementation"]))
            return step(*args, **kwargs)

        monkeypatch.setattr(steps, name, watched)
        pools, table = poisoned_pools(v3, 1)
        metadata = build.for_extend(table, lens(1), lens(1), max_q_len=1, page_size=PAGE)

        def both(pools, metadata, name=name):
            metadata = {GROUP: metadata}
            hidden, pools = v3(lens(5), pools, metadata, mode=name, implementation="xla")
            return v3.draft(hidden, lens(6), pools, metadata, mode=name, implementation="xla")

        jax.eval_shape(both, pools, metadata)
        width = 128 if name in ("prefill", "extend") else 512
        assert calls == [(name, width, "xla")] * 3  # a dense layer, those with experts, the draft layer
        calls.clear()


def test_bfloat16_is_near():
    expected = np.load(V3 / "expected.npz")
    model = load_checkpoint(V3, dtype=jnp.bfloat16)
    prompt = jnp.asarray(expected["prompt_0"])
    pools, table = poisoned_pools(model, 1)
    metadata = build.for_extend(table, lens(SHORT), lens(SHORT), max_q_len=SHORT, page_size=PAGE)
    hidden, logits, _ = forward(model, prompt, pools, metadata, mode="prefill")
    assert hidden.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    error = np.abs(np.asarray(logits) - expected["logits_0"])
    assert error.max() > TOLERANCE  # it is not float32 by another name
    assert np.median(error) < 0.05
    assert (np.asarray(logits).argmax(-1) == expected["logits_0"].argmax(-1)).mean() > 0.9


def test_a_model_is_made_without_a_checkpoint(v3, unchecked):
    config = dataclasses.replace(v3.config, num_hidden_layers=1, num_nextn_predict_layers=0)
    model = nnx.eval_shape(lambda: DeepseekForCausalLM(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert [(g.name, g.num_layers, g.dtype) for g in model.cache_groups] == [(GROUP, 1, jnp.bfloat16)]
    assert [(g.name, g.num_layers, g.dtype) for g in v3.cache_groups] == [(GROUP, 4, jnp.float32)]
    assert (model.can_draft, v3.can_draft) == (False, True)
    assert (v3.attention_spec.num_heads, v3.attention_spec.latent_dim) == (4, 576)
    assert v3.attention_spec.scale == v3.config.softmax_scale
    assert isinstance(model.config, DeepseekConfig)
    assert "embed_tokens" in dict(nnx.to_pure_dict(nnx.state(model)))
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0"):
        model.draft(jnp.zeros((1, 192)), lens(1), {}, {}, mode="decode")
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0"):
        model.draft_logits(jnp.zeros((1, 192)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "verify"}, "mode='verify' must be one of prefill, extend, decode, target_verify"),
        ({"mode": "extend", "form": "latent"}, "form='latent' must be None, 'expanded' or 'absorbed'"),
        ({"mode": "decode", "form": "expanded"}, "form='expanded' with mode='decode': must be one of prefill, extend"),
        ({"mode": "extend", "tree_mask": True}, "tree_mask with mode='extend': must be one of decode, target_verify"),
    ],
)
def test_modes_and_forms_that_do_not_exist(options, message, v3, unchecked):
    with pytest.raises(ValueError, match=message):
        v3(lens(1), {GROUP: None}, {GROUP: None}, **options)


@needs_kernels
@pytest.mark.parametrize("mode", ["decode", "target_verify"])
def test_one_work_list_for_all_layers(mode, monkeypatch):
    """What a kernel's layers share is made once a pass, not in each."""
    static = ("plan", "max_q_len", "causal", "kv_stride")
    monkeypatch.setattr(mosaic_gpu, "work_list", jax.jit(work_list.__wrapped__, static_argnames=static))  # not inlined
    model = nnx.eval_shape(lambda: load_checkpoint(V3, dtype=jnp.bfloat16))
    pools, table = jax.eval_shape(lambda: poisoned_pools(model, 2))

    def run(params, tokens, pools, table):
        model = nnx.merge(graph, params)
        if mode == "decode":
            metadata = build.for_decode(table, lens(5, 9), page_size=PAGE)
            mask = None
        else:
            metadata = build.for_target_verify(table, lens(5, 9), num_tokens=3, page_size=PAGE)
            mask = jnp.ones((2, 3, 3), bool)
        options = {"mode": mode, "tree_mask": mask, "implementation": "mosaic_gpu"}
        hidden, pools = model(tokens, pools, {GROUP: metadata}, **options)
        return model.draft(hidden, tokens, pools, {GROUP: metadata}, **options)

    graph, params = nnx.split(model)
    tokens = jax.ShapeDtypeStruct((2 if mode == "decode" else 6,), jnp.int32)
    with dispatch.compiling_for(support.H200):
        jaxpr = jax.make_jaxpr(run)(params, tokens, pools, table)
    names = [str(equation.params.get("name")) for equation in equations(jaxpr.jaxpr)]
    assert names.count("work_list") == 2  # of the model's layers, and of the draft layer
    assert names.count(mode) == 4


@needs_kernels
@pytest.mark.parametrize(
    ("mode", "device", "kv_dtype", "form"),
    [
        ("prefill", support.H200, None, "expanded"),
        ("prefill", support.H200, "float8_e4m3fn", "absorbed"),  # in either form of pass they read what is cached
        ("extend", support.H200, None, "absorbed"),
        ("extend", support.CPU, None, "expanded"),
    ],
)
def test_the_form_of_prompts(mode, device, kv_dtype, form):
    """Of sizes that kernels are for: whole prompts expand, prompts after a prefix do where there is no kernel."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 8, "intermediate_size": 8}
    model = nnx.eval_shape(lambda: random_model({**CONFIGS["v2-lite"], **sizes}, dtype=jnp.bfloat16))
    groups = stored_as(model.cache_groups, kv_dtype, None, None)
    pools = jax.eval_shape(lambda: create_pools(groups, num_pages=4, page_size=PAGE))
    one = jnp.ones(1, jnp.int32)
    metadata = build.for_extend(jnp.zeros((1, 4), jnp.int32), one, one, max_q_len=1, num_rows=1, page_size=PAGE)
    with dispatch.compiling_for(device):
        step, _ = model._step(pools[GROUP], metadata, model.dtype, mode, None, None, None)
    assert step.form == form


def equations(jaxpr):
    """Those of jaxprs inside too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_pools_and_metadata_are_under_the_name_of_their_group(v3, unchecked):
    """Else one error, before anything is computed, and not one of whatever is done with them first."""
    pools, table = poisoned_pools(v3, 1)
    one = jnp.ones(1, jnp.int32)
    metadata = build.for_extend(table, one, one, max_q_len=1, num_rows=1, page_size=PAGE)
    for given, by_group, message in (
        (pools[GROUP], {GROUP: metadata}, "pools is a LatentPool, must be a dict with 'full', a value for each cache"),
        (pools, metadata, "metadata is a AttentionMetadata, must be a dict with 'full'"),
        ({}, {GROUP: metadata}, r"pools has the cache groups \[\], must be a dict with 'full'"),
        (pools, {"window": metadata}, r"metadata has the cache groups \['window'\], must be a dict with 'full'"),
    ):
        with pytest.raises(ValueError, match=message):
            v3(one, given, by_group, mode="extend")
        with pytest.raises(ValueError, match=message):
            v3.draft(jnp.zeros((1, 1)), one, given, by_group, mode="extend")
    with pytest.raises(ValueError, match=r"num_pages has the cache groups \['other'\], must be a dict with 'full'"):
        v3.create_pools(num_pages={"other": 3}, page_size=PAGE)
