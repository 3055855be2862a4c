"""Generations with every pass written down: what went in, what came out, and the logits of every row of the model."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from mla_attn import buckets, generation
from mla_attn.metadata import row_owners
from mla_attn.models import CausalLM
from mla_attn.models.deepseek import GROUP

POOL_TOKENS = 2048  # one size for all runs: those with the same shapes compile the same programs


@dataclasses.dataclass
class Call:
    """One call of a bucket, as made, and its results in NumPy.

    ``rows`` has for each row of the model T: ``requests`` (-1 on padding), ``positions``, ``tokens`` (of the draft
    layer: those that follow) and ``logits`` (of the draft layer: its own).
    """

    bucket: buckets.Buckets
    state: Any
    inputs: dict[str, Any]
    outputs: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]

    @property
    def name(self) -> str:
        return self.bucket.name

    def of(self, request: int, what: str = "logits") -> np.ndarray:
        """What the rows of one request hold."""
        return self.rows[what][self.rows["requests"] == request]

    def again(self, pools) -> "Call":
        """The same call over other pools, which are left as they are."""
        return _call(self.bucket, self.state, jax.tree.map(jnp.copy, pools), self.inputs)[0]


@dataclasses.dataclass
class Recording:
    """A generation, its calls in order, what it streamed, the pools it left; and of each pass, by name, the function
    that was compiled and the shapes of its arguments."""

    tokens: list[list[int]]
    statistics: generation.Statistics
    calls: list[Call]
    stream: list[tuple[int, list[int]]]
    pools: Any
    traced: dict[str, tuple]

    def named(self, *names: str) -> list[Call]:
        return [call for call in self.calls if call.name in names]


def record(model: CausalLM, prompts, **options) -> Recording:
    """Generate, over a cache that holds NaN wherever nothing was written, in pages of requests and others."""
    recording = Recording([], None, [], [], None, {})
    model_class = type(model)
    created, begun = model_class.create_pools, buckets.Buckets.__init__
    traced: list[dict[str, Any]] = []

    def create(self, *, num_pages, page_size):
        assert num_pages < POOL_TOKENS // page_size
        pools = created(self, num_pages=POOL_TOKENS // page_size, page_size=page_size)
        return jax.tree.map(lambda data: jnp.full_like(data, jnp.nan), pools)

    def watched(method, head):
        def run(self, *arguments, **options):
            *_, tokens, _, metadata = arguments
            hidden, pools = method(self, *arguments, **options)
            m = metadata[GROUP]
            owners, owned = row_owners(m.q_starts, m.q_lens, m.slots.shape[0])
            facts = {"requests": jnp.where(owned, owners, -1), "positions": m.positions, "tokens": tokens}
            traced.append({**facts, "logits": head(self, hidden)})
            return hidden, pools

        return run

    def begin(self, name, fn, rungs):
        def with_rows(*arguments):
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
            recording.traced[name] = (fn, *shapes)
            outputs, pools = fn(*arguments)
            return {**outputs, "rows": traced.pop()}, pools

        begun(self, name, with_rows, rungs)

    def call(self, state, pools, inputs):
        made, outputs, pools = _call(self, state, pools, inputs, run=called)
        recording.calls.append(made)
        recording.pools = pools
        return outputs, pools

    called = buckets.Buckets.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_class, "create_pools", create)
        patch.setattr(model_class, "__call__", watched(model_class.__call__, model_class.logits))
        patch.setattr(model_class, "draft", watched(model_class.draft, model_class.draft_logits))
        patch.setattr(buckets.Buckets, "__init__", begin)
        patch.setattr(buckets.Buckets, "__call__", call)
        result = generation.generate(
            model, prompts, on_tokens=lambda request, tokens: recording.stream.append((request, tokens)), **options
        )
    recording.tokens, recording.statistics = result.tokens, result.statistics
    return recording


def _call(bucket, state, pools, inputs, run=buckets.Buckets.__call__):
    outputs, pools = run(bucket, state, pools, inputs)
    rows = outputs.pop("rows")
    copies = jax.tree.map(np.array, (outputs, rows))
    return Call(bucket, state, inputs, *copies), outputs, pools


@contextlib.contextmanager
def programs_kept(folder: Path):
    """While open, JAX keeps compiled programs in ``folder`` and takes equal ones from there."""
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.5,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    if before["jax_compilation_cache_dir"] is not None:  # somebody keeps them elsewhere
        yield
        return
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
