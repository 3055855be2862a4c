"""Page tables of all cache groups, kept in step: which request has which pages, and what is found again.

Groups of one window share a page table, and so page ids, an allocator and a prefix cache: those without a window one,
those of each window another, in which a request holds its last pages alone.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from mla_attn.cache.allocator import PageAllocator
from mla_attn.cache.prefix import PrefixCache
from mla_attn.checks import check_integer
from mla_attn.models.base import CacheGroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How many requests and tokens run at a time.

    Attributes:
        max_batch: most requests running.
        max_len: most tokens of a request, prompt and new ones together.
        max_waiting: most requests waiting.
        prompt_tokens: most prompt tokens of a step, all requests together.
        prompts_per_pass: most requests in a pass over prompts.
        prompt_chunk: most prompt tokens of a request in a step.
        verify_rows: most rows of a request in a pass that is not over prompts: 1 without drafts.
        rows_ahead: rows that a draft model has cached beyond the committed ones: the anchor's.
        drafts_cached: whether the drafter caches rows of its own, which requests without drafts do not write.
        whole_prompts: prompts never come in parts, nor begin with cached pages: ``extend`` is not needed.
        prompts_first: a step that computes prompts does nothing else.
        overlap: a step reads the tokens of the step before; otherwise its own.
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
    """The paged cache.

    Attributes:
        num_pages: pages in all of the groups without a window; 0 if there is no such group.
        page_size: tokens per page.
        prefix_cache: whether full pages are found by their content, and kept while there is room.
        windows: of the other groups each window, and the pages of its groups.
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
        """Pages of the groups of that window."""
        return self.num_pages if window is None else dict(self.windows)[window]


@dataclasses.dataclass(frozen=True)
class WindowSizes:
    """What the groups of one window need.

    Between what is known to be final, from where a request's window is counted, and the last row of a call lie the rows
    of that call and those of passes that were not read yet. A request then holds pages of ``window - 1`` tokens and of
    these rows: ``ceil((window + rows + page_size - 2) / page_size)`` of them.

    Attributes:
        width: columns of the page table: most pages of a request.
        steady: pages of a request that computes no prompt.
        prompts: pages beside these for prompt rows, of all requests together.
    """

    width: int
    steady: int
    prompts: int

    @classmethod
    def of(cls, window: int, limits: Limits, *, page_size: int, prefix_cache: bool) -> "WindowSizes":
        """For a window of so many keys, the row's own included."""
        unread = 1 + limits.overlap
        steady = unread * (limits.verify_rows + limits.rows_ahead) + prefix_cache * (page_size - 1)
        prompt = unread * limits.prompt_rows
        rows = max(steady, prompt) if limits.prompts_first else steady + prompt

        def pages(rows: int) -> int:
            return min(-(-(window + rows + page_size - 2) // page_size), -(-limits.max_len // page_size))

        prompts = -(-unread * limits.prompt_tokens // page_size) + unread * limits.prompts_per_pass
        return cls(pages(rows), pages(steady), prompts)

    def pages_for(self, max_batch: int) -> int:
        """Pages with which so many requests run side by side, whatever they ask for."""
        return max(self.width, min(max_batch * self.width, max_batch * self.steady + self.prompts))

    def has_room(self, num_pages: int, most: Sequence[int]) -> bool:
        """Whether requests that hold at ``most`` so many pages, were there no window, never run out of them."""
        wide = sum(min(pages, self.width) for pages in most)
        return min(wide, sum(min(pages, self.steady) for pages in most) + self.prompts) <= num_pages


class Table:
    """Pages of the groups of one window, None for those that see all keys."""

    def __init__(self, cache: CacheSizes, limits: Limits, window: int | None):
        self.window = window
        facts = {"page_size": cache.page_size, "prefix_cache": cache.prefix_cache}
        self.sizes = None if window is None else WindowSizes.of(window, limits, **facts)
        width = cache.pages(limits.max_len) if self.sizes is None else self.sizes.width
        self.pages = PageAllocator(cache.pages_of(window), cache.page_size, table_width=width)
        self.prefixes = PrefixCache(self.pages, window=window)

    def make_free(self, num_pages: int) -> bool:
        """Have so many pages free, whatever of prefixes that costs; False if there are too few."""
        return self.pages.num_free >= num_pages or self.prefixes.evict(num_pages)


@dataclasses.dataclass(frozen=True)
class PageCounts:
    """Pages of a cache group. Groups with equal windows have one page table, and these counts in common.

    Attributes:
        window: keys that a row sees, itself included; None for all.
        total: pages of the pool.
        used: pages that running requests hold, each counted once.
        shared: those of them that several hold.
        idle: pages that the prefix cache alone holds, until a request needs them.
    """

    window: int | None
    total: int
    used: int
    shared: int
    idle: int

    @classmethod
    def of(cls, table: Table) -> "PageCounts":
        holders = table.pages.holders - table.prefixes.held  # running requests alone
        used, shared = int(np.count_nonzero(holders)), int(np.count_nonzero(holders > 1))
        return cls(table.window, table.pages.num_pages, used, shared, table.prefixes.num_idle_pages)


class Tables:
    """The page tables of all cache groups.

    Attributes:
        all: of groups without a window first.
        full: that one; None if all groups have windows.
        windowed: the others.
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
        """What passes take: the tables side by side, and where those with a window begin."""
        tables = [table.pages.table(ids) for table in self.all]
        if not self.windowed:
            return {"page_table": tables[0]}
        offsets = np.stack([table.pages.offsets(ids) for table in self.windowed], axis=1)
        return {"page_table": np.concatenate(tables, axis=1), "kv_offsets": offsets}

    def find(self, digests: Sequence[bytes]) -> list[list[int]]:
        """Pages of each table for the longest beginning that all of them hold, as ``PrefixCache.find``."""
        found = [self.all[0].prefixes.find(digests)]
        for table in self.all[1:]:
            found.append(table.prefixes.find(digests[: len(found[-1])]))
        if len({len(pages) for pages in found}) > 1:  # what the last ones hold is too short for those before
            return self.find(digests[: len(found[-1])])
        return found

    def fork(self, request: Hashable, digests: Sequence[bytes]) -> None:
        """Add a request with the pages that ``find`` found for just these digests."""
        for table in self.all:
            table.prefixes.fork(request, digests)

    def reserve(self, request: Hashable, rows: int, *, final: int) -> None:
        """Room for so many rows of a request in the tables with windows, which let go of what no row sees any more.

        Args:
            request: a running one.
            rows: in all.
            final: those of them that are cached for good, of which no pass will take one back.
        """
        # So that the last full page can be found: its own window is then there.
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
        """Pages of each cache group, under its name."""
        by_window = {table.window: PageCounts.of(table) for table in self.all}
        return {group.name: by_window[group.window] for group in groups}

    def free(self, request: Hashable) -> None:
        for table in self.all:
            table.pages.free(request)

    def keep(self, request: Hashable, digests: Sequence[bytes], *, begin: int) -> None:
        """As ``PrefixCache.keep``, in each table."""
        for table in self.all:
            table.prefixes.keep(request, digests, begin=begin)

    def clear_prefixes(self) -> None:
        for table in self.all:
            table.prefixes.clear()

    def have_room(self, most: Sequence[int]) -> bool:
        """Whether tables with windows are large enough for requests of at most so many pages each at a time."""
        return all(
            table.sizes is not None and table.sizes.has_room(table.pages.num_pages, most) for table in self.windowed
        )
