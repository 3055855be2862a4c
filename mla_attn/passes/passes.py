"""The passes of a model as programs, one for each mode and shape, compiled ahead of time and run by the engine.

Every pass is a pure function ``(state, pools, inputs) -> (outputs, pools)`` of the model's arrays, the pools of its
cache groups and a dict of fields (``mla_attn.passes.fields``); metadata is built inside. Requests with ``q_lens`` or
``active`` of 0 are padding.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from mla_attn.buckets import Buckets
from mla_attn.dispatch import Order
from mla_attn.models.base import CacheGroup, CausalLM
from mla_attn.passes.drafts import DRAFT
from mla_attn.passes.fields import FIELDS, SAMPLING, Arrays, structs
from mla_attn.passes.functions import Functions, Method
from mla_attn.programs import Folder, Step


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The ladders of shapes and the static sizes that the passes are compiled for.

    Attributes:
        batches: ladder of request counts B.
        prompt_rows: ladder of prompt tokens T of one pass, summed over requests.
        table_width: columns of the page table of groups without a window; 0 if there is no such group.
        page_size: tokens per page P.
        max_len: most tokens of a request.
        prompt_batches: ladder of request counts in passes over prompts; None for ``batches``.
        windows: window and number of columns of each windowed page table, in order.
    """

    batches: tuple[int, ...]
    prompt_rows: tuple[int, ...]
    table_width: int
    page_size: int
    max_len: int
    prompt_batches: tuple[int, ...] | None = None
    windows: tuple[tuple[int, int], ...] = ()

    @property
    def tables(self) -> tuple[tuple[int | None, int], ...]:
        """Window and number of columns of each page table."""
        full = ((None, self.table_width),) if self.table_width else ()
        return (*full, *self.windows)


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass before it is compiled.

    Attributes:
        name: the pass's mode, shown in progress, warnings and profiles.
        fn: the pure function.
        inputs: names of the fields that it takes.
        sizes: sizes of the fields' axes except B and T.
        given: kept fields that the host passes in, because the request begins with this pass.
    """

    name: str
    fn: Callable[[Any, Any, Arrays], tuple[Arrays, Any]]
    inputs: tuple[str, ...]
    sizes: Mapping[str, int]
    given: tuple[str, ...] = ()


def as_it_is(inner: Pass) -> Pass:
    """Returns the pass unchanged."""
    return inner


class Passes:
    """The passes of one model as ``Buckets``, each built at its first use. ``DraftPasses`` has the passes that draft
    and verify.

    There is a program for each pass and batch size, and for passes over prompts also for each number of rows. Models
    that differ only in their arrays share programs, which are compiled once per process.

    Args:
        model: the model; its arrays become ``state``, an argument of every pass.
        shapes: shapes to compile for.
        draft: a draft model, whose arrays follow those of the model in ``state``; None if there is none.
        groups: all cache groups, as ``stored_as`` returns them; None for those that the models have.
        implementation: implementation of the attention ops; None for the environment variable's value at this time,
            else the default choice.
        skip_threshold: as in ``mla_attention``.
        wrap: function that is applied to every pass before it is compiled.
        folder: folder of lowered programs; None for none.
    """

    functions_class = Functions  # replaced by benchmarks
    buckets_class = Buckets  # replaced by benchmarks

    def __init__(
        self,
        model: CausalLM,
        shapes: Shapes,
        *,
        draft: CausalLM | None = None,
        groups: Iterable[CacheGroup] | None = None,
        implementation: Order = None,
        skip_threshold: float | None = None,
        wrap: Callable[[Pass], Pass] = as_it_is,
        folder: Folder | None = None,
    ):
        self.shapes, self.dtype, self._wrap, self._folder = shapes, model.dtype, wrap, folder
        facts = {"page_size": shapes.page_size, "max_len": shapes.max_len, "tables": shapes.tables}
        facts |= {"implementation": implementation, "skip_threshold": skip_threshold}
        own = [group for group in groups or model.cache_groups if not group.name.startswith(DRAFT)]
        self.functions, self.state = self.functions_class.of(model, groups=own, first=0, prefix="", **facts)
        self.draft_functions = None
        if draft is not None:
            first = len(self.state)
            facts |= {"groups": draft.cache_groups, "first": first, "prefix": DRAFT}
            self.draft_functions, arrays = self.functions_class.of(draft, **facts)
            self.state = (*self.state, *arrays)
        columns = sum(width for _, width in shapes.tables)
        self.sizes = {"W": columns, "windows": len(shapes.windows), "dim": model.hidden_size}
        self.tables = ("page_table", *(("kv_offsets",) if shapes.windows else ()))

    def replacement(self, model_or_state: Any) -> tuple[Any, tuple[Any, ...]]:
        """Checks another model's arrays; returns that model, and its arrays as a value for ``state``.

        Raises:
            ValueError: a parameter is missing or has another shape or dtype (the message names it), or the model has
                another structure.
        """
        graphdef, state = (self.functions.graphdef, model_or_state)
        if isinstance(model_or_state, nnx.Module):
            graphdef, state = nnx.split(model_or_state)
        if not isinstance(state, nnx.State):
            raise ValueError(f"model_or_state is a {type(state).__name__}, must be a model or an nnx.State")
        # Compare with ``state``, not with the original model, whose parameters may have been replaced since.
        held = jax.tree.unflatten(self.functions.structure, self.functions.own(self.state))
        old, new = (dict(nnx.to_flat_state(s)) for s in (held, state))
        for path in [*old, *new]:
            _check_parameter(".".join(map(str, path)), old.get(path), new.get(path))
        if graphdef != self.functions.graphdef:
            raise ValueError("model_or_state is built otherwise than the engine's model: its config must be the same")
        leaves = jax.device_put(jax.tree.leaves(state), [leaf.sharding for leaf in jax.tree.leaves(held)])
        model = nnx.merge(graphdef, jax.tree.unflatten(self.functions.structure, leaves))
        return model, (*leaves, *self.state[len(leaves) :])

    @functools.cached_property
    def prefill(self) -> Buckets:
        """Whole prompts with no cached tokens."""
        return self._prompt("prefill")

    @functools.cached_property
    def extend(self) -> Buckets:
        """Prefill chunks that continue after the cached part of their prompts."""
        return self._prompt("extend")

    @functools.cached_property
    def decode(self) -> Buckets:
        """One token per active request."""
        inputs = (*self.tables, "lens", "active", "tokens", *SAMPLING)
        return self.buckets("decode", Method(self.functions, "decode"), inputs)

    def _prompt(self, mode: str) -> Buckets:
        inputs = (*self.tables, "seq_lens", "q_lens", "prompt_tokens", *SAMPLING)
        return self.buckets(mode, Method(self.functions, "prompt", (mode,)), inputs, prompts=True, given=SAMPLING)

    def buckets(
        self,
        name: str,
        fn: Callable[..., Any],
        inputs: tuple[str, ...],
        *,
        prompts: bool = False,
        given: tuple[str, ...] = (),
        **sizes: int,
    ) -> Buckets:
        """The ``Buckets`` of a pass, for every batch size and, if over prompts, for every number of rows.

        Passes with equal ``fn`` and equal other arguments share programs.
        """
        made, step = _step(name, fn, inputs, tuple({**self.sizes, **sizes}.items()), given, self._wrap)
        shapes = self.shapes
        ladder = [{"B": batch} for batch in shapes.batches]
        if prompts:
            rows = shapes.prompt_rows if any("T" in FIELDS[name].axes.split() for name in inputs) else (0,)
            ladder = [{"B": b, "T": t} for b in shapes.prompt_batches or shapes.batches for t in rows]
        rungs = [structs(made.inputs, {**made.sizes, **rung}, self.dtype) for rung in ladder]
        return self.buckets_class(name, step, rungs, self._folder)


@functools.lru_cache(maxsize=64)  # passes; JAX keeps a pass's programs while it is in this cache
def _step(
    name: str,
    fn: Callable[..., Any],
    inputs: tuple[str, ...],
    sizes: tuple[tuple[str, int], ...],
    given: tuple[str, ...],
    wrap: Callable[[Pass], Pass],
) -> tuple[Pass, Step]:
    """Wraps and jits a pass. Equal passes share one object, because JAX caches compiled programs by object."""
    made = wrap(Pass(name, fn, inputs, dict(sizes), given))
    return made, Step(made.fn, name, (name, fn, inputs, sizes, given, wrap))


def forget_programs() -> None:
    """Releases programs that no engine uses; otherwise they are kept for the next engine with equal passes."""
    _step.cache_clear()


def _check_parameter(name: str, old: Any, new: Any) -> None:
    """Raises ValueError unless parameter ``new`` can replace ``old``; either may be absent."""
    kinds = [_kind(parameter) for parameter in (new, old)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"model_or_state has {kinds[0]} at {name!r}, must be {kinds[1]}")


def _kind(parameter: Any) -> str:
    if parameter is None:
        return "no parameter"
    array = parameter.get_value() if isinstance(parameter, nnx.Variable) else parameter
    if not isinstance(array, jax.Array | np.ndarray):
        return f"a {type(array).__name__}"
    return f"{array.dtype}{list(array.shape)}"
