import json
import os
import re
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from checkpoints import GPT_OSS, LLAMA3, QWEN3, V2, V3, quantise, read_checkpoint, write_checkpoint
from mla_attn.models import CheckpointError, load_checkpoint, open_checkpoint
from mla_attn.models.loading import read_config
from mla_attn.models.safetensors import Stored

BLOCK = (48, 80)  # divides no shape of the fixtures evenly in both directions: last blocks are partial
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


@pytest.fixture(scope="module")
def v3():
    return read_checkpoint(V3)


@pytest.fixture(scope="module")
def loaded():
    return leaves(load_checkpoint(V3, dtype=jnp.float32))


def leaves(model) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(leaf.get_value()) for path, leaf in state}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def quantised(tensors):
    """The fixture as DeepSeek publishes weights: linear layers in FP8, the router, norms, embeddings and heads not."""
    out, kept = {}, ("norm", "mlp.gate.", "embed_tokens", "head", "eh_proj")
    for name, tensor in tensors.items():
        if any(part in name for part in kept):
            out[name] = tensor
        else:
            out[name], out[name + "_scale_inv"] = quantise(tensor, BLOCK)
    return out


def test_every_weight_lands_where_it_belongs(v3, loaded):
    _, tensors = v3
    f32 = {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}
    attention = "model.layers.2.self_attn"
    kv_b = f32[f"{attention}.kv_b_proj.weight"]  # 4 heads of 64 nope rows, then 64 value rows
    for head in range(4):
        np.testing.assert_array_equal(loaded["layers.2.self_attn.w_uk"][head], kv_b[128 * head : 128 * head + 64])
        np.testing.assert_array_equal(loaded["layers.2.self_attn.w_uv"][head], kv_b[128 * head + 64 : 128 * head + 128])
    for ours, theirs in {
        "embed_tokens.embedding": "model.embed_tokens.weight",
        "lm_head.kernel": "lm_head.weight",
        "norm.scale": "model.norm.weight",
        "layers.0.self_attn.kv_a_proj.kernel": "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "layers.0.mlp.up_proj.kernel": "model.layers.0.mlp.up_proj.weight",
        "layers.1.mlp.gate.kernel": "model.layers.1.mlp.gate.weight",
        "layers.1.mlp.gate.e_score_correction_bias": "model.layers.1.mlp.gate.e_score_correction_bias",
        "layers.1.mlp.shared_experts.down_proj.kernel": "model.layers.1.mlp.shared_experts.down_proj.weight",
        "mtp.block.self_attn.o_proj.kernel": "model.layers.3.self_attn.o_proj.weight",
        "mtp.head.kernel": "model.layers.3.shared_head.head.weight",
        "mtp.norm.scale": "model.layers.3.shared_head.norm.weight",
    }.items():
        want = f32[theirs].T if ours.endswith("kernel") else f32[theirs]
        np.testing.assert_array_equal(loaded[ours], want, err_msg=ours)
    for expert in range(8):
        want = f32[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"].T
        np.testing.assert_array_equal(loaded["layers.1.mlp.down_proj"][expert], want)


def test_dtypes_of_parameters():
    model = leaves(load_checkpoint(V3, dtype=jnp.bfloat16))
    wide = {name for name, leaf in model.items() if leaf.dtype == np.float32}
    assert wide == {name for name in model if ".mlp.gate." in name}  # the router alone
    assert {leaf.dtype.name for leaf in model.values()} == {"float32", "bfloat16"}
    assert {leaf.dtype.name for leaf in leaves(load_checkpoint(V2, dtype=jnp.float32)).values()} == {"float32"}
    assert {leaf.dtype.name for leaf in leaves(load_checkpoint(V2, dtype=jnp.float16)).values()} == {
        "float32",
        "float16",
    }
    with pytest.raises(ValueError, match="dtype=float64 must be one of bfloat16, float16, float32"):
        load_checkpoint(V3, dtype=np.float64)


def test_the_checkpoints_own_dtype(tmp_path, v3):
    """That of its embedding."""
    config, tensors = v3
    for stored, wanted in (("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")):
        name = "model.embed_tokens.weight"
        changed = {**tensors, name: tensors[name].astype(stored)}
        assert open_checkpoint(write_checkpoint(tmp_path / stored, config, changed)).model.dtype == wanted


def test_shards_hold_the_same_model(tmp_path, v3, loaded):
    assert_same(leaves(load_checkpoint(write_checkpoint(tmp_path / "c", *v3, shards=5), dtype=jnp.float32)), loaded)


def test_one_tensor_is_mapped_at_a_time(tmp_path, v3, monkeypatch):
    folder = write_checkpoint(tmp_path / "c", *v3, shards=3)
    mapped, most, read = [], [], Stored.read

    def watched(self):
        most.append(sum(ref() is not None for ref in mapped))
        tensor = read(self)
        root = tensor
        while isinstance(root.base, np.ndarray):
            root = root.base
        mapped.append(weakref.ref(root))
        return tensor

    monkeypatch.setattr(Stored, "read", watched)
    model = load_checkpoint(folder, dtype=jnp.bfloat16)  # as stored, so that nothing is copied by conversion
    assert len(most) == len(v3[1])
    assert max(most) <= 1  # the one before, until its name is bound anew
    # Nothing of the file is left in the model either.
    jax.block_until_ready(nnx.state(model))
    assert not any(ref() is not None for ref in mapped)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fp8_blocks_are_multiplied_with_their_scales(tmp_path, v3, loaded, dtype):
    config, tensors = v3
    blocks = quantised(tensors)
    got = leaves(
        load_checkpoint(write_checkpoint(tmp_path / "c", config | {"quantization_config": FP8}, blocks), dtype=dtype)
    )
    expected = {}
    for name, tensor in tensors.items():
        expected[name] = tensor
        if name + "_scale_inv" in blocks:
            values, scales = blocks[name].astype(np.float32), blocks[name + "_scale_inv"]
            each = np.empty(values.shape, np.float32)
            for i, j in np.ndindex(*values.shape):
                each[i, j] = values[i, j] * scales[i // BLOCK[0], j // BLOCK[1]]
            expected[name] = each
    assert sum(name.endswith("_scale_inv") for name in blocks) > 70
    assert_same(got, leaves(load_checkpoint(write_checkpoint(tmp_path / "w", config, expected), dtype=dtype)))
    # And the scales were multiplied, not divided by: the weights are near the unquantised ones.
    if dtype == jnp.float32:
        for name, leaf in loaded.items():
            np.testing.assert_allclose(got[name], leaf, rtol=0.07, atol=2e-3 * np.abs(leaf).max(), err_msg=name)


def test_tied_embeddings(tmp_path, v3, loaded, caplog):
    config, tensors = v3
    config = config | {"tie_word_embeddings": True}
    rest = {name: tensor for name, tensor in tensors.items() if "head.weight" not in name}
    model = load_checkpoint(write_checkpoint(tmp_path / "c", config, rest), dtype=jnp.float32)
    assert "lm_head.kernel" not in leaves(model)
    np.testing.assert_array_equal(leaves(model)["mtp.head.kernel"], loaded["embed_tokens.embedding"].T)
    hidden = np.random.default_rng(0).standard_normal((3, 192)).astype(np.float32)
    want = hidden @ loaded["embed_tokens.embedding"].T
    np.testing.assert_allclose(model.logits(jnp.asarray(hidden)), want, rtol=1e-4, atol=1e-4)
    for name, head in (("same", tensors["model.embed_tokens.weight"]), ("other", tensors["lm_head.weight"])):
        load_checkpoint(write_checkpoint(tmp_path / name, config, rest | {"lm_head.weight": head}), dtype=jnp.float32)
        assert ("lm_head.weight is not model.embed_tokens.weight: passed over" in caplog.text) == (name == "other")


def test_draft_copies_may_be_left_out_or_differ(tmp_path, v3, loaded):
    config, tensors = v3
    copies = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")
    rest = {name: tensor for name, tensor in tensors.items() if name not in copies}
    assert_same(leaves(load_checkpoint(write_checkpoint(tmp_path / "c", config, rest), dtype=jnp.float32)), loaded)
    other = rest | {name: tensors[name] * ml_dtypes.bfloat16(2) for name in copies}
    model = load_checkpoint(write_checkpoint(tmp_path / "d", config, other), dtype=jnp.float32)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((3, 192)), jnp.float32)
    np.testing.assert_array_equal(model.draft_logits(hidden), 2 * model.logits(hidden))
    own = leaves(model)
    np.testing.assert_array_equal(own["mtp.head.kernel"], 2 * loaded["lm_head.kernel"])
    np.testing.assert_array_equal(own["mtp.embed_tokens.embedding"], 2 * loaded["embed_tokens.embedding"])
    np.testing.assert_array_equal(own["lm_head.kernel"], loaded["lm_head.kernel"])


def test_rotary_buffers_are_passed_over(tmp_path, v3, loaded):
    config, tensors = v3
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(32, np.float32) for i in range(4)}
    folder = write_checkpoint(tmp_path / "c", config, tensors | extra)
    assert_same(leaves(load_checkpoint(folder, dtype=jnp.float32)), loaded)


