"""Time on the clock and time of kernels.

A call is ``call(q_latent, q_rope, pool, metadata, layer) -> (out, lse)``. Buffers rotate by ``layer``: as in a model,
calls read one layer of the pool after the other, which together are far larger than any cache.
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
LONG_GAP = 20e-6  # seconds; kernels of a program follow each other within 5e-6
_HOST_COPIES = ("MemcpyH2D", "MemcpyD2H")


class ProfileError(RuntimeError):
    """A profile lacks what is asked of it."""


def seconds_per_call(f, args, *, burst: int = 1) -> float:
    """Wall seconds of one call among ``burst`` queued ones."""
    start = time.perf_counter()
    jax.block_until_ready([f(*args) for _ in range(burst)])
    return (time.perf_counter() - start) / burst


def chain(call, calls: int, layers: int, *, unroll: bool):
    """A program of dependent calls, ``(q_latent, q_rope, pool, metadata) -> (out, lse)`` of the last.

    A call's output is the next one's latent query: a dependence that costs no kernel and that no compiler can cut. An
    ``optimization_barrier`` is no substitute: XLA drops what a barrier carries and nobody reads, and then all calls of
    an unrolled chain but one. (What does not depend on the query, XLA may still share between unrolled calls of one
    layer, such as the baseline's gather.)
    """

    def program(q_latent, q_rope, pool, metadata):
        def body(i, last):
            return call(last[0], q_rope, pool, metadata, i % layers)

        return lax.fori_loop(0, calls, body, (q_latent, jnp.zeros(q_latent.shape[:2])), unroll=unroll)

    return program


def chain_seconds(compiled, args, calls: int, burst: int) -> float:
    """Wall seconds of one call in ``burst`` chains, each started from the end of the one before."""
    q_latent, *others = args
    start = time.perf_counter()
    for _ in range(burst):
        q_latent, _ = compiled(q_latent, *others)
    jax.block_until_ready(q_latent)
    return (time.perf_counter() - start) / (burst * calls)


def wall_seconds(compiled, args, calls: int, burst: int) -> float:
    """Wall seconds of one call of a chain, on a rested device.

    On a GPU of one profiled chain, from the begin of its first kernel to the end of its last: what the host takes to
    begin and end a burst, up to a millisecond and never the same, is more than what lies between kernels. (XLA does not
    use its command buffers while it is profiled; with them that is less.) Where a profile has no kernels, and on a CPU,
    of ``burst`` chains on the host's clock.
    """
    rest()
    if jax.default_backend() == "gpu":
        with contextlib.suppress(ProfileError):  # which is said where the kernels' times are missing
            return occupancy(lambda: jax.block_until_ready(compiled(*args))).span / calls
        rest()
    return chain_seconds(compiled, args, calls, burst)


def rest() -> None:
    """Lets a GPU recover from its power limit, which after 100 ms at full load lowers the clocks."""
    if jax.default_backend() == "gpu":
        time.sleep(REST)


def sustained_seconds(compiled, args, calls: int, burst: int, seconds: float) -> float:
    """Wall seconds of one call in bursts of chains run for so many seconds: the median of the later half."""
    begin, bursts = time.perf_counter(), []
    while time.perf_counter() - begin < seconds:
        bursts.append(chain_seconds(compiled, args, calls, burst))
    return statistics.median(bursts[len(bursts) // 2 :])


def dispatch_seconds(compiled, args, repeats: int) -> float:
    """Host seconds until a call returns, while its work runs on."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        out = compiled(*args)
        seconds.append(time.perf_counter() - start)
        jax.block_until_ready(out)
    return statistics.median(seconds)


def kernel_seconds(run, calls: int) -> dict[str, tuple[float, float]]:
    """Kernels of a call on a GPU, copies and memsets included: name -> (launches per call, seconds per call).

    Args:
        run: runs ``calls`` calls, warmed up before, and waits for them.
        calls: how many.

    Raises:
        ProfileError: the profile has no kernels, or not a whole number of them per call; the message says what it has.
    """
    kernels, seen = _profile(run)
    if not kernels or len(kernels) % calls:
        raise ProfileError(f"{len(kernels)} kernels for {calls} calls on these lines: {seen}")
    times = collections.defaultdict(list)
    for name, _, duration in kernels:
        times[name].append(duration * 1e-9)
    return {name: (len(each) / calls, sum(each) / calls) for name, each in times.items()}


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """What a GPU did while a profile was taken; seconds.

    Attributes:
        span: from the begin of the first kernel to the end of the last.
        busy: of it, with a kernel running; copies from and to the host are none.
        waited: of it, in gaps of more than ``LONG_GAP``. What the host launched ahead follows closely: in these there
            was nothing launched. (Shorter ones are the launches' own, between kernels of a program.)
    """

    span: float
    busy: float
    waited: float


def occupancy(run) -> Occupancy:
    """Whether the device had something to do while ``run()`` ran.

    Raises:
        ProfileError: the profile has no kernels; the message says what it has.
    """
    found, seen = _profile(run)
    kernels = sorted((begin, begin + length) for name, begin, length in found if name not in _HOST_COPIES)
    if not kernels:
        raise ProfileError(f"no kernels on these lines: {seen}")
    busy = waited = 0.0
    end = start = kernels[0][0]
    for begin, until in kernels:  # of several streams, so they may overlap
        waited += begin - end if begin - end > 1e9 * LONG_GAP else 0.0
        busy += max(until - max(begin, end), 0.0)
        end = max(end, until)
    return Occupancy(1e-9 * (end - start), 1e-9 * busy, 1e-9 * waited)


def _profile(run) -> tuple[list[tuple[str, float, float]], str]:
    """What the GPU's streams did while ``run()`` ran: name, begin and duration in ns. And the names of all lines."""
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
            if line.name.startswith("Stream")  # other lines sum up what the streams did
            for event in line.events
        ]
    return kernels, ", ".join(sorted({name for name, _ in lines} or {plane.name for plane in planes}))
