"""Inside ``jax.shard_map``: which mesh axes arrays vary over, where JAX checks it (``check_vma=True``)."""

from typing import Any

import jax


def vary_together[T](tree: T, like: Any = ()) -> T:
    """The same arrays, each marked as varying over every mesh axis that any of them, or of ``like``, varies over.

    A loop's carry must vary over the same axes before and after its body. Constants vary over none, so what a loop
    starts with is marked like what its body adds. Outside of ``jax.shard_map`` this does nothing.
    """
    axes = frozenset().union(*(_axes(leaf) for leaf in jax.tree.leaves((tree, like))))
    return jax.tree.map(lambda leaf: _vary(leaf, axes), tree) if axes else tree


def _axes(array) -> frozenset:
    return jax.typeof(array).mat.varying


def _vary(array, axes: frozenset):
    missing = tuple(sorted(axes - _axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array