def test_a_missing_draft_layer_costs_drafts_alone(tmp_path, v3, loaded, caplog):
    """As transformers saves V3 models: config.json promises a draft layer, there are no tensors of it."""
    folder = write_checkpoint(tmp_path / "c", *without("layers.3.")(*v3))
    model = load_checkpoint(folder, dtype=jnp.float32)
    assert caplog.messages == [
        f"{folder / 'config.json'}: num_nextn_predict_layers=1, but there are no tensors of the draft layer: loaded "
        "without, it cannot draft"
    ]
    assert_same(leaves(model), {name: leaf for name, leaf in loaded.items() if not name.startswith("mtp.")})
    assert (model.can_draft, model.cache_groups[0].num_layers) == (False, 3)
    with pytest.raises(ValueError, match=r"no MTP layer to draft with: its config\.json promises one, its checkpoint"):
        model.draft_logits(jnp.zeros((1, 192)))


def test_tensors_without_elements_are_passed_over(tmp_path, v3):
    """As transformers writes the shared experts of a model that has none."""
    config, tensors = without("shared_experts")(*v3)
    empty = {f"model.layers.{i}.mlp.shared_experts.up_proj.weight": np.zeros((0, 192), np.float32) for i in (1, 2, 3)}
    load_checkpoint(
        write_checkpoint(tmp_path / "c", config | {"n_shared_experts": 0}, empty | tensors), dtype=jnp.float32
    )


