"""Every setting of a checkpoint's JSON files that is read: its kind and range, its default, what is done with it.

``DeepseekConfig.from_hf``, ``DecoderConfig.from_hf``, ``load_checkpoint`` and ``load_tokenizer`` read by these tables,
and the page beside this file shows them (``settings_page``). What is not here is passed over: it says how a model was
trained, or how others run it.
"""

from collections.abc import Mapping

from mla_attn.models.settings import (
    BLOCK,
    BOOLEAN,
    LAYER_TYPES,
    OBJECT,
    REQUIRED,
    TEXT,
    TOKEN_ID,
    TOKEN_IDS,
    TOKEN_TEXT,
    Setting,
    as_json,
    integer,
    nullable,
    number,
    only,
)

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
DECODER_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_oss")
ROUTINGS = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}  # with their scoring_func

_SIZE = integer(1)
_REFUSED = "others are refused: they would change results"

KNOWN_TYPE = {"model_type": Setting(only(*MODEL_TYPES, *DECODER_TYPES), "says which of the tables below hold")}
FAMILY = {
    "model_type": Setting(only(*MODEL_TYPES), "the defaults of `topk_method` and `scoring_func` are its"),
    "hidden_act": Setting(only("silu"), _REFUSED, "silu"),
    "attention_bias": Setting(only(False), _REFUSED, False),
    "mlp_bias": Setting(only(False), _REFUSED, False),
    "moe_layer_freq": Setting(only(1), _REFUSED, 1),
    "llama_4_scaling": Setting(only(None), _REFUSED + "; `llama_4_scaling_beta` below is read", None),
}
SHAPES = {
    "vocab_size": Setting(_SIZE, "rows of the embedding, width of the head; token ids are below it"),
    "hidden_size": Setting(_SIZE, "width of the model"),
    "intermediate_size": Setting(_SIZE, "width of MLPs without experts"),
    "num_hidden_layers": Setting(_SIZE, "layers, the draft layer not counted"),
    "num_attention_heads": Setting(_SIZE, "query heads; `num_key_value_heads` is passed over: all share the latent"),
    "q_lora_rank": Setting(nullable(_SIZE), "rank of the query projection; null: one matrix"),
    "kv_lora_rank": Setting(_SIZE, "channels of a cached latent"),
    "qk_nope_head_dim": Setting(_SIZE, "channels of a head without rope"),
    "qk_rope_head_dim": Setting(_SIZE, "channels of a head with rope, even"),
    "v_head_dim": Setting(_SIZE, "channels of a value head"),
    "max_position_embeddings": Setting(_SIZE, "most tokens of a request"),
    "rms_norm_eps": Setting(number(above=0.0), "in all norms, those of the latents included", 1e-6),
    "rope_interleave": Setting(BOOLEAN, "whether rope turns neighbours, or the halves", True),
    "num_nextn_predict_layers": Setting(integer(0, 1), "whether there is a draft (MTP) layer", 0),
    "tie_word_embeddings": Setting(BOOLEAN, "whether the embedding is the head too", False),
    "bos_token_id": Setting(TOKEN_ID, "begins prompts of byte-level checkpoints that ask for it", None),
}
END_TOKENS = {"eos_token_id": Setting(TOKEN_IDS, "ends a text; those of both files count", ())}
ROPE_THETA = {"rope_theta": Setting(number(above=1.0), "base of rope, in the file or among the rope keys", 10000.0)}
PARTS = {
    "rope_scaling": Setting(
        OBJECT, "rope keys, below; `rope_parameters` is another name of it, one of them alone", None
    ),
    "quantization_config": Setting(OBJECT, "how weights are quantised, below", None),
}
EXPERTS = {
    "n_routed_experts": Setting(nullable(_SIZE), "experts a layer; null: a model without, and none of these is read"),
    "num_experts_per_tok": Setting(_SIZE, "experts a token; at most those of the groups that are kept"),
    "moe_intermediate_size": Setting(_SIZE, "width of an expert"),
    "n_shared_experts": Setting(nullable(integer()), "experts that every token has; null: none"),
    "first_k_dense_replace": Setting(integer(), "first layer with experts"),
    "norm_topk_prob": Setting(nullable(BOOLEAN), "whether a token's weights are made to sum to 1; null: not"),
    "routed_scaling_factor": Setting(number(above=0.0), "multiplies the weights"),
    "topk_method": Setting(
        only(*ROUTINGS), "how experts are chosen; if left out `greedy` for `deepseek_v2`, else `noaux_tc`", None
    ),
    "scoring_func": Setting(
        only("softmax", "sigmoid"),
        "of the router; must go with `topk_method`; if left out softmax for `deepseek_v2`",
        None,
    ),
}
GROUPS = {
    "n_group": Setting(_SIZE, "groups of experts; read unless `topk_method` is `greedy`; divides `n_routed_experts`"),
    "topk_group": Setting(_SIZE, "groups that are kept, at most `n_group`"),
}

