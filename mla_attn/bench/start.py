"""``mla-attn bench start``: times the start of an engine up to its first token and its last program, and the lowering
and compiling of single calls."""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import mla_attn
from mla_attn.bench import output
from mla_attn.bench.machine import machine
from mla_attn.bench.output import say
from mla_attn.bench.serve.command import open_model
from mla_attn.engine import DraftModel, Engine, SamplingParams
from mla_attn.metadata import for_target_verify
from mla_attn.models.files import read_json
from mla_attn.ops.grouped_matmul import grouped_matmul
from mla_attn.ops.mla import mla_attention
from mla_attn.passes import open_draft
from mla_attn.speculative import DraftTree

_REQUESTS, _KV_LEN, _EXPERTS = 64, 4096, 64
_PROMPT = 64  # tokens of the first request
# Heads, query tokens and page size of a call of ``mla_attention``.
_CALLS = ((128, 1, 64), (16, 1, 64), (16, 4, 64), (64, 7, 1))


@dataclasses.dataclass(frozen=True)
class Made:
    """Times of one program, in seconds.

    Attributes:
        name: the call, or the pass.
        lower: time to trace and lower it, or to read it.
        compile: time for XLA to compile it, kernels included.
        text: size of the lowered module's text, in bytes; None for passes.
        programs: number of programs that the times are sums of.
    """

    name: str
    lower: float
    compile: float
    text: int | None = None
    programs: int = 1


def main(options: argparse.Namespace) -> int:
    """Prints a table, or JSON. Exit status 0."""
    report = {"machine": machine(), "what": options.what}
    report |= _kernels() if options.what == "kernels" else _engine(options)
    output.save(report, options.json)
    if options.json == "-":
        print(json.dumps(report))
        return 0
    print(f"{options.what} on {report['machine']['device']}, {report['machine']['date']}")
    if "summary" in report:
        print(report["summary"])
    print("| | programs | lower s | compile s | text kB |\n| --- | ---: | ---: | ---: | ---: |")
    for row in report["made"]:
        text = "" if row["text"] is None else f"{row['text'] / 1e3:.0f}"
        print(f"| {row['name']} | {row['programs']} | {row['lower']:.2f} | {row['compile']:.2f} | {text} |")
    return 0


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of a command as arguments of ``Engine``."""
    widths = options.tree or (1,) * options.speculate
    sizes = ("max_batch", "max_len", "num_pages", "page_size", "prompt_tokens")
    names = (*sizes, "kv_dtype", "draft_kv_dtype", "implementation", "cache_dir")
    scales = None if options.kv_scales is None else read_json(pathlib.Path(options.kv_scales))
    chosen = {name: getattr(options, name) for name in names}
    return chosen | {"speculation": (DraftTree(widths),) if widths else (), "kv_scale": scales}


def _engine(options: argparse.Namespace) -> dict[str, Any]:
    """Starts an engine that compiles while it serves a first request. The clock starts with the weights in memory."""
    arguments = engine_options(options)
    trees = arguments["speculation"]
    say(f"{options.what}: loading")
    _, load = open_model(options.what, options.dtype, drafts=bool(trees) and options.draft is None)
    _, load_draft = open_draft(options.draft, dtype=jnp.dtype(options.dtype))
    model, draft = load(), load_draft()
    models = (model, draft.model) if isinstance(draft, DraftModel) else (model,)
    jax.block_until_ready([jax.tree.leaves(nnx.state(each)) for each in models])
    say(f"{options.what}: starting")
    begin = time.perf_counter()
    engine = Engine(model, draft=draft, **arguments)
    engine.warm_up(progress=sys.stderr.isatty(), background=True)
    created = time.perf_counter() - begin
    params = SamplingParams(max_new_tokens=2, ignore_eos=True, speculation=trees[0] if trees else None)
    engine.add_request([1] * min(_PROMPT, engine.max_len - 2), params)
    first, last = None, None
    for new in engine.run():
        last = time.perf_counter() - begin
        first = last if first is None else first
        if new.error is not None:
            raise new.error
    say(f"{options.what}: first token after {first:.1f} s")
    engine.warm_up(progress=sys.stderr.isatty())
    every = time.perf_counter() - begin
    buckets, folder, statistics = engine._programs(), engine.folder, engine.statistics
    made = [Made(b.name, b.lower_seconds, b.compile_seconds, None, b.compiles) for b in buckets]
    seconds = {"created": created, "first_token": first, "first_request": last, "all_programs": every}
    counts = {"programs": statistics.programs, "read": statistics.programs_read}
    size = 0 if folder is None else folder.size()
    return {
        "sizes": {name: value for name, value in vars(options).items() if name not in ("run", "check", "json", "plot")},
        "batches": engine._batches,
        "seconds": seconds,
        **counts,
        "folder_bytes": size,
        "summary": f"first token after {first:.1f} s, first request after {last:.1f} s, all {statistics.programs} "
        f"programs after {every:.1f} s; {statistics.programs_read} were read from {folder and folder.path}, which has "
        f"{size / 1e6:.1f} MB",
        "made": [dataclasses.asdict(row) for row in made],
    }


def _kernels() -> dict[str, Any]:
    """Lowers and compiles single calls, each for the first time in this process, without JAX's compilation cache."""
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        spec, arguments = _attention(8, 1, 64)  # a call of its own, so that imports are not timed
        _make("", functools.partial(_attend, spec=spec, implementation=None), arguments)
        made = []
        for call in _calls():
            say(call[0])
            made.append(dataclasses.asdict(_make(*call)))
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
    return {"made": made}


