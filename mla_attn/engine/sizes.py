"""The default sizes of an engine: its cache, which depends on free memory, and the shapes to compile for."""

import dataclasses
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from mla_attn.buckets import ladder
from mla_attn.checks import check_integer, check_integers, check_number
from mla_attn.engine.pages import CacheSizes, Limits, WindowSizes
from mla_attn.engine.scheduler import PROMPTS_PER_PASS
from mla_attn.memory import free_bytes, tree_bytes
from mla_attn.models.base import CacheGroup, CausalLM, check_groups, create_pools, stored_as
from mla_attn.models.sizes import check_model_fits
from mla_attn.passes import DraftModel, Drafts, NgramDrafts, Shapes, all_groups, check_drafts, most_positions
from mla_attn.speculative import DraftTree
from mla_attn.text import gibibytes

logger = logging.getLogger(__name__)

GPU_FRACTION, CPU_FRACTION = 0.9, 0.25  # passes need the rest; a CPU's memory is shared with other programs


def batch_ladder(batches: Sequence[int] | None, max_batch: int) -> tuple[int, ...]:
    """The batch sizes to compile passes for, smallest first; powers of two by default.

    Raises:
        ValueError: one of ``batches`` is below 1 or not an integer, or all are below ``max_batch``.
    """
    batches = () if batches is None else batches
    check_integers("batches", batches)
    if not len(batches):
        return ladder(max_batch)
    if min(batches) < 1 or max(batches) < max_batch:
        raise ValueError(f"batches={tuple(batches)} must be at least 1, the largest at least max_batch={max_batch}")
    return tuple(sorted(batches))


def row_ladder(prompt_tokens: int) -> tuple[int, ...]:
    """The numbers of rows to compile prompt passes for: every second power of two, because most passes are full."""
    return ladder(prompt_tokens, smallest=min(64, prompt_tokens))[::-2][::-1]


