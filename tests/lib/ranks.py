"""Calls over a mesh of CPU devices beside the same calls on one; both cache the same rows, and NaN everywhere else."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

import oracle
from mla_attn import metadata as md
from mla_attn import parallel, steps
from mla_attn.cache import KVPool, LatentPool
from mla_attn.parallel.layout import pool_specs
from mla_attn.specs import GQASpec, MLASpec

MODES = ["decode", "target_verify", "ragged_verify", "tree_verify", "draft_extend", "draft_decode", "extend", "mixed"]
CONTEXTS = {"rtol": 1e-6, "atol": 1e-6}  # of results that are merged
PAGE, LAYERS, LAYER = 2, 2, 1  # sizes of every pool, and the layer that calls use
REQUESTS, ROWS = 4, 3  # of every call; most rows of a request
MLA = MLASpec(num_heads=8, kv_lora_rank=16, qk_rope_head_dim=8, scale=0.3)
GQA = GQASpec(num_heads=8, num_kv_heads=4, head_dim=8, v_head_dim=6, scale=0.3)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Devices of a mesh, and how ``jax.shard_map`` sees it."""

    heads: int = 1
    batch: int = 1
    context: int = 1
    kind: AxisType = AxisType.Auto
    check_vma: bool = True

    @functools.cached_property
    def mesh(self) -> Mesh:
        shape = (self.batch, self.heads, self.context)
        devices = jax.devices("cpu")[: self.batch * self.heads * self.context]
        return jax.make_mesh(shape, ("batch", "heads", "context"), axis_types=(self.kind,) * 3, devices=devices)

    @property
    def over(self):
        layout = parallel.Layout(heads=("heads",), batch=("batch",), context=("context",))
        return {"mesh": self.mesh, "layout": layout}

    def place(self, pool):
        """The pool on the devices, as ``create_pool`` places it."""
        specs = pool_specs(pool, self.over["layout"])
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
        return jax.tree.map(jax.device_put, pool, shardings)

    def sharded(self, function):
        return parallel.sharded(function, **self.over, check_vma=self.check_vma)

    def plan(self, builder, *lengths, **options):
        return parallel.plan(builder, *lengths, **self.over, check_vma=self.check_vma, page_size=PAGE, **options)


def lengths(ranks, *, edges):
    """Cached tokens of four requests, at the edges of what one rank, and a page of every rank, hold."""
    size = ranks.context
    return ([0, 1, size, PAGE * size + 1], [size - 1, size + 1, PAGE * size - 1, 3])[edges]


@dataclasses.dataclass(frozen=True)
class Cached:
    """The cached rows of requests in a pool of one device, and in one over ranks."""

    ranks: Ranks
    pool: LatentPool | KVPool
    table: jax.Array
    sharded_pool: LatentPool | KVPool
    sharded_table: jax.Array


