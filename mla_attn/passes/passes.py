"""The passes of a model as programs: one for each mode and shape, compiled ahead of time and run by the engine.

Every pass is a pure function ``(state, pools, inputs) -> (outputs, pools)`` of the model's arrays, the pools of its
cache groups and a dict of fields (``mla_attn.passes.fields``); metadata is built inside. Requests with ``q_lens`` (or
``active``) 0 are padding.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from mla_attn.buckets import Buckets, jit_step
from mla_attn.dispatch import Order
from mla_attn.models.base import CausalLM
from mla_attn.passes.fields import SAMPLING, Arrays, structs
from mla_attn.passes.functions import Functions, Method


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Ladders of shapes, and static sizes, that the passes are compiled for.

    Attributes:
        batches: ladder of request counts B.
        prompt_rows: ladder of prompt tokens T of one pass, all requests together.
        table_width: pages per request W.
        page_size: tokens per page P.
        max_len: most tokens of a request.
        prompt_batches: ladder of request counts in passes over prompts; ``batches`` if None.
    """

    batches: tuple[int, ...]
    prompt_rows: tuple[int, ...]
    table_width: int
    page_size: int
    max_len: int
    prompt_batches: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass before it is compiled.

    Attributes:
        name: its mode, shown in progress, warnings and profiles.
        fn: the pure function.
        inputs: names of the fields it takes.
        sizes: sizes of their axes, but for B and T.
        given: kept fields among the inputs that the host gives, because the request begins with this pass.
    """

    name: str
    fn: Callable[[Any, Any, Arrays], tuple[Arrays, Any]]
    inputs: tuple[str, ...]
    sizes: Mapping[str, int]
    given: tuple[str, ...] = ()


class Passes:
    """The passes of one model as ``Buckets``, each built when it is first asked for. ``DraftPasses`` adds those that
    draft and verify.

    There is a program for each pass and batch size, and in passes over prompts for each number of rows too. Models that
    differ in nothing but their arrays share programs, which are compiled once in a process.

    Args:
        model: the model; its arrays become ``state``, which every pass takes.
        shapes: shapes to compile for.
        implementation: implementation of the attention ops; None picks, by the environment as it is now.
        wrap: applied to every pass before it is compiled.
    """

    functions_class = Functions  # benchmarks replace it
    buckets_class = Buckets  # benchmarks replace it

    def __init__(
        self,
        model: CausalLM,
        shapes: Shapes,
        *,
        implementation: Order = None,
        wrap: Callable[[Pass], Pass] = lambda inner: inner,
    ):
        layout = {"page_size": shapes.page_size, "max_len": shapes.max_len}
        self.shapes, self.dtype, self._wrap = shapes, model.dtype, wrap
        self.functions, self.state = self.functions_class.of(model, **layout, implementation=implementation)
        self.sizes = {"W": shapes.table_width, "dim": model.hidden_size}

    def replacement(self, model_or_state: Any) -> tuple[Any, tuple[Any, ...]]:
        """Checks another model's arrays; returns that model, and what ``state`` becomes with its arrays.

        Raises:
            ValueError: parameters, shapes or dtypes differ, by name, or the model is built otherwise.
        """
        graphdef, state = (self.functions.graphdef, model_or_state)
        if isinstance(model_or_state, nnx.Module):
            graphdef, state = nnx.split(model_or_state)
        if not isinstance(state, nnx.State):
            raise ValueError(f"model_or_state is a {type(state).__name__}, must be a model or an nnx.State")
        # What is held, not what the model of old has now: its parameters may have been replaced since.
        held = jax.tree.unflatten(self.functions.structure, self.state[: self.functions.structure.num_leaves])
        old, new = (dict(nnx.to_flat_state(s)) for s in (held, state))
        for path in [*old, *new]:
            _check_parameter(".".join(map(str, path)), old.get(path), new.get(path))
        if graphdef != self.functions.graphdef:
            raise ValueError("model_or_state is built otherwise than the engine's model: its config must be the same")
        leaves = jax.device_put(jax.tree.leaves(state), [leaf.sharding for leaf in jax.tree.leaves(held)])
        return nnx.merge(graphdef, jax.tree.unflatten(self.functions.structure, leaves)), tuple(leaves)

    @functools.cached_property
    def prefill(self) -> Buckets:
        """Prompts of which nothing is cached."""
        return self._prompt("prefill")

    @functools.cached_property
    def extend(self) -> Buckets:
        """Prefill chunks, after what is cached of their prompts."""
        return self._prompt("extend")

    @functools.cached_property
    def decode(self) -> Buckets:
        """One token per active request."""
        inputs = ("page_table", "lens", "active", "tokens", *SAMPLING)
        return self.buckets("decode", Method(self.functions, "decode"), inputs)

    def _prompt(self, mode: str) -> Buckets:
        inputs = ("page_table", "seq_lens", "q_lens", "prompt_tokens", *SAMPLING)
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
        """The ``Buckets`` of a pass: every batch size and, over prompts, every number of rows.

        Passes whose ``fn`` and other arguments are equal share programs.
        """
        made, jitted = _jitted(name, fn, inputs, tuple({**self.sizes, **sizes}.items()), given, self._wrap)
        shapes = self.shapes
        ladder = [{"B": batch} for batch in shapes.batches]
        if prompts:
            ladder = [{"B": b, "T": t} for b in shapes.prompt_batches or shapes.batches for t in shapes.prompt_rows]
        rungs = [structs(made.inputs, {**made.sizes, **rung}, self.dtype) for rung in ladder]
        return self.buckets_class(name, jitted, rungs)


@functools.lru_cache(maxsize=64)  # passes: JAX keeps the programs of each for as long as it is kept here
def _jitted(
    name: str,
    fn: Callable[..., Any],
    inputs: tuple[str, ...],
    sizes: tuple[tuple[str, int], ...],
    given: tuple[str, ...],
    wrap: Callable[[Pass], Pass],
) -> tuple[Pass, Any]:
    """Wraps and jits a pass. Equal passes get one object, because JAX keeps what it compiled by object."""
    made = wrap(Pass(name, fn, inputs, dict(sizes), given))
    return made, jit_step(made.fn, name)


def forget_programs() -> None:
    """Let go of programs that no engine holds; they are otherwise kept for the next one that is equal."""
    _jitted.cache_clear()


def _check_parameter(name: str, old: Any, new: Any) -> None:
    """Raises ValueError unless parameter ``new`` can take the place of ``old``; either may be absent."""
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