# Grouped-query families.
_SILU = Setting(only("silu"), _REFUSED, "silu")
_BIASES = "whether the four projections of attention have biases"
_WINDOW = "keys that a row of a layer with a window sees, itself included"

DECODER_FAMILY = {"model_type": Setting(only(*DECODER_TYPES), "the family")}
DECODER = {
    "vocab_size": SHAPES["vocab_size"],
    "hidden_size": SHAPES["hidden_size"],
    "intermediate_size": Setting(_SIZE, "width of MLPs, in gpt-oss of an expert"),
    "num_hidden_layers": Setting(_SIZE, "layers"),
    "num_attention_heads": Setting(_SIZE, "query heads"),
    "num_key_value_heads": Setting(_SIZE, "key and value heads, a divisor of the query heads; left out: as many", None),
    "head_dim": Setting(_SIZE, "channels of a head, even; left out: `hidden_size` over the query heads", None),
    "max_position_embeddings": SHAPES["max_position_embeddings"],
    "rms_norm_eps": Setting(number(above=0.0), "in all norms", 1e-6),
    "layer_types": Setting(
        LAYER_TYPES, "`sliding_attention` layers have the window; left out: as the family does, below", None
    ),
    "mlp_bias": FAMILY["mlp_bias"],
    "partial_rotary_factor": Setting(only(1.0, 1), _REFUSED, 1.0),
    "bos_token_id": SHAPES["bos_token_id"],
    **END_TOKENS,
    **PARTS,
}
UNTIED = {"tie_word_embeddings": SHAPES["tie_word_embeddings"]}
TIED = {"tie_word_embeddings": Setting(BOOLEAN, "whether the embedding is the head too", True)}
LLAMA = {
    "hidden_act": _SILU,
    "attention_bias": Setting(BOOLEAN, _BIASES, False),
    "sliding_window": Setting(only(None), _REFUSED, None),
}
MISTRAL = {
    "hidden_act": _SILU,
    "attention_bias": FAMILY["attention_bias"],
    "sliding_window": Setting(nullable(_SIZE), _WINDOW + ": every layer; null: none has one"),
}
_QWEN_WINDOWS = {
    "use_sliding_window": Setting(BOOLEAN, "whether there are windows", False),
    "sliding_window": Setting(_SIZE, _WINDOW + "; read with `use_sliding_window`, and then required", None),
    "max_window_layers": Setting(
        integer(),
        "first layer with a window; read with `use_sliding_window` without `layer_types`, then required",
        None,
    ),
}
QWEN2 = {"hidden_act": _SILU, **_QWEN_WINDOWS}
QWEN3 = {"hidden_act": _SILU, "attention_bias": LLAMA["attention_bias"], **_QWEN_WINDOWS}
GEMMA2 = {
    "hidden_activation": Setting(
        only("gelu_pytorch_tanh"), "others are refused; `hidden_act` is passed over", "gelu_pytorch_tanh"
    ),
    "attention_bias": LLAMA["attention_bias"],
    "sliding_window": Setting(_SIZE, _WINDOW + ": layers 0, 2, 4, ..."),
    "query_pre_attn_scalar": Setting(number(above=0.0), "the softmax scale is this to the power of -0.5"),
    "attn_logit_softcapping": Setting(nullable(number(above=0.0)), "cap of scores; null: none"),
    "final_logit_softcapping": Setting(nullable(number(above=0.0)), "cap of logits; null: none"),
    "use_bidirectional_attention": Setting(only(False), _REFUSED, False),
}
GPT_OSS = {
    "hidden_act": _SILU,
    "attention_bias": Setting(BOOLEAN, _BIASES, True),
    "sliding_window": Setting(_SIZE, _WINDOW + ": layers 0, 2, 4, ..."),
    "num_local_experts": Setting(_SIZE, "experts a layer"),
    "num_experts_per_tok": Setting(_SIZE, "experts a token; `experts_per_token` is passed over"),
    "swiglu_limit": Setting(number(above=0.0), "clamps the two halves of experts", 7.0),
    "rms_norm_eps": Setting(number(above=0.0), "in all norms", 1e-5),
    "rope_theta": Setting(number(above=1.0), "base of rope, in the file or among the rope keys", 150000.0),
}
ROPE = {
    "type": Setting(only("default", "yarn"), "`rope_type` is another name of it; both must agree", "default"),
    "truncate": Setting(only(True), _REFUSED, True),
    "attention_factor": Setting(only(None), _REFUSED, None),
    "partial_rotary_factor": Setting(only(1.0, 1), _REFUSED, 1.0),
    "max_position_embeddings": Setting(_SIZE, "must be the file's own", None),
}
TRAINED = {
    "original_max_position_embeddings": Setting(_SIZE, "positions before scaling; with yarn or `llama_4_scaling_beta`"),
}
YARN = {
    "factor": Setting(number(least=1.0), "stretches positions, with yarn"),
    **TRAINED,
    "beta_fast": Setting(number(above=0.0), "rotations from which a frequency is kept, with yarn", 32.0),
    "beta_slow": Setting(number(above=0.0), "rotations up to which it is divided by factor, with yarn", 1.0),
    "mscale": Setting(number(least=0.0), "scales cosines and sines, with yarn", 1.0),
    "mscale_all_dim": Setting(number(least=0.0), "scales scores, with yarn", 0.0),
}
DECODER_ROPE = {name: setting for name, setting in ROPE.items() if name != "truncate"} | {
    "type": Setting(only("default", "llama3", "yarn"), "`rope_type` is another name of it; both must agree", "default")
}
DECODER_YARN = {name: setting for name, setting in YARN.items() if not name.startswith("mscale")} | {
    "truncate": Setting(BOOLEAN, "whether the ramp of frequencies ends at whole pairs, with yarn", True)
}
LLAMA3 = {
    "factor": Setting(number(least=1.0), "stretches positions, with llama3 or yarn"),
    "original_max_position_embeddings": Setting(_SIZE, "positions before scaling, with llama3 or yarn"),
    "low_freq_factor": Setting(number(above=0.0), "rotations up to which a frequency is divided, with llama3"),
    "high_freq_factor": Setting(number(above=0.0), "rotations from which it is kept, with llama3; above the former"),
}
QUERY_SCALING = {"llama_4_scaling_beta": Setting(number(least=0.0), "scales queries by position", None)}
FP8 = {
    "quant_method": Setting(only("fp8"), "weights are dequantised as they are read"),
    "fmt": Setting(only("e4m3"), _REFUSED, "e4m3"),
    "activation_scheme": Setting(only("dynamic"), "passed over: activations are not quantised", "dynamic"),
    "weight_block_size": Setting(BLOCK, "rows and columns that share a scale"),
}
QUANTIZED = {
    "quant_method": Setting(
        only("fp8", "mxfp4", "compressed-tensors"),
        "`fp8`: the table above; `mxfp4`, gpt-oss alone: experts are dequantised as they are read",
    ),
    "config_groups": Setting(
        only({}), "with `compressed-tensors`: weights must be plain. Scales of a float8 cache are read", None
    ),
}
BEGIN_TOKEN = {
    "add_bos_token": Setting(BOOLEAN, "whether prompts begin with `bos_token`; left out: as tokenizer.json says", None),
    "bos_token": Setting(TOKEN_TEXT, "the begin token", None),
}
TIKTOKEN = {
    "tokenizer_class": Setting(TEXT, "`TikTokenTokenizer`: tiktoken.model is read", None),
    "added_tokens_decoder": Setting(OBJECT, "special tokens of tiktoken.model, by id", None),
}
ADDED_TOKEN = {"special": Setting(BOOLEAN, "whether an added token has no text in an answer", True)}

