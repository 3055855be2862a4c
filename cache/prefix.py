"""Prefix reuse by content: which cached pages already hold the first tokens of a prompt.

Kept sequences are requests of the page allocator that nobody runs: a fork of a request keeps its full pages when it
ends. A digest of all tokens up to a page's end names that page, so a prompt finds the longest run of pages that holds
its first tokens, whoever computed them.
"""

import collections
import hashlib
import itertools
from collections.abc import Hashable, Sequence

import numpy as np

from mla_attn.cache.pages import PageAllocator


class PrefixCache:
    """Full pages of past and running requests, found by their tokens; the least recently used go first.

    Args:
        pages: the allocator, whose requests share their pages with what is kept here.
    """

    def __init__(self, pages: PageAllocator):
        self._pages = pages
        self._names = itertools.count()
        # Kept sequences and the digests of their pages, least recently used first.
        self._kept: collections.OrderedDict[Hashable, list[bytes]] = collections.OrderedDict()
        # Each digest's sequence: the one kept last. A sequence to which no digest leads is of no use and is let go.
        self._holder: dict[bytes, Hashable] = {}
        self._leading: collections.Counter[Hashable] = collections.Counter()

    @property
    def num_pages(self) -> int:
        """Pages whose content can be found, each counted once."""
        return len(self._holder)

    def fork(self, request: Hashable, tokens: Sequence[int], *, kind: Hashable = None) -> int:
        """Adds ``request`` to the allocator, sharing the longest kept run of full pages that begins ``tokens``.

        Args:
            request: of ``PageAllocator.create``.
            tokens: the request's tokens whose rows may be taken from there.
            kind: only what was kept under an equal kind is found.

        Returns:
            Tokens that are shared, a multiple of the page size, 0 if none.
        """
        known = itertools.takewhile(self._holder.__contains__, self._digests(tokens, kind))
        path = [self._holder[digest] for digest in known]
        if not path:
            self._pages.create(request)
            return 0
        self._touch(path)
        return self._pages.fork(path[-1], request, len(path) * self._pages.page_size)

    def keep(self, request: Hashable, tokens: Sequence[int], *, kind: Hashable = None) -> None:
        """Keeps the full pages of a live request's first ``tokens``, whose rows are final, also after it is freed.

        Args:
            request: live in the allocator.
            tokens: its first tokens, at most its length.
            kind: as in ``fork``.
        """
        digests = self._digests(tokens, kind)
        if not digests or digests[-1] in self._holder:
            self._touch([self._holder[digest] for digest in digests if digest in self._holder])
            return
        sequence = ("kept", next(self._names))
        self._pages.fork(request, sequence, len(digests) * self._pages.page_size)
        self._kept[sequence] = digests
        for digest in digests:
            before = self._holder.get(digest)
            self._holder[digest] = sequence
            self._leading[sequence] += 1
            if before is not None:
                self._lose(before)

    def evict(self, num_pages: int) -> bool:
        """Let go of least recently used pages that nobody else holds until ``num_pages`` are free in the allocator.

        The end of a sequence goes before its beginning. Returns whether that many are free now.
        """
        for sequence in list(self._kept):
            while self._pages.num_free < num_pages and sequence in self._kept:
                if self._pages.shares_last_page(sequence):
                    break
                self._drop_last(sequence)
        return self._pages.num_free >= num_pages

    def clear(self) -> None:
        """Let go of everything."""
        for sequence in list(self._kept):
            self._pages.free(sequence)
        self._kept.clear()
        self._holder.clear()
        self._leading.clear()

    def _touch(self, path: list[Hashable]) -> None:
        """Mark as used, the first of ``path`` last: who holds a beginning outlives who holds what follows it."""
        for sequence in reversed(path):
            self._kept.move_to_end(sequence)

    def _drop_last(self, sequence: Hashable) -> None:
        digests = self._kept[sequence]
        digest = digests.pop()
        self._pages.truncate(sequence, len(digests) * self._pages.page_size)
        if self._holder.get(digest) == sequence:
            del self._holder[digest]
            self._lose(sequence)

    def _lose(self, sequence: Hashable) -> None:
        """A digest leads elsewhere now."""
        self._leading[sequence] -= 1
        if not self._leading[sequence]:
            del self._leading[sequence], self._kept[sequence]
            self._pages.free(sequence)

    def _digests(self, tokens: Sequence[int], kind: Hashable) -> list[bytes]:
        """A name for each full page: a digest of the kind and all tokens up to its end."""
        size = self._pages.page_size
        data = np.asarray(tokens, np.int32)
        digest, names = repr(kind).encode(), []
        for begin in range(0, len(data) - size + 1, size):
            digest = hashlib.blake2b(digest + data[begin : begin + size].tobytes(), digest_size=16).digest()
            names.append(digest)
        return names
