"""The interface that the engine, the passes, generation and the benchmarks require of a model of any family.

A *cache group* is the layers of a model that share a kind of pool, page tables and metadata (vLLM: "KV cache groups").
Full and sliding-window layers are two groups, and so are layers whose rows are stored in two dtypes. Pools, page tables
and metadata are passed to a model, and pools are returned, as dicts with one entry per group, by name. Positions and
row owners are equal in the metadata of all groups; page tables, slots and offsets may differ.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from mla_attn.cache import KVPool, LatentPool
from mla_attn.cache.formats import FORMATS, RowFormat
from mla_attn.checks import check_dtype as check_any_dtype
from mla_attn.dispatch import Order, choose
from mla_attn.metadata import AttentionMetadata
from mla_attn.names import DTYPES
from mla_attn.ops import gqa, mla
from mla_attn.parallel import Layout, Parallelism
from mla_attn.parallel import create_pool as create_sharded_pool
from mla_attn.specs import GQASpec, MLASpec
from mla_attn.text import shown

Pool = LatentPool | KVPool
Pools = dict[str, Pool]
Metadata = Mapping[str, AttentionMetadata]
MODES = ("prefill", "extend", "decode", "target_verify", "draft_extend", "draft_decode")
PROMPT_MODES = ("prefill", "extend")
DRAFT_LAYER = "mtp"  # name of the cache group of a draft layer whose rows have a format of their own


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that share a kind of pool, page tables and metadata.

    Attributes:
        name: key of the dicts of pools, page tables and metadata.
        num_layers: layers of the pool, L.
        spec: static facts of their attention; its type determines the type of the pool.
        dtype: dtype of the stored numbers.
        sinks: whether their softmax has sinks.
        row_format: row format of latent rows, as in ``LatentPool.create``.
        draft_layers: number of layers, the last ones, that only draft: the draft layer, or all of a draft model.
        scales: scales of a float8 cache, by argument of the pool's ``create``, a sequence for those of each layer;
            other caches ignore them.
    """

    name: str
    num_layers: int
    spec: MLASpec | GQASpec
    dtype: np.dtype
    sinks: bool = False
    row_format: str = "plain"
    draft_layers: int = 0
    scales: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def window(self) -> int | None:
        """Number of visible keys per row, its own included; earlier keys are never read again. None for all."""
        return self.spec.window

    def create_pool(self, *, num_pages: int, page_size: int, parallelism: Parallelism | None = None) -> Pool:
        """Creates an all-zero pool, on several devices if ``parallelism`` is given: as ``parallel.create_pool``, whose
        pages are those of a device. Raises ValueError as ``LatentPool.create`` and ``KVPool.create`` do."""
        kind, options = KVPool, {}
        if isinstance(self.spec, MLASpec):
            kind, options = LatentPool, {"row_format": self.row_format}
        sizes = {"num_layers": self.num_layers, "num_pages": num_pages, "page_size": page_size}
        create: Any = kind.create
        scales = self.scales if self.row_format == "plain" else {}
        scales = {name: x if isinstance(x, int | float) else jnp.asarray(x, jnp.float32) for name, x in scales.items()}
        if parallelism is not None:
            where = {"mesh": parallelism.mesh, "layout": parallelism.layout}
            create = functools.partial(create_sharded_pool, **where)
        return create(**sizes, spec=self.spec, dtype=self.dtype, **options, **scales)

    def check_supported(self, *, page_size: int, implementation: Order) -> None:
        """Raises unless an attention implementation (the named one, if not None) supports decode calls with pages of
        this size. An implementation that refuses any of a model's calls refuses its decode calls too.

        Raises:
            ValueError: an unknown implementation.
            NotImplementedError: it does not support such calls on this device; the message has the reason.
        """
        pool = jax.eval_shape(lambda: self.create_pool(num_pages=1, page_size=page_size))
        if isinstance(self.spec, MLASpec):
            call = mla.MLACall.of(pool, self.spec, sinks=self.sinks)
            choose("mla_attention", call, mla.IMPLEMENTATIONS, implementation)
        else:
            call = gqa.GQACall.of(pool, self.spec, sinks=self.sinks)
            choose("gqa_attention", call, gqa.IMPLEMENTATIONS, implementation)


def create_pools(
    groups: Iterable[CacheGroup],
    *,
    num_pages: int | Mapping[str, int],
    page_size: int,
    parallelism: Parallelism | None = None,
) -> Pools:
    """Creates an all-zero pool for each group, with ``num_pages`` pages each, or with the pages that a mapping gives
    for every group; on several devices if ``parallelism`` is given."""
    groups = tuple(groups)
    sizes = num_pages if isinstance(num_pages, Mapping) else dict.fromkeys((g.name for g in groups), num_pages)
    check_groups("num_pages", sizes, groups)
    facts = {"page_size": page_size, "parallelism": parallelism}
    return {group.name: group.create_pool(num_pages=sizes[group.name], **facts) for group in groups}