# What the page shows, file by file.
_PAGE = {
    "config.json": KNOWN_TYPE,
    "config.json of DeepSeek and Kimi": FAMILY | SHAPES | END_TOKENS | ROPE_THETA | PARTS,
    "config.json of DeepSeek and Kimi, of models with experts": EXPERTS | GROUPS,
    "config.json of DeepSeek and Kimi, `rope_scaling`": ROPE | YARN | QUERY_SCALING,
    "config.json, `quantization_config`": FP8,
    "config.json of the other families": DECODER_FAMILY | DECODER | ROPE_THETA,
    "config.json of `llama`": LLAMA | UNTIED,
    "config.json of `mistral`": MISTRAL | UNTIED,
    "config.json of `qwen2`": QWEN2 | UNTIED,
    "config.json of `qwen3`": QWEN3 | UNTIED,
    "config.json of `gemma2`": GEMMA2 | TIED,
    "config.json of `gpt_oss`": GPT_OSS | UNTIED,
    "config.json of the other families, `rope_scaling`": DECODER_ROPE | DECODER_YARN | LLAMA3,
    "config.json of the other families, `quantization_config`": QUANTIZED,
    "generation_config.json": END_TOKENS,
    "tokenizer_config.json": BEGIN_TOKEN | TIKTOKEN | ADDED_TOKEN,
}


def settings_page() -> str:
    """The tables in Markdown, as the page beside this file holds them."""
    return "\n\n".join(f"### {title}\n\n{_table(settings)}" for title, settings in _PAGE.items())


def _table(settings: Mapping[str, Setting]) -> str:
    rows = ["| key | kind and range | if left out | what is done with it |", "| --- | --- | --- | --- |"]
    for name, setting in settings.items():
        default = setting.default
        absent = "refused" if default is REQUIRED else "-" if default in (None, ()) else as_json(default)
        rows.append(f"| `{name}` | {setting.kind.described} | {absent} | {setting.use} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(settings_page())
