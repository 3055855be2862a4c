"""The page tables of all cache groups, which are updated together.

Groups with equal windows share a page table, and so page ids, an allocator and a prefix cache. Groups without a window
share one; in a table with a window, a request holds only its last pages.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from jaxtyping import Int32

from mla_attn.cache.allocator import PageAllocator
from mla_attn.cache.prefix import PrefixCache
from mla_attn.checks import check_integer
from mla_attn.models.base import CacheGroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of requests and tokens in an engine.

    Attributes:
        max_batch: most running requests.
        max_len: most tokens of a request, prompt and new ones together.
        max_waiting: most waiting requests.
        prompt_tokens: most prompt tokens of a step, summed over requests.
        prompts_per_pass: most requests in a pass over prompts.
        prompt_chunk: most prompt tokens of a request in a step.
        verify_rows: most rows of a request in a decode or verify pass; 1 without drafts.
        rows_ahead: rows that a draft model caches beyond the committed tokens: 1, for the anchor.
        drafts_cached: whether the drafter caches its own rows, which requests without drafts do not write.
        whole_prompts: whether prompts are never split and never begin with cached pages, so that ``extend`` is unused.
        all_drafted: whether every request has drafts, so that ``decode`` is unused.
        prompts_first: whether a step that computes prompts does nothing else.
        overlap: whether a step reads the tokens of the previous step; otherwise it reads its own.
    """

    max_batch: int
    max_len: int
    max_waiting: int
    prompt_tokens: int
    prompts_per_pass: int
    prompt_chunk: int
    verify_rows: int = 1
    rows_ahead: int = 0
    drafts_cached: bool = True
    whole_prompts: bool = False
    all_drafted: bool = False
    prompts_first: bool = False
    overlap: bool = True

    def __post_init__(self):
        for name in ("max_batch", "max_len", "max_waiting", "prompt_tokens", "prompts_per_pass", "prompt_chunk"):
            check_integer(name, getattr(self, name), 1)

    @property
    def prompt_rows(self) -> int:
        """Most prompt rows of a request in a step."""
        return min(self.prompt_chunk, self.prompt_tokens, self.max_len)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """The sizes of the paged cache.

    Attributes:
        num_pages: pages of each group without a window; 0 if there is no such group.
        page_size: tokens per page.
        prefix_cache: whether full pages are shared by content, and kept while there is room.
        windows: pairs of a window and the pages of its groups.
    """

    num_pages: int
    page_size: int
    prefix_cache: bool
    windows: tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        check_integer("num_pages", self.num_pages, 0 if self.windows else 1)
        check_integer("page_size", self.page_size, 1)

    def pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def pages_of(self, window: int | None) -> int:
        """Pages of the groups with this window."""
        return self.num_pages if window is None else dict(self.windows)[window]


