"""Break the code on purpose and see the tests notice: ``python -m tests.mutants [--no-control] [NAME ...]``.

Each mutant replaces one piece of source, which must occur exactly once, and names the test that must fail. Every named
test must pass unbroken first, unless ``--no-control`` says that it just has. Survivors are printed and make the exit status
1; so does a mutant whose piece of source is no longer there.
"""

# ruff: noqa: E501 - the table of mutants has a row a line

import argparse
import dataclasses
import multiprocessing
import multiprocessing.pool
import os
import pathlib
import shutil
import sys
import tempfile

from tqdm import tqdm

ROOT = pathlib.Path(__file__).resolve().parents[1]
PARTS = ("mla_attn", "cache", "pallas_kernels", "tests", "pyproject.toml")

XLA = "tests/ops/test_mla.py::TestXLA::"
LANES = "tests/ops/test_mla.py::TestXLALanes::"
REFERENCE = "tests/ops/test_mla.py::TestReference::"
RAGGED = "tests/ops/test_ragged.py::TestXLA::"
MERGE = "tests/ops/test_merge.py::"
WRITE = "tests/cache/test_latent.py::"
PAGES = "tests/cache/test_allocator.py::"
METADATA = "tests/metadata/test_builders.py"
STEPS = "tests/steps/test_mla.py"
SAMPLING = "tests/test_sampling.py::"
PREFIX = "tests/cache/test_prefix.py::"
STATE = "tests/engine/test_state.py"
ENGINE = "tests/engine/test_engine.py::"
FAULTS = "tests/engine/test_faults.py::"
GROUPS = "tests/engine/test_groups.py::"
COMBINE = "pallas_kernels/mosaic_gpu/combine.py"
COMBINED = "tests/pallas_kernels/test_combine.py"
SCHEDULE = "tests/pallas_kernels/test_work_list.py::"
KEPT = "tests/programs/test_step.py::"
ADAPTER = "tests/mosaic_gpu/test_mla.py::"
OVER_RANKS = "tests/parallel/test_calls.py::"
PARALLEL_ENGINE = "tests/engine/test_parallel.py::test_tokens"
METADATA_BUILDERS = "mla_attn/metadata/builders.py"
DECODER = "mla_attn/models/decoder.py"
DECODER_CONFIG = "mla_attn/models/decoder_config.py"
DECODED = "tests/models/test_decoder.py::test_whole_prompts_in_one_call"


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    test: str


BLOCKWISE = "mla_attn/xla/blockwise.py"
WORK = "pallas_kernels/work_list.py"
MOSAIC = "mla_attn/mosaic_gpu/mla.py"
FORMATS = "cache/formats.py"
FLOAT8 = "tests/cache/test_float8.py::"

