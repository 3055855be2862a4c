"""Compare every implementation with the float64 oracle on random poisoned batches, until time is up.

    python -m tests.fuzz --seconds 600 --seed 0
    python -m tests.fuzz --ranks

A *class* fixes everything that selects a program (sizes, layout, dtype, static arguments); its *draws* vary lengths,
pages, masks and data. One compilation serves all draws of a class. A failure prints the command that repeats it.
"""

# ruff: noqa: E402 - the checkout must be importable before it is imported

import argparse
import collections
import dataclasses
import functools
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent / "lib"))
import source_tree

source_tree.install()

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import float8
import helpers
from layouts import group_size
from mla_attn.dispatch import Implementation, current_device
from mla_attn.ops import gqa, gqa_attention, mla, mla_attention

DRAWS = 25
POISONS = (np.nan, np.inf, -np.inf, 3e38)
# Weights rounded to bfloat16, as every implementation rounds them for the product with the values, cost a row more than
# the tolerances where values of few channels cancel: bfloat16 is held to them at the widths of real models.
LATENTS = {"float32": ((32, 16), (64, 0), (256, 64), (512, 64)), "bfloat16": ((256, 64), (512, 64), (512, 0))}
LATENTS["float16"] = LATENTS["bfloat16"]
DIMS = {"float32": ((16, 16), (64, 32), (128, 128)), "bfloat16": ((64, 64), (128, 128))}  # of keys and values
DIMS["float16"] = DIMS["bfloat16"]


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that selects a program."""

    kv_heads: int  # of keys and values; 0 for latent rows
    pool_layout: str
    sinks: bool
    batch: int
    max_q_len: int
    heads: int
    page_size: int
    table_width: int
    layers: int
    widths: tuple[int, int]
    dtype: str
    cache: str | None  # a float8 format
    float8_queries: bool
    layout: str
    causal: bool
    window: int | None
    soft_cap: float | None
    tree_columns: int | None
    kv_stride: int
    batch_invariant: bool

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "Case":
        max_q_len = int(rng.choice([1, 1, 2, 4, 7, 13]))
        page_size = int(rng.choice([1, 2, 4, 8, 16, 48, 64]))
        longest = int(rng.choice([9, 70, 200, 1300]))
        tree = bool(rng.random() < 0.25)
        causal = tree or bool(rng.random() < 0.8)
        dtype = str(rng.choice(["float32", "bfloat16", "float16"], p=[0.45, 0.45, 0.1]))
        kv_heads = int(rng.choice([0, 1, 2, 5]))
        heads, widths = (1, 2, 3, 8, 16, 20), (DIMS if kv_heads else LATENTS)[dtype]
        widths = widths[rng.integers(len(widths))]
        columns = max_q_len + int(rng.integers(0, 6))
        windows = [w for w in (1, 5, 12, 64) if not tree or w >= columns]
        caches = [None, None, *float8.CACHES] if not kv_heads and widths[0] % 128 == 0 else [None, *float8.LARGEST]
        cache = caches[rng.integers(len(caches))]
        group = group_size(dtype if cache is None else "uint8")
        shuffled = ["shuffled"] * (page_size % group == widths[0] % group == 0)
        return cls(
            kv_heads=kv_heads,
            pool_layout=str(rng.choice(["nhd", "hnd", "interleaved", *shuffled])),
            sinks=bool(rng.random() < 0.25),
            batch=int(rng.integers(1, 7)),
            max_q_len=max_q_len,
            heads=kv_heads * int(rng.choice([1, 2, 4])) if kv_heads else int(rng.choice(heads)),
            page_size=page_size,
            table_width=-(-max(longest, max_q_len) // page_size) + 1,
            layers=int(rng.choice([1, 3])),
            widths=widths,
            dtype=dtype,
            cache=cache,
            float8_queries=dtype == "bfloat16" and bool(rng.random() < 0.3),
            layout=str(rng.choice(["dense", "packed"])),
            causal=causal,
            window=int(rng.choice(windows)) if causal and rng.random() < 0.3 else None,
            soft_cap=float(rng.choice([2.0, 30.0])) if rng.random() < 0.25 else None,
            tree_columns=columns if tree else None,
            kv_stride=int(rng.choice([1, 1, 1, 4])),
            batch_invariant=bool(rng.random() < 0.2),
        )

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        return (gqa if self.kv_heads else mla).IMPLEMENTATIONS

    def make(self, seed: int, **sizes) -> helpers.PagedBatch | helpers.KVBatch:
        make = helpers.kv_batch if self.kv_heads else helpers.poisoned_batch
        batch = make(seed, **self.sizes(), **sizes)
        return helpers.quantized(batch) if self.float8_queries else batch

    @functools.cached_property
    def smallest(self) -> helpers.PagedBatch | helpers.KVBatch:
        """A batch of this class without keys: its spec and pool are those of any draw, but for the pages."""
        return self.make(0, kv_lens=[0], q_lens=[0], num_pages=1)

    def refusal(self, implementation: Implementation) -> str | None:
        """Why an implementation does not support this class; None if it does."""
        call = (gqa.GQACall if self.kv_heads else mla.MLACall).of(
            self.smallest.pool,
            self.smallest.spec,
            max_q_len=self.max_q_len,
            causal=self.causal,
            tree=self.tree_columns is not None,
            sinks=self.sinks,
            batch_invariant=self.batch_invariant,
            q_dtype=self.smallest.queries[0].dtype,
        )
        return implementation.supports(call, current_device())

    def sizes(self) -> dict:
        names = ("head_dim", "v_head_dim") if self.kv_heads else ("kv_lora_rank", "qk_rope_head_dim")
        kind = {"kv_heads": self.kv_heads, "pool_layout": self.pool_layout} if self.kv_heads else {}
        return {
            **dict(zip(names, self.widths, strict=True)),
            **kind,
            "heads": self.heads,
            "page_size": self.page_size,
            "num_layers": self.layers,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "dtype": jnp.dtype(self.dtype),
            "cache": self.cache,
            "layout": self.layout,
            "max_q_len": self.max_q_len,
            "table_width": self.table_width,
            "kv_stride": self.kv_stride,
            **({"num_rows": self.batch * self.max_q_len + 3} if self.layout == "packed" else {}),
        }

    def inputs(self, rng: np.random.Generator):
        """One batch of this class, and a tree mask and sinks, or None for each.

        Of calls that are not causal some are cross attention: requests may have fewer keys than rows.
        """
        longest = (self.table_width - 1) * self.page_size * self.kv_stride
        kv_lens = rng.integers(0, longest + 1, self.batch)
        edge = rng.random(self.batch)  # lengths around a page's end, and empty ones, come often
        kv_lens = np.where(edge < 0.3, kv_lens // self.page_size * self.page_size + rng.integers(-1, 2), kv_lens)
        kv_lens = np.where(edge > 0.9, 0, np.clip(kv_lens, 0, longest))
        q_lens = rng.integers(0, self.max_q_len + 1, self.batch)
        q_lens = q_lens if not self.causal and rng.random() < 0.5 else np.minimum(q_lens, kv_lens)
        sinks = rng.normal(0, 3, self.heads).astype(np.float32) if self.sinks else None
        batch = self.make(
            int(rng.integers(2**31)),
            kv_lens=kv_lens,
            q_lens=q_lens,
            num_pages=self.batch * self.table_width,
            layer=int(rng.integers(self.layers)),
            kv_offsets=rng.integers(0, self.kv_stride, self.batch),
            poison=POISONS[rng.integers(len(POISONS))],
        )
        if self.tree_columns is None:
            return batch, None, sinks
        mask = rng.random((self.batch, self.max_q_len, self.tree_columns)) < 0.6
        own = np.arange(self.max_q_len)
        mask[:, own, own + self.tree_columns - self.max_q_len] = True
        return self.with_depths(rng, batch), mask, sinks

    def with_depths(self, rng: np.random.Generator, batch):
        """Rows at the positions of a random tree: of each at most its number after the first."""
        m, positions = batch.metadata, np.asarray(batch.metadata.positions).copy()
        for start, q_len, kv_len in zip(*(np.asarray(x) for x in (m.q_starts, m.q_lens, m.kv_lens)), strict=True):
            depths = rng.integers(0, np.arange(q_len) + 1)
            positions[start : start + q_len] = kv_len - q_len + depths
        return dataclasses.replace(batch, metadata=dataclasses.replace(m, positions=jnp.asarray(positions)))


def compiled(case: Case, implementation: str):
    """The op for one class: one compilation for all its draws."""
    spec, op = case.smallest.spec, gqa_attention if case.kv_heads else mla_attention

    @jax.jit
    def run(queries, pool, metadata, layer, tree_mask, sinks, q_scale):
        result = op(
            *queries,
            pool,
            metadata,
            spec,
            layer=layer,
            causal=case.causal,
            tree_mask=tree_mask,
            sinks=sinks,
            q_scale=q_scale,
            return_lse=sinks is None,
            implementation=implementation,
            batch_invariant=case.batch_invariant,
        )
        return result if sinks is None else (result, None)

    return run


def check(case: Case, run, batch, mask, sinks, expected) -> str | None:
    """What is wrong with one result, or None."""
    extra = (None if x is None else jnp.asarray(x) for x in (mask, sinks))
    out, lse = run(batch.queries, batch.pool, batch.metadata, np.int32(batch.layer), *extra, batch.q_scale)
    try:
        helpers.assert_attention_close(out, lse, expected[0], expected[1], visible_v_max=expected[2], dtype=batch.dtype)
    except AssertionError as error:
        return str(error)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="CLASS", help="repeat one class, with all its draws")
    parser.add_argument("--implementation", choices=[i.name for i in mla.IMPLEMENTATIONS], help="one alone")
    parser.add_argument("--ranks", action="store_true", help="compare calls over eight CPU devices with one device")
    options = parser.parse_args()
    if options.ranks:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        import rank_fuzz

        return rank_fuzz.run(options.seconds, options.seed, options.only)
    names = [i.name for i in mla.IMPLEMENTATIONS if options.implementation in (None, i.name)]
    counts, refused, failures = collections.Counter(), collections.Counter(), 0
    end = time.monotonic() + options.seconds
    bar = tqdm(desc="classes", disable=not sys.stderr.isatty())
    number = options.only or 0
    while time.monotonic() < end:
        rng = np.random.default_rng([options.seed, number])
        case = Case.draw(rng)
        served = {}
        for implementation in (i for i in case.implementations if i.name in names):
            if case.refusal(implementation) is None:
                served[implementation.name] = compiled(case, implementation.name)
            else:
                refused[implementation.name] += 1
        for draw in range(DRAWS if served else 0):
            with np.errstate(over="ignore"):  # 3e38 is infinite in float16
                batch, mask, sinks = case.inputs(rng)
            expected = batch.expected(causal=case.causal, tree_mask=mask, sinks=sinks)
            for name, run in served.items():
                wrong = check(case, run, batch, mask, sinks, expected)
                counts[name] += 1
                if wrong:
                    failures += 1
                    print(f"\n{name}: {wrong}\n  {case}\n  draw {draw}, kv_lens {batch.metadata.kv_lens.tolist()}")
                    print(f"  python -m tests.fuzz --seed {options.seed} --only {number}")
            if time.monotonic() >= end:
                break
        jax.clear_caches()
        number += 1
        bar.update()
        if options.only is not None:
            break
    bar.close()
    done = ", ".join(f"{name} {counts[name]} batches ({refused[name]} classes refused)" for name in names)
    classes = number - (options.only or 0)
    print(f"seed {options.seed}: {classes} classes on {jax.default_backend()}: {done}; {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