def stored_as(
    groups: Iterable[CacheGroup], kv_dtype: Any, kv_scale: Any = None, draft_kv_dtype: Any = None
) -> tuple[CacheGroup, ...]:
    """The groups with another format of their cache rows, and other scales.

    If the draft layers of a group have another format than its other layers, they become a group of their own,
    ``DRAFT_LAYER``, at its end.

    Args:
        groups: the groups of a model, in its dtype, and those of a draft model.
        kv_dtype: name of a format, as ``float8_e4m3fn`` or ``float8_e4m3fn:blocks``, or a dtype; None for the model's.
        kv_scale: scales of float8 numbers: a number, or for each of ``groups`` with such numbers, by name, a dict with
            "scale" (latent rows) or "k_scale" and "v_scale". None for those of the checkpoint, and 1 without such.
            Other caches ignore them.
        draft_kv_dtype: as ``kv_dtype``, for layers that only draft; None for ``kv_dtype``.

    Raises:
        ValueError: an unknown format, one that does not fit a group, a ``draft_kv_dtype`` without layers that draft, or
            scales that a pool would refuse.
    """
    groups, own = tuple(groups), ("kv_dtype", _format_of("kv_dtype", kv_dtype))
    drafts = own if draft_kv_dtype is None else ("draft_kv_dtype", _format_of("draft_kv_dtype", draft_kv_dtype))
    if draft_kv_dtype is not None and not any(group.draft_layers for group in groups):
        raise ValueError(
            f"draft_kv_dtype={shown(draft_kv_dtype)} must be None: there is no draft layer, and no draft model"
        )
    if kv_scale is not None:
        groups = _with_scales(groups, kv_scale, own[1], drafts[1])
    return tuple(part for group in groups for part in _parts(group, own, drafts))


def _format_of(name: str, value: Any) -> RowFormat | None:
    if value is None:
        return None
    given = value if isinstance(value, str) else check_any_dtype(name, value).name
    if given not in FORMATS:
        raise ValueError(f"{name}={shown(given)} must be one of {', '.join(FORMATS)}")
    return FORMATS[given]


def _with_scales(
    groups: tuple[CacheGroup, ...], kv_scale: Any, own: RowFormat | None, drafts: RowFormat | None
) -> tuple[CacheGroup, ...]:
    """The groups with these scales; a mapping may leave out those that are not stored in a scaled format."""
    if not isinstance(kv_scale, Mapping):
        return tuple(dataclasses.replace(group, scales=_scales(group, kv_scale)) for group in groups)

    def is_scaled(group: CacheGroup) -> bool:
        formats = [own] * (group.draft_layers < group.num_layers) + [drafts] * (group.draft_layers > 0)
        return any(format is not None and format.scaled for format in formats)

    wanted = [group for group in groups if group.name in kv_scale or is_scaled(group)]
    check_groups("kv_scale", kv_scale, wanted or groups)
    return tuple(
        dataclasses.replace(group, scales=_scales(group, kv_scale[group.name])) if group.name in kv_scale else group
        for group in groups
    )


def _parts(
    group: CacheGroup, own: tuple[str, RowFormat | None], drafts: tuple[str, RowFormat | None]
) -> tuple[CacheGroup, ...]:
    """The group in the formats of its layers: one group, or two if its draft layers have another format."""
    kept = group.num_layers - group.draft_layers
    if not group.draft_layers:
        return (_in_format(group, *own),)
    drafting = _in_format(group, *drafts)
    if not kept:
        return (drafting,)
    target = _in_format(group, *own)
    if (target.dtype, target.row_format) == (drafting.dtype, drafting.row_format):
        return (target,)
    first, last = (
        {name: _of_layers(x, at) for name, x in group.scales.items()} for at in (slice(kept), slice(kept, None))
    )
    return (
        dataclasses.replace(target, num_layers=kept, draft_layers=0, scales=first),
        dataclasses.replace(drafting, name=DRAFT_LAYER, num_layers=group.draft_layers, scales=last),
    )


def _in_format(group: CacheGroup, name: str, format: RowFormat | None) -> CacheGroup:
    """The group in a format, the argument called ``name``; None for its own."""
    if format is not None:
        if format.latent_only and not isinstance(group.spec, MLASpec):
            raise ValueError(f"{name}={format.name} is of latent rows, but {group.name!r} holds keys and values")
        row_format = "blocks" if format.latent_only else "plain"
        group = dataclasses.replace(group, dtype=format.dtype, row_format=row_format)
    jax.eval_shape(lambda: group.create_pool(num_pages=1, page_size=1))  # raises what a pool would
    return group


def _of_layers(scale: Any, layers: slice) -> Any:
    """The scales of some of the layers; a scale without an axis of layers is that of all."""
    return scale if np.ndim(scale) == 0 else scale[layers]


