"""Random calls over random meshes of eight CPU devices, beside one device, until time is up: ``tests.fuzz --ranks``.

A *class* fixes mesh, mode and static arguments; its *draws* vary cached lengths and data. Results, caches, and the keys
that each row sees are compared. A failure prints the command that repeats it.
"""

import dataclasses
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from tqdm import tqdm

import ranks as r

DRAWS, LONGEST = 3, 24


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that selects a program."""

    ranks: r.Ranks
    spec: object
    mode: str
    repeated: int
    options: dict
    pool: dict

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "Case":
        sizes = [(h, b, c) for h in (1, 2, 4) for b in (1, 2) for c in (1, 2, 4, 8) if h * b * c <= 8 and h * c <= 8]
        kinds = (AxisType.Auto, AxisType.Explicit)
        heads, batch, context = sizes[rng.integers(len(sizes))]
        ranks = r.Ranks(heads, batch, context, kinds[rng.integers(2)], bool(rng.random() < 0.5))
        mode, latent = str(rng.choice(r.MODES)), bool(rng.random() < 0.5)
        window = int(rng.choice([3, 5, 9])) if rng.random() < 0.4 else None
        soft_cap = 2.0 if rng.random() < 0.2 else None
        kv_heads = int(rng.choice([1, 2, 4, 8]))
        spec = r.MLA if latent else dataclasses.replace(r.GQA, num_kv_heads=kv_heads)
        spec = dataclasses.replace(spec, window=window, soft_cap=soft_cap)
        sinks = bool(rng.random() < 0.3)
        options = {"sinks": jnp.asarray(rng.normal(0, 3, 8), jnp.float32)} if sinks else {"return_lse": True}
        pool = {} if latent else {"layout": str(rng.choice(["nhd", "hnd", "interleaved"]))}
        return cls(ranks, spec, mode, 1 if latent else max(1, heads // kv_heads), options, pool)

    def check(self, rng: np.random.Generator) -> str | None:
        """What is wrong with a draw, or None."""
        prefix = rng.integers(0, LONGEST - r.ROWS, r.REQUESTS)
        prefix = np.where(rng.random(r.REQUESTS) < 0.3, prefix // (r.PAGE * self.ranks.context) * r.PAGE, prefix)
        try:
            options = {"prefix": prefix, "longest": LONGEST, "repeated": self.repeated, "pool": self.pool}
            r.compare(self.ranks, self.spec, self.mode, **options, **self.options)
        except AssertionError as error:
            return f"{error}\n  prefix {prefix.tolist()}"
        return None


def run(seconds: float, seed: int, only: int | None) -> int:
    assert len(jax.devices("cpu")) == 8
    failures, draws, number, end = 0, 0, only or 0, time.monotonic() + seconds
    bar = tqdm(desc="classes", disable=not sys.stderr.isatty())
    while time.monotonic() < end:
        rng = np.random.default_rng([seed, number])
        case = Case.draw(rng)
        for draw in range(DRAWS):
            draws += 1
            if wrong := case.check(rng):
                failures += 1
                print(f"\n{wrong}\n  {case}, draw {draw}")
                print(f"  python -m tests.fuzz --ranks --seed {seed} --only {number}")
        number += 1
        bar.update()
        if number % 20 == 0:
            jax.clear_caches()
        if only is not None:
            break
    bar.close()
    print(f"seed {seed}: {number - (only or 0)} classes over ranks, {draws} calls, {failures} failed")
    return 1 if failures else 0
