"""Generations with every pass written down: what went in, what came out, and the logits of every row of the model."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from mla_attn import generation
from mla_attn.engine import Engine
from mla_attn.metadata import row_owners
from mla_attn.models import CausalLM
from mla_attn.passes import FIELDS, KEPT, Functions, Passes
from mla_attn.passes.functions import of_rows

POOL_TOKENS = 2048  # one size for all runs: those with the same shapes compile the same programs


@dataclasses.dataclass
class Stateless:
    """A compiled pass of an engine, called with all its fields: state is made of those that the device would keep."""

    bucket: Any
    states: dict[str, jax.ShapeDtypeStruct]

    def __call__(self, state, pools, inputs):
        batch = len(inputs["page_table"])
        states = {name: np.zeros(s.shape, s.dtype) for name, s in self.states.items()}
        kept = [name for name in inputs if name in KEPT]
        for name in kept:
            value = np.asarray(inputs[name])
            states[name][tuple(map(slice, value.shape))] = value
        rest = {name: value for name, value in inputs.items() if name not in kept}
        rest["slots"] = np.arange(batch, dtype=np.int32)
        outputs, (pools, _) = self.bucket(state, (pools, jax.tree.map(jnp.asarray, states)), rest)
        return outputs, pools


@dataclasses.dataclass
class Call:
    """One call of a pass as the whole batch would have made it, a row a request, and its results in NumPy.

    ``rows`` has for each row of the model T: ``requests`` (-1 on padding), ``positions``, ``tokens`` (of the draft
    layer: those that follow) and ``logits`` (of the draft layer: its own).
    """

    name: str
    bucket: Stateless
    state: Any
    inputs: dict[str, Any]
    outputs: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]

    def of(self, request: int, what: str = "logits") -> np.ndarray:
        """What the rows of one request hold."""
        return self.rows[what][self.rows["requests"] == request]

    def again(self, pools) -> "Call":
        """The same call over other pools, which are left as they are."""
        outputs, _ = self.bucket(self.state, jax.tree.map(jnp.copy, pools), self.inputs)
        rows = outputs.pop("rows")
        return Call(self.name, self.bucket, self.state, self.inputs, *jax.tree.map(np.array, (outputs, rows)))


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


_rows: list[dict[str, Any]] = []  # of the model in the pass that is being traced
_traced: dict["_WithRows", tuple] = {}


class _RecordedFunctions(Functions):
    """Passes that also note the rows of the model."""

    def run(self, model, tokens, pools, m, **options):
        hidden, pools = super().run(model, tokens, pools, m, **options)
        self._note(tokens, of_rows(m), model.logits(hidden))
        return hidden, pools

    def run_draft(self, model, hidden, tokens, pools, m, **options):
        hidden, pools = super().run_draft(model, hidden, tokens, pools, m, **options)
        self._note(tokens, of_rows(m), model.draft_logits(hidden))
        return hidden, pools

    def _note(self, tokens, m, logits):
        owners, owned = row_owners(m.q_starts, m.q_lens, m.slots.shape[0])
        requests = jnp.where(owned, owners, -1)
        _rows.append({"requests": requests, "positions": m.positions, "tokens": tokens, "logits": logits})


@dataclasses.dataclass(frozen=True)
class _WithRows:
    """A pass that also returns the rows of the model."""

    fn: Callable[..., Any]

    def __call__(self, *arguments):
        _traced[self] = (self.fn, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments))
        outputs, pools = self.fn(*arguments)
        return {**outputs, "rows": _rows.pop()}, pools


class _RecordedPasses(Passes):
    functions_class = _RecordedFunctions

    def __init__(self, *arguments, **options):
        self.passes: dict[str, _WithRows] = {}
        super().__init__(*arguments, **options)

    @property
    def traced(self) -> dict[str, tuple]:
        return {name: _traced[fn] for name, fn in self.passes.items() if fn in _traced}

    def buckets(self, name, fn, inputs, **options):
        self.passes[name] = _WithRows(fn)
        return super().buckets(name, self.passes[name], inputs, **options)


class _RecordedEngine(Engine):
    """Over a cache that holds NaN wherever nothing was written, in pages of requests and others; none is used again."""

    passes_class = _RecordedPasses

    def _build(self, *arguments, **options):
        self.calls: list[Call] = []
        super()._build(*arguments, **options)
        self._scheduler.pages.free = lambda request: None

    def _create_device(self):
        size = self._cache.page_size
        assert self._cache.num_pages < POOL_TOKENS // size
        pools = self.model.create_pools(num_pages=POOL_TOKENS // size, page_size=size)
        return jax.tree.map(lambda data: jnp.full_like(data, jnp.nan), pools), super()._create_device()[1]

    def _run(self, bucket, **arrays):
        states = jax.tree.map(np.asarray, self._device[1])
        live = np.asarray(arrays["active" if "active" in arrays else "q_lens"]) > 0
        slots = np.asarray(arrays["slots"])[live]
        requests = np.array([self._scheduler.slots[slot].id for slot in slots])
        outputs = super()._run(bucket, **arrays)
        rows = outputs.pop("rows")
        batch, rest = self._batches[0], {name: value for name, value in arrays.items() if name != "slots"}
        if "active" in arrays:
            rest |= {name: states[name][slots] for name in KEPT}
        inputs = {name: _by_request(name, value, requests, batch) for name, value in rest.items()}
        results = {name: _by_request(name, value, requests, batch) for name, value in outputs.items()}
        rows = jax.tree.map(np.array, rows)
        owners = np.append(requests, np.full(batch + 1 - len(requests), -1))  # the last for padding, -1
        rows["requests"] = owners[rows["requests"]]
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._device[1])
        self.calls.append(Call(bucket.name, Stateless(bucket, shapes), self._passes.state, inputs, results, rows))
        return outputs


def _by_request(name: str, value: Any, requests: np.ndarray, batch: int) -> np.ndarray:
    """A field with a row for each request of the generation, in order: of those that are not in the batch, padding."""
    value = np.asarray(value)
    if not FIELDS[name].axes.startswith("B"):
        return value
    rows = np.full((batch, *value.shape[1:]), -1 if name in ("page_table", "emitted") else 0, value.dtype)
    rows[requests] = value[: len(requests)]
    return rows


def record(model: CausalLM, prompts, **options) -> Recording:
    """Generate, and write down every pass."""
    engines, stream = [], []

    class Recorded(_RecordedEngine):
        def _build(self, *arguments, **rest):
            super()._build(*arguments, **rest)
            engines.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "Engine", Recorded)
        result = generation.generate(
            model, prompts, on_tokens=lambda request, tokens: stream.append((request, tokens)), **options
        )
    (engine,) = engines
    # Tables as they are in the end, with pages that an earlier call did not need yet.
    last: dict[int, np.ndarray] = {}
    for call in reversed(engine.calls):
        table = call.inputs["page_table"]
        for request in range(len(table)):
            table[request] = last.setdefault(request, table[request].copy()) if (table[request] >= 0).any() else -1
    return Recording(result.tokens, result.statistics, engine.calls, stream, engine._device[0], engine._passes.traced)


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
