"""Engines as benchmarks need them: one for several batch sizes, one whose drafts are right as often as asked for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_attn.engine import Engine
from mla_attn.passes.state import SlotPasses


class BenchEngine(Engine):
    """An engine that can run fewer requests at a time than it was made for, and forget.

    Weights, cache and programs of a large model take minutes to make: one engine so serves several batch sizes.
    """

    limit: int | None = None  # of running requests; None is all that it was made for

    @property
    def most_running(self) -> int:
        return self.max_batch if self.limit is None else self.limit

    def forget(self) -> None:
        """Empty the prefix cache of an idle engine: the same trace again finds none of its prompts."""
        self._prefixes.clear()

    def _free_slot(self) -> int | None:
        slot = super()._free_slot()  # the first, so that none before it is free
        return slot if slot is not None and slot < self.most_running else None


class _SimulatedPasses(SlotPasses):
    """Their state is the model's and a probability."""

    def _model(self, state):
        return super()._model(state[0])

    def _target_verify(self, state, pools, x):
        return super()._target_verify(state, pools, x | {"acceptance": state[1]})

    def _pick(self, logits, positions, x):
        targets = super()._pick(logits, positions, x)
        if logits.ndim == 2:  # no drafts in this pass
            return targets
        parents, drafts = self._tree.parents.tolist(), x["drafts"]
        child = np.array([parents.index(node) - 1 if node in parents else -1 for node in range(len(parents))])
        luck = jax.vmap(jax.vmap(_uniform, in_axes=(None, 0)))(x["seed"], positions)
        # The first token that is no draft stands for one that was not foreseen.
        ids = jnp.arange(len(parents), dtype=jnp.int32)
        drafted = (drafts[:, None] == ids[None, :, None]).any(axis=-1)
        unforeseen = jnp.argmin(drafted, axis=-1).astype(jnp.int32)[:, None]
        judged = jnp.where(luck < x["acceptance"], drafts[:, child], unforeseen)
        return jnp.where(jnp.asarray(child >= 0)[None], judged, targets)


class SimulatedEngine(BenchEngine):
    """An engine whose verify passes do their work, then accept each draft with a probability.

    Random weights draft no better than chance; so the speed at an acceptance that trained ones would reach can be
    measured. The tokens mean nothing. Of the children of a node the first is the one that may be right.
    """

    passes_class = _SimulatedPasses

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.simulate(0.0)

    def simulate(self, acceptance: float) -> None:
        """From now on, drafts are right with this probability; programs stay as they are."""
        self._acceptance = jnp.float32(acceptance)  # on the device: calls need not bring it there

    @property
    def _state(self) -> Any:
        return super()._state, self._acceptance


def _uniform(seed, position):
    return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position))
