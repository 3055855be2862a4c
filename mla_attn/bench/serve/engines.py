"""An engine for benchmarks that accepts drafts with a given probability."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_attn.engine import Engine
from mla_attn.passes import Functions, Passes


class _SimulatedFunctions(Functions):
    """Passes whose state is the model's arrays and the acceptance probability."""

    def targets(self, state, logits, positions, x, tree):
        targets, drafts = super().targets(state, logits, positions, x, tree), x["drafts"]
        parents = tree.parents.tolist()
        child = np.array([parents.index(node) - 1 if node in parents else -1 for node in range(len(parents))])
        luck = jax.vmap(jax.vmap(_uniform, in_axes=(None, 0)))(x["seed"], positions)
        # To reject all drafts of a node, the target's token is the first one that was not drafted.
        ids = jnp.arange(len(parents), dtype=jnp.int32)
        drafted = (drafts[:, None] == ids[None, :, None]).any(axis=-1)
        unforeseen = jnp.argmin(drafted, axis=-1).astype(jnp.int32)[:, None]
        judged = jnp.where(luck < state[-1], drafts[:, child], unforeseen)
        return jnp.where(jnp.asarray(child >= 0)[None], judged, targets)


class _SimulatedPasses(Passes):
    """The passes of a ``SimulatedEngine``."""

    functions_class = _SimulatedFunctions

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._num_weights = len(self.state)
        self.simulate(0.0)

    def simulate(self, acceptance: float) -> None:
        # The probability is on the device, so that no call copies it there.
        self.state = (*self.state[: self._num_weights], jnp.float32(acceptance))


class SimulatedEngine(Engine):
    """An engine whose verify passes do all their work, then accept each draft with a given probability, initially 0.

    Random weights draft no better than chance. This engine measures the speed at an acceptance that trained weights
    would reach. Its tokens are meaningless. Only the first child of a node can be accepted.
    """

    passes_class = _SimulatedPasses

    def simulate(self, acceptance: float) -> None:
        """Sets the probability that a draft is accepted, without recompilation."""
        assert isinstance(self._passes, _SimulatedPasses)
        self._passes.simulate(acceptance)


def _uniform(seed, position):
    return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position))
