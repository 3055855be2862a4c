"""Compare every implementation with the float64 oracle on random poisoned batches, until time is up.

    python -m tests.fuzz --seconds 600 --seed 0

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

import helpers
from mla_attn.dispatch import current_device
from mla_attn.ops import mla, mla_attention

DRAWS = 25
POISONS = (np.nan, np.inf, -np.inf, 3e38)
# Weights rounded to bfloat16, as every implementation rounds them for the product with the values, cost a row more than
# the tolerance of its cosine where few channels nearly cancel: bfloat16 is held to it at the widths of real models.
LATENTS = {"float32": ((32, 16), (64, 0), (256, 64), (512, 64)), "bfloat16": ((256, 64), (512, 64), (512, 0))}


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that selects a program."""

    batch: int
    max_q_len: int
    heads: int
    page_size: int
    table_width: int
    layers: int
    latent: tuple[int, int]
    dtype: str
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
        dtype = str(rng.choice(["float32", "bfloat16"]))
        return cls(
            batch=int(rng.integers(1, 7)),
            max_q_len=max_q_len,
            heads=int(rng.choice([1, 2, 3, 8, 16, 20])),
            page_size=page_size,
            table_width=-(-max(longest, max_q_len) // page_size) + 1,
            layers=int(rng.choice([1, 3])),
            latent=LATENTS[dtype][rng.integers(len(LATENTS[dtype]))],
            dtype=dtype,
            layout=str(rng.choice(["dense", "packed"])),
            causal=causal,
            window=int(rng.choice([1, 5, 64])) if causal and not tree and rng.random() < 0.25 else None,
            soft_cap=float(rng.choice([2.0, 30.0])) if rng.random() < 0.25 else None,
            tree_columns=max_q_len + int(rng.integers(0, 6)) if tree else None,
            kv_stride=int(rng.choice([1, 1, 1, 4])),
            batch_invariant=bool(rng.random() < 0.2),
        )

    @functools.cached_property
    def smallest(self) -> helpers.PagedBatch:
        """A batch of this class without keys: its spec and pool are those of any draw, but for the pages."""
        return helpers.poisoned_batch(0, **self.sizes(), kv_lens=[0], q_lens=[0], num_pages=1)

    def refusal(self, implementation: mla.Implementation) -> str | None:
        """Why an implementation does not support this class; None if it does."""
        call = mla.MLACall.of(
            self.smallest.pool,
            self.smallest.spec,
            max_q_len=self.max_q_len,
            causal=self.causal,
            tree=self.tree_columns is not None,
            batch_invariant=self.batch_invariant,
        )
        return implementation.supports(call, current_device())

    def sizes(self) -> dict:
        return {
            "heads": self.heads,
            "page_size": self.page_size,
            "num_layers": self.layers,
            "kv_lora_rank": self.latent[0],
            "qk_rope_head_dim": self.latent[1],
            "window": self.window,
            "soft_cap": self.soft_cap,
            "dtype": jnp.dtype(self.dtype),
            "layout": self.layout,
            "max_q_len": self.max_q_len,
            "table_width": self.table_width,
            "kv_stride": self.kv_stride,
            **({"num_rows": self.batch * self.max_q_len + 3} if self.layout == "packed" else {}),
        }

    def inputs(self, rng: np.random.Generator):
        """One batch of this class, and a tree mask or None."""
        longest = (self.table_width - 1) * self.page_size * self.kv_stride
        kv_lens = rng.integers(0, longest + 1, self.batch)
        edge = rng.random(self.batch)  # lengths around a page's end, and empty ones, come often
        kv_lens = np.where(edge < 0.3, kv_lens // self.page_size * self.page_size + rng.integers(-1, 2), kv_lens)
        kv_lens = np.where(edge > 0.9, 0, np.clip(kv_lens, 0, longest))
        q_lens = np.minimum(rng.integers(0, self.max_q_len + 1, self.batch), kv_lens)
        batch = helpers.poisoned_batch(
            int(rng.integers(2**31)),
            kv_lens=kv_lens,
            q_lens=q_lens,
            num_pages=self.batch * self.table_width,
            layer=int(rng.integers(self.layers)),
            kv_offsets=rng.integers(0, self.kv_stride, self.batch),
            poison=POISONS[rng.integers(len(POISONS))],
            **self.sizes(),
        )
        if self.tree_columns is None:
            return batch, None
        mask = rng.random((self.batch, self.max_q_len, self.tree_columns)) < 0.6
        own = np.arange(self.max_q_len)
        mask[:, own, own + self.tree_columns - self.max_q_len] = True
        return batch, mask


def compiled(case: Case, implementation: str):
    """The op for one class: one compilation for all its draws."""
    spec = case.smallest.spec

    @jax.jit
    def run(q_latent, q_rope, pool, metadata, layer, tree_mask):
        return mla_attention(
            q_latent,
            q_rope,
            pool,
            metadata,
            spec,
            layer=layer,
            causal=case.causal,
            tree_mask=tree_mask,
            return_lse=True,
            implementation=implementation,
            batch_invariant=case.batch_invariant,
        )

    return run


def check(case: Case, run, batch, mask, expected) -> str | None:
    """What is wrong with one result, or None."""
    arrays = (batch.q_latent, batch.q_rope, batch.pool, batch.metadata)
    out, lse = run(*arrays, np.int32(batch.layer), None if mask is None else jnp.asarray(mask))
    try:
        helpers.assert_attention_close(
            out, lse, expected[0], expected[1], visible_v_max=expected[2], dtype=jnp.dtype(case.dtype)
        )
    except AssertionError as error:
        return str(error)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="CLASS", help="repeat one class, with all its draws")
    options = parser.parse_args()
    names = [i.name for i in mla.IMPLEMENTATIONS]
    counts, refused, failures = collections.Counter(), collections.Counter(), 0
    end = time.monotonic() + options.seconds
    bar = tqdm(desc="classes", disable=not sys.stderr.isatty())
    number = options.only or 0
    while time.monotonic() < end:
        rng = np.random.default_rng([options.seed, number])
        case = Case.draw(rng)
        served = {}
        for implementation in mla.IMPLEMENTATIONS:
            if case.refusal(implementation) is None:
                served[implementation.name] = compiled(case, implementation.name)
            else:
                refused[implementation.name] += 1
        for draw in range(DRAWS if served else 0):
            batch, mask = case.inputs(rng)
            expected = batch.expected(causal=case.causal, tree_mask=mask)
            for name, run in served.items():
                wrong = check(case, run, batch, mask, expected)
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
