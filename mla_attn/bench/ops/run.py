"""The run of ``mla-attn bench ops``: checks and times implementations on every shape, and builds the report."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mla_attn.bench import timing
from mla_attn.bench.ceilings import Ceilings, measure_ceilings
from mla_attn.bench.machine import machine
from mla_attn.bench.ops import baseline
from mla_attn.bench.ops.problem import Expected, Problem, errors, expected, make_problem, problem_bytes
from mla_attn.bench.ops.shapes import Shape
from mla_attn.bench.output import say
from mla_attn.memory import check_fits
from mla_attn.ops import gqa_attention, mla_attention, plan_gqa, plan_mla
from mla_attn.specs import GQASpec, MLASpec
from mla_attn.support import supports

_SCALE = 192**-0.5  # DeepSeek's: 128 + 64 channels before absorption
_PROFILED_CALLS = 10
_CHAIN_SECONDS = 0.5  # slow calls have shorter chains
_BURST_SECONDS = 0.04  # on a GPU, long enough that the host's share of a burst is small
_SUSTAINED_SECONDS = 1.0


@dataclasses.dataclass(kw_only=True)
class Result:
    """Figures of one implementation on one shape; None if not measured, for the reason in ``reason``."""

    shape: str
    implementation: str
    status: str  # "ok", "wrong", "refused" or "failed"
    reason: str | None = None
    errors: dict[str, float] | None = None  # errors divided by tolerances
    kernel_us: float | None = None
    kernels: dict[str, tuple[float, float]] | None = None  # name: launches and microseconds per call
    kernel_reason: str | None = None
    wall_us: float | None = None
    wall_range_us: tuple[float, float] | None = None
    sustained_us: float | None = None  # wall time after a power limit has lowered the GPU's clocks
    host_us: float | None = None
    chain_calls: int | None = None
    layers: int | None = None
    flops: int
    bytes: int
    bound: str
    bound_us: float
    temp_bytes: int | None = None

    @property
    def seconds(self) -> float | None:
        """The time in seconds from which rates are computed: kernel time if known, else wall time."""
        microseconds = self.wall_us if self.kernel_us is None else self.kernel_us
        return None if microseconds is None else microseconds * 1e-6


class _WrongError(Exception):
    """A result is wrong; the message says in what way."""


@dataclasses.dataclass
class _Candidate:
    """An implementation with correct results, compiled and ready to be timed."""

    result: Result
    arguments: tuple
    compiled: Callable
    chained: Callable
    calls: int  # calls per chain
    burst: int  # chains between two readings of the host clock
    wall: list[float] = dataclasses.field(default_factory=list)


def default_implementations(op: str) -> list[str]:
    """Every implementation that is chosen automatically for an ordinary call here, and the baseline."""
    answers = supports(f"{op}_attention")
    return [name for name, refusal in answers.items() if name != "reference" and refusal is None] + [baseline.NAME]


def run(
    shapes: Sequence[Shape],
    implementations: Sequence[str],
    *,
    page_size: int,
    dtype: str,
    kv_dtype: str | None = None,
    latent: tuple[int, int],
    head_dim: int,
    repeats: int,
    unroll: bool,
    seed: int,
    save: Callable[[dict], None] = lambda report: None,
) -> dict:
    """Runs the benchmark; returns the report in its JSON form: machine, configuration, ceilings, and a ``Result`` for
    each shape and implementation.

    Args:
        shapes: calls to time.
        implementations: names from ``dispatch.NAMES``, or the baseline's.
        page_size: tokens per page.
        dtype: name of the dtype of the queries.
        kv_dtype: name of the pool's format; None for ``dtype``.
        latent: latent and rope channels, of MLA.
        head_dim: channels of a head, of GQA.
        repeats: number of timed chains and of profiles; medians are reported.
        unroll: whether chains are unrolled.
        seed: seed of all data.
        save: function that is called with the report so far after every shape.
    """
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    configuration = {
        "implementations": list(implementations),
        "page_size": page_size,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "latent": list(latent),
        "head_dim": head_dim,
        "repeats": repeats,
        "unroll": unroll,
        "seed": seed,
    }
    sizes = {"page_size": page_size, "dtype": jnp.dtype(dtype), "kv_dtype": kv_dtype}
    specs = [spec_of(shape, latent, head_dim) for shape in shapes]
    for shape, spec in zip(shapes, specs, strict=True):
        check_fits(f"the arrays of {shape.name}", problem_bytes(shape, spec, **sizes))
    say("measuring ceilings")
    ceilings = measure_ceilings(jnp.dtype(dtype), seed)
    report = {
        "machine": machine(),
        "configuration": configuration,
        "ceilings": dataclasses.asdict(ceilings),
        "results": [],
    }
    for number, (shape, spec) in enumerate(zip(shapes, specs, strict=True)):
        say(f"[{number + 1}/{len(shapes)}] {shape.name}: making data")
        problem = make_problem(shape, spec, **sizes, seed=seed + number)
        results = _run_shape(problem, implementations, ceilings, repeats, unroll)
        report["results"] += [dataclasses.asdict(result) for result in results]
        save(report)
    return report


def spec_of(shape: Shape, latent: tuple[int, int], head_dim: int) -> MLASpec | GQASpec:
    """The spec of a shape's calls, of MLA or, with KV heads, of GQA."""
    if shape.kv_heads is None:
        return MLASpec(num_heads=shape.heads, kv_lora_rank=latent[0], qk_rope_head_dim=latent[1], scale=_SCALE)
    return GQASpec(num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=head_dim, scale=head_dim**-0.5)


