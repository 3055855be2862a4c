"""The layout of ops over the axes of a mesh, and the partition specs that follow from it."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mla_attn.cache import KVPool, LatentPool
from mla_attn.text import shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What is sharded over which axes of a mesh that the caller made. () means not sharded; a name alone is one axis.

    Attributes:
        heads: axes that query heads and their weights are sharded over (tensor parallelism). MLA's pool is the same on
            all their devices; GQA's is sharded by KV head.
        batch: axes that requests, with their rows and pages, are sharded over (data-parallel attention). Page ids are
            those of a device's own pool.
        context: axes that the cached tokens of each request are sharded over, position p on rank ``p % size``
            (decode context parallelism). Query heads are sharded over them too, in addition to ``heads``.
        experts: axes that the experts of a layer are sharded over; they may be axes of ``heads`` and ``batch``.
    """

    heads: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()

    def __post_init__(self):
        for name in ("heads", "batch", "context", "experts"):
            given = getattr(self, name)
            axes = (given,) if isinstance(given, str) else given
            if not isinstance(axes, tuple) or not all(isinstance(axis, str) for axis in axes):
                raise ValueError(f"{name}={shown(given)} must be a tuple of names of axes")
            if len(set(axes)) < len(axes):
                raise ValueError(f"{name}={axes} must not repeat an axis")
            object.__setattr__(self, name, axes)
        attention = (*self.heads, *self.batch, *self.context)
        if len(set(attention)) < len(attention):
            raise ValueError(
                f"heads={self.heads}, batch={self.batch}, context={self.context}: an axis must be in one of them"
            )

    @property
    def query_heads(self) -> tuple[str, ...]:
        """Axes that query heads are sharded over."""
        return (*self.heads, *self.context)

    @property
    def pages(self) -> tuple[str, ...]:
        """Axes whose devices have pages and metadata of their own."""
        return (*self.batch, *self.context)

    def check(self, mesh: Mesh) -> None:
        """Raises ValueError unless the mesh has all axes."""
        if not isinstance(mesh, Mesh):
            raise ValueError(f"mesh is a {type(mesh).__name__}, must be a jax.sharding.Mesh")
        for name in ("heads", "batch", "context", "experts"):
            if unknown := [axis for axis in getattr(self, name) if axis not in mesh.axis_names]:
                raise ValueError(f"{name} has the axis {unknown[0]!r}, must be axes of the mesh: {mesh.axis_names}")


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """A mesh that the caller made, and what is sharded over its axes.

    Attributes:
        mesh: the mesh.
        layout: axes of the mesh.
    """

    mesh: Mesh
    layout: Layout

    def __post_init__(self):
        self.layout.check(self.mesh)

    def size(self, name: str) -> int:
        """Number of devices along the axes of the layout's field of this name."""
        return size(self.mesh, getattr(self.layout, name))

    def sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)


def size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Number of devices along these axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def over(*entries: tuple[str, ...]) -> P:
    """The partition spec of an array whose leading axes are sharded over these axes of a mesh."""
    return P(*(entry or None for entry in entries))


def pool_specs(pool: Any, layout: Layout) -> Any:
    """The partition specs of a pool's arrays, in a pool."""
    pages, heads = layout.pages, layout.heads
    if isinstance(pool, LatentPool):
        return dataclasses.replace(pool, data=over(pages), scale=None if pool.scale is None else P())
    if not isinstance(pool, KVPool):
        raise ValueError(f"pool is a {type(pool).__name__}, must be a LatentPool or a KVPool")
    arrays = over(pages, heads) if pool.axes[0].of_heads == 1 else over(pages, (), heads)
    scales = {
        name: None if scale is None else over((), heads) if scale.ndim == 2 else P()
        for name, scale in (("k_scale", pool.k_scale), ("v_scale", pool.v_scale))
    }
    return dataclasses.replace(pool, k=arrays, v=None if pool.v is None else arrays, **scales)


def place(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Reshards arrays to these specs over the mesh's axes of type Explicit, where ``jax.shard_map`` does not."""
    explicit = {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    if not explicit:
        return tree

    def visible(spec: P) -> P:
        entries = (() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in spec)
        return over(*(tuple(axis for axis in entry if axis in explicit) for entry in entries))

    def put(spec: P, part: Any) -> Any:
        sharding = NamedSharding(mesh, visible(spec))
        return jax.tree.map(lambda array: jax.sharding.reshard(array, sharding), part)

    return jax.tree.map(put, specs, tree, is_leaf=lambda x: isinstance(x, P))