def test_end_tokens_of_both_configs(tmp_path, v3):
    folder = write_checkpoint(tmp_path / "c", *v3)
    for eos, want in ((101, (257, 101)), ([257, 101, 300], (257, 101, 300)), (None, (257,))):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "temperature": 0.6}))
        assert read_config(folder).eos_token_ids == want
    assert load_checkpoint(folder, dtype=jnp.float32).eos_token_ids == want
    (folder / "generation_config.json").write_text('{"eos_token_id": 1.0}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id=1\.0 must be a token id"):
        load_checkpoint(folder, dtype=jnp.float32)


def without(*parts):
    return lambda config, tensors: (config, {n: t for n, t in tensors.items() if not any(part in n for part in parts)})


def having(**extra):
    return lambda config, tensors: (config, tensors | {name.replace("__", "."): t for name, t in extra.items()})


def replacing(name, change):
    return lambda config, tensors: (config, tensors | {name: change(tensors[name])})


def configured(**changes):
    return lambda config, tensors: (config | changes, tensors)


def fp8(change=lambda tensors: tensors, **config):
    return lambda c, tensors: (c | {"quantization_config": FP8} | config, change(quantised(tensors)))


def refuses(folder, message):
    """In a line, with a name of a file or of the folder."""
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(folder, dtype=jnp.float32)
    assert str(folder) in str(caught.value) and str(caught.value).isprintable()


Q_A = "model.layers.1.self_attn.q_a_proj.weight"
BROKEN = {
    "missing": (without("layers.1.self_attn.o_proj"), "1 missing: model.layers.1.self_attn.o_proj.weight"),
    "many missing": (without("layers.2.mlp.experts"), r"24 missing: (\S+, ){7}\S+ and 16 more$"),
    "draft layer in part": (without("layers.3.enorm"), r"1 missing: model.layers.3.enorm.weight$"),
    "extra": (having(model__surprise=np.ones(3, np.float32)), "1 unexpected: model.surprise$"),
    "extra and missing": (
        lambda c, t: having(odd=np.ones(3, np.float32))(*without("model.norm")(c, t)),
        "1 missing: model.norm.weight; 1 unexpected: odd",
    ),
    "draft layer not configured": (
        configured(num_nextn_predict_layers=0),
        r"\d+ unexpected: .*; it has a draft layer: num_nextn_predict_layers must be 1",
    ),
    "layers": (configured(num_hidden_layers=10**9), r"config\.json: num_hidden_layers=1000000000 and n_routed_expert"),
    "experts": (
        configured(n_routed_experts=2**31 - 4),
        r"need at least 6442450936 tensors, the checkpoint has \d+$",
    ),
    "draft experts": (
        configured(n_routed_experts=2**31 - 4, first_k_dense_replace=3),
        r"need at least 2147483648 tensors, the checkpoint has \d+$",
    ),
    **{
        name: (configured(**{name: 2**31 - 2}), r"config\.json: a matrix of .*\b" + shown)
        for name, shown in {
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_size",
            "intermediate_size": "intermediate_size",
            "moe_intermediate_size": "moe_intermediate_size",
            "n_shared_experts": "n_shared_experts",
            "num_attention_heads": "num_attention_heads",
            "q_lora_rank": "q_lora_rank",
            "kv_lora_rank": "kv_lora_rank",
            "qk_nope_head_dim": "qk head dim",
            "qk_rope_head_dim": "qk head dim",
            "v_head_dim": "v_head_dim",
        }.items()
    },
    "another layer": (configured(num_hidden_layers=4, num_nextn_predict_layers=0), "unexpected: model.layers.3.e"),
    "experts beyond the config": (configured(n_routed_experts=4, n_group=2, topk_group=2), r"unexpected: .*experts\.4"),
    "bias missing": (without("layers.1.mlp.gate.e_"), "1 missing: model.layers.1.mlp.gate.e_score_correction_bias"),
    "shape": (replacing(Q_A, lambda t: t[:-1]), re.escape(f"{Q_A} has shape (95, 192), must be (96, 192)")),
    "transposed": (replacing(Q_A, lambda t: t.T), re.escape(f"{Q_A} has shape (192, 96), must be (96, 192)")),
    "expert shape": (
        replacing("model.layers.1.mlp.experts.7.up_proj.weight", lambda t: t[:, :-1]),
        r"experts\.7\.up_proj\.weight has shape \(96, 191\), must be \(96, 192\)",
    ),
    "dtype": (replacing(Q_A, lambda t: t.astype(np.int8)), "has dtype I8, must be one of F32, F16, BF16, F8_E4M3"),
    "double": (replacing(Q_A, lambda t: t.astype(np.float64)), f"{Q_A} has dtype F64"),
    "fp8 without scales": (
        fp8(lambda t: {n: v for n, v in t.items() if n != Q_A + "_scale_inv"}),
        f"1 missing: {Q_A}_scale_inv",
    ),
    "fp8 not configured": (fp8(quantization_config=None), "F8_E4M3, but config.json has no quantization_config"),
    "fp8 scale shape": (
        fp8(lambda t: t | {Q_A + "_scale_inv": np.ones((1, 3), np.float32)}),
        re.escape(f"{Q_A}_scale_inv has shape (1, 3), must be (2, 3): one for each (48, 80) block"),
    ),
    "fp8 scale dtype": (
        fp8(lambda t: t | {Q_A + "_scale_inv": t[Q_A + "_scale_inv"].astype(ml_dtypes.bfloat16)}),
        f"{Q_A}_scale_inv has dtype BF16, must be F32",
    ),
    "fp8 norm": (
        fp8(lambda t: t | {
            "model.norm.weight": t["model.norm.weight"].astype(ml_dtypes.float8_e4m3fn),
            "model.norm.weight_scale_inv": np.ones((4,), np.float32),
        }),
        r"model.norm.weight is F8_E4M3 with shape \(192,\); only matrices",
    ),
    "scale of an unquantised tensor": (
        having(**{(Q_A + "_scale_inv").replace(".", "__"): np.ones((2, 3), np.float32)}),
        f"1 unexpected: {Q_A}_scale_inv",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_tensors_that_do_not_match(tmp_path, v3, case):
    change, message = BROKEN[case]
    folder = write_checkpoint(tmp_path / "c", *change(*v3))
    refuses(folder, message)


def cut(file, size):
    with open(file, "r+b") as f:
        f.truncate(size)


def edit_header(file, change):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def first_norm(header):
    return header["model.layers.0.input_layernorm.weight"]["data_offsets"]


def swap_offsets(header):
    header["lm_head.weight"]["data_offsets"], header["model.norm.weight"]["data_offsets"] = (
        header["model.norm.weight"]["data_offsets"],
        header["lm_head.weight"]["data_offsets"],
    )


DAMAGED = {
    "no config": (lambda c: (c / "config.json").unlink(), r"config\.json is missing"),
    "config not json": (lambda c: (c / "config.json").write_text("{"), r"config\.json is corrupt"),
    "config a folder": (lambda c: ((c / "config.json").unlink(), (c / "config.json").mkdir()), "not a regular file"),
    "config a pipe": (lambda c: ((c / "config.json").unlink(), os.mkfifo(c / "config.json")), "not a regular file"),
    "config a device": (
        lambda c: ((c / "config.json").unlink(), (c / "config.json").symlink_to("/dev/zero")),
        r"config\.json is not a regular file",
    ),
    "config a loop": (
        lambda c: ((c / "config.json").unlink(), (c / "config.json").symlink_to("config.json")),
        r"config\.json cannot be read: Too many levels of symbolic links",
    ),
    "config in UTF-16": (lambda c: (c / "config.json").write_text("{}", "utf-16"), r"config\.json is corrupt: .*utf-8"),
    "config with a key twice": (
        lambda c: (c / "config.json").write_text('{"vocab_size": 1, "vocab_size": 2}'),
        r"config\.json is corrupt: it has the key vocab_size twice",
    ),
    "config nested": (lambda c: (c / "config.json").write_text("[" * 10**5), r"config\.json is corrupt: .*too deep"),
    "generation config": (lambda c: (c / "generation_config.json").write_text("{"), r"generation_config\.json is corr"),
    "a link to nowhere": (
        lambda c: ((c / "model.safetensors").unlink(), (c / "model.safetensors").symlink_to("gone")),
        r"model\.safetensors is missing",
    ),
    "config a list": (lambda c: (c / "config.json").write_text("[]"), r"config\.json must hold a JSON object"),
    "no weights": (lambda c: (c / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "empty": (lambda c: cut(c / "model.safetensors", 0), "model.safetensors is truncated: 0 bytes"),
    "cut in the length": (lambda c: cut(c / "model.safetensors", 5), "is truncated: 5 bytes"),
    "cut in the header": (lambda c: cut(c / "model.safetensors", 500), "is truncated: 500 bytes"),
    "cut in the data": (lambda c: cut(c / "model.safetensors", 1_000_000), "truncated or corrupt: its header"),
    "bytes after the end": (
        lambda c: (c / "model.safetensors").write_bytes((c / "model.safetensors").read_bytes() + b"x"),
        "truncated or corrupt: its header describes",
    ),
    "header not json": (
        lambda c: (c / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"nope"),
        "is corrupt: Expecting value",
    ),
    "header without dtype": (
        lambda c: edit_header(c / "model.safetensors", lambda h: h["lm_head.weight"].pop("dtype")),
        "is corrupt: lm_head.weight must have dtype, shape and data_offsets",
    ),
    "bytes that do not fit the shape": (
        lambda c: edit_header(c / "model.safetensors", lambda h: h["lm_head.weight"]["shape"].append(2)),
        r"is corrupt: lm_head.weight BF16 \(258, 192, 2\) has 99072 bytes",
    ),
    "shared bytes": (
        lambda c: edit_header(
            c / "model.safetensors", lambda h: h["model.norm.weight"].update(data_offsets=first_norm(h))
        ),
        r"is corrupt: .* has 384 bytes",
    ),
    "swapped offsets": (lambda c: edit_header(c / "model.safetensors", swap_offsets), "is corrupt: .* has"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(tmp_path, v3, case):
    damage, message = DAMAGED[case]
    folder = write_checkpoint(tmp_path / "c", *v3)
    damage(folder)
    refuses(folder, message)


def edit_index(folder, change):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


SHARD = "model-00002-of-00003.safetensors"
BAD_INDEX = {
    "missing shard": (lambda c: (c / SHARD).unlink(), f"names '{SHARD}': .*{SHARD} is missing"),
    "truncated shard": (lambda c: cut(c / SHARD, 100_000), f"{SHARD} is truncated or corrupt"),
    "a name too long": (
        lambda c: edit_index(c, lambda m: m.update({"x": "a" * 300})),
        r"names 'aaa.*\(302 characters\), which is not a file name in this folder",
    ),
    **{
        f"a name that cannot be, {name!r}": (
            lambda c, name=name: edit_index(c, lambda m: m.update(x=name)),
            r"index\.json names .*which is not a file name",
        )
        for name in ("", "..", "a\0b", "a\nb", "\ud800", "/etc/hostname", "sub/x.safetensors")
    },
    "outside": (lambda c: edit_index(c, lambda m: m.update(x="../x.safetensors")), "not a file name in this folder"),
    "wrong shard": (
        lambda c: edit_index(c, lambda m: m.update(dict.fromkeys(["model.norm.weight", "lm_head.weight"], SHARD))),
        "lm_head.weight.* not in the shard it names",
    ),
    "no map": (lambda c: (c / "model.safetensors.index.json").write_text("{}"), "weight_map must map"),
    "twice": (
        lambda c: ((c / "copy.safetensors").write_bytes((c / SHARD).read_bytes()),
                   edit_index(c, lambda m: m.update(odd="copy.safetensors"))),
        f"{SHARD}: .* already stored in copy.safetensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INDEX)
def test_shards_that_do_not_match_their_index(tmp_path, v3, case):
    damage, message = BAD_INDEX[case]
    folder = write_checkpoint(tmp_path / "c", *v3, shards=3)
    damage(folder)
    refuses(folder, message)


def test_an_unsupported_config_is_a_checkpoint_error(tmp_path, v3):
    config, tensors = v3
    folder = write_checkpoint(tmp_path / "c", config | {"model_type": "bert"}, tensors)
    refuses(folder, r"config\.json: model_type='bert' is not supported")


def test_rotary_buffers_alone_are_no_draft_layer(tmp_path, v3, caplog):
    """Nor are tensors without elements."""
    config, tensors = without("layers.3.")(*v3)
    buffers = {
        "model.layers.3.self_attn.rotary_emb.inv_freq": np.ones(32, np.float32),
        "model.layers.3.mlp.shared_experts.up_proj.weight": np.zeros((0, 192), np.float32),
    }
    model = load_checkpoint(write_checkpoint(tmp_path / "c", config, tensors | buffers), dtype=jnp.float32)
    assert not model.can_draft and "loaded without" in caplog.text


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_files_without_permission(tmp_path, v3, monkeypatch, name):
    """Tests run as root, whom nobody refuses anything."""
    folder = write_checkpoint(tmp_path / "c", *v3)
    (folder / "generation_config.json").write_text("{}")
    for call in ("lstat", "open"):
        real = getattr(os, call)

        def refused(path, *rest, real=real):
            if str(path).endswith(name):
                raise PermissionError(13, "Permission denied", path)
            return real(path, *rest)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, refused)
            if (call, name) != ("lstat", "config.json"):
                refuses(folder, rf"{name} cannot be read: Permission denied")


# Grouped-query families.


def test_names_of_another_family_are_told(tmp_path):
    config, tensors = read_checkpoint(QWEN3)
    folder = write_checkpoint(tmp_path / "c", config | {"model_type": "llama"}, tensors)
    refuses(folder, r"8 unexpected: model\.layers\.0\.self_attn\.k_norm\.weight")


def test_scales_of_an_fp8_cache_are_no_weights(tmp_path, caplog):
    """By whatever name a tool gives them; what is no scale of a cache is not expected."""
    config, tensors = read_checkpoint(LLAMA3)
    names = [name for name in tensors if name.endswith("_scale")]
    assert len(names) == 6
    want = leaves(load_checkpoint(LLAMA3))
    plain = {name: tensor for name, tensor in tensors.items() if name not in names}
    model = load_checkpoint(write_checkpoint(tmp_path / "plain", config, plain))
    assert_same(leaves(model), want)
    assert model.cache_scales is None and not caplog.records
    odd = plain | {"model.layers.1.self_attn.q_proj.input_scale": np.ones(1, np.float32)}
    refuses(write_checkpoint(tmp_path / "odd", config, odd), "1 unexpected: .*q_proj.input_scale")


def test_gates_and_ups_of_gpt_oss_alternate():
    _, tensors = read_checkpoint(GPT_OSS)
    model = leaves(load_checkpoint(GPT_OSS, dtype=jnp.float32))
    both = tensors["model.layers.3.mlp.experts.gate_up_proj"].astype(np.float32)
    bias = tensors["model.layers.3.mlp.experts.gate_up_proj_bias"].astype(np.float32)
    for begin, name in enumerate(("gate", "up")):
        np.testing.assert_array_equal(model[f"layers.3.mlp.{name}_proj"], both[..., begin::2])
        np.testing.assert_array_equal(model[f"layers.3.mlp.{name}_bias"], bias[..., begin::2])
    assert model["layers.0.self_attn.sinks"].dtype == np.float32
    wide = {name for name, leaf in leaves(load_checkpoint(GPT_OSS)).items() if leaf.dtype == np.float32}
    assert {name.split(".", 2)[2] for name in wide} == {"self_attn.sinks", "mlp.router.kernel", "mlp.router.bias"}


@pytest.fixture(scope="module")
def mxfp4():
    """The gpt-oss fixture with experts of random numbers in MXFP4, as OpenAI publishes them, and those numbers."""
    config, tensors = read_checkpoint(GPT_OSS)
    rng, numbers = np.random.default_rng(0), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        count, width, rows = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (count, rows, width // 32, 16), np.uint8)
        scales = rng.integers(118, 124, blocks.shape[:-1], np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        halves = np.stack([blocks & 15, blocks >> 4], -1).astype(np.uint8)
        signed = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float32).reshape(*scales.shape, 32)
        numbers[name] = np.swapaxes((signed * 2.0 ** (scales[..., None] - 127.0)).reshape(count, rows, width), 1, 2)
    return config | {"quantization_config": {"quant_method": "mxfp4"}}, tensors, numbers


def test_mxfp4_experts_are_dequantised(tmp_path, mxfp4):
    config, tensors, numbers = mxfp4
    model = leaves(load_checkpoint(write_checkpoint(tmp_path / "c", config, tensors), dtype=jnp.float32))
    for layer in range(4):
        both = numbers[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        np.testing.assert_array_equal(model[f"layers.{layer}.mlp.gate_proj"], both[..., 0::2])
        np.testing.assert_array_equal(model[f"layers.{layer}.mlp.up_proj"], both[..., 1::2])
        down = numbers[f"model.layers.{layer}.mlp.experts.down_proj"]
        np.testing.assert_array_equal(model[f"layers.{layer}.mlp.down_proj"], down)


def test_mxfp4_that_does_not_match(tmp_path, mxfp4):
    config, tensors, _ = mxfp4
    name = "model.layers.2.mlp.experts.down_proj"
    scales = tensors[f"{name}_scales"]
    for number, (changes, message) in enumerate(
        (
            ({f"{name}_scales": None}, "1 missing: .*down_proj_scales"),
            ({f"{name}_scales": scales[..., 1:]}, r"down_proj_scales has shape \(4, 128, 2\), must be \(4, 128, 3\)"),
            ({f"{name}_scales": scales.astype(np.float32)}, "down_proj_scales has dtype F32, must be U8"),
            (
                {f"{name}_blocks": tensors[f"{name}_blocks"].astype(np.int8)},
                "down_proj_blocks has dtype I8, must be one of U8",
            ),
            ({f"{name}_bias": np.zeros((4, 128), np.uint8)}, "down_proj_bias has dtype U8, must be one of F32, F16"),
        )
    ):
        changed = {key: value for key, value in (tensors | changes).items() if value is not None}
        refuses(write_checkpoint(tmp_path / str(number), config, changed), message)
    _, stored = read_checkpoint(GPT_OSS)
    refuses(write_checkpoint(tmp_path / "plain", config, stored), "8 missing: .*_blocks")