def _run_shape(problem: Problem, implementations, ceilings: Ceilings, repeats: int, unroll: bool) -> list[Result]:
    """Checks every implementation, then times the correct ones in turns, so that drift affects all alike."""
    shape, pool = problem.shape, problem.pool
    itemsize = problem.queries[0].dtype.itemsize
    flops, nbytes = shape.flops(problem.spec), shape.bytes(problem.spec, row_bytes=pool.row_bytes, itemsize=itemsize)
    seconds, bound = ceilings.bound(flops, nbytes)
    want = expected(problem, pool.num_layers - 1)
    results, candidates = [], []
    for name in implementations:
        say(f"    {name}: compiling and checking")
        facts = {"flops": flops, "bytes": nbytes, "bound": bound, "bound_us": seconds * 1e6, "layers": pool.num_layers}
        result = Result(shape=shape.name, implementation=name, status="ok", **facts)
        results.append(result)
        try:
            candidates.append(_prepare(problem, result, want, unroll))
        except _WrongError as error:
            result.status, result.reason = "wrong", f"not timed: {error}"
        except NotImplementedError as error:
            result.status, result.reason = "refused", str(error)
        except Exception as error:  # compilation or memory failed: continue with the others
            result.status, result.reason = "failed", f"{type(error).__name__}: {error}".partition("\n")[0]
        if result.reason:
            say(f"    {name}: {result.status}: {result.reason}")
    for turn in range(repeats):
        for c in candidates if turn % 2 == 0 else candidates[::-1]:
            c.wall.append(timing.wall_seconds(c.chained, c.arguments, c.calls, c.burst) * 1e6)
    for c in candidates:
        _finish(problem, c, repeats)
        kernel = "" if c.result.kernel_us is None else f"{c.result.kernel_us:.1f} us of kernels, "
        say(f"    {c.result.implementation}: {kernel}{c.result.wall_us:.1f} us on the clock")
    return results


def _call(name: str, spec: MLASpec | GQASpec):
    mla = isinstance(spec, MLASpec)
    dense: Any = baseline.dense_gather if mla else baseline.dense_gather_gqa
    attention: Any = mla_attention if mla else gqa_attention

    def call(*arguments):
        *arguments, layer = arguments
        if name == baseline.NAME:
            return dense(*arguments, spec, layer=layer)
        return attention(*arguments, spec, layer=layer, return_lse=True, implementation=name)

    return call