# fmt: off
MUTANTS = (
    Mutant("causal sees one key too many", BLOCKWISE, "visible &= p <= at\n", "visible &= p <= at + 1\n", XLA + "test_lengths_and_mixed_rows"),
    Mutant("causal sees one key too few", BLOCKWISE, "visible &= p <= at\n", "visible &= p < at\n", XLA + "test_lengths_and_mixed_rows"),
    Mutant("length mask dropped", BLOCKWISE, "(row < q_len) & (p < kv_len)", "(row < q_len) & (p < kv_len + 1)", XLA + "test_not_causal"),
    Mutant("window counts one key more", BLOCKWISE, "visible &= p > at - rules.window", "visible &= p >= at - rules.window", XLA + "test_window"),
    Mutant("window's first block too late", BLOCKWISE, "key_index(begin) // plan.block", "-(-key_index(begin) // plan.block)", XLA + "test_window"),
    Mutant("last block forgotten", BLOCKWISE, "-(-key_index(stop) // plan.block)", "key_index(stop) // plan.block", XLA + "test_lengths_and_mixed_rows"),
    Mutant("keys no row sees not cleaned", "mla_attn/xla/paged.py", "jnp.where(seen, keys, jnp.zeros((), keys.dtype))", "keys", XLA + "test_poison_changes_no_bit"),
    Mutant("tree mask read one column off", BLOCKWISE, "column = after_prefix + columns - width", "column = after_prefix + columns - width + 1", XLA + "test_tree"),
    Mutant("tree hides the prefix", BLOCKWISE, "return bits | (column < 0)[:, None, :]", "return bits & (column >= 0)[:, None, :]", XLA + "test_tree"),
    Mutant("LSE in base 2", BLOCKWISE, "m + jnp.log(", "m + jnp.log2(", XLA + "test_lengths_and_mixed_rows"),
    Mutant("running sum not rescaled", BLOCKWISE, "l * alpha + p.sum(axis=-1)", "l + p.sum(axis=-1)", XLA + "test_scale_and_large_scores"),
    Mutant("scale squared", BLOCKWISE, "index, scale = tile + lanes, rules.scale\n", "index, scale = tile + lanes, rules.scale**2\n", XLA + "test_lengths_and_mixed_rows"),
    Mutant("soft cap forgotten", "mla_attn/xla/mla.py", "spec.window, spec.soft_cap, tree_mask, sinks", "spec.window, None, tree_mask, sinks", XLA + "test_soft_cap"),
    Mutant("stride ignored", BLOCKWISE, "slots * batch.kv_stride)[:, None, :]", "slots)[:, None, :]", XLA + "test_strided_positions"),
    Mutant("tile size follows the mode", "mla_attn/xla/paged.py", "tile=1 if batch_invariant else None", "tile=None", "tests/xla/test_blockwise.py::test_invariant_cuts_follow_neither_mode_nor_batch"),
    Mutant("a tile left out for one row's sake", BLOCKWISE, ".all(axis=-1, keepdims=True)", ".any(axis=-1, keepdims=True)", "tests/ops/test_skip.py::test_bound[one lane-0.1-gqa_attention]"),
    Mutant("tiles left out below a limit eight times too high", BLOCKWISE, "ratio = skip_threshold /", "ratio = 8 * skip_threshold /", "tests/ops/test_skip.py::test_bound[lanes-0.1-mla_attention]"),
    Mutant("tiles left out of requests shorter than the threshold", BLOCKWISE, "jnp.where(ratio < 1, jnp.log(ratio), -jnp.inf)", "jnp.log(ratio)", "tests/ops/test_skip.py::test_tiles_that_are_left_out[gqa_attention]"),
    Mutant("no tile left out", BLOCKWISE, "lax.cond(left_out.all(), lambda: state, selected)", "added()", "tests/ops/test_skip.py::test_tiles_that_are_left_out[mla_attention]"),
    Mutant("a lane's foreign part merged", BLOCKWISE, "own = (i < parts)[:, None, None]", "own = (i <= parts)[:, None, None]", LANES + "test_lengths_and_mixed_rows"),
    Mutant("first slot of the next page read early", "cache/placement.py", "column = jnp.clip(slots // self.page_size, 0,", "column = jnp.clip((slots + 1) // self.page_size, 0,", REFERENCE + "test_lengths_and_mixed_rows"),
    Mutant("layer forgotten when read", "cache/placement.py", "return self.physical_pages(pages, layer), slots % self.page_size", "return self.physical_pages(pages, 0), slots % self.page_size", XLA + "test_lengths_and_mixed_rows"),
    Mutant("slot -1 wraps", "cache/placement.py", "return (slots >= 0) & (slots", "return (slots >= -1) & (slots", WRITE + "test_negative_slots_do_not_wrap"),
    Mutant("slot N * P enters the next layer", "cache/placement.py", "(slots < self.num_slots)", "(slots <= self.num_slots)", WRITE + "test_rows_go_to_their_slots_and_nowhere_else"),
    Mutant("moves in one layer only", "cache/placement.py", "layers = jnp.arange(self.num_layers, dtype=jnp.int32)[:, None]", "layers = jnp.zeros((self.num_layers, 1), jnp.int32)", WRITE + "test_moving_rows"),
    Mutant("page stride ignored", "cache/placement.py", "return pages * self.page_stride +", "return pages +", "tests/cache/test_placement.py::test_placement"),
    Mutant("rope read right after the latent part", "cache/latent.py", "rows[..., self.rope_offset : self.rope_offset + rope_width]", "rows[..., latent_width : latent_width + rope_width]", WRITE + "test_rows_of_other_systems"),
    Mutant("layers over each other", "cache/latent.py", 'object.__setattr__(self, "layer_stride", self.num_pages)', 'object.__setattr__(self, "layer_stride", 0)', "tests/cache/test_placement.py::test_layers_are_one_after_the_other_unless_said"),
    Mutant("wide integers wrap", "mla_attn/checks.py", "if held.max > INT32_MAX:", "if held.max < 0:", "tests/test_checks.py::test_integers_of_any_width_become_int32"),
    Mutant("merge trusts an empty part", "mla_attn/ops/merge.py", "part = jnp.where(used, out.astype(jnp.float32), 0.0)", "part, used = out.astype(jnp.float32), True", MERGE + "test_empty_states_change_no_bit"),
    Mutant("sink in the LSE's sign", "mla_attn/ops/merge.py", "jax.nn.sigmoid(", "jax.nn.sigmoid(-1.0 * ", MERGE + "test_sink_enters_the_denominator_once"),
    Mutant("reference causal off by one", "mla_attn/reference/dense.py", "visible &= p <= at\n", "visible &= p <= at - 1\n", REFERENCE + "test_lengths_and_mixed_rows"),
    Mutant("reference drops its mask of values", "mla_attn/reference/dense.py", "jnp.where(seen, v, 0.0)", "v", REFERENCE + "test_poison_changes_no_bit"),
    Mutant("ragged keys of the neighbour", "mla_attn/xla/ragged.py", "(kv_starts[requests] + first_keys)", "(kv_starts[requests] + first_keys + 1)", RAGGED + "test_lengths"),
    Mutant("a row past the limit is written", "mla_attn/metadata/layout.py", "jnp.maximum(self.max_len - prefix_lens, 0)", "jnp.maximum(self.max_len - prefix_lens + 1, 0)", METADATA),
    Mutant("verify forgets its drafts", "mla_attn/metadata/builders.py", "jnp.where(q_lens > 0, prefix_lens + q_lens, 0)", "jnp.where(q_lens > 0, prefix_lens, 0)", METADATA),
    Mutant("draft step not counted", "mla_attn/metadata/builders.py", "num_drafted = step if num_drafted is None", "num_drafted = 0 if num_drafted is None", METADATA + "::test_builders_equal_a_plain_construction[draft_decode-1-None-None-]"),
    Mutant("a negative length moves other rows", "mla_attn/metadata/builders.py", "jnp.clip(q_lens, 0, num_rows)", "jnp.minimum(q_lens, num_rows)", METADATA + "::test_wrong_lengths_harm_their_own_request_alone"),
    Mutant("a window's freed pages checked", "mla_attn/metadata/check.py", "(first_page + page_size > hidden", "(first_page + page_size >= hidden", METADATA + "::test_pages_left_of_every_window_may_be_anything"),
    Mutant("prefix chunks overlap", "mla_attn/ops/expanded.py", "begin = jnp.full(batch, i * chunk, jnp.int32)", "begin = jnp.full(batch, i * (chunk - 1), jnp.int32)", STEPS + "::test_extend_by_chunks"),
    Mutant("a table's beginning forgotten", "mla_attn/ops/expanded.py", "m.kv_lens - m.q_lens - first, 0", "m.kv_lens - m.q_lens, 0", STEPS + "::test_extend_over_a_table_that_begins_later"),
    Mutant("a carry that varies less than its body", BLOCKWISE, "vary_together(state, like=q)", "state", "tests/ops/test_sharding.py::test_mla_attention_over_heads"),
    Mutant("NaN taken for no key", COMBINE, "seen = l != 0", "seen = l > 0", COMBINED),
    Mutant("the environment as it was at the first call", "mla_attn/steps/entry.py", '"implementation": requested(implementation)', '"implementation": implementation', STEPS + "::test_the_environment_is_read_at_every_call"),
    Mutant("one device's program for another's", "mla_attn/dispatch.py", "if (target := _target.value) is not None:", "if (target := None) is not None:", "tests/ops/test_eager.py::test_programs_of_one_device_are_not_taken_for_another"),
    Mutant("layers traced before they are checked", "mla_attn/steps/entry.py", 'if layer is not None and placement is not None and not', "if layer is None and not", STEPS + "::test_errors_of_absorbed_modes"),
    Mutant("query scaling off by one", "mla_attn/steps/scaling.py", "(positions // self.original_max_position)", "((positions + 1) // self.original_max_position)", STEPS + "::test_query_scaling_is_the_formula"),
    Mutant("placeholder draft accepted", "mla_attn/speculative/acceptance.py", "right = (drafts == targets[:, :-1]) & (drafts >= 0)", "right = ((drafts == targets[:, :-1]) | (drafts < 0))", "tests/speculative/test_acceptance.py"),
    Mutant("reference count not given back", "cache/allocator.py", "self._holders[pages] -= 1", "self._holders[pages] -= 0", PAGES + "TestPageMachine"),
    Mutant("a partial page shared", "cache/allocator.py", "full = int(num_tokens) // self.page_size", "full = -(-int(num_tokens) // self.page_size)", PAGES + "test_fork_shares_full_pages_only_and_growing_writes_none_of_them"),
    Mutant("draws the same at every position", "mla_attn/sampling.py", "jax.random.fold_in(jax.random.key(seed), position)", "jax.random.key(seed)", SAMPLING + "test_seeds_and_positions_make_other_draws"),
    Mutant("top-p after all tokens, not after top-k", "mla_attn/sampling.py", "masses = jnp.where(keys >= least[..., None], jnp.exp(logits), 0.0)", "masses = jnp.exp(logits)", SAMPLING + "test_distribution"),
    Mutant("pages found by their own tokens alone", "cache/prefix.py", "hashlib.blake2b(digest + data[", "hashlib.blake2b(data[", PREFIX + "test_the_same_page_after_another_beginning_is_another"),
    Mutant("beginnings let go before ends", "cache/prefix.py", "np.arange(self._clock, self._clock - len(pages), -1)", "np.arange(self._clock - len(pages) + 1, self._clock + 1)", PREFIX + "test_a_common_beginning_outlives_what_follows_it"),
    Mutant("padding requests write a slot", "mla_attn/engine/state.py", "slots = jnp.where(live, slots, ", "slots = jnp.where(live | ~live, slots, ", STATE),
    Mutant("padding requests draw", "mla_attn/engine/state.py", "jnp.where(live, x[\"temperature\"], 0.0)", "x[\"temperature\"]", STATE),
    Mutant("evicted pages found", "cache/prefix.py", "np.where(self._entry_of[pages] == entries, pages, -1)", "np.where(entries >= 0, pages, -1)", PREFIX + "test_the_least_recently_used_go_first_and_their_ends_before_their_beginnings"),
    Mutant("digests of evicted pages never forgotten", "cache/prefix.py", "self._entries.pop(old, None)", "pass", PREFIX + "test_digests_of_evicted_pages_are_forgotten"),
    Mutant("a lost beginning stays lost", "cache/prefix.py", "        if own.size:\n", "        if own.size and own[-1] == len(pages) - 1:\n", PREFIX + "test_a_beginning_that_was_lost_is_found_again"),
    Mutant("a program of another version taken", "mla_attn/programs/naming.py", "        _versions(),\n", "", KEPT + "test_what_a_program_depends_on_is_in_its_name"),
    Mutant("a program of other source taken", "mla_attn/programs/naming.py", '        ("source", _SOURCE),\n', "", KEPT + "test_what_a_program_depends_on_is_in_its_name"),
    Mutant("a damaged program used", "mla_attn/programs/folder.py", "if head != _head(name, program):", "if len(head) < len(_MAGIC):", KEPT + "test_a_damaged_file_is_made_anew"),
    Mutant("a program of another name used", "mla_attn/programs/folder.py", "hashlib.sha256(name.encode() + program)", "hashlib.sha256(program)", KEPT + "test_a_file_under_anothers_name_is_made_anew"),
    Mutant("a call waits for its own rung", "mla_attn/buckets.py", "if not self.awaits(fitting[0]) or any(", "if True or any(", "tests/test_buckets.py::test_a_call_takes_a_larger_program_while_a_warm_up_goes_on"),
    Mutant("a round of drafts in programs that are not there", "mla_attn/engine/launching.py", "if any(bucket.awaits(fitting[0]) for bucket in passes):", "if False:", "tests/engine/test_warming.py::test_requests_are_served_while_programs_compile"),
    Mutant("every layer writes to the first", "mla_attn/models/causal.py", "jax.lax.optimization_barrier(np.int32(number))", "np.int32(0)", "tests/models/test_decoder.py::test_each_layer_writes_to_its_place_in_its_group"),
    Mutant("of equal experts the last", "mla_attn/models/moe.py", "number((*scores.shape, count), -1) < number(", "number((*scores.shape, count), -1) > number(", "tests/models/test_routing.py::test_the_largest_are_those_of_top_k"),
    Mutant("launches kept after a fault", "mla_attn/engine/faults.py", "engine._unread.clear()", "pass", FAULTS + "test_c51_an_interrupt_while_the_host_waits"),
    Mutant("pages trusted after a fault", "mla_attn/engine/faults.py", "engine._scheduler.reset(live)", "pass", FAULTS + "test_a_pass_that_raises"),
    Mutant("rows of other weights kept", "mla_attn/engine/engine.py", "self._in_doubt = True  # cached rows", "pass  # cached rows", FAULTS + "test_c49_other_weights_between_steps"),
    Mutant("logits that are no numbers drawn from", "mla_attn/passes/functions.py", "jnp.where(jnp.isfinite(logits).all(axis=-1), tokens, INVALID_TOKEN)", "tokens", FAULTS + "test_c45_tokens_before_the_invalid_one_are_handed_out"),
    Mutant("tokens lost when cut short", "mla_attn/engine/outputs.py", "            self._record(self._current)", "            pass", "tests/engine/test_outputs.py"),
    Mutant("found before it was accounted for", "mla_attn/engine/scheduler.py", "min(self.num_accounted + ", "min(self.num_computed + ", "tests/engine/test_scheduler.py"),
    Mutant("end tokens passed over", "mla_attn/engine/scheduler.py", "*(() if params.ignore_eos else eos_token_ids)", "", "tests/engine/test_requests.py::test_requests_end_at_the_models_end_tokens"),
    Mutant("idle pages of a prefix counted twice", "cache/prefix.py", " - int(np.count_nonzero(idle[found]))", "", "tests/cache/test_prefix.py::test_pages_that_are_found_are_not_available_beside"),
    Mutant("a callback's interrupt goes through", "mla_attn/engine/outputs.py", "except BaseException as error:", "except Exception as error:", ENGINE + "test_whatever_a_callback_raises_loses_nobody_elses_token"),
    Mutant("a window's offset dropped", "mla_attn/passes/functions.py", 'x["kv_offsets"][:, next(offset)]', 'jnp.zeros_like(x["kv_offsets"][:, next(offset)])', GROUPS + "test_tokens_are_those_of_an_engine_that_keeps_all"),
    Mutant("a window's page released a token early", "mla_attn/engine/pages.py", "final - table.window + 1", "final - table.window + 2", GROUPS + "test_any_traffic_of_windows_ends_with_all_pages_free"),
    Mutant("a windowed table too narrow", "mla_attn/engine/pages.py", "-(-(window + rows + page_size - 2) //", "-(-(window + rows - 2) //", GROUPS + "test_sizes_of_windows"),
    Mutant("generated pages kept at the end alone", "mla_attn/engine/outputs.py", "if not request.finished:\n            self._scheduler.keep_new_pages(request)", "pass", GROUPS + "test_a_prefix_is_found_though_its_pages_were_released"),
    Mutant("a prefix found in one group alone", "mla_attn/engine/pages.py", "if len({len(pages) for pages in found}) > 1:", "if len(found[0]) < len(found[-1]):", GROUPS + "test_a_prefix_is_found_though_its_pages_were_released"),
    Mutant("n-grams off by one", "mla_attn/speculative/ngrams.py", "((0, 0), (k + 1, 0))", "((0, 0), (k, 0))", "tests/speculative/test_ngrams.py::test_by_hand"),
    Mutant("emitted tokens a place early in the text", "mla_attn/passes/drafters.py", 'first = x["lens"] + 1 - x["num_emitted"]', 'first = x["lens"] - x["num_emitted"]', "tests/engine/test_drafters.py::test_a_text_that_repeats_is_drafted_from"),
    Mutant("a draft model without the anchor's row", "mla_attn/passes/drafters.py", 'md.for_draft_extend, x, x["lens"] + 1, **options', 'md.for_draft_extend, x, x["lens"], **options', "tests/engine/test_drafters.py::test_a_model_that_drafts_for_itself_is_always_right"),
    Mutant("room for one row in flight too few", "mla_attn/engine/scheduler.py", "request.num_decoded_rows + request.num_rows_in_flight", "request.num_decoded_rows", ENGINE + "test_tokens"),
    Mutant("preempted requests lose their tokens", "mla_attn/engine/scheduler.py", "self.waiting.appendleft(request)", "request.num_tokens = request.prompt_len; self.waiting.appendleft(request)", ENGINE + "test_preempted_requests_go_on_where_they_were"),
    Mutant("a group's last tile forgotten", WORK, "keys_before(last + 1, plan, kv_stride)", "keys_before(last, plan, kv_stride)", SCHEDULE + "test_any_batch"),
    Mutant("stride of the causal limit forgotten", WORK, "jnp.clip(-(-end // kv_stride), 0,", "jnp.clip(end, 0,", SCHEDULE + "test_any_batch[not causal, strided]"),
    Mutant("rows after the last request not zeroed", WORK, "tokens - ends.max(initial=0)", "0", SCHEDULE + "test_any_batch"),
    Mutant("partial results not rescaled", COMBINE, "acc, l = acc * alpha, l * alpha", "l = l * alpha", COMBINED),
    Mutant("last piece counted again", COMBINE, 'jnp.where(first + n < tile["splits"], self.partial_lse[a, row], -jnp.inf)', "self.partial_lse[a, row]", COMBINED),
    Mutant("last pieces forgotten", COMBINE, "(left > below) & (left <= tail)", "(left > below) & (left < tail)", COMBINED + "::test_splits_are_joined_and_nothing_else_is_touched[False-0-24]"),
    Mutant("a unit joined under its neighbour's record", COMBINE, "following = self._read(unit + self.blocks)", "following = self._read(unit)", COMBINED),
    Mutant("rows claimed twice taken twice", WORK, "return sound & (q_starts >= _latest_before(jnp.where(sound, q_starts + q_lens, 0)))", "return sound", SCHEDULE + "test_rows_claimed_twice_are_the_first_claimers"),
    Mutant("rows past the last not refused", WORK, "(q_starts <= num_tokens - q_lens)", "(q_starts <= tokens)", SCHEDULE + "test_any_batch"),
    Mutant("pieces out of key order", WORK, "row_tile * cuts.splits[of] + split, -1", "(row_tile + 1) * cuts.splits[of] - 1 - split, -1", SCHEDULE + "test_any_batch"),
    Mutant("invariant cuts follow the batch", WORK, "jnp.int32(INVARIANT_TILES) if plan.invariant else", "_most_split_tiles(tiles, row_tiles, plan) if plan.invariant else", SCHEDULE + "test_cuts_follow_nothing_but_a_requests_own_keys"),
    Mutant("nothing is split", WORK, "return cap[jnp.argmin(ends)]", "return cap[12] * 999", SCHEDULE + "test_one_long_request_among_short_ones_is_split"),
    Mutant("shortest first", WORK, "(work[None] > work[:, None])", "(work[None] < work[:, None])", SCHEDULE + "test_thread_blocks_end_together"),
    Mutant("float16 queries over a float8 pool", MOSAIC, "call.q_dtype not in (jnp.bfloat16, jnp.float8_e4m3fn)", "False", ADAPTER + "test_which_queries_float8_pools_take"),
    Mutant("no scales of queries after the last row", MOSAIC, "jnp.pad(scales.ravel(), (0, plan.tile_rows))", "scales.ravel()", ADAPTER + "test_scales_of_float8_queries_follow_their_rows"),
    Mutant("what follows float8 latents elsewhere", MOSAIC, "if call.rope_offset != (offset", "if False and call.rope_offset != (offset", ADAPTER + "test_which_float8_rows_the_kernel_can_copy"),
    Mutant("the list of another call taken", MOSAIC, "if m.work_plan == launch:", "if m.work_plan is not None:", ADAPTER + "test_a_call_other_than_planned_makes_its_own_list"),
    Mutant("old list kept for new lengths", "mla_attn/ops/paged.py", "metadata = dataclasses.replace(metadata, work_plan=None)", "pass", ADAPTER + "test_lengths_replaced_are_planned_again"),
    Mutant("float32 results rounded to bfloat16", MOSAIC, "combine_all=out_dtype != jnp.bfloat16", "combine_all=False", ADAPTER + "test_results_wider_than_the_kernels_are_combined"),
    Mutant("bits of two kernels promised to be one's", MOSAIC, "    if not batch_invariant:\n", "    if True:\n", ADAPTER + "test_which_kernel_and_how_many_rows"),
    Mutant("few keys of one request taken for few keys of all", MOSAIC, "key_tiles=requests * max_tiles", "key_tiles=max_tiles", ADAPTER + "test_what_a_call_is_launched_with"),
    Mutant("prompts always expanded", "mla_attn/models/deepseek.py", "form is None and mode in PROMPT_MODES and planned.work_plan is None", "form is None and mode in PROMPT_MODES", "tests/mosaic_gpu/test_mla.py::test_prompts_are_absorbed_where_a_kernel_takes_them"),
    Mutant("prompts absorbed without a kernel", "mla_attn/models/deepseek.py", "mode in PROMPT_MODES and planned.work_plan is None", "mode in PROMPT_MODES and planned.work is None", "tests/mosaic_gpu/test_mla.py::test_prompts_are_absorbed_where_a_kernel_takes_them"),
    Mutant("end tokens of generation_config.json passed over", "mla_attn/models/loading.py", "(*config.eos_token_ids, *ends)", "config.eos_token_ids", "tests/models/test_loading.py::test_end_tokens_of_both_configs"),
    Mutant("sizes of a config believed", "mla_attn/models/loading.py", "if elements > largest:", "if elements > 2**200:", "tests/models/test_loading.py::test_tensors_that_do_not_match"),
    Mutant("a key twice in JSON", "mla_attn/models/files.py", "if len(data) < len(pairs):", "if not pairs:", "tests/models/test_files.py::test_headers_that_the_format_forbids"),
    Mutant("booleans taken for sizes", "mla_attn/models/settings.py", "isinstance(value, int) and not isinstance(value, bool)", "isinstance(value, int)", "tests/models/test_config.py::test_what_is_not_supported_is_refused"),
    Mutant("streams without an end", "mla_attn/models/tokenizer.py", "text, self._shown = self._new_text(), len(self._seen)", 'text = ""', "tests/models/test_tokenizer.py::test_a_stream_ends_with_what_waits"),
    Mutant("a begin token before one that is there", "mla_attn/models/tokenizer.py", "return own if not self.wanted or begins[1] else", "return own if not self.wanted else", "tests/models/test_tokenizer.py::test_the_begin_token_comes_once"),
    Mutant("rotary buffers taken for a draft layer", "mla_attn/models/loading.py", "name.startswith(prefix) and not _is_passed_over(name, stored)", "name.startswith(prefix)", "tests/models/test_loading.py::test_rotary_buffers_alone_are_no_draft_layer"),
    Mutant("memory in use taken for free", "mla_attn/memory.py", 'statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)', 'statistics["bytes_limit"]', "tests/test_memory.py::test_free_bytes_of_a_gpu"),
    Mutant("settings refused without their file", "mla_attn/models/loading.py", 'raise CheckpointError(f"{file}: {error}") from error', "raise", "tests/models/test_loading.py::test_an_unsupported_config_is_a_checkpoint_error"),
    Mutant("a file blamed for its caller's ids", "mla_attn/models/tokenizer.py", "tokens = _check_ids(tokens)\n        return _guarded", "return _guarded", "tests/models/test_tokenizer.py::test_wrong_arguments_of_a_file"),
    Mutant("Ctrl-C waits for the compiler", "mla_attn/cli/process.py", "signal.signal(signal.SIGINT, signal.SIG_DFL)", "pass", "tests/test_cli_arguments.py::test_an_interrupt_ends_it_at_once_and_without_a_word"),
    Mutant("half-split pairs turned as interleaved ones", "mla_attn/models/deepseek.py", "config.qk_nope_head_dim, config.rope_interleave", "config.qk_nope_head_dim, True", "tests/models/test_variants.py"),
    Mutant("queries not scaled by position", "mla_attn/models/deepseek.py", '"query_scaling": self.query_scaling,', '"query_scaling": None,', "tests/models/test_variants.py"),
    Mutant("windows of a model wider by one", DECODER_CONFIG, "return self.sliding_window if slides", "return self.sliding_window + 1 if slides and self.sliding_window", DECODED + "[gpt]"),
    Mutant("windows on the other layers", DECODER_CONFIG, "slides = layer % 2 == 0", "slides = layer % 2 == 1", DECODED + "[gemma2]"),
    Mutant("a model's sinks dropped", DECODER, 'sinks = self.sinks[...] if hasattr(self, "sinks") else None', "sinks = None", DECODED + "[gpt]"),
    Mutant("outputs of Gemma's attention normed after the sum", DECODER, "x = x + self.post_attention_layernorm(attended)", "x = self.post_attention_layernorm(x + attended)", DECODED + "[gemma2]"),
    Mutant("norms of queries and keys swapped", DECODER, "q, k = self.q_norm(q), self.k_norm(k)", "q, k = self.k_norm(q), self.q_norm(k)", DECODED + "[qwen3]"),
    Mutant("half-split pairs of decoders turned as interleaved ones", DECODER, "rotate(each, *cos_sin, interleaved=False)", "rotate(each, *cos_sin, interleaved=True)", DECODED + "[llama3]"),
    Mutant("Gemma's scale from the head's width", DECODER_CONFIG, 'read.get("query_pre_attn_scalar", head_dim) ** -0.5', "head_dim**-0.5", DECODED + "[gemma2]"),
    Mutant("Gemma's factor of embeddings rounded", DECODER, "jnp.asarray(self.config.hidden_size**0.5, x.dtype)", "jnp.asarray(self.config.hidden_size**0.5, jnp.bfloat16).astype(x.dtype)", DECODED + "[gemma2]"),
    Mutant("logits without their cap", DECODER, "capped(super().logits(hidden), self.config.logits_soft_cap)", "super().logits(hidden)", DECODED + "[gemma2]"),
    Mutant("gates and ups as halves", "mla_attn/models/decoder_weights.py", "return tensor[..., 0::2], tensor[..., 1::2]", "return tuple(np.split(tensor, 2, axis=-1))", DECODED + "[gpt]"),
    Mutant("experts weighed among all", "mla_attn/models/moe.py", "jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=-1), axis=-1)", "jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), experts, axis=-1)", DECODED + "[gpt]"),
    Mutant("gates clamped below too", "mla_attn/models/moe.py", "gate = jnp.minimum(self._multiply(rows, self.gate_proj, sizes) + bias(self.gate_bias), self.limit)", "gate = jnp.clip(self._multiply(rows, self.gate_proj, sizes) + bias(self.gate_bias), -self.limit, self.limit)", DECODED + "[gpt]"),
    Mutant("YaRN's ramp at whole pairs always", "mla_attn/models/rope.py", "if self.truncate:", "if True:", DECODED + "[gpt]"),
    Mutant("Llama 3's rope by the wrong factor", "mla_attn/models/rope.py", "(turns - self.low_freq_factor)", "(turns - self.high_freq_factor)", DECODED + "[llama3]"),
    Mutant("layers of a group by their place in the model", DECODER, "names[:layer].count(name))", "layer)", "tests/models/test_decoder.py::test_each_layer_writes_to_its_place_in_its_group"),
    Mutant("the high half of an MXFP4 byte first", "mla_attn/models/weights.py", "[value & 15, value >> 4]", "[value >> 4, value & 15]", "tests/models/test_loading.py::test_mxfp4_experts_are_dequantised"),
    Mutant("negative zero below zero", "mla_attn/sampling.py", "jnp.where(x == 0, 0.0, x)", "x", SAMPLING + "test_zeros_of_either_sign_are_equal"),
    Mutant("draft passes all told to be the first", "mla_attn/engine/inputs.py", '{"step": np.int32(step), ', '{"step": np.int32(0), ', "tests/engine/test_engine.py::test_what_draft_passes_are_told"),
    Mutant("equal logits at the edge are cut", "mla_attn/sampling.py", "return jnp.where(keys >= least[..., None], logits, -jnp.inf)", "return jnp.where(keys > least[..., None], logits, -jnp.inf)", SAMPLING + "test_equal_logits_at_the_edge_stay"),
    Mutant("weights in containers of Flax", "mla_attn/passes/functions.py", "requested(implementation)), tuple(leaves)", "requested(implementation)), state", "tests/test_buckets.py::test_weights_are_a_plain_tuple_of_arrays"),
    Mutant("the fastest profile for the median", "mla_attn/bench/ops/run.py", "[repeats // 2]", "[0]", "tests/bench/test_ops.py::test_kernel_time_is_the_median_of_profiles_of_a_rested_device"),
    Mutant("the time of all calls for that of one", "mla_attn/bench/timing.py", ".span / calls", ".span", "tests/bench/test_ops.py::test_wall_time_on_a_gpu_is_that_of_one_chain_on_its_own_clock"),
    Mutant("profiles of a hot device", "mla_attn/bench/ops/run.py", "        timing.rest()\n        profiles", "        profiles", "tests/bench/test_ops.py::test_kernel_time_is_the_median_of_profiles_of_a_rested_device"),
    Mutant("a tree's rows of the neighbour", MOSAIC, "dtype=jnp.int32) - m.q_starts[owner]", "dtype=jnp.int32) - m.q_starts[owner] + 1", ADAPTER + "test_tree_words"),
    Mutant("a mask's last word forgotten", "pallas_kernels/tree_words.py", "words = -(-keys // BITS)", "words = max(keys // BITS, 1)", ADAPTER + "test_tree_words"),
    Mutant("a sink counted twice", "mla_attn/xla/blockwise.py", "out * share[..., None])", "out * share[..., None] ** 2)", "tests/ops/test_gqa.py::TestXLA::test_sinks"),
    Mutant("a tree's window from where its row is cached", "mla_attn/xla/blockwise.py", "return jnp.maximum(batch.positions[at], 0)", "return jnp.maximum(batch.positions[at] + 1, 0)", "tests/ops/test_gqa.py::test_a_tree_with_a_window"),
    Mutant("heads read by turns, not by groups", "mla_attn/xla/blockwise.py", "return x.swapaxes(1, 2).reshape(plan.lanes, kv_heads,", "return x.swapaxes(2, 3).swapaxes(1, 2).reshape(plan.lanes, kv_heads,", "tests/ops/test_gqa.py::TestXLA::test_groups"),
    Mutant("pages of heads read as pages of tokens", "mla_attn/xla/paged.py", "jnp.moveaxis(rows, 1, token_axis)", "rows", "tests/ops/test_gqa.py::TestXLA::test_layouts"),
    Mutant("a value read for a key", "cache/kv.py", "rows[0][..., 0, :], rows[0][..., 1, :]", "rows[0][..., 1, :], rows[0][..., 0, :]", "tests/cache/test_kv.py"),
    Mutant("a token of a shuffled page in another group", "cache/placement.py", "offsets // group, elements, offsets % group", "offsets % group, elements, offsets // group", "tests/cache/test_kv.py::test_where_a_shuffled_channel_lies"),
    Mutant("shuffled keys joined within groups", "cache/placement.py", "pages.transpose(0, 3, 1, 2, 4)", "pages.transpose(0, 3, 1, 4, 2)", "tests/ops/test_gqa.py::TestXLA::test_layouts"),
    Mutant("shuffled values joined by place in a group", "cache/placement.py", "pages.transpose(0, 2, 4, 1, 3)", "pages.transpose(0, 4, 2, 1, 3)", "tests/ops/test_gqa.py::TestXLA::test_layouts"),
    Mutant("shuffled pages of any size", "cache/kv.py", "if page_size % group or head_dim % group:", "if head_dim % group:", "tests/cache/test_kv.py::test_errors"),
    Mutant("shuffled arrays with groups of any size", "cache/kv.py", "if array.shape[-1] != group:", "if array.shape[-1] > group:", "tests/cache/test_kv.py::test_errors"),
    Mutant("a window's list short of a tile", "pallas_kernels/even_list.py", "first = keys_before(s.position + at.nth - plan.window + 1, plan, kv_stride) // TILE", "first = keys_before(s.position + at.nth - plan.window + 1, plan, kv_stride) // TILE + 1", "tests/pallas_kernels/test_even_list.py::test_every_row_sees_its_keys_once[window]"),
    Mutant("a tree's list short of a tile", "pallas_kernels/even_list.py", "        first = keys_before(window_starts[s.request], plan, kv_stride) // TILE", "        first = keys_before(window_starts[s.request], plan, kv_stride) // TILE + 1", "tests/pallas_kernels/test_even_list.py::test_every_row_sees_its_keys_once[tree]"),
    Mutant("a prompt's list short of its last tile", "pallas_kernels/prompt_list.py", "-(-end // KEYS) - tile", "end // KEYS - tile", "tests/pallas_kernels/test_prompt_list.py::test_every_row_once_and_all_of_its_keys"),
    Mutant("a prompt's list without the causal limit", "pallas_kernels/prompt_list.py", "end = jnp.minimum(end, position + rows)", "end = end", "tests/pallas_kernels/test_prompt_list.py::test_every_row_once_and_all_of_its_keys"),
    Mutant("a prompt's window left by a tile too early", "pallas_kernels/prompt_list.py", "jnp.maximum(position + 1 - plan.window, 0) // KEYS", "jnp.maximum(position + 1 - plan.window, 0) // KEYS + 1", "tests/pallas_kernels/test_prompt_list.py::test_every_row_once_and_all_of_its_keys"),
    Mutant("a known number of chunks, one merged twice", "mla_attn/ops/expanded.py", "            state = add_chunk(i, state, layer)", "            state = add_chunk(max(i - 1, 0), add_chunk(i, state, layer), layer) if i == 1 else add_chunk(i, state, layer)", STEPS + "::test_extend_by_a_known_number_of_chunks"),
    Mutant("prefixes past the known number of chunks", "mla_attn/ops/expanded.py", "_nan_where(cached > num_chunks * chunk, state, m)", "state", STEPS + "::test_a_known_number_of_chunks_leaves_no_loop"),
    Mutant("whole prompts absorbed", "mla_attn/models/deepseek.py", 'mode == "prefill" and self._expands(pool, m, dtype, **facts)', 'mode == "prefill" and False', "tests/models/test_deepseek.py::test_the_form_of_prompts"),
    Mutant("a sink in both of two splits", "pallas_kernels/even_list.py", "(at.split == 0) & ~continues", "at.split == 0", "tests/pallas_kernels/test_even_list.py::test_every_row_sees_its_keys_once[long]"),
    Mutant("query heads of nobody for somebody's", "mla_attn/mosaic_gpu/gqa.py", "padded, *rows.shape[2:])[:, :, :group]", "padded, *rows.shape[2:])[:, :, -group:]", "tests/mosaic_gpu/test_gqa.py::test_heads_of_nobody"),
    Mutant("a tree's window from the last row", "mla_attn/mosaic_gpu/gqa.py", "positions.min(axis=1)", "jnp.where(row < m.q_lens[:, None], positions, 0).max(axis=1)", "tests/mosaic_gpu/test_gqa.py::test_where_windows_of_trees_begin"),
    Mutant("shuffled pages given to Hopper's kernel", "mla_attn/mosaic_gpu/gqa.py", "if call.layout not in _LAYOUTS:", "if False:", "tests/test_support.py"),
    Mutant("fewer tiles of rows than groups may need", "pallas_kernels/tile_list.py", "groups * (tile_rows + aligned - 2)", "groups * (tile_rows - 1)", "tests/pallas_kernels/test_grouped_matmul.py::test_the_list_holds_the_most_tiles_that_sizes_may_need"),
    Mutant("stages past shared memory", "pallas_kernels/triton/grouped_configs.py", "if self.shared > (most :=", "if self.shared > 2 * (most :=", "tests/pallas_kernels/test_triton_grouped.py::test_configs_that_there_are_not"),
    Mutant("a windowed table cut from its own beginning", "mla_attn/xla/paged.py", "phases=pages % (block // pool.page_size) * pool.page_size", "phases=pages * 0", "tests/steps/test_gqa.py::test_a_windowed_pool_is_as_good_as_a_full_one"),
    Mutant("the offset of a table forgotten", "mla_attn/metadata/layout.py", "(positions >= offsets), positions - offsets", "(positions >= offsets), positions", "tests/metadata/test_windows.py"),
    Mutant("a page released that a row still sees", "cache/allocator.py", "gone = max(int(num_tokens) // self.page_size - found.first, 0)", "gone = max(-(-int(num_tokens) // self.page_size) - found.first, 0)", "tests/cache/test_windows.py"),
    Mutant("a prefix found without its last page but one", "cache/prefix.py", "np.flatnonzero(run_begins <= seen)", "np.flatnonzero(run_begins <= seen + 1)", "tests/cache/test_windows.py"),
    Mutant("a step of MLA without its sinks", "mla_attn/steps/mla.py", "sinks=sinks,", "sinks=None,", STEPS + "::test_sinks"),
    Mutant("windows counted at full size", "mla_attn/models/sizes.py", "pages.get(group.window, num_pages)", "num_pages", GROUPS + "test_a_model_its_drafter_and_their_windows_must_fit"),
    Mutant("pages kept for longer than a window", "mla_attn/engine/pages.py", "final -= self._cache.prefix_cache *", "final -= 30 + self._cache.prefix_cache *", GROUPS + "test_tokens_are_those_of_an_engine_that_keeps_all"),
    # Float8: what is stored, and where its scales go.
    Mutant("float8 not clipped", FORMATS, "return jnp.clip(x, -most, most).astype(dtype)", "return x.astype(dtype)", FLOAT8 + "test_c06_what_is_too_large_is_clipped"),
    Mutant("float8 multiplied at the write", FORMATS, "(x / _aligned(scale, x) for", "(x * _aligned(scale, x) for", FLOAT8 + "test_scales_divide"),
    Mutant("float8 read without its scale", FORMATS, "(x * _aligned(scale, x) for", "(x for", FLOAT8 + "test_latent_rows"),
    Mutant("scale of the first layer for all", "cache/scales.py", "jnp.asarray(layer, jnp.int32), axis=0", "jnp.asarray(0, jnp.int32), axis=0", FLOAT8 + "test_layers_scanned_over"),
    Mutant("v_scale for keys", "cache/kv.py", "return scale_of_layer(self.k_scale, layer), scale_of_layer(self.v_scale, layer)", "return scale_of_layer(self.v_scale, layer), scale_of_layer(self.v_scale, layer)", FLOAT8 + "test_keys_and_values"),
    Mutant("scales of blocks turned round", FORMATS, "_from_bytes(scale, jnp.float32)[..., None]", "_from_bytes(scale, jnp.float32)[..., ::-1, None]", FLOAT8 + "test_blocks"),
    Mutant("a block of zeros has scale 0", FORMATS, "jnp.where(largest == 0, 1.0, ", "jnp.where(largest == 0, 0.0, ", FLOAT8 + "test_blocks"),
    Mutant("NaN spreads over its block", FORMATS, "jnp.where(jnp.isnan(blocks), 0.0, jnp.abs(blocks))", "jnp.abs(blocks)", FLOAT8 + "test_blocks"),
    Mutant("a pool keeps the caller's scale", "cache/scales.py", "return jnp.array(value, jnp.float32)", "return jnp.asarray(value, jnp.float32)", FLOAT8 + "test_a_pool_has_scales_of_its_own"),
    Mutant("bfloat16 pool minds a scale", "cache/latent.py", "        if not self.format.scaled or self.scale is None:", "        if self.scale is None:", "tests/cases/test_float8.py::test_c13_scales_of_a_bfloat16_cache"),
    Mutant("scores of float8 keys not scaled", "mla_attn/xla/mla.py", "score_factors(q.shape, q_scale, scale)", "score_factors(q.shape, q_scale)", XLA + "test_float8_cache"),
    Mutant("float8 results not scaled", "mla_attn/xla/mla.py", "out = out if scale is None else out * scale", "out = out", XLA + "test_float8_cache"),
    Mutant("q_scale left out", "mla_attn/xla/mla.py", "score_factors(q.shape, q_scale, scale)", "score_factors(q.shape, scale)", XLA + "test_float8_queries"),
    Mutant("k_scale for values", "mla_attn/xla/gqa.py", "out *= v_scale if v_scale.ndim == 0 else v_scale", "out *= k_scale if k_scale.ndim == 0 else k_scale", "tests/ops/test_gqa.py::TestXLA::test_float8_cache"),
    Mutant("scale after the cap", BLOCKWISE, "scores = rules.soft_cap * jnp.tanh(scores / rules.soft_cap)", "scores = scale / rules.scale * rules.soft_cap * jnp.tanh(scores / scale * rules.scale / rules.soft_cap)", XLA + "test_float8_options"),
    Mutant("weights in float8", BLOCKWISE, "p.astype(v.dtype)", "p.astype(jnp.float8_e4m3fn).astype(v.dtype)", XLA + "test_float8_cache"),
    Mutant("expanded prefix without its scale", "mla_attn/ops/expanded.py", "read_latent(pool, m.page_table, indices, of_rank, layer=layer, dtype=q.dtype)", "(y.astype(q.dtype) for y in jnp.split(pool.operands(pool.data[pool.placement.locate_reads(m.page_table, indices, of_rank, layer)], jnp.float32), [pool.kv_lora_rank], axis=-1))", "tests/cases/test_float8.py::test_c12_prefix_and_new_tokens"),
    Mutant("a draft layer's rows read from the model's pool", "mla_attn/models/deepseek.py", "(DRAFT_LAYER, 0) if own else", "(GROUP, 0) if own else", "tests/models/test_float8_cache.py::test_pools_of_a_draft_layer"),
    Mutant("a draft layer with the first layer's scale", "mla_attn/models/base.py", "for at in (slice(kept), slice(kept, None))", "for at in (slice(kept), slice(kept))", "tests/models/test_float8_cache.py::test_formats_and_scales_of_drafters"),
    Mutant("scales of the last prompt", "mla_attn/models/calibration.py", "np.maximum(before[name], x)", "x", "tests/models/test_calibration.py::test_scales_are_maxima_of_rows"),
    Mutant("calibrated drafts after token 0", "mla_attn/models/calibration.py", "jnp.where(following < 0, likeliest, following)", "jnp.maximum(following, 0)", "tests/models/test_calibration.py::test_scales_are_maxima_of_rows"),
    Mutant("float8 operands without k_scale", "mla_attn/ops/expanded.py", 'zip(("q_scale", "k_scale", "v_scale"), scales, strict=True)', 'zip(("q_scale", "v_scale"), scales[::2], strict=True)', "tests/cases/test_float8.py::test_float8_operands"),
    Mutant("ranks in the other order", "mla_attn/metadata/layout.py", "held = positions % self.ranks == self.rank", "held = positions % self.ranks == self.ranks - 1 - self.rank", "tests/metadata/test_contexts.py::test_builders[for_extend-3]"),
    Mutant("every rank writes", "mla_attn/metadata/layout.py", "jnp.where(known & held,", "jnp.where(known,", OVER_RANKS + "test_modes[decode-Auto-vma=True]"),
    Mutant("ranks forget their stride", METADATA_BUILDERS, "kv_stride=layout.ranks", "kv_stride=1", OVER_RANKS + "test_modes[decode-Auto-vma=True]"),
    Mutant("ranks forget their first key", "mla_attn/metadata/layout.py", "return first + self.rank if self.ranks > 1 else first", "return first", OVER_RANKS + "test_modes[decode-Auto-vma=True]"),
    Mutant("ranks merge in base 2", "mla_attn/parallel/context.py", "merge_states(*parts,", "merge_states(parts[0], 1.4427 * parts[1],", OVER_RANKS + "test_modes[decode-Auto-vma=True]"),
    Mutant("sinks lost over ranks", "mla_attn/parallel/local.py", "sinks=sinks, out_dtype=out_dtype)", "sinks=None, out_dtype=out_dtype)", OVER_RANKS + "test_sinks_count_once[mla]"),
    Mutant("scales of queries of one rank", "mla_attn/parallel/local.py", 'given["q_scale"] = jax.lax.all_gather(scale, contexts, axis=1, tiled=True)', 'given["q_scale"] = jnp.tile(scale, (1, jax.lax.axis_size(contexts)))', OVER_RANKS + "test_float8_queries[mla]"),
    Mutant("KV heads of the first rank", "mla_attn/parallel/local.py", "first = jax.lax.axis_index(contexts) * heads", "first = 0 * jax.lax.axis_index(contexts) * heads", OVER_RANKS + "test_gqa_prompts[(1, 1, 4)]"),
    Mutant("another device's KV head", "mla_attn/parallel/local.py", "* spec.num_kv_heads // devices", "% spec.num_kv_heads", OVER_RANKS + "test_fewer_kv_heads_than_devices[2-(4, 1, 1)]"),
    Mutant("a prefix rank by rank", "mla_attn/ops/expanded.py", "jax.lax.all_gather(rows, axes, axis=2)", "jax.lax.all_gather(rows, axes, axis=1)", OVER_RANKS + "test_expanded[(1, 2, 4)-extend]"),
    Mutant("rows do not move between ranks", "cache/placement.py", "jax.lax.psum(readable.astype(jnp.int32), context_axes) > 0 if context_axes else readable", "readable", OVER_RANKS + "test_accepted_branch_moves_between_ranks[nhd]"),
    Mutant("experts' rows rolled on", "mla_attn/ops/grouped_matmul.py", "jnp.roll(out, before, axis=0)", "jnp.roll(out, -before, axis=0)", "tests/ops/test_grouped_matmul.py::test_some_of_the_groups[1-xla]"),
    Mutant("every device has the first experts", "mla_attn/models/moe.py", "first_group=self._first(weights)", "first_group=0", PARALLEL_ENGINE + "[v2, experts over explicit axes]"),
    Mutant("every device adds the experts' biases", "mla_attn/models/moe.py", "jax.lax.axis_index(self.summed) == 0 if self.summed", "True if self.summed", PARALLEL_ENGINE + "[gpt-oss, widths of experts]"),
    Mutant("parts of products not summed", "mla_attn/models/layers.py", "        if self.summed:\n", "        if self.summed and self.gathered:\n", PARALLEL_ENGINE + "[v2, experts over explicit axes]"),
    Mutant("tokens of other devices' vocabulary", "mla_attn/models/layers.py", "held = (own >= 0) & (own < table.shape[0])", "held = own < table.shape[0]", PARALLEL_ENGINE + "[v3, contexts and a draft tree]"),
    Mutant("keys after a part of a request", "mla_attn/integrations/ragged_metadata.py", "m.kv_lens[request] - m.q_lens[request] + first + q_lens", "m.kv_lens[request]", "tests/integrations/test_ragged_paged.py::test_against_float64[mla-16-mixed]"),
    Mutant("requests past the last", "mla_attn/integrations/ragged_metadata.py", "kv_lens, q_lens = jnp.where(live, kv_lens, 0), jnp.where(live, q_lens, 0)", "pass", "tests/integrations/test_ragged_paged.py::test_against_float64[mla-16-mixed]"),
    Mutant("memory for every request's rows", "mla_attn/integrations/ragged_metadata.py", "return metadata if max_q_len is not None or num_rows == 0 else _in_parts(metadata, num_rows)", "return metadata", "tests/integrations/test_ragged_paged.py::test_the_cache_is_not_copied[mla-bfloat16]"),
    Mutant("pages of one row side by side", "mla_attn/integrations/ragged_layout.py", "page_stride=stride", "page_stride=1", "tests/integrations/test_ragged_paged.py::test_pages_of_one_token_in_packs"),
    Mutant("cache with its axis of 1 elsewhere", "mla_attn/integrations/ragged_layout.py", "lax.optimization_barrier(data.reshape(-1)).reshape", "data.reshape", "tests/integrations/test_ragged_paged.py::test_the_cache_is_not_copied[gqa-float32]"),
    Mutant("scores without k_scale", "mla_attn/integrations/ragged_paged.py", "scale = scale if factor is None else scale * factor", "pass", "tests/integrations/test_ragged_paged.py::test_options[gqa]"),
    Mutant("arguments that moved", "mla_attn/integrations/sglang_jax.py", "if missing and not getattr(function", "if False and not getattr(function", "tests/integrations/test_sglang_jax.py::test_names_that_moved"),
    Mutant("metadata of the first rank's rows", "mla_attn/integrations/sglang_metadata.py", "len(batch.input_ids) // batch.dp_size", "len(batch.input_ids)", "tests/integrations/test_sglang_jax.py::test_a_step[two data ranks-mla]"),
    Mutant("device left as told to the engine", "mla_attn/integrations/sglang_jax.py", "            self.server_args = given\n", "            pass\n", "tests/integrations/test_sglang_jax.py::test_a_step[two tensor ranks-gqa]"),
    Mutant("trees as wide as pages", "mla_attn/integrations/sglang_jax.py", "cu_kv_lens[1:] - cu_kv_lens[:-1] if mask_aligned_to_cu_kv else kv_lens", "cu_kv_lens[1:] - cu_kv_lens[:-1]", "tests/integrations/test_sglang_jax.py::test_trees_of_drafts[False]"),
    Mutant("experts from the first on", "mla_attn/integrations/sglang_jax.py", "given[\"group_offset\"].reshape(())", "0", "tests/integrations/test_sglang_jax.py::test_experts"),
    Mutant("hidden argument of ejkernel", "mla_attn/integrations/ejkernel.py", "name not in known and name not in _HINTS", "name not in known and name in _HINTS", "tests/integrations/test_ejkernel.py::test_what_moved_is_named"),
    Mutant("prefix of a tree left of its window in Triton", "pallas_kernels/triton/attention.py", "before = before & (columns >= _of_rows(begin, TRANSPOSED))", "before = before", "tests/pallas_kernels/test_triton.py::TestGQAInterpreted::test_trees[9]"),
    Mutant("float8 a bit too low in Triton", "pallas_kernels/triton/attention.py", "(bits & 0x7F) << 7", "(bits & 0x7F) << 6", "tests/pallas_kernels/test_triton.py::TestGQAInterpreted::test_float8[float8_e4m3fn]"),
    Mutant("all rows see what the first sees in Triton", "pallas_kernels/triton/attention.py", "tl.min(tl.where(live, end, 0x7FFFFFFF), 0)", "tl.max(end, 0)", "tests/pallas_kernels/test_triton.py::TestMLAInterpreted::test_heads[6-bfloat16]"),
    Mutant("splits merged unscaled in Triton", "pallas_kernels/triton/combine.py", "acc = acc * kept + tl.sum", "acc = acc + tl.sum", "tests/pallas_kernels/test_triton.py::test_many_splits"),
    Mutant("results of prompts unscaled in Triton", "pallas_kernels/triton/prefill.py", "acc * kept[:, None], input", "acc, input", "tests/pallas_kernels/test_triton.py::TestRaggedInterpreted::test_sinks_and_many_tiles"),
    Mutant("a stage too many in Triton", "pallas_kernels/triton/configs.py", "Rule(rows=64, channels=576, shared_values=True, sizes=_sizes(64, 8, 2))", "Rule(rows=64, channels=576, shared_values=True, sizes=_sizes(64, 8, 3))", "tests/pallas_kernels/test_triton_code.py::test_machine_code[mla-decode-sm_90]"),
    Mutant("AMD GPUs taken for NVIDIA's", "mla_attn/dispatch.py", "capability.startswith(\"gfx\")", "capability.startswith(\"amd\")", "tests/test_dispatch.py::test_amd_gpus_are_told_from_those_of_nvidia[gfx942-None-gfx942]"),
    Mutant("first wrong row", "mla_attn/bench/ops/check.py", "if not share[row, head] <= 1", "if share[row, head] > 1e9", "tests/bench/test_ops.py::test_a_check_names_the_first_wrong_row"),
)
# fmt: on