def _scales(group: CacheGroup, given: Any) -> dict[str, Any]:
    names = ("scale",) if isinstance(group.spec, MLASpec) else ("k_scale", "v_scale")
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    if set(given) != set(names):
        raise ValueError(f"kv_scale[{group.name!r}] has {list(given)}, must be a dict with {', '.join(names)}")
    return dict(given)


def check_groups(name: str, value: Any, groups: Iterable[CacheGroup]) -> None:
    """Raises ValueError unless ``value``, the argument called ``name``, is a mapping with exactly these groups."""
    wanted = [group.name for group in groups]
    keys = f"a dict with {', '.join(map(repr, wanted))}"
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is a {type(value).__name__}, must be {keys}, a value for each cache group")
    if set(value) != set(wanted):
        raise ValueError(f"{name} has the cache groups {list(value)}, must be {keys}")


def layout_of(model: Any) -> Layout | None:
    """The layout of a sharded model, which runs inside ``jax.shard_map``; None of one that runs on one device."""
    return getattr(model, "layout", None)


def check_dtype(dtype: DTypeLike) -> np.dtype:
    """A model's dtype; ValueError for another than bfloat16, float16 or float32."""
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"dtype={dtype.name} must be one of {', '.join(DTYPES)}")
    return dtype


def check_step(mode: str, tree_mask: Any) -> None:
    """ValueError for a mode that does not exist, or a tree mask with one of prompts."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} must be one of {', '.join(MODES)}")
    if tree_mask is not None and mode in PROMPT_MODES:
        others = [name for name in MODES if name not in PROMPT_MODES]
        raise ValueError(f"tree_mask with mode={mode!r}: must be one of {', '.join(others)}")


@runtime_checkable
class CausalLM(Protocol):
    """A decoder over paged caches. It is an ``nnx.Module``, so that its arrays can be split off, donated or replaced.

    Shapes: T packed rows of the call, B requests, S most rows of a request.
    """

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; token ids are 0 to ``vocab_size - 1``."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that ``__call__`` and ``draft`` return."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Most tokens of a request, prompt and new ones together."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Token ids that end a text, from the checkpoint; may be empty."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the hidden states."""
        ...

    @property
    def can_draft(self) -> bool:
        """Whether the model has a draft layer, which ``draft`` and ``draft_logits`` need."""
        ...

    @property
    def draft_refusal(self) -> str | None:
        """The reason why the model has no draft layer, as a sentence; None if it has one."""
        ...

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups, at least one, with distinct names; they include draft layers."""
        ...

    def create_pools(self, *, num_pages: int | Mapping[str, int], page_size: int) -> Pools:
        """Creates an all-zero pool for each cache group, with ``num_pages`` pages each, or as a mapping gives."""
        ...

    def __call__(
        self,
        tokens: Int[Array, "T"],
        pools: Pools,
        metadata: Metadata,
        *,
        mode: str,
        tree_mask: Bool[Array, "B S M"] | None = None,
        implementation: Order = None,
        skip_threshold: float | None = None,
    ) -> tuple[Float[Array, "T dim"], Pools]:
        """Runs the rows of this call through all layers, which write their cache rows.

        Args:
            tokens: token ids; padding rows may hold any value, and their results are finite but meaningless.
            pools: pool of each cache group; donate them at the outermost jit.
            metadata: metadata of each cache group, from the mode's builder.
            mode: one of ``MODES``. "prefill" is "extend" for requests with no cached tokens.
            tree_mask: mask of a draft tree; not with prompts.
            implementation: attention implementation; None for the default choice.
            skip_threshold: as in ``mla_attn.mla_attention``.

        Returns:
            Hidden states after the final norm, and the pools.
        """
        ...

    def logits(self, hidden: Float[Array, "*rows dim"]) -> Float[Array, "*rows vocab"]:
        """Float32 logits of hidden states that ``__call__`` returned."""
        ...

    def draft(
        self,
        hidden: Float[Array, "T dim"],
        next_tokens: Int[Array, "T"],
        pools: Pools,
        metadata: Metadata,
        *,
        mode: str,
        tree_mask: Bool[Array, "B S M"] | None = None,
        implementation: Order = None,
        skip_threshold: float | None = None,
    ) -> tuple[Float[Array, "T dim"], Pools]:
        """Runs the draft layer: the row at position t takes the hidden state of position t and the token at t + 1.

        Returns:
            Hidden states for ``draft_logits`` or another draft step, and the pools.

        Raises:
            ValueError: ``can_draft`` is False.
        """
        ...

    def draft_logits(self, draft_hidden: Float[Array, "*rows dim"]) -> Float[Array, "*rows vocab"]:
        """Float32 logits of hidden states that ``draft`` returned."""
        ...