def _planned(problem: Problem, name: str) -> tuple:
    """Arguments of a call, with the work list that a step computes once for all its layers."""
    if name == baseline.NAME:
        return problem.arguments
    plan_op = plan_mla if isinstance(problem.spec, MLASpec) else plan_gqa
    plan = functools.partial(plan_op, spec=problem.spec, out_dtype=problem.queries[0].dtype, implementation=name)
    return *problem.queries, problem.pool, jax.jit(plan)(problem.metadata, problem.pool)


def _prepare(problem: Problem, result: Result, want: Expected, unroll: bool) -> _Candidate:
    """Compiles and checks an implementation.

    Raises:
        _WrongError: the result is wrong, so it is not timed.
    """
    call, layers = _call(result.implementation, problem.spec), problem.pool.num_layers
    arguments, last_layer = _planned(problem, result.implementation), jnp.int32(layers - 1)
    compiled = jax.jit(call).lower(*arguments, last_layer).compile()
    if (memory := compiled.memory_analysis()) is not None:
        result.temp_bytes = memory.temp_size_in_bytes
    outputs = jax.block_until_ready(compiled(*arguments, last_layer))
    if not all(bool(jnp.isfinite(x).all()) for x in outputs):
        raise _WrongError("NaN or infinity in the result")
    result.errors = shares = errors(outputs, want, problem.queries[0].dtype)
    if max(shares.values()) > 1:
        raise _WrongError(", ".join(f"{n} error {s:.3g} x its tolerance" for n, s in shares.items() if s > 1))
    once = min(timing.seconds_per_call(compiled, (*arguments, last_layer)) for _ in range(2))
    calls = result.chain_calls = max(2, min(timing.CHAIN_CALLS, int(_CHAIN_SECONDS / once)))
    chained = jax.jit(timing.chain(call, calls, layers, unroll=unroll)).lower(*arguments).compile()
    timing.chain_seconds(chained, arguments, calls, 1)
    limit = _CHAIN_SECONDS if jax.default_backend() == "cpu" else _BURST_SECONDS
    return _Candidate(result, arguments, compiled, chained, calls, burst=max(1, min(5, int(limit / (calls * once)))))


def _finish(problem: Problem, candidate: _Candidate, repeats: int) -> None:
    """Fills in the figures of a candidate whose chains have been timed."""
    result, layers = candidate.result, [jnp.int32(i) for i in range(problem.pool.num_layers)]
    result.wall_us, result.wall_range_us = statistics.median(candidate.wall), (min(candidate.wall), max(candidate.wall))
    if jax.default_backend() == "cpu":
        result.kernel_reason = "kernels and dispatch are told apart on GPUs only"
        return
    seconds = timing.dispatch_seconds(candidate.compiled, (*candidate.arguments, layers[0]), 4 * repeats)
    result.host_us = seconds * 1e6
    try:
        kernels = _kernels(candidate, layers, repeats)
        result.kernels = {name: (launches, seconds * 1e6) for name, (launches, seconds) in kernels.items()}
        result.kernel_us = sum(us for _, us in result.kernels.values())
    except Exception as error:  # if the profiler fails, only a column is missing
        result.kernel_reason = f"{type(error).__name__}: {error}"
    # Bursts of this length make the host's share negligible.
    burst = math.ceil(1e6 * _BURST_SECONDS / (result.wall_us * candidate.calls))
    chained = candidate.chained, candidate.arguments, candidate.calls, burst
    result.sustained_us = timing.sustained_seconds(*chained, _SUSTAINED_SECONDS) * 1e6


def _kernels(candidate: _Candidate, layers, repeats: int) -> dict[str, tuple[float, float]]:
    """Kernels of a call, from the profile with the median total kernel time of ``repeats`` profiles."""

    def calls():
        outs = [candidate.compiled(*candidate.arguments, layers[i % len(layers)]) for i in range(_PROFILED_CALLS)]
        jax.block_until_ready(outs)

    profiles = []
    for _ in range(repeats):
        timing.rest()
        profiles.append(timing.kernel_seconds(calls, _PROFILED_CALLS))
    return sorted(profiles, key=lambda kernels: sum(seconds for _, seconds in kernels.values()))[repeats // 2]
