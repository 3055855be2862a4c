"""The ceilings of a machine, measured in every run, so that no figure is compared with a datasheet."""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax

from mla_attn.bench.timing import seconds_per_call

# By platform: bytes to read, side of the square product, seconds of sustained products.
_SIZES = {"gpu": (2**32, 8192, 3.0), "cpu": (2**28, 1024, 1.0)}
_BURST = 0.04  # seconds


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The rates that bounds are computed from, per second; ``product`` says which product was timed.

    Bounds use the rate of a short run, which ends before a power limit lowers the clocks.
    """

    read_bytes: float
    product_flops_short: float
    product_flops_sustained: float
    product: str

    def bound(self, flops: int, nbytes: int) -> tuple[float, str]:
        """The least time of a call in seconds, and whether it is bound by "memory" or "compute"."""
        memory, compute = nbytes / self.read_bytes, flops / self.product_flops_short
        return (memory, "memory") if memory >= compute else (compute, "compute")


def measure_ceilings(dtype: jnp.dtype, seed: int) -> Ceilings:
    """Measures read bandwidth and the rate of a matrix product in ``dtype``, over fresh random data.

    Read: integer sums of the rows of a buffer much larger than any cache, the best of eight bursts. Product: the same
    bursts, started on an idle device; then back to back for some seconds, the median of the later half. A burst is long
    enough for the host's begin and end of it, up to 0.2 ms, not to count, and ends before a power limit sets in.
    """
    nbytes, side, seconds = _SIZES["cpu" if jax.default_backend() == "cpu" else "gpu"]
    key = jax.random.key(seed, impl="unsafe_rbg")
    buffer = jax.random.bits(key, (nbytes // 2**16, 2**14), jnp.uint32)
    read = jax.jit(lambda x: x.sum(axis=1, dtype=jnp.uint32))
    read_bytes = buffer.nbytes / _best_of_bursts(read, (buffer,))
    buffer.delete()

    a, b = (jax.random.normal(k, (side, side), dtype) for k in jax.random.split(key))
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
    seconds_per_call(product, (a, b))
    time.sleep(min(seconds, 1.0))
    short = _best_of_bursts(product, (a, b))
    burst = max(1, round(0.05 / short))
    rounds = [seconds_per_call(product, (a, b), burst=burst) for _ in range(max(2, round(seconds / (burst * short))))]
    sustained = statistics.median(rounds[len(rounds) // 2 :])
    short = min(short, sustained)  # the short run may have met a busy machine
    flops = 2 * side**3
    return Ceilings(read_bytes, flops / short, flops / sustained, f"{dtype.name} {side}^3")


def _best_of_bursts(f, args) -> float:
    """Seconds per call in the fastest of eight bursts."""
    seconds_per_call(f, args)
    burst = max(1, round(_BURST / seconds_per_call(f, args)))
    return min(seconds_per_call(f, args, burst=burst) for _ in range(8))