# What tests import besides the library, once for all mutants: no backend starts, and nothing of this checkout is among it.
IMPORTED = (
    "pytest",
    "hypothesis",
    "jaxtyping",
    "jax.numpy",
    "jax.experimental.checkify",
    "jax.experimental.pallas.mosaic_gpu",
    "flax.nnx",
)


def copy_tree(target: pathlib.Path) -> None:
    """With compiled Python, which is valid for as long as its source keeps its time."""
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=shutil.ignore_patterns("fixtures"))
        else:
            shutil.copy2(source, target / part)
    (target / "tests" / "fixtures").symlink_to(ROOT / "tests" / "fixtures")  # read alone, and large


def run_tests(tree: pathlib.Path, tests: list[str]) -> tuple[int, str]:
    """Status and output of pytest in a copy of the checkout, which this process has imported nothing of."""
    os.chdir(tree)
    sys.path[:] = [path for path in sys.path if pathlib.Path(path or ".").resolve() != ROOT]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.modules["beartype"] = None  # pyright: ignore[reportArgumentType] (annotations go unchecked, in half the time)
    import pytest

    output = tree / "output.txt"
    with output.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        # What a failed test leaves open is no failure of pytest's own.
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "--assert=plain"]
        status = pytest.main([*options, *tests])
        sys.stdout.flush()
    return int(status), output.read_text()


