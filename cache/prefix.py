"""Prefix reuse by content: which cached pages already hold the first tokens of a prompt.

A digest of all tokens up to a page's end names that page, so a prompt finds the longest run of pages that holds its
first tokens, whoever computed them. The cache holds each such page once, beside the requests that do, so that it stays
when they end.
"""

import hashlib
from collections.abc import Hashable, Sequence

import numpy as np

from mla_attn.cache.allocator import PageAllocator
from mla_attn.checks import INT32_MAX, check_integer, check_window
from mla_attn.text import shown


class PrefixCache:
    """Full pages of past and running requests, found by their tokens; the least recently used go first.

    Args:
        pages: the allocator, whose requests share their pages with what is kept here.
        window: keys that a row of its pool sees, itself included, where pages left of every window are released; None
            for all. n tokens are then found where the pages of n - window + 1 .. n - 1 are kept, whatever came before.

    Attributes:
        held: int32 [N], 1 for each page that is kept here.
    """

    def __init__(self, pages: PageAllocator, *, window: int | None = None):
        self._pages, self._window = pages, check_window(window)
        self.held = np.zeros(pages.num_pages, np.int32)
        self._kept: dict[bytes, int] = {}  # page of each digest
        self._digest_of: dict[int, bytes] = {}  # the other way round
        self._last_use = np.zeros(pages.num_pages, np.int64)  # of kept pages, by ``_clock``
        self._clock = 0

    @property
    def num_pages(self) -> int:
        """Pages whose content can be found."""
        return len(self._kept)

    @property
    def num_idle_pages(self) -> int:
        """Pages that nobody holds but this cache: ``evict`` can free as many."""
        return int(np.count_nonzero(self._idle))

    @property
    def _idle(self) -> np.ndarray:
        return (self.held > 0) & (self._pages.holders == 1)

    def extend_digests(
        self, digests: list[bytes], tokens: Sequence[int] | np.ndarray, *, kind: Hashable = None
    ) -> None:
        """Append the names of the full pages of ``tokens`` that ``digests`` does not have yet.

        Args:
            digests: names of the first pages, of an earlier call for a beginning of ``tokens``; empty at first.
            tokens: a request's first tokens.
            kind: pages are found by requests of an equal kind alone.
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
        """The longest kept run of pages that begins ``digests``; -1 for those that a window leaves behind."""
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
        best, begin, run = 0, 0, 0  # pages found, the first that is seen, kept pages in a row so far
        for n, page in enumerate(pages, start=1):
            run = run + 1 if page >= 0 else 0
            seen = max(n * size - window + 1, 0) // size
            if n - seen <= run:
                best, begin = n, seen
        return [-1] * begin + pages[begin:best]

    def num_available(self, found: Sequence[int]) -> int:
        """Pages that may be taken, free or idle, beside those ``found``."""
        idle = self._idle
        found = [page for page in found if page >= 0]
        return self._pages.num_free + int(np.count_nonzero(idle)) - int(np.count_nonzero(idle[found]))

    def fork(self, request: Hashable, digests: Sequence[bytes]) -> int:
        """Adds ``request`` to the allocator with the longest kept run of pages that begins ``digests``.

        Args:
            request: name of the new request, as ``PageAllocator.create`` takes it.
            digests: names of the pages whose rows may be taken from there.

        Returns:
            Tokens that are shared, a multiple of the page size, 0 if none.
        """
        found = self.find(digests)
        self._touch([page for page in found if page >= 0])
        self._pages.adopt(request, found)
        return len(found) * self._pages.page_size

    def keep(self, request: Hashable, digests: Sequence[bytes], *, begin: int = 0) -> None:
        """Keeps the first pages of a live request, whose rows are final, also after it is freed.

        Where a page of equal content is kept already, that one stays.

        Args:
            request: a live request of the allocator.
            digests: names of its first pages.
            begin: pages that were kept by an earlier call.
        """
        row, first = self._pages.table([request])[0], self._pages.offset(request) // self._pages.page_size
        begin = max(begin, first)
        for page, digest in zip(row[begin - first :].tolist(), digests[begin:], strict=False):
            if digest not in self._kept:
                self._pages.hold(page)
                self._kept[digest], self._digest_of[page] = page, digest
                self.held[page] = 1
        self._touch([self._kept[digest] for digest in digests[begin:]])

    def evict(self, num_pages: int) -> bool:
        """Drops least recently used pages until ``num_pages`` are free in the allocator; none if there are too few.

        The end of a text goes before its beginning. Returns whether that many are free now. Pages are chosen by array
        operations over all of them: running requests may hold tens of thousands, too many for a Python loop.
        """
        num_pages = check_integer("num_pages", num_pages, 0)
        missing = num_pages - self._pages.num_free
        if missing <= 0:
            return True
        idle = np.flatnonzero(self._idle)
        if missing > len(idle):
            return False
        oldest = np.argpartition(self._last_use[idle], missing - 1)[:missing]
        for page in idle[oldest].tolist():
            self._drop(self._digest_of[page])
        return True

    def clear(self) -> None:
        """Drops all pages."""
        for digest in list(self._kept):
            self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        page = self._kept.pop(digest)
        del self._digest_of[page]
        self.held[page] = 0
        self._pages.unhold(page)

    def _touch(self, pages: Sequence[int]) -> None:
        """Marks pages as used, the first as used last: a beginning outlives what follows it."""
        self._clock += len(pages)
        self._last_use[list(pages)] = np.arange(self._clock, self._clock - len(pages), -1)