def choose_sizes(
    groups: Iterable[CacheGroup],
    limits: Limits,
    *,
    num_pages: int | Mapping[str, int] | None,
    max_len: int | None,
    page_size: int,
    prefix_cache: bool = True,
    memory_fraction: float | None = None,
    page_parts: int = 1,
) -> tuple[CacheSizes, Limits]:
    """Chooses the pages of the cache and the most tokens of a request; those that are None depend on free memory.

    Groups with a window get the pages that ``max_batch`` requests need, and as many again for prefixes. Groups without
    a window get the rest.

    Args:
        groups: all cache groups.
        limits: limits with the models' positions as ``max_len``.
        num_pages: pages of each group, as in ``Engine``.
        max_len: as in ``Engine``.
        page_size, prefix_cache, memory_fraction: as in ``Engine``.
        page_parts: devices that have equal parts of a page's tokens.

    Raises:
        ValueError: a size is not an integer or below 1; there is no room for one request of ``max_len``, or for a page;
            free memory is unknown; or a group with a window has too few pages.
    """
    groups, positions = tuple(groups), limits.max_len
    check_integer("page_size", page_size, 1)
    if max_len is not None:
        limits = dataclasses.replace(limits, max_len=check_integer("max_len", max_len, 1))
    if memory_fraction is not None:
        check_number("memory_fraction", memory_fraction, above=0, most=1)
    facts = {"page_size": page_size, "prefix_cache": prefix_cache}
    given = _given(num_pages, groups)
    windows = dict(window_pages(groups, limits, **facts, most=num_pages if isinstance(num_pages, int) else None))
    windows |= {window: pages for window, pages in given.items() if window is not None}
    for window, pages in windows.items():
        least = WindowSizes.of(window, limits, **facts).width
        if pages < least:
            raise ValueError(f"num_pages={pages} of the groups with window={window}: a request needs {least}")
    full = [group for group in groups if group.window is None]
    if full and None not in given:
        room = _room(memory_fraction) - sum(
            pages * page_bytes((g for g in groups if g.window == window), page_size // page_parts)
            for window, pages in windows.items()
        )
        given[None] = _choose_pages(page_bytes(full, page_size // page_parts), room, limits, max_len, page_size)
    if max_len is None and full:
        limits = dataclasses.replace(limits, max_len=min(positions, given[None] * page_size))
    if max_len is None:
        logger.info("max_len=%d, of max_position_embeddings=%d", limits.max_len, positions)
    return CacheSizes(num_pages=given.get(None, 0), windows=tuple(windows.items()), **facts), limits


def pass_shapes(
    limits: Limits,
    cache: CacheSizes,
    widths: Iterable[tuple[int | None, int]],
    batches: tuple[int, ...],
    prompt_rows: tuple[int, ...],
) -> Shapes:
    """The shapes that an engine's passes are compiled for; ``widths`` are window and columns of each page table."""
    widths = tuple(widths)
    return Shapes(
        batches=batches,
        prompt_rows=prompt_rows,
        table_width=dict(widths).get(None, 0),
        windows=tuple((window, width) for window, width in widths if window is not None),
        page_size=cache.page_size,
        max_len=limits.max_len,
        prompt_batches=(min(limits.prompts_per_pass, limits.max_batch),),
    )


def window_pages(
    groups: Iterable[CacheGroup], limits: Limits, *, page_size: int, prefix_cache: bool, most: int | None = None
) -> tuple[tuple[int, int], ...]:
    """The windows among the groups, and the pages of each window's groups: enough for ``max_batch`` requests, twice as
    many with a prefix cache, but at most ``most`` unless one request needs more."""
    made = []
    for window in sorted({group.window for group in groups if group.window is not None}):
        sizes = WindowSizes.of(window, limits, page_size=page_size, prefix_cache=prefix_cache)
        pages = sizes.pages_for(limits.max_batch) * (1 + prefix_cache)
        pages = min(pages, limits.max_batch * math.ceil(limits.max_len / page_size))
        made.append((window, max(sizes.width, pages if most is None else min(pages, most))))
    return tuple(made)


def check_engine_fits(
    model: CausalLM,
    draft: Drafts,
    trees: Sequence[DraftTree],
    *,
    num_pages: int,
    page_size: int,
    max_len: int,
    max_batch: int,
    prompt_tokens: int,
    kv_dtype: str | None = None,
    draft_kv_dtype: str | None = None,
) -> None:
    """Raises MemoryError, with figures, if an engine of these sizes does not fit on the default device.

    Args:
        model, draft: as in ``Engine``; their models may be abstract, so that nothing is loaded before.
        trees: ``speculation`` of the engine.
        num_pages, page_size, max_len, max_batch, prompt_tokens, kv_dtype, draft_kv_dtype: as in ``Engine``.

    Raises:
        ValueError: as in ``most_limits`` and ``choose_sizes``.
    """
    limits = most_limits(model, draft, trees, max_batch=max_batch, max_waiting=max_batch, prompt_tokens=prompt_tokens)
    groups = stored_as(all_groups(model, draft), kv_dtype, None, draft_kv_dtype)
    cache, _ = choose_sizes(groups, limits, num_pages=num_pages, max_len=max_len, page_size=page_size)
    models = (model, draft.model) if isinstance(draft, DraftModel) else (model,)
    sizes = {"num_pages": cache.num_pages, "page_size": page_size, "windows": dict(cache.windows)}
    check_model_fits(*models, **sizes, groups=groups)


def most_limits(
    model: CausalLM,
    draft: Drafts,
    trees: Sequence[DraftTree],
    *,
    max_batch: int,
    max_waiting: int,
    prompt_tokens: int,
) -> Limits:
    """The limits of an engine from its constructor's arguments, with the models' positions as ``max_len``.

    Raises:
        ValueError: a size is not an integer or below 1, ``trees`` is not a sequence of trees, or the drafter does not
            fit the model.
    """
    if not isinstance(trees, Sequence) or not all(isinstance(tree, DraftTree) for tree in trees):
        raise ValueError(f"speculation={trees!r} must be a sequence of DraftTree")
    if trees or draft is not None:
        check_drafts(draft, model, trees)
    return Limits(
        max_batch=max_batch,
        max_len=most_positions(model, draft),
        max_waiting=max_waiting,
        prompt_tokens=prompt_tokens,
        prompts_per_pass=PROMPTS_PER_PASS,
        prompt_chunk=prompt_tokens,
        **draft_limits(draft, trees),
    )


def draft_limits(draft: Drafts, trees: Sequence[DraftTree]) -> dict[str, Any]:
    """The attributes of ``Limits`` that depend on the drafter and on the engine's trees."""
    return {
        "verify_rows": max((tree.size for tree in trees), default=1),
        "rows_ahead": int(isinstance(draft, DraftModel)),
        "drafts_cached": not isinstance(draft, NgramDrafts),
    }


def _given(num_pages: Any, groups: tuple[CacheGroup, ...]) -> dict[int | None, int]:
    """The given numbers of pages, by window. A single number is for the groups without a window, if there are any."""
    given: dict[int | None, int] = {}
    if num_pages is None:
        return given
    if not isinstance(num_pages, Mapping):
        windows = {group.window for group in groups}
        return given | dict.fromkeys([None] if None in windows else windows, check_integer("num_pages", num_pages, 1))
    check_groups("num_pages", num_pages, groups)
    for group in groups:
        pages = check_integer(f"num_pages[{group.name!r}]", num_pages[group.name], 1)
        if given.setdefault(group.window, pages) != pages:
            raise ValueError(f"num_pages={dict(num_pages)} must be equal for groups of window={group.window}")
    return given


def _room(fraction: float | None) -> int:
    free = free_bytes()
    if free is None:
        raise ValueError("num_pages=None must be given: the device does not tell how much memory is free")
    return int((_fraction() if fraction is None else fraction) * free)


def _fraction() -> float:
    return CPU_FRACTION if jax.default_backend() == "cpu" else GPU_FRACTION


def _choose_pages(each: int, room: int, limits: Limits, max_len: int | None, page_size: int) -> int:
    """The pages of groups that together need ``each`` bytes per page."""
    most = limits.max_batch * math.ceil(limits.max_len / page_size)
    pages, least = room // each, math.ceil((max_len or 1) / page_size)
    # Rounded, since programs depend on it: with about as much memory free, another process finds its programs kept.
    num_pages = max(round_down(pages), min(pages, least))
    if jax.default_backend() == "cpu":  # at most what running requests can need; on a GPU the rest is for prefixes
        num_pages = min(num_pages, most)
    if num_pages < least:
        raise ValueError(
            f"max_len={max_len} needs {least} pages of {page_size} tokens, {gibibytes(least * each)}: there is room "
            f"for {gibibytes(max(room, 0))} of the memory that is free (memory_fraction)"
        )
    logger.info(
        "num_pages=%d of %d tokens: %s of %s", num_pages, page_size, gibibytes(num_pages * each), gibibytes(room)
    )
    return num_pages


def round_down(count: int) -> int:
    """The count with its highest six binary digits alone: at most 3 % less."""
    lost = max(count.bit_length() - 6, 0)
    return count >> lost << lost


def page_bytes(groups: Iterable[CacheGroup], page_size: int) -> int:
    """Bytes of a page in the pools of all these cache groups together."""
    groups = tuple(groups)
    return tree_bytes(jax.eval_shape(lambda: create_pools(groups, num_pages=1, page_size=page_size)))