def try_mutant(mutant: Mutant) -> str | None:
    """None if its test notices; else what happened."""
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        copy_tree(tree)
        path = tree / mutant.file
        source = path.read_text()
        if source.count(mutant.old) != 1:
            return f"{mutant.file} holds its source {source.count(mutant.old)} times, must be once: {mutant.old!r}"
        path.write_text(source.replace(mutant.old, mutant.new))
        os.utime(path, (0, 0))  # so that what was compiled of the source is not taken, be it as long and as old
        status, output = run_tests(tree, [mutant.test])
    if status == 1:
        return None
    return "survived" if status == 0 else f"pytest exited with {status}: {output[-800:]}"


def passes_unbroken(test: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(pathlib.Path(folder))
        status, output = run_tests(pathlib.Path(folder), [test])
    if status:
        sys.stderr.write(output[-4000:])
    return status == 0


def processes() -> multiprocessing.pool.Pool:
    """As many processes as cores, a new one for each task: a copy of one that has imported all that tests need."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))  # as tests/conftest.py does
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context.Pool(os.cpu_count(), maxtasksperchild=1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Break the code and see tests notice.")
    parser.add_argument("words", nargs="*", metavar="NAME", help="parts of the names of the mutants to try (all)")
    parser.add_argument("--no-control", action="store_true", help="the tests have just been seen to pass unbroken")
    arguments = parser.parse_args()
    mutants = [m for m in MUTANTS if not arguments.words or any(word in m.name for word in arguments.words)]
    tests = list(dict.fromkeys(m.test for m in mutants))
    # One test at least: should nothing pass in these processes, whatever the code, then no mutant was killed.
    control = tests[:1] if arguments.no_control else tests
    survivors = 0
    with processes() as pool:
        print(f"{len(mutants)} mutants; first {len(control)} of their {len(tests)} tests unbroken", flush=True)
        if not all(pool.imap(passes_unbroken, control)):
            return 1
        outcomes = tqdm(pool.imap(try_mutant, mutants), total=len(mutants), disable=not sys.stderr.isatty())
        for mutant, outcome in zip(mutants, outcomes, strict=True):
            survivors += outcome is not None
            print(f"{'killed' if outcome is None else 'ALIVE '}  {mutant.name}  [{mutant.test}]", flush=True)
            if outcome is not None:
                print(f"        {outcome}", flush=True)
    print(f"{len(mutants) - survivors} killed, {survivors} alive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
