"""The wrapper of steps and ops over a mesh, the metadata of a step, and pools.

``sharded`` runs the op of one device on every device, on its share of the arrays (``jax.shard_map``). Only context
parallelism adds collectives: one all-gather of the queries and two all-to-alls of the partial results.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from mla_attn.cache import KVPool, LatentPool, move_rows
from mla_attn.checks import check_integer
from mla_attn.dispatch import Order, requested
from mla_attn.metadata import AttentionMetadata
from mla_attn.ops import gqa_attention, mla_attention, plan_gqa, plan_mla
from mla_attn.parallel.layout import Layout, over, place, pool_specs, size
from mla_attn.parallel.local import in_shard
from mla_attn.specs import GQASpec, MLASpec

_OPS = (mla_attention, gqa_attention)


def sharded(function: Callable[..., Any], *, mesh: Mesh, layout: Layout, check_vma: bool = True) -> Callable[..., Any]:
    """Returns a step of ``mla_attn.steps``, ``mla_attention``, ``gqa_attention`` or ``move_rows`` over a mesh.

    The result takes the arguments of ``function`` and gives its results, with these differences:

    ==============================  ==================================================================================
    argument                        is
    ==============================  ==================================================================================
    rows [T, ...]                   those of the first batch rank, then those of the next, T / ranks each
    pool                            from ``create_pool``
    metadata                        from ``plan``
    spec                            that of all devices
    src, dst (of ``move_rows``)     from ``path_moves`` with the slots of ``metadata``
    ==============================  ==================================================================================

    It is jitted and, as steps do, donates the pool (inside an outer ``jit`` that one must donate). Results of
    heads and batch ranks have the bits of a device that computes them alone. Contexts are merged in float32, in the
    order of the ranks; ``batch_invariant=True`` then holds for a given number of ranks.

    Args:
        function: the step or op of one device.
        mesh: the caller's mesh; axes of any type.
        layout: what is sharded over which of its axes.
        check_vma: whether ``jax.shard_map`` checks which values vary over which axes.

    Raises:
        ValueError: another function, an axis that the mesh does not have, heads or rows that the devices cannot share.
    """
    layout.check(mesh)
    if function in (plan_mla, plan_gqa):
        raise ValueError("function=plan_mla or plan_gqa: must be a step or an op, plan() makes work lists")
    in_shard(function, layout)
    return _sharded(function, mesh, layout, check_vma)


@functools.lru_cache(maxsize=256)  # JAX keeps the programs of a function while it is in this cache
def _sharded(function, mesh: Mesh, layout: Layout, check_vma: bool):
    signature = inspect.signature(function)

    def run(pool, arrays, static):
        _check_heads(dict(static).get("spec"), mesh, layout)
        if "metadata" in arrays:
            arrays = arrays | {"metadata": _of_one(arrays["metadata"], size(mesh, layout.pages))}
        local = functools.partial(_on_device, function, layout, static)
        pools = pool_specs(pool, layout)
        specs = {name: _spec(name, value, static, mesh, layout) for name, value in arrays.items()}
        pool, arrays = place(pool, pools, mesh), place(arrays, specs, mesh)
        heads = over(layout.batch, layout.query_heads)
        results = _results(function, dict(static), heads, pools)
        shard = jax.shard_map(local, mesh=mesh, in_specs=(pools, specs), out_specs=results, check_vma=check_vma)
        return shard(pool, arrays)

    donated = () if function in _OPS else (0,)
    program = jax.jit(run, static_argnums=2, donate_argnums=donated)

    @functools.wraps(function)
    def call(*args, **kwargs):
        bound = signature.bind(*args, **kwargs).arguments
        pool = bound.pop("pool")
        if "implementation" in signature.parameters:
            bound["implementation"] = requested(bound.get("implementation"))
        if "layer" in bound and (placement := getattr(pool, "placement", None)) is not None:
            # An array, because all layers share a program.
            bound["layer"] = jnp.asarray(placement.check_layer(bound["layer"]), jnp.int32)
        arrays = {name: value for name, value in bound.items() if any(map(_is_array, jax.tree.leaves(value)))}
        static = tuple((name, value) for name, value in bound.items() if name not in arrays)
        return program(pool, arrays, static)

    return call


def _on_device(function, layout: Layout, static, pool, arrays):
    return in_shard(function, layout)(**dict(static), **arrays, pool=pool)


def _of_one(metadata: AttentionMetadata, ranks: int) -> AttentionMetadata:
    """Metadata from ``plan`` over so many devices, as that of one of them."""
    if metadata.ranks != ranks:
        raise ValueError(f"metadata has the arrays of {metadata.ranks} device(s), must be of {ranks}: from plan")
    return dataclasses.replace(metadata, ranks=1)


def _check_heads(spec: MLASpec | GQASpec | None, mesh: Mesh, layout: Layout) -> None:
    """Raises ValueError unless the devices can share the heads."""
    devices = size(mesh, layout.query_heads)
    if spec is not None and spec.num_heads % devices:
        raise ValueError(f"num_heads={spec.num_heads} must be a multiple of the {devices} devices that share them")
    if isinstance(spec, GQASpec):
        spec.shard(heads=size(mesh, layout.heads))


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _spec(name: str, value: Any, static, mesh: Mesh, layout: Layout) -> P:
    """The partition spec of an argument."""
    if name in ("metadata", "src", "dst"):
        return over(layout.pages)
    if name in ("latent", "rope", "tree_mask"):
        return over(layout.batch)
    if name in ("sinks", "w_uk", "w_uv"):
        return over(layout.query_heads)
    if name in ("k", "v") and isinstance(spec := dict(static).get("spec"), GQASpec):
        # Fewer KV heads than devices are given to all, each of which takes one.
        split = spec.num_kv_heads % size(mesh, layout.heads) == 0
        return over(layout.batch, layout.heads if split else ())
    if name in ("q_latent", "q_rope", "q", "k", "v") or (name == "q_scale" and value.ndim):
        return over(layout.batch, layout.query_heads)
    return P()


def _results(function, static: dict[str, Any], heads: P, pools: Any) -> Any:
    """The partition specs of the results of a function."""
    if function is move_rows:
        return pools
    attended = (heads, heads) if static.get("return_lse", False) else (heads,)
    if function in _OPS:
        return attended if len(attended) > 1 else heads
    return (*attended, pools)


def plan(
    builder: Callable[..., Any],
    *lengths: Any,
    mesh: Mesh,
    layout: Layout,
    check_vma: bool = True,
    pool: LatentPool | KVPool | None = None,
    spec: MLASpec | GQASpec | None = None,
    causal: bool = True,
    tree: bool = False,
    sinks: bool = False,
    out_dtype: DTypeLike = jnp.bfloat16,
    q_dtype: DTypeLike = jnp.bfloat16,
    implementation: Order = None,
    batch_invariant: bool = False,
    **options: Any,
) -> AttentionMetadata:
    """Makes the metadata of a step on every device, once for all layers, with work lists where ``pool`` is given.

    The result is for functions from ``sharded`` alone: its arrays are those of the devices along (batch, context), one
    after the other.

    Args:
        builder: builder of ``mla_attn.metadata``; ``for_encoder`` gives slots.
        *lengths: its page table, lengths and other arrays, of all requests: those of the first batch rank, then those
            of the next. Page ids are those of a rank's own pool, the same on all context ranks, where a page stands for
            P tokens of each of them.
        mesh, layout, check_vma: as in ``sharded``.
        pool, spec, causal, tree, sinks, out_dtype, q_dtype, implementation, batch_invariant: as in ``plan_mla`` and
            ``plan_gqa``, for calls that share a work list. No list if ``pool`` is None.
        **options: other arguments of the builder; ``num_rows`` counts the rows of all batch ranks.

    Raises:
        ValueError: as the builder and ``plan_mla``; or requests or rows that the batch ranks cannot share.
    """
    layout.check(mesh)
    ranks = size(mesh, layout.batch)
    if options.get("num_rows") is not None:
        rows = check_integer("num_rows", options["num_rows"], 0)
        if rows % ranks:
            raise ValueError(f"num_rows={rows} must be a multiple of the {ranks} batch ranks")
        options["num_rows"] = rows // ranks
    bound = inspect.signature(builder).bind(*lengths, **options).arguments
    arrays = {name: value for name, value in bound.items() if any(map(_is_array, jax.tree.leaves(value)))}
    static = tuple((name, value) for name, value in bound.items() if name not in arrays)
    planned = None
    if pool is not None and spec is not None:
        calls: dict[str, Any] = {"causal": causal, "tree": tree, "sinks": sinks, "batch_invariant": batch_invariant}
        calls |= {"out_dtype": jnp.dtype(out_dtype), "q_dtype": jnp.dtype(q_dtype)}
        calls["implementation"] = requested(implementation)
        planned = (_local_pool(pool, mesh, layout), spec, tuple(calls.items()))
    made = _plan(arrays, (builder, static, planned, mesh, layout, check_vma))
    if not isinstance(made, AttentionMetadata):  # slots of an encoder
        return made
    return dataclasses.replace(made, ranks=size(mesh, layout.pages))


@functools.partial(jax.jit, static_argnums=1)
def _plan(arrays, facts):
    builder, static, planned, mesh, layout, check_vma = facts

    def local(arrays):
        context = None
        if size(mesh, layout.context) > 1:
            context = (jax.lax.axis_index(layout.context), size(mesh, layout.context))
        metadata = builder(**arrays, **dict(static), context=context)
        if planned is None:
            return metadata
        pool, spec, calls = planned
        op = plan_mla if isinstance(spec, MLASpec) else plan_gqa
        return in_shard(op, layout)(metadata, pool, spec, **dict(calls))

    shared = ("step", "num_drafted", "page_map")  # not of a request each
    of_requests = {n for n, x in arrays.items() if n not in shared and not (n == "depths" and x.ndim == 1)}
    specs = {name: over(layout.batch) if name in of_requests else P() for name in arrays}
    shard = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=over(layout.pages), check_vma=check_vma)
    return shard(place(arrays, specs, mesh))


def _local_pool(pool, mesh: Mesh, layout: Layout):
    """The shapes of a device's pool."""

    def shape(spec: P, array):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(sharding.shard_shape(array.shape), array.dtype)

    return jax.tree.map(shape, pool_specs(pool, layout), pool, is_leaf=lambda x: isinstance(x, P))