def _make(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Made:
    begin = time.perf_counter()
    lowered = jax.jit(call).lower(*arguments)
    then = time.perf_counter()
    lowered.compile()
    return Made(name, then - begin, time.perf_counter() - then, len(lowered.as_text()))


def _calls() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Name, function and abstract arguments of each call that this device supports, by each of its implementations."""
    for heads, q_len, page_size in _CALLS:
        facts: dict[str, Any] = {"num_heads": heads, "max_q_len": q_len, "page_size": page_size}
        spec, arguments = _attention(heads, q_len, page_size)
        for name, refusal in mla_attn.supports("mla_attention", **facts).items():
            if refusal is None and name != "reference":
                call = functools.partial(_attend, spec=spec, implementation=name)
                label = f"`mla_attention`, {heads} heads, {q_len} query tokens, page {page_size}, {name}"
                yield label, call, arguments
    rows, weights = _shape(_REQUESTS * 6, 2048), _shape(_EXPERTS, 2048, 1408)
    sizes = jax.ShapeDtypeStruct((_EXPERTS,), jnp.int32)
    for name, refusal in mla_attn.supports("grouped_matmul", depth=2048, width=1408).items():
        if refusal is None and name != "reference":
            call = functools.partial(grouped_matmul, implementation=name)
            yield f"`grouped_matmul`, 2048 x 1408, {name}", call, (rows, weights, sizes)
    if mla_attn.supports("mla_attention").get("mosaic_gpu", "") is None:
        from jax.experimental.pallas.ops.gpu import attention_mgpu

        config = attention_mgpu.TuningConfig(block_q=64, block_kv=64, max_concurrent_steps=2)
        array = jax.ShapeDtypeStruct((2, 1024, 8, 128), jnp.float16)
        yield "JAX's `attention_mgpu`", lambda q, k, v: attention_mgpu.attention(q, k, v, config), (array, array, array)


def _attention(heads: int, q_len: int, page_size: int):
    spec = mla_attn.MLASpec(num_heads=heads, kv_lora_rank=512, qk_rope_head_dim=64, scale=192**-0.5)
    width = _KV_LEN // page_size

    def make():
        pool = mla_attn.LatentPool.create(
            num_layers=1, num_pages=_REQUESTS * width, page_size=page_size, spec=spec, dtype=jnp.bfloat16
        )
        table, lens = jnp.zeros((_REQUESTS, width), jnp.int32), jnp.ones(_REQUESTS, jnp.int32)
        return pool, for_target_verify(table, lens, num_tokens=q_len, page_size=page_size)

    rows = (_REQUESTS * q_len, heads)
    return spec, (_shape(*rows, 512), _shape(*rows, 64), *jax.eval_shape(make))


def _attend(q_latent, q_rope, pool, metadata, *, spec, implementation):
    return mla_attention(q_latent, q_rope, pool, metadata, spec, layer=0, implementation=implementation)


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