def cached(ranks, lens, spec, *, seed=0, longest=None, repeated=1, **options):
    """Random rows for requests with these cached tokens; all other rows of the pools are NaN.

    Args:
        longest: most tokens of a request, those that a call adds included.
        repeated: how often each KV head is held, where there are fewer than head ranks.
        options: of the pool's ``create``.
    """
    rng, requests = np.random.default_rng(seed), len(lens)
    longest = int(max(lens)) + ROWS + 1 if longest is None else longest
    width = -(-longest // PAGE)
    options = {"num_layers": LAYERS, "page_size": PAGE, "dtype": "float32", **options}
    kind = LatentPool if isinstance(spec, MLASpec) else KVPool
    one = kind.create(num_pages=requests * width + 1, spec=spec, **options)
    table = rng.permutation(one.num_pages)[: requests * width].reshape(requests, width)
    of_rank, of_context = requests // ranks.batch, -(-longest // (PAGE * ranks.context))
    many = kind.create(num_pages=of_rank * of_context + 1, spec=spec, **options)
    local = np.stack([rng.permutation(many.num_pages)[:-1].reshape(of_rank, of_context) for _ in range(ranks.batch)])
    arrays, sharded = {}, {}
    for name in one.PAGED:
        if (array := getattr(one, name)) is None:
            continue
        tokens = dict(zip(one.PAGED, one.axes, strict=True))[name].of_tokens
        shape = np.moveaxis(array, tokens, 1).shape
        own, theirs = (
            _rows(rng, shape, array.dtype),
            _rows(None, (ranks.batch, ranks.context, *_pages(many, shape)), array.dtype),
        )
        data = _rows(None, shape, array.dtype)
        for b, length in enumerate(lens):
            group, at = divmod(b, of_rank)
            for p in range(length):
                here = (table[b, p // PAGE], p % PAGE)
                turn, rank = divmod(p, ranks.context)
                there = (local[group, at, turn // PAGE], turn % PAGE)
                for layer in range(LAYERS):
                    row = own[here[0] + layer * one.num_pages, here[1]]
                    data[here[0] + layer * one.num_pages, here[1]] = row
                    theirs[group, rank, there[0] + layer * many.num_pages, there[1]] = row
        theirs = theirs.reshape(-1, *shape[1:])
        if isinstance(spec, GQASpec):
            theirs = np.repeat(theirs, repeated, axis=2)
        arrays[name], sharded[name] = (jnp.asarray(np.moveaxis(x, 1, tokens)) for x in (data, theirs))
    scales = {n: jnp.repeat(getattr(one, n), repeated, axis=1) for n in ("k_scale", "v_scale") if _by_head(one, n)}
    return Cached(
        ranks,
        dataclasses.replace(one, **arrays),
        jnp.asarray(table, jnp.int32),
        ranks.place(dataclasses.replace(many, **sharded, **scales)),
        jnp.asarray(local.reshape(requests, of_context), jnp.int32),
    )


def _by_head(pool, name):
    return isinstance(pool, KVPool) and getattr(pool, name) is not None and getattr(pool, name).ndim == 2


def _pages(pool, shape):
    return (LAYERS * pool.num_pages, *shape[1:])


def _rows(rng, shape, dtype):
    """Random rows, or NaN ones without a generator; float8 as bytes, of which 127 is NaN."""
    if dtype == np.uint8:
        return np.full(shape, 127, np.uint8) if rng is None else rng.integers(0, 120, shape).astype(np.uint8)
    return np.full(shape, np.nan, np.float32) if rng is None else rng.standard_normal(shape, np.float32)


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def tree_of(rows):
    """A tree mask of rows that see the first and themselves, and their depths."""
    mask = np.eye(rows, dtype=bool)
    mask[:, 0] = True
    return jnp.asarray(np.broadcast_to(mask, (REQUESTS, rows, rows))), jnp.asarray([0] + [1] * (rows - 1), jnp.int32)


def call(mode, prefix):
    """``(builder, lengths, options, rows, tree mask)`` of a mode's call after these cached tokens."""
    i32, rows = functools.partial(jnp.asarray, dtype=jnp.int32), np.asarray([3, 1, 2, 3])
    new, tree = {"max_q_len": ROWS}, None
    if mode == "decode":
        return md.for_decode, (i32(prefix) + 1,), {}, REQUESTS, tree
    if mode in ("target_verify", "tree_verify"):
        options = {"num_tokens": ROWS}
        if mode == "tree_verify":
            tree, options["depths"] = tree_of(ROWS)
        return md.for_target_verify, (i32(prefix),), options, REQUESTS * ROWS, tree
    if mode == "ragged_verify":  # two requests of each batch rank have as many rows
        options = {"num_tokens": ROWS, "q_lens": i32(rows), "num_rows": 12}
        return md.for_target_verify, (i32(prefix),), options, 12, tree
    if mode == "draft_decode":
        return md.for_draft_decode, (i32(prefix), 0), {"num_tokens": 1}, REQUESTS, tree
    if mode == "mixed":
        return md.for_mixed, (i32(prefix + rows), i32(rows)), {**new, "num_rows": 12}, 12, tree
    builder = md.for_draft_extend if mode == "draft_extend" else md.for_extend
    return builder, (i32(prefix + rows), i32(rows)), new, REQUESTS * ROWS, tree


def on_one_device(step, c: Cached, spec, mode, prefix, arrays, *, layer=LAYER, **options):
    """The results of a step on one device, one batch rank's requests after the other; and its pool after that."""
    ranks, pool = c.ranks, jax.tree.map(jnp.copy, c.pool)
    results, requests = [], len(prefix) // ranks.batch
    for group in range(ranks.batch):
        mine = slice(group * requests, (group + 1) * requests)
        metadata = metadata_of(c, mode, prefix, group)
        rows = {n: _share(x, group, ranks.batch) if n not in SHARED else x for n, x in arrays.items()}
        *result, pool = step(**rows, pool=pool, metadata=metadata, spec=spec, layer=layer, **_of(options, mine))
        results.append(result)
    return [jnp.concatenate(parts) for parts in zip(*results, strict=True)], pool


SHARED = ("w_uk", "w_uv")


def _of(options, requests):
    return {n: x[requests] if n == "tree_mask" else x for n, x in options.items()}


def metadata_of(c: Cached, mode, prefix, group):
    """The metadata of one batch rank's requests on one device."""
    builder, lens, options, rows, _ = call(mode, prefix)
    mine = slice(group * len(prefix) // c.ranks.batch, (group + 1) * len(prefix) // c.ranks.batch)
    options = {n: x[mine] if n == "q_lens" else x for n, x in options.items()}
    if "num_rows" in options:
        options["num_rows"] = rows // c.ranks.batch
    lens = [x[mine] if np.ndim(x) else x for x in lens]
    return builder(c.table[mine], *lens, page_size=PAGE, **options)


def _share(x, group, groups):
    size = x.shape[0] // groups
    return x[group * size : (group + 1) * size]


def owned_rows(c: Cached, mode, prefix):
    """Which rows of a call belong to requests."""
    return np.concatenate([np.asarray(metadata_of(c, mode, prefix, g).slots) >= 0 for g in range(c.ranks.batch)])


def assert_same_cache(c: Cached, one, many, lens):
    """The pools hold the same rows of these requests in every layer, and nothing but NaN besides."""
    ranks, requests = c.ranks, len(lens)
    for name in one.PAGED:
        if getattr(one, name) is None:
            continue
        tokens = dict(zip(one.PAGED, one.axes, strict=True))[name].of_tokens
        x, y = (np.moveaxis(np.asarray(getattr(pool, name)), tokens, 1) for pool in (one, many))
        y = y.reshape(ranks.batch, ranks.context, -1, *y.shape[1:])
        repeated = y.shape[4] // x.shape[2] if x.ndim > 3 else 1
        count = 0
        for b in range(requests):
            group = b // (requests // ranks.batch)
            for p in range(int(lens[b])):
                turn, rank = divmod(p, ranks.context)
                for layer in range(LAYERS):
                    own = x[int(c.table[b, p // PAGE]) + layer * one.num_pages, p % PAGE]
                    own = np.repeat(own, repeated, axis=0) if repeated > 1 else own
                    page = int(c.sharded_table[b, turn // PAGE]) + layer * many.num_pages
                    theirs = y[group, rank, page, turn % PAGE]
                    np.testing.assert_array_equal(theirs, own, err_msg=f"{name}, request {b}, position {p}, {layer=}")
                    count += not _is_empty(theirs)
        rows = y.reshape(-1, *y.shape[4:])
        assert count == sum(not _is_empty(row) for row in rows), "a row was written where none belongs"


def _is_empty(row):
    return (row == 127).all() if row.dtype == np.uint8 else np.isnan(row).all()


def assert_same_keys(c: Cached, mode, prefix, metadata, spec, tree):
    """Each row sees the keys of one device, each of them on one rank."""
    ranks, stride = c.ranks, metadata.kv_stride
    fields = ("q_starts", "q_lens", "kv_lens", "kv_offsets", "page_table", "positions")
    parts = {
        n: np.asarray(x).reshape(ranks.batch, ranks.context, -1, *x.shape[1:])
        for n in fields
        for x in [getattr(metadata, n)]
    }
    mask = None if tree is None else np.asarray(tree)
    for group in range(ranks.batch):
        one = metadata_of(c, mode, prefix, group)
        rules = {"window": spec.window, "tree_mask": mask}
        for b, j in ((b, j) for b, rows in enumerate(np.asarray(one.q_lens)) for j in range(rows)):
            wanted = oracle.visible_slots(one, b, j, num_slots=c.table.shape[1] * PAGE, **rules)
            found = []
            for rank in range(ranks.context):
                own = types.SimpleNamespace(**{n: x[group, rank] for n, x in parts.items()}, kv_stride=stride)
                slots = oracle.visible_slots(own, b, j, num_slots=own.page_table.shape[1] * PAGE, **rules)
                found += [int(own.kv_offsets[b]) + i * stride for i in slots]
            assert sorted(found) == wanted, f"request {b}, row {j}: keys {sorted(found)}, must be {wanted}"


def mla_step(mode):
    name = {"mixed": "decode", "ragged_verify": "target_verify", "tree_verify": "target_verify"}.get(mode, mode)
    return steps.absorbed_extend if name == "extend" else getattr(steps, name)


def gqa_step(mode):
    return getattr(steps, "gqa_" + mla_step(mode).__name__.removeprefix("absorbed_"))


def mla_rows(rows, seed=1):
    heads, latent, rope = MLA.num_heads, MLA.kv_lora_rank, MLA.qk_rope_head_dim
    shapes = {"q_latent": (heads, latent), "q_rope": (heads, rope), "latent": (latent,), "rope": (rope,)}
    return {name: random(seed + i, rows, *shape) for i, (name, shape) in enumerate(shapes.items())}


def gqa_rows(rows, spec=GQA, seed=1):
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    shapes = {"q": (heads, spec.head_dim), "k": (kv_heads, spec.head_dim), "v": (kv_heads, spec.v_head_dim)}
    return {name: random(seed + i, rows, *shape) for i, (name, shape) in enumerate(shapes.items())}


def compare(ranks, spec, mode, *, step=None, prefix=None, longest=None, repeated=1, pool=None, exact=None, **options):
    """Runs a call over ranks and on one device; results and caches must be the same."""
    is_mla = spec is MLA or isinstance(spec, type(MLA))
    step = step or (mla_step if is_mla else gqa_step)(mode)
    prefix = np.asarray(lengths(ranks, edges=0) if prefix is None else prefix)
    c = cached(ranks, prefix, spec, longest=longest, repeated=repeated, **(pool or {}))
    builder, lens, built, rows, tree = call(mode, prefix)
    owned = owned_rows(c, mode, prefix)
    arrays = mla_rows(rows) if is_mla else gqa_rows(rows, spec)
    arrays = {n: jnp.where(owned.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.nan) for n, x in arrays.items()}
    if tree is not None:
        options["tree_mask"] = tree
    wanted, one = on_one_device(step, c, spec, mode, prefix, arrays, **options)
    metadata = ranks.plan(builder, c.sharded_table, *lens, **built)
    assert_same_keys(c, mode, prefix, metadata, spec, tree)
    *got, many = ranks.sharded(step)(
        **arrays, pool=c.sharded_pool, metadata=metadata, spec=spec, layer=LAYER, **options
    )
    for a, b in zip(got, wanted, strict=True):
        if exact if exact is not None else ranks.context == 1:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, **CONTEXTS)
    lens = [metadata_of(c, mode, prefix, group) for group in range(ranks.batch)]
    assert_same_cache(c, one, many, np.concatenate([np.where(m.q_lens > 0, m.kv_lens, 0) for m in lens]))
    return got