def create_pool(
    spec: MLASpec | GQASpec, *, num_layers: int, num_pages: int, page_size: int, mesh: Mesh, layout: Layout, **options
) -> LatentPool | KVPool:
    """Creates an all-zero pool on every device; no device allocates another's.

    The arrays of all (batch, context) ranks are one array, a rank's pages after those of the one before; ``num_pages``
    is that of a rank. Over more devices than KV heads, each has its KV head alone, so that some hold the same.

    Args:
        spec: the attention's, of all devices; its type determines the type of the pool.
        num_layers: layers L.
        num_pages: pages N of each layer on each rank.
        page_size: tokens P of a page, of those that a context rank holds.
        mesh, layout: as in ``sharded``.
        **options: as in ``LatentPool.create`` or ``KVPool.create``; scales are those of all KV heads.

    Raises:
        ValueError: as there, or heads that the devices cannot share.
    """
    layout.check(mesh)
    kind: Any = LatentPool if isinstance(spec, MLASpec) else KVPool
    heads, local = size(mesh, layout.heads), spec.shard(heads=size(mesh, layout.heads))
    arrays = {name: jnp.asarray(options.pop(name)) for name in list(options) if _is_array(options[name])}
    if isinstance(spec, GQASpec) and spec.num_kv_heads % heads:
        times = heads // spec.num_kv_heads
        arrays = {name: jnp.repeat(x, times, axis=1) if x.ndim == 2 else x for name, x in arrays.items()}
    specs = {name: over((), layout.heads) if array.ndim == 2 else P() for name, array in arrays.items()}
    sizes = {"num_layers": num_layers, "num_pages": num_pages, "page_size": page_size}
    create = functools.partial(kind.create, **sizes, spec=local, **options)
    shapes = jax.eval_shape(lambda scales: create(**scales), _shards(arrays, specs, mesh))
    make = jax.shard_map(
        lambda scales: create(**scales), mesh=mesh, in_specs=(specs,), out_specs=pool_specs(shapes, layout)
    )
    return jax.jit(make)(place(arrays, specs, mesh))


def _shards(arrays, specs, mesh: Mesh):
    shape = {n: jax.sharding.NamedSharding(mesh, specs[n]).shard_shape(x.shape) for n, x in arrays.items()}
    return {n: jax.ShapeDtypeStruct(shape[n], x.dtype) for n, x in arrays.items()}
