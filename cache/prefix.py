"""Prefix reuse by content: which cached pages already hold the first tokens of a prompt.

A page's key is a digest of all tokens up to the page's end, so a prompt finds the longest run of cached pages that hold
its first tokens, no matter which request computed them. The cache is itself a holder of each page, so that the page
stays allocated when its requests end.
"""

import hashlib
import itertools
from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Int, Int32

from mla_attn.cache.allocator import PageAllocator
from mla_attn.checks import INT32_MAX, check_integer, check_window
from mla_attn.text import shown

_NO_PAGE, _NO_ENTRY = -1, -2  # of a page that is not cached; of a digest that never was


class PrefixCache:
    """Caches full pages of past and running requests by their tokens; the least recently used are evicted first.

    Args:
        pages: the allocator of the pages.
        window: None, or the attention window of all layers of the pool (visible keys, the row's own included), whose
            requests release the pages left of it. A prefix of n tokens is then found if the pages of positions
            n - window + 1 to n - 1 are cached, even if earlier ones are not.

    All methods work on arrays of pages, because a long prompt has tens of thousands, too many for Python loops. Only
    digests are looked up and stored one by one. An evicted page's digest is therefore forgotten later, when the page
    is cached under another one.
    """

    def __init__(self, pages: PageAllocator, *, window: int | None = None):
        self._pages, self._window = pages, check_window(window)
        # Entry by digest, valid if it is still that of its page, which is the entry modulo the number of pages.
        self._entries: dict[bytes, int] = {}
        self._entry_of = np.full(pages.num_pages, _NO_PAGE, np.int64)
        self._digest_of: dict[int, bytes] = {}  # by page: its last digest
        self._last_use = np.zeros(pages.num_pages, np.int64)  # value of ``_clock`` at each page's last use
        self._clock = 0

    @property
    def held(self) -> Int32[np.ndarray, "N"]:
        """1 for each cached page, else 0."""
        return (self._entry_of != _NO_PAGE).astype(np.int32)

    @property
    def num_pages(self) -> int:
        """Number of cached pages."""
        return int(np.count_nonzero(self._entry_of != _NO_PAGE))

    @property
    def num_idle_pages(self) -> int:
        """Number of pages that only this cache holds, which ``evict`` can free."""
        return int(np.count_nonzero(self._idle))

    @property
    def _idle(self) -> np.ndarray:
        return (self._entry_of != _NO_PAGE) & (self._pages.holders == 1)

    def extend_digests(
        self, digests: list[bytes], tokens: Sequence[int] | np.ndarray, *, kind: Hashable = None
    ) -> None:
        """Appends the digests of the full pages of ``tokens`` that ``digests`` does not have yet.

        Args:
            digests: digests of the first pages, from an earlier call with fewer tokens of the request; initially empty.
            tokens: a request's first tokens.
            kind: only requests of an equal kind share pages.
        """
        size = self._pages.page_size
        data = np.asarray(tokens[len(digests) * size :])  # int32 would round or wrap, into other tokens
        if data.size and not (data.dtype.kind in "iu" and data.min() >= -INT32_MAX and data.max() <= INT32_MAX):
            raise ValueError(f"tokens={shown(tokens)} must be integers of at most {INT32_MAX}")
        data = data.astype(np.int32)
        digest = digests[-1] if digests else repr(kind).encode()
        for begin in range(0, len(data) - size + 1, size):
            digest = hashlib.blake2b(digest + data[begin : begin + size].tobytes(), digest_size=16).digest()
            digests.append(digest)

    def find(self, digests: Sequence[bytes]) -> Int32[np.ndarray, "n"]:
        """Finds the longest cached run of pages at the start of ``digests``; -1 for pages left of the window."""
        if self._window is not None:
            return self._find_in_window(digests, self._window)
        pages, some = np.empty(0, np.int32), 8
        while len(pages) < len(digests):  # ever more at a time, because the rest is in vain if one of them is missing
            more = self._look_up(digests[len(pages) : some])
            if (missing := np.flatnonzero(more < 0)).size:
                return np.append(pages, more[: missing[0]])
            pages, some = np.append(pages, more), 8 * some
        return pages

    def _find_in_window(self, digests: Sequence[bytes], window: int) -> np.ndarray:
        pages, size = self._look_up(digests), self._pages.page_size
        lengths = np.arange(1, len(pages) + 1)
        run_begins = np.maximum.accumulate(np.where(pages < 0, lengths, 0))  # where the run of cached pages began
        seen = np.maximum(lengths * size - window + 1, 0) // size  # first page in the window
        if not (right := np.flatnonzero(run_begins <= seen)).size:
            return pages[:0]
        best = right[-1]
        pages[: seen[best]] = -1
        return pages[: best + 1]

    def _look_up(self, digests: Sequence[bytes]) -> np.ndarray:
        """The cached page of each digest; -1 if there is none."""
        entries = np.fromiter(map(self._entries.get, digests, itertools.repeat(_NO_ENTRY)), np.int64, len(digests))
        pages = entries % self._pages.num_pages
        return np.where(self._entry_of[pages] == entries, pages, -1).astype(np.int32)

    def num_available(self, found: Sequence[int] | Int[np.ndarray, "n"]) -> int:
        """Number of pages that can be allocated, free or evictable, without evicting those in ``found``."""
        idle, found = self._idle, np.asarray(found, np.int32)
        found = found[found >= 0]
        return self._pages.num_free + int(np.count_nonzero(idle)) - int(np.count_nonzero(idle[found]))

    def fork(self, request: Hashable, digests: Sequence[bytes]) -> int:
        """Adds ``request`` to the allocator with the longest cached run of pages at the start of ``digests``.

        Args:
            request: name of the new request, as in ``PageAllocator.create``.
            digests: digests of the pages that the request may share.

        Returns:
            The number of shared tokens, a multiple of the page size, 0 if none.
        """
        return self.share(request, self.find(digests))

    def share(self, request: Hashable, found: Int32[np.ndarray, "n"]) -> int:
        """Does what ``fork`` does, with the pages that ``find`` has just found."""
        self._pages.adopt(request, found)
        if len(found):
            self._touch(found[found >= 0])
        return len(found) * self._pages.page_size

    def keep(self, request: Hashable, digests: Sequence[bytes], *, begin: int = 0) -> None:
        """Caches the first pages of a live request, whose rows must be final, so that they outlive it.

        If a page with the same digest is cached already, that one is kept.

        Args:
            request: a live request of the allocator.
            digests: digests of its first pages.
            begin: number of pages that an earlier call cached.
        """
        row, first = self._pages.table([request])[0], self._pages.offset(request) // self._pages.page_size
        begin = max(begin, first)
        digests = digests[begin:]
        pages = row[begin - first :][: len(digests)]
        own = np.flatnonzero(self._entry_of[pages] == _NO_PAGE)
        if own.size:
            names = [digests[place] for place in own.tolist()]
            copies = self._look_up(names)
            self._add(list(itertools.compress(names, copies < 0)), pages[own[copies < 0]])
            pages[own] = np.where(copies < 0, pages[own], copies)
        self._touch(pages)

    def _add(self, digests: Sequence[bytes], pages: np.ndarray) -> None:
        self._pages.hold(pages)
        self._clock += 1  # so that no entry is used twice
        entries = self._clock * self._pages.num_pages + pages.astype(np.int64)
        for digest, page, entry in zip(digests, pages.tolist(), entries.tolist(), strict=True):
            old = self._digest_of.get(page)
            if old is not None and self._entries.get(old, _NO_ENTRY) % self._pages.num_pages == page:
                self._entries.pop(old, None)
            self._digest_of[page], self._entries[digest] = digest, entry
        self._entry_of[pages] = entries

    def evict(self, num_pages: int) -> bool:
        """Drops the least recently used pages until ``num_pages`` are free; drops none if there are too few.

        Returns whether ``num_pages`` are free now. The end of a text is dropped before its beginning; with a window,
        the beginning before the end.
        """
        num_pages = check_integer("num_pages", num_pages, 0)
        missing = num_pages - self._pages.num_free
        if missing <= 0:
            return True
        idle = np.flatnonzero(self._idle)
        if missing > len(idle):
            return False
        if missing < len(idle):
            idle = idle[np.argpartition(self._last_use[idle], missing - 1)[:missing]]
        self._drop(idle)
        return True

    def clear(self) -> None:
        """Drops all cached pages."""
        self._drop(np.flatnonzero(self._entry_of != _NO_PAGE))
        self._entries.clear()
        self._digest_of.clear()

    def _drop(self, pages: np.ndarray) -> None:
        self._entry_of[pages] = _NO_PAGE
        self._pages.unhold(pages)

    def _touch(self, pages: np.ndarray) -> None:
        """Marks pages as used, the first page as the most recent, so that a beginning outlives its continuation.

        With a window the last page is the most recent: a prefix is found by the pages of its last window.
        """
        self._clock += len(pages)
        order = pages if self._window is None else pages[::-1]
        self._last_use[order] = np.arange(self._clock, self._clock - len(pages), -1)
