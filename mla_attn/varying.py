"""Varying axes: inside ``jax.shard_map`` with ``check_vma=True``, JAX tracks which mesh axes an array varies over."""

from typing import Any

import jax


def vary_together[T](tree: T, like: Any = ()) -> T:
    """Marks arrays as varying over every mesh axis that any of them, or of ``like``, varies over.

    A loop's carry must vary over the same axes before and after its body, and constants vary over none, so the initial
    carry is marked to vary as the arrays that the body adds to it. Outside of ``jax.shard_map`` this does nothing.
    """
    axes = frozenset().union(*(_axes(leaf) for leaf in jax.tree.leaves((tree, like))))
    return jax.tree.map(lambda leaf: _vary(leaf, axes), tree) if axes else tree


def _axes(array) -> frozenset:
    return jax.typeof(array).mat.varying


def _vary(array, axes: frozenset):
    missing = tuple(sorted(axes - _axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array