@dataclasses.dataclass(frozen=True)
class WindowSizes:
    """The pages that the groups with one window need.

    A request's window is counted from its final rows. After them come the rows of passes that were not read yet, and
    those of the next call. So a request holds pages for ``window - 1`` tokens and for these rows, which are
    ``ceil((window + rows + page_size - 2) / page_size)`` pages.

    Attributes:
        width: columns of the page table, which is the largest number of pages of a request.
        steady: pages of a request that does not compute a prompt.
        prompts: further pages for prompt rows, for all requests together.
    """

    width: int
    steady: int
    prompts: int

    @classmethod
    def of(cls, window: int, limits: Limits, *, page_size: int, prefix_cache: bool) -> "WindowSizes":
        """The sizes for a window of ``window`` visible keys, the row's own included."""
        unread = 1 + limits.overlap
        steady = unread * (limits.verify_rows + limits.rows_ahead) + prefix_cache * (page_size - 1)
        prompt = unread * limits.prompt_rows
        rows = max(steady, prompt) if limits.prompts_first else steady + prompt

        def pages(rows: int) -> int:
            return min(-(-(window + rows + page_size - 2) // page_size), -(-limits.max_len // page_size))

        prompts = -(-unread * limits.prompt_tokens // page_size) + unread * limits.prompts_per_pass
        return cls(pages(rows), pages(steady), prompts)

    def pages_for(self, max_batch: int) -> int:
        """Pages with which ``max_batch`` requests of any length can run at the same time."""
        return max(self.width, min(max_batch * self.width, max_batch * self.steady + self.prompts))

    def has_room(self, num_pages: int, most: Sequence[int]) -> bool:
        """Whether ``num_pages`` suffice for requests that would each need at most these pages without a window."""
        wide = sum(min(pages, self.width) for pages in most)
        return min(wide, sum(min(pages, self.steady) for pages in most) + self.prompts) <= num_pages


class Table:
    """The pages of the groups with one window (None for groups without a window)."""

    def __init__(self, cache: CacheSizes, limits: Limits, window: int | None):
        self.window = window
        facts = {"page_size": cache.page_size, "prefix_cache": cache.prefix_cache}
        self.sizes = None if window is None else WindowSizes.of(window, limits, **facts)
        width = cache.pages(limits.max_len) if self.sizes is None else self.sizes.width
        self.pages = PageAllocator(cache.pages_of(window), cache.page_size, table_width=width)
        self.prefixes = PrefixCache(self.pages, window=window)

    def make_free(self, num_pages: int) -> bool:
        """Evicts cached prefixes until ``num_pages`` are free; returns False if there are too few."""
        return self.pages.num_free >= num_pages or self.prefixes.evict(num_pages)


@dataclasses.dataclass(frozen=True)
class PageCounts:
    """The page counts of a cache group. Groups with equal windows share a page table, and so these counts.

    Attributes:
        window: number of visible keys per row, its own included; None for all.
        total: pages of the pool.
        used: pages that running requests hold, each counted once.
        shared: pages that more than one running request holds.
        idle: pages that only the prefix cache holds, which can be evicted.
    """

    window: int | None
    total: int
    used: int
    shared: int
    idle: int

    @classmethod
    def of(cls, table: Table) -> "PageCounts":
        holders = table.pages.holders - table.prefixes.held  # without the prefix cache
        used, shared = int(np.count_nonzero(holders)), int(np.count_nonzero(holders > 1))
        return cls(table.window, table.pages.num_pages, used, shared, table.prefixes.num_idle_pages)


class Tables:
    """The page tables of all cache groups.

    Attributes:
        all: all tables, that of the groups without a window first.
        full: the table of the groups without a window; None if all groups have windows.
        windowed: the tables with windows.
    """

    def __init__(self, limits: Limits, cache: CacheSizes):
        windows = ([None] if cache.num_pages else []) + [window for window, _ in cache.windows]
        self.all = [Table(cache, limits, window) for window in windows]
        self.full = self.all[0] if cache.num_pages else None
        self.windowed = [table for table in self.all if table.window is not None]
        self._cache = cache

    @property
    def widths(self) -> tuple[tuple[int | None, int], ...]:
        """Window and columns of each table, in the order of ``arrays``."""
        return tuple((table.window, table.pages.table_width) for table in self.all)

    def arrays(self, ids: Sequence[Hashable]) -> dict[str, np.ndarray]:
        """The inputs of passes: the tables side by side, and the offsets of those with a window."""
        tables = [table.pages.table(ids) for table in self.all]
        if not self.windowed:
            return {"page_table": tables[0]}
        offsets = np.stack([table.pages.offsets(ids) for table in self.windowed], axis=1)
        return {"page_table": np.concatenate(tables, axis=1), "kv_offsets": offsets}

    def find(self, digests: Sequence[bytes]) -> list[Int32[np.ndarray, "n"]]:
        """The cached pages of each table for the longest prefix that all tables have; see ``PrefixCache.find``."""
        found = [self.all[0].prefixes.find(digests)]
        for table in self.all[1:]:
            found.append(table.prefixes.find(digests[: len(found[-1])]))
        if len({len(pages) for pages in found}) > 1:  # a later table had a shorter prefix
            return self.find(digests[: len(found[-1])])
        return found

    def share(self, request: Hashable, found: Sequence[Int32[np.ndarray, "n"]]) -> None:
        """Adds a request with the pages of each table that ``find`` has just found."""
        for table, pages in zip(self.all, found, strict=True):
            table.prefixes.share(request, pages)

    def reserve(self, request: Hashable, rows: int, *, final: int) -> None:
        """Reserves rows of a request in the tables with windows, and releases the pages left of the window.

        Args:
            request: a running request.
            rows: total number of rows.
            final: number of leading rows that are final.
        """
        # The window of the last full page is kept too, so that later prompts can find that page.
        final -= self._cache.prefix_cache * (final % self._cache.page_size)
        for table in self.windowed:
            assert table.window is not None
            pages, left = table.pages, final - table.window + 1
            if left >= pages.offset(request) + pages.page_size:
                pages.release(request, left)
            length = pages.length(request)
            if rows > length:
                more = self._cache.pages(rows) - self._cache.pages(length)
                table.make_free(more)
                pages.grow(request, self._cache.pages(rows) * pages.page_size)

    def counts(self, groups: Iterable[CacheGroup]) -> "dict[str, PageCounts]":
        """The page counts of each cache group, by name."""
        by_window = {table.window: PageCounts.of(table) for table in self.all}
        return {group.name: by_window[group.window] for group in groups}

    def free(self, request: Hashable) -> None:
        for table in self.all:
            table.pages.free(request)

    def keep(self, request: Hashable, digests: Sequence[bytes], *, begin: int) -> None:
        """Calls ``PrefixCache.keep`` in each table."""
        for table in self.all:
            table.prefixes.keep(request, digests, begin=begin)

    def clear_prefixes(self) -> None:
        for table in self.all:
            table.prefixes.clear()

    def have_room(self, most: Sequence[int]) -> bool:
        """Whether the tables with windows suffice for requests that would need at most these pages without windows."""
        return all(
            table.sizes is not None and table.sizes.has_room(table.pages.num_pages, most) for table in self.windowed
        )
