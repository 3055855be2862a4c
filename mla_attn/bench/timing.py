"""Measurement of wall times and kernel times.

A call is ``call(query, *others, layer) -> (out, lse)``; others are the pool, the metadata and, of MLA, before them the
rope part of the query. As in a model, successive calls read successive layers of the pool; together the layers are far
larger than any cache.
"""

import collections
import contextlib
import dataclasses
import pathlib
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
from jax import lax

CHAIN_CALLS = 21
REST = 0.3  # seconds
LONG_GAP = 20e-6  # seconds; gaps between kernels of one program are below 5e-6 seconds
_HOST_COPIES = ("MemcpyH2D", "MemcpyD2H")


class ProfileError(RuntimeError):
    """A profile does not have the expected kernels."""


def seconds_per_call(f, args, *, burst: int = 1) -> float:
    """Wall seconds per call of ``burst`` calls that are queued at once."""
    start = time.perf_counter()
    jax.block_until_ready([f(*args) for _ in range(burst)])
    return (time.perf_counter() - start) / burst


def chain(call, calls: int, layers: int, *, unroll: bool):
    """Makes a program of dependent calls, ``(query, *others) -> (out, lse)`` of the last call.

    A call's output is the next call's query (of MLA the latent part). This dependence needs no extra kernel, and no
    compiler can remove it. An ``optimization_barrier`` would not do: XLA removes unused values that pass through a
    barrier, and so all calls of an unrolled chain but one. (XLA may still share computations that do not depend on the
    query, such as the baseline's gather, between unrolled calls of one layer.)
    """

    def program(query, *others):
        def body(i, last):
            return call(last[0], *others, i % layers)

        return lax.fori_loop(0, calls, body, (query, jnp.zeros(query.shape[:2])), unroll=unroll)

    return program


def chain_seconds(compiled, args, calls: int, burst: int) -> float:
    """Wall seconds per call of ``burst`` chains, each of which starts from the result of the previous one."""
    query, *others = args
    start = time.perf_counter()
    for _ in range(burst):
        query, _ = compiled(query, *others)
    jax.block_until_ready(query)
    return (time.perf_counter() - start) / (burst * calls)


def wall_seconds(compiled, args, calls: int, burst: int) -> float:
    """Wall seconds per call of a chain, on a rested device.

    On a GPU one chain is profiled, and the time is from the start of its first kernel to the end of its last. The host
    clock is not accurate enough there: starting and ending a burst takes a variable time of up to a millisecond, more
    than all gaps between kernels. (XLA does not use command buffers while it is profiled; with them, gaps are shorter.)
    If a profile has no kernels, and on a CPU, ``burst`` chains are timed with the host clock.
    """
    rest()
    if jax.default_backend() == "gpu":
        with contextlib.suppress(ProfileError):  # reported where kernel times are missing
            return occupancy(lambda: jax.block_until_ready(compiled(*args))).span / calls
        rest()
    return chain_seconds(compiled, args, calls, burst)


def rest() -> None:
    """Waits until a GPU's clocks have recovered from its power limit, which lowers them after 100 ms at full load."""
    if jax.default_backend() == "gpu":
        time.sleep(REST)


def sustained_seconds(compiled, args, calls: int, burst: int, seconds: float) -> float:
    """Wall seconds per call while bursts of chains run for ``seconds``: the median of the later half."""
    begin, bursts = time.perf_counter(), []
    while time.perf_counter() - begin < seconds:
        bursts.append(chain_seconds(compiled, args, calls, burst))
    return statistics.median(bursts[len(bursts) // 2 :])


def dispatch_seconds(compiled, args, repeats: int) -> float:
    """Host seconds until an asynchronous call returns: the median of ``repeats``."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        out = compiled(*args)
        seconds.append(time.perf_counter() - start)
        jax.block_until_ready(out)
    return statistics.median(seconds)


def kernel_seconds(run, calls: int) -> dict[str, tuple[float, float]]:
    """Profiles the kernels of a call on a GPU, copies and memsets included: name -> (launches, seconds) per call.

    Args:
        run: function that runs ``calls`` calls, already warmed up, and waits for them.
        calls: number of calls.

    Raises:
        ProfileError: the profile has no kernels, or not a whole number per call; the message lists what it has.
    """
    kernels, lines = _profile(run)
    if not kernels or len(kernels) % calls:
        raise ProfileError(f"{len(kernels)} kernels for {calls} calls on these lines: {lines}")
    times = collections.defaultdict(list)
    for name, _, duration in kernels:
        times[name].append(duration * 1e-9)
    return {name: (len(each) / calls, sum(each) / calls) for name, each in times.items()}


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """How busy a GPU was during a profile, in seconds.

    Attributes:
        span: time from the start of the first kernel to the end of the last.
        busy: part of ``span`` in which a kernel ran; copies from and to the host do not count.
        waited: part of ``span`` in gaps longer than ``LONG_GAP``, in which the GPU waited for the host. (Shorter gaps
            are between kernels of one program.)
    """

    span: float
    busy: float
    waited: float


def occupancy(run) -> Occupancy:
    """Profiles how busy the device is while ``run()`` runs.

    Raises:
        ProfileError: the profile has no kernels; the message lists what it has.
    """
    events, lines = _profile(run)
    kernels = sorted((begin, begin + length) for name, begin, length in events if name not in _HOST_COPIES)
    if not kernels:
        raise ProfileError(f"no kernels on these lines: {lines}")
    busy = waited = 0.0
    end = start = kernels[0][0]
    for begin, until in kernels:  # kernels of several streams may overlap
        waited += begin - end if begin - end > 1e9 * LONG_GAP else 0.0
        busy += max(until - max(begin, end), 0.0)
        end = max(end, until)
    return Occupancy(1e-9 * (end - start), 1e-9 * busy, 1e-9 * waited)


def _profile(run) -> tuple[list[tuple[str, float, float]], str]:
    """Profiles ``run()``; returns (name, start, duration) in ns of events on GPU streams, and all lines' names."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        paths = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        if len(paths) != 1:
            raise ProfileError(f"the profiler wrote {len(paths)} traces")
        planes = list(jax.profiler.ProfileData.from_file(str(paths[0])).planes)
        lines = [(f"{plane.name} {line.name}", line) for plane in planes for line in plane.lines if "GPU" in plane.name]
        kernels = [
            (event.name, event.start_ns, event.duration_ns)
            for _, line in lines
            if line.name.startswith("Stream")  # other lines summarize the streams
            for event in line.events
        ]
    return kernels, ", ".join(sorted({name for name, _ in lines} or {plane.name for plane in planes}))
