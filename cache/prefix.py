"""Prefix reuse by content: which cached pages already hold the first tokens of a prompt.

Kept sequences are requests of the page allocator that nobody runs: a fork of a request keeps its full pages when it
ends. A digest of all tokens up to a page's end names that page, so a prompt finds the longest run of pages that holds
its first tokens, whoever computed them.
"""

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Hashable, Sequence

import numpy as np

from mla_attn.cache.allocator import PageAllocator
from mla_attn.checks import INT32_MAX, check_integer


@dataclasses.dataclass
class _Kept:
    """A kept sequence: page i of ``row`` ends what digest i names."""

    digests: list[bytes]
    row: np.ndarray
    found_by: int = 0  # digests that lead here


class PrefixCache:
    """Full pages of past and running requests, found by their tokens; the least recently used go first.

    Args:
        pages: the allocator, whose requests share their pages with what is kept here.

    Attributes:
        held: int32 [N], how many kept sequences hold each page.
    """

    def __init__(self, pages: PageAllocator):
        self._pages = pages
        self._names = itertools.count()
        self.held = np.zeros(pages.num_pages, np.int32)
        self._kept: collections.OrderedDict[Hashable, _Kept] = collections.OrderedDict()  # least recently used first
        # Each digest's sequence: the one kept last. A sequence to which no digest leads is of no use and is let go.
        self._holder: dict[bytes, Hashable] = {}

    @property
    def num_pages(self) -> int:
        """Pages whose content can be found, each counted once."""
        return len(self._holder)

    @property
    def num_idle_pages(self) -> int:
        """Pages that nobody holds but this cache: ``evict`` can free as many."""
        return int(np.count_nonzero((self.held > 0) & (self.held == self._pages.holders)))

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
        # Not the last one alone: the way to it may have led through a sequence that is gone.
        if all(digest in self._holder for digest in digests):
            self._touch([self._holder[digest] for digest in digests])
            return
        name = ("kept", next(self._names))
        self._pages.fork(request, name, len(digests) * self._pages.page_size)
        sequence = self._kept[name] = _Kept(digests, self._pages.table([name])[0, : len(digests)], len(digests))
        self.held[sequence.row] += 1
        for digest in digests:
            before = self._holder.get(digest)
            self._holder[digest] = name
            if before is not None:
                self._lose(before)

    def evict(self, num_pages: int) -> bool:
        """Let go of least recently used pages until ``num_pages`` are free in the allocator; of none if that cannot be.

        The end of a sequence goes before its beginning. Returns whether that many are free now.
        """
        num_pages = check_integer("num_pages", num_pages, 0)
        if num_pages > self._pages.num_free + self.num_idle_pages:
            return False
        for name in list(self._kept):
            while self._pages.num_free < num_pages and name in self._kept and self._ends_exclusive(name):
                self._drop_last(name)
        return True

    def clear(self) -> None:
        """Let go of everything."""
        for name in self._kept:
            self._pages.free(name)
        self._kept.clear()
        self._holder.clear()
        self.held[:] = 0

    def _touch(self, path: list[Hashable]) -> None:
        """Mark as used, the first of ``path`` last: who holds a beginning outlives who holds what follows it."""
        for name in reversed(path):
            self._kept.move_to_end(name)

    def _ends_exclusive(self, name: Hashable) -> bool:
        """Whether nobody else holds the last page of a kept sequence. If somebody does, it holds all before it too."""
        return bool(self._pages.holders[self._kept[name].row[-1]] == 1)

    def _drop_last(self, name: Hashable) -> None:
        sequence = self._kept[name]
        digest = sequence.digests.pop()
        self.held[sequence.row[-1]] -= 1
        sequence.row = sequence.row[:-1]
        self._pages.truncate(name, len(sequence.digests) * self._pages.page_size)
        if self._holder.get(digest) == name:
            del self._holder[digest]
            self._lose(name)

    def _lose(self, name: Hashable) -> None:
        """A digest leads elsewhere now."""
        sequence = self._kept[name]
        sequence.found_by -= 1
        if not sequence.found_by:
            self.held[sequence.row] -= 1
            del self._kept[name]
            self._pages.free(name)

    def _digests(self, tokens: Sequence[int], kind: Hashable) -> list[bytes]:
        """A name for each full page: a digest of the kind and all tokens up to its end."""
        size = self._pages.page_size
        data = np.asarray(tokens)  # not as int32: rounded or wrapped, tokens would be taken for others
        if data.size and not (data.dtype.kind in "iu" and data.min() >= -INT32_MAX and data.max() <= INT32_MAX):
            raise ValueError(f"tokens={tokens!r} must be integers of at most {INT32_MAX}")
        data = data.astype(np.int32)
        digest, names = repr(kind).encode(), []
        for begin in range(0, len(data) - size + 1, size):
            digest = hashlib.blake2b(digest + data[begin : begin + size].tobytes(), digest_size=16).digest()
            names.append(digest)
        return names
