"""Which tests belong to ``-m quick``, ``compat`` and ``slow``, by the beginnings of their ids under ``tests/``."""

# For an inner loop: one implementation, one dtype, one layout, no engine traffic; `make quick`, two minutes.
QUICK = (
    "cache/",
    "engine/test_scheduler.py",
    "metadata/",
    "models/test_base.py",
    "models/test_config.py",
    "models/test_decoder_config.py",
    "models/test_keys.py",
    "models/test_loading.py",
    "models/test_precision.py",
    "models/test_rope.py",
    "models/test_tokenizer.py",
    "ops/test_gqa.py::TestXLA::test_layouts",
    "ops/test_gqa.py::test_",
    "ops/test_merge.py",
    "ops/test_mla.py::TestXLA::",
    "ops/test_mla.py::test_errors",
    "ops/test_skip.py::test_tiles",
    "reference/",
    "speculative/",
    "test_checks.py",
    "test_cli_arguments.py",
    "test_dispatch.py",
    "test_memory.py",
    "test_specs.py",
    "test_support.py",
    "xla/",
)
NOT_QUICK = ("bfloat16", "packed", "test_batch_invariant")

# What a release of jax or flax can break, once each; allocator, prefixes, configs, tokenizers and benchmarks it cannot.
COMPAT = (
    "cache/test_latent.py::test_layers",
    "compile/test_memory.py::test_donated_pool_is_gone",
    "engine/test_engine.py::test_tokens[greedy-plain]",
    "integrations/test_ragged_paged.py::test_options",
    "integrations/test_sglang_jax.py::test_a_step",
    "models/test_decoder.py",
    "models/test_deepseek.py",
    "ops/test_gqa.py::TestXLA::test_layouts",
    "ops/test_gqa.py::TestXLA::test_sinks",
    "ops/test_grouped_matmul.py",
    "ops/test_merge.py",
    "ops/test_mla.py::TestXLA::",
    "ops/test_ragged.py::TestXLA::",
    "ops/test_sharding.py::test_gqa_attention_over_heads[nhd-",
    "ops/test_sharding.py::test_mla_attention_over_heads",
    "pallas_kernels/test_kernels.py::test_every_call_lowers",
    "parallel/test_calls.py::test_gqa_modes",
    "parallel/test_calls.py::test_modes[decode",
    "parallel/test_calls.py::test_modes[extend",
    "programs/",
    "speculative/test_sampling.py",
    "steps/",
    "test_buckets.py::test_no_compile_after_warm_up",
    "xla/",
)
NOT_COMPAT = ("bfloat16",)

# Left to `make test-slow`, besides those that are marked where they stand: twins of others, and what compiles for long.
SLOW = (
    "bench/test_serve.py::test_host_time",
    "bench/test_serve.py::test_requests_are_served",
    "cases/test_compiling.py::test_c21_whole_model",
    "cases/test_gqa.py",
    "cases/test_numerics.py::test_c10_heads[4-",
    "cases/test_padding.py::test_c15_tails",
    "cases/test_support.py::test_c24_supports_tells_the_truth",
    "compile/test_cuda_aot.py",
    "engine/test_parallel.py::test_tokens[gpt-oss",
    "engine/test_parallel.py::test_tokens[qwen3",
    "engine/test_parallel.py::test_tokens[v3, e",
    "engine/test_parallel.py::test_tokens[v3, h",
    "engine/test_parallel.py::test_traffic[heads",
    "generation/test_generation.py::test_one_new_token",
    "generation/test_generation.py::test_prompts_in_one_batch[v3-1-None]",
    "generation/test_generation.py::test_speculation[3]",
    "generation/test_generation.py::test_stop_tokens[3]",
    "generation/test_generation.py::test_stream[3]",
    "ops/test_mla.py::TestReference::",
    "ops/test_mla.py::TestXLALanes::",
    "ops/test_ragged.py::TestXLALanes::",
    "ops/test_sharding.py::test_prompts_over_heads",
    "pallas_kernels/test_grouped_matmul.py::TestMachineCode",
    "pallas_kernels/test_grouped_matmul.py::test_interpreted[two warpgroups]",
    "pallas_kernels/test_grouped_matmul.py::test_interpreted[unaligned groups]",
    "pallas_kernels/test_kernels.py::TestMachineCode",
    "pallas_kernels/test_triton.py::TestGQAInterpreted::test_batch_invariant",
    "pallas_kernels/test_triton.py::TestRaggedInterpreted::test_any_lengths",
    "parallel/test_calls.py::test_gqa_layouts[interleaved",
    "parallel/test_calls.py::test_kernels_lower[Auto-vma=False",
    "parallel/test_calls.py::test_kernels_lower[Explicit-vma=True",
    "test_cli.py::test_one_prompt_as_it_comes",
    "test_cli.py::test_the_reference_implementation",
    "test_sampling.py::test_no_token_is_lost_at_a_top_p_of_one",
)

# What takes longest, with which each process begins, so that both end at about the same time.
LONG = (
    "compile/test_cuda_aot.py",
    "compile/test_notebooks.py",
    "engine/test_drafters.py",
    "generation/",
    "models/test_decoder.py",
    "pallas_kernels/test_kernels.py",
)


def is_long(nodeid: str) -> bool:
    return nodeid.removeprefix("tests/").startswith(LONG)


def selections(nodeid: str) -> list[str]:
    """The selections that a test belongs to."""
    name = nodeid.removeprefix("tests/")
    chosen = {"quick": (QUICK, NOT_QUICK), "compat": (COMPAT, NOT_COMPAT), "slow": (SLOW, ())}
    return [s for s, (begins, never) in chosen.items() if name.startswith(begins) and not any(n in name for n in never)]


def unmatched(nodeids: list[str]) -> list[str]:
    """Beginnings that no test has: of a test that was renamed."""
    names = [nodeid.removeprefix("tests/") for nodeid in nodeids]
    return [
        begin for begin in sorted({*QUICK, *COMPAT, *SLOW, *LONG}) if not any(name.startswith(begin) for name in names)
    ]
