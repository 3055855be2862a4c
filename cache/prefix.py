"""Prefix reuse by content: which cached pages already hold the first tokens of a prompt.

A page's key is a digest of all tokens up to the page's end, so a prompt finds the longest run of cached pages that hold
its first tokens, no matter which request computed them. The cache is itself a holder of each page, so that the page
stays allocated when its requests end.
"""

import hashlib
from collections.abc import Hashable, Sequence

import numpy as np

from mla_attn.cache.allocator import PageAllocator
from mla_attn.checks import INT32_MAX, check_integer, check_window
from mla_attn.text import shown


class PrefixCache:
    """Caches full pages of past and running requests by their tokens; the least recently used are evicted first.

    Args:
        pages: the allocator of the pages.
        window: None, or the attention window of all layers of the pool (visible keys, the row's own included), whose
            requests release the pages left of it. A prefix of n tokens is then found if the pages of positions
            n - window + 1 to n - 1 are cached, even if earlier ones are not.

    Attributes:
        held: int32 [N], 1 for each cached page.
    """

    def __init__(self, pages: PageAllocator, *, window: int | None = None):
        self._pages, self._window = pages, check_window(window)
        self.held = np.zeros(pages.num_pages, np.int32)
        self._kept: dict[bytes, int] = {}  # page id by digest
        self._digest_of: dict[int, bytes] = {}  # digest by page id
        self._last_use = np.zeros(pages.num_pages, np.int64)  # value of ``_clock`` at each page's last use
        self._clock = 0

    @property
    def num_pages(self) -> int:
        """Number of cached pages."""
        return len(self._kept)

    @property
    def num_idle_pages(self) -> int:
        """Number of pages that only this cache holds, which ``evict`` can free."""
        return int(np.count_nonzero(self._idle))

    @property
    def _idle(self) -> np.ndarray:
        return (self.held > 0) & (self._pages.holders == 1)

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

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Finds the longest cached run of pages at the start of ``digests``; -1 for pages left of the window."""
        if self._window is not None:
            return self._find_in_window(digests, self._window)
        found = []
        for digest in digests:
            page = self._kept.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def _find_in_window(self, digests: Sequence[bytes], window: int) -> list[int]:
        pages, size = [self._kept.get(digest, -1) for digest in digests], self._pages.page_size
        best, begin, run = 0, 0, 0  # pages found, first page in the window, cached pages in a row so far
        for n, page in enumerate(pages, start=1):
            run = run + 1 if page >= 0 else 0
            seen = max(n * size - window + 1, 0) // size
            if n - seen <= run:
                best, begin = n, seen
        return [-1] * begin + pages[begin:best]

    def num_available(self, found: Sequence[int]) -> int:
        """Number of pages that can be allocated, free or evictable, without evicting those in ``found``."""
        idle = self._idle
        found = [page for page in found if page >= 0]
        return self._pages.num_free + int(np.count_nonzero(idle)) - int(np.count_nonzero(idle[found]))

    def fork(self, request: Hashable, digests: Sequence[bytes]) -> int:
        """Adds ``request`` to the allocator with the longest cached run of pages at the start of ``digests``.

        Args:
            request: name of the new request, as in ``PageAllocator.create``.
            digests: digests of the pages that the request may share.

        Returns:
            The number of shared tokens, a multiple of the page size, 0 if none.
        """
        found = self.find(digests)
        self._touch([page for page in found if page >= 0])
        self._pages.adopt(request, found)
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
        own = zip(digests, row[begin - first :].tolist(), strict=False)
        new = {digest: page for digest, page in own if digest not in self._kept}
        pages = list(new.values())
        self._pages.hold(*pages)
        self._kept.update(new)
        self._digest_of.update(zip(pages, new, strict=True))
        self.held[pages] = 1
        self._touch([self._kept[digest] for digest in digests])

    def evict(self, num_pages: int) -> bool:
        """Drops the least recently used pages until ``num_pages`` are free; drops none if there are too few.

        Returns whether ``num_pages`` are free now. The end of a text is dropped before its beginning; with a window,
        the beginning before the end. Pages are chosen by array operations over all pages, because tens of thousands
        would be too many for a Python loop.
        """
        num_pages = check_integer("num_pages", num_pages, 0)
        missing = num_pages - self._pages.num_free
        if missing <= 0:
            return True
        idle = np.flatnonzero(self._idle)
        if missing > len(idle):
            return False
        oldest = np.argpartition(self._last_use[idle], missing - 1)[:missing]
        self._drop(idle[oldest].tolist())
        return True

    def clear(self) -> None:
        """Drops all cached pages."""
        self._drop(list(self._digest_of))

    def _drop(self, pages: list[int]) -> None:
        for page in pages:
            del self._kept[self._digest_of.pop(page)]
        self.held[pages] = 0
        self._pages.unhold(*pages)

    def _touch(self, pages: Sequence[int]) -> None:
        """Marks pages as used, the first page as the most recent, so that a beginning outlives its continuation.

        With a window the last page is the most recent: a prefix is found by the pages of its last window.
        """
        self._clock += len(pages)
        order = pages if self._window is None else pages[::-1]
        self._last_use[list(order)] = np.arange(self._clock, self._clock - len(pages), -1)
