"""The page allocator: host-side bookkeeping of which request has which pages of a paged pool.

It is pure NumPy and never touches the device. A request has room for its first ``length`` tokens; token t is stored in
row ``t % page_size`` of page ``table[t // page_size]``. A step only writes rows at positions between the request's old
and new length, so one invariant is enough to keep shared pages from being written:

    a page held by several requests lies entirely below the length of each of them.

``fork`` therefore shares full pages only, and ``truncate`` drops a shared page that would be left partly filled. The
page that ``grow`` continues in is then never shared. The host cannot copy rows, so both methods return how many leading
tokens still have rows; the caller recomputes the others, or copies them on the device.

A prefix cache (``mla_attn.cache.prefix``) keeps full pages alive independently of the requests that use them, with
``hold`` and ``unhold``; ``adopt`` creates a request that begins with such pages.
"""

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Int, Int32

from mla_attn.checks import INT32_MAX, check_integer

Pages = Sequence[int] | Int[np.ndarray, "n"]  # page ids


class OutOfPages(RuntimeError):
    """The pool has too few free pages for a call. The call changed nothing.

    Attributes:
        needed: pages that the call needed.
        free: pages that were free.
        num_pages: pages of the pool, free or not.
    """

    def __init__(self, needed: int, free: int, num_pages: int):
        super().__init__(f"{needed} pages needed, {free} of {num_pages} free")
        self.needed, self.free, self.num_pages = needed, free, num_pages


@dataclasses.dataclass
class _Request:
    row: np.ndarray  # i32[table_width]: page ids in order of position from page ``first`` on, then -1
    length: int  # tokens that it has room for; its last page is number ceil(length / page_size) - 1
    first: int = 0  # number of leading pages that were released


class PageAllocator:
    """Holds the page tables of all live requests over one pool of pages.

    The free page with the lowest id is taken first. Which pages a call gets then depends only on which pages are free,
    not on the order in which they were freed: runs are reproducible, and pages in use stay at the low end of the pool.

    Every method checks its arguments first and changes nothing when it raises. ``ValueError`` names the argument, its
    value and what is allowed. ``request`` may be any hashable value.

    Args:
        num_pages: pages N of one layer of the pool; ids are 0 .. N - 1.
        page_size: tokens P per page.
        table_width: most pages W of a request, so at most W * P tokens; constant, because compiled shapes contain it.
    """

    def __init__(self, num_pages: int, page_size: int, *, table_width: int):
        for name, value in (("num_pages", num_pages), ("page_size", page_size), ("table_width", table_width)):
            check_integer(name, value, 1)
        self.num_pages, self.page_size, self.table_width = int(num_pages), int(page_size), int(table_width)
        self._num_free, self._lowest = self.num_pages, 0  # no page below the second is free
        self._holders = np.zeros(self.num_pages, np.int32)  # tables that contain the page, plus holds; 0 = free
        self._requests: dict[Hashable, _Request] = {}

    def create(self, request: Hashable, num_tokens: int = 0) -> None:
        """Adds a request with room for ``num_tokens`` tokens.

        Raises:
            ValueError: ``request`` is live, or ``num_tokens`` is not in 0 .. table_width * page_size.
            OutOfPages: too few pages are free.
        """
        self._check_new("request", request)
        self._check_tokens(num_tokens)
        new = _Request(np.full(self.table_width, -1, np.int32), 0)
        self._extend(new, num_tokens)
        self._requests[request] = new

    def grow(self, request: Hashable, num_tokens: int) -> None:
        """Extends a request to room for ``num_tokens`` tokens in total. It keeps the pages that it has.

        Raises:
            ValueError: ``request`` is not live, or ``num_tokens`` is not in length .. offset + table_width * page_size.
            OutOfPages: too few pages are free.
        """
        found = self._find("request", request)
        self._check_tokens(num_tokens, least=found.length, first=found.first)
        self._extend(found, num_tokens)

    def truncate(self, request: Hashable, num_tokens: int) -> int:
        """Drops the tokens from ``num_tokens`` on (rejected drafts, preemption) and the pages past them.

        A page that would be left partly filled is dropped too if it is shared, because growing would write to it.

        Returns:
            The new length: ``num_tokens``, or, where a shared page was dropped, the next lower multiple of
            ``page_size``; rows from there to ``num_tokens`` must be recomputed or copied. This cannot happen if only
            final rows, such as those of accepted tokens, are ever passed to ``fork``.

        Raises:
            ValueError: ``request`` is not live, or ``num_tokens`` is not in offset .. length.
        """
        found = self._find("request", request)
        self._check_tokens(num_tokens, least=found.first * self.page_size, most=found.length)
        full, partial = divmod(int(num_tokens), self.page_size)
        if partial and self._holders[found.row[full - found.first]] > 1:
            partial = 0
        self._release(found, full + (partial > 0))
        found.length = full * self.page_size + partial
        return found.length

    def fork(self, parent: Hashable, child: Hashable, num_tokens: int) -> int:
        """Adds ``child``, which shares the full pages among the first ``num_tokens`` tokens of ``parent``.

        It takes no page, so it cannot raise ``OutOfPages``. ``grow(child, ...)`` then adds pages that the child does
        not share, the first of them for the tokens of a last page that was not full. The allocator sees lengths, not
        contents: rows of the shared tokens must be written already (or by a call that comes before any use of them),
        and be the same for both requests.

        Returns:
            The child's length, which is the number of shared tokens: ``num_tokens`` rounded down to a multiple of
            ``page_size``. Rows after them must be computed for the child, or copied from the parent.

        Raises:
            ValueError: ``parent`` is not live, ``child`` is, or ``num_tokens`` is not in offset .. length of
                ``parent``.
        """
        found = self._find("parent", parent)
        self._check_new("child", child)
        self._check_tokens(num_tokens, least=found.first * self.page_size, most=found.length)
        full = int(num_tokens) // self.page_size
        row, shared = np.full_like(found.row, -1), found.row[: full - found.first]
        row[: len(shared)] = shared
        self._holders[shared] += 1
        self._requests[child] = _Request(row, full * self.page_size, found.first)
        return full * self.page_size

    def adopt(self, request: Hashable, pages: Pages) -> None:
        """Adds a request that begins with ``pages``: full pages that already have a holder.

        Leading entries may be -1, for pages released below a window.

        Raises:
            ValueError: ``request`` is live, a page is free, or there are more than ``table_width`` pages.
        """
        self._check_new("request", request)
        length = len(pages) * self.page_size
        there = np.flatnonzero(np.asarray(pages) != -1)
        first = int(there[0]) if there.size else len(pages)
        pages = pages[first:]
        check_integer("len(pages)", len(pages), 0, self.table_width)
        row = np.full(self.table_width, -1, np.int32)
        row[: len(pages)] = self._held(pages)
        self._holders[row[: len(pages)]] += 1
        self._requests[request] = _Request(row, length, first)

    def hold(self, pages: Pages) -> None:
        """Adds a holder to each of some full pages, so that they outlive their requests; ValueError if one is free."""
        self._holders[self._held(pages)] += 1  # ids are distinct, as those of every call here

    def unhold(self, pages: Pages) -> None:
        """Ends a ``hold`` of each. Pages without another holder become free; ValueError if one is free already."""
        self._drop_holder(self._held(pages))

    def release(self, request: Hashable, num_tokens: int) -> int:
        """Drops the pages that lie entirely below position ``num_tokens``; the caller promises not to read them again.

        With a window and c committed tokens, ``release(request, c - window + 1)`` is safe before a call whose first
        row has position c, even if drafts are rejected later. With S rows per call the table then needs no more than
        ``ceil((window + S + page_size - 2) / page_size)`` columns.

        Args:
            request: a live request.
            num_tokens: at most the request's length; at or below its offset, nothing is dropped.

        Returns:
            The new ``offset``.

        Raises:
            ValueError: ``request`` is not live, or ``num_tokens`` exceeds its length.
        """
        found = self._find("request", request)
        self._check_tokens(num_tokens, least=-INT32_MAX, most=found.length)
        gone = max(int(num_tokens) // self.page_size - found.first, 0)
        self._drop_holder(found.row[:gone])
        found.row[:] = np.concatenate([found.row[gone:], np.full(gone, -1, np.int32)])
        found.first += gone
        return found.first * self.page_size

    def offset(self, request: Hashable) -> int:
        """Position of the first token in a request's table row; ValueError if the request is not live."""
        return self._find("request", request).first * self.page_size

    def offsets(self, request_ids: Sequence[Hashable], *, batch: int | None = None) -> Int32[np.ndarray, "B"]:
        """``offset`` of each request of a batch, for ``kv_offsets=``; 0 for padding. It raises as ``table`` does."""
        found = [self.offset(request) for request in request_ids]
        batch = len(found) if batch is None else check_integer("batch", batch, len(found))
        return np.asarray(found + [0] * (batch - len(found)), np.int32)

    def free(self, request: Hashable) -> None:
        """Removes a request; its pages without another holder become free.

        Raises:
            ValueError: ``request`` is not live.
        """
        found = self._find("request", request)
        self._release(found, found.first)
        del self._requests[request]

    def length(self, request: Hashable) -> int:
        """Number of tokens that a request has room for; ValueError if it is not live."""
        return self._find("request", request).length

    def table(self, request_ids: Sequence[Hashable], *, batch: int | None = None) -> Int32[np.ndarray, "B W"]:
        """Page table of a batch: row b lists the pages of ``request_ids[b]`` in order of position, from its
        ``offset`` on.

        Entries past a request's length are -1, and so are the padding rows that bring the table to ``batch`` rows
        (default: one row per request). No op reads them, and the builders drop rows that would be written there.

        Returns:
            A new i32[batch, table_width].

        Raises:
            ValueError: a request is not live, or there are more than ``batch`` of them.
        """
        rows = [self._find("request_ids", request).row for request in request_ids]
        if batch is not None:
            check_integer("batch", batch, len(rows))
        table = np.full((len(rows) if batch is None else batch, self.table_width), -1, np.int32)
        for out, row in zip(table, rows, strict=False):  # padding rows stay -1
            out[:] = row
        return table

    @property
    def holders(self) -> Int32[np.ndarray, "N"]:
        """Number of holders of each page, as a read-only view that follows later changes."""
        view = self._holders.view()
        view.flags.writeable = False
        return view

    @property
    def num_free(self) -> int:
        """Number of pages without a holder."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Number of pages with a holder."""
        return self.num_pages - self._num_free

    @property
    def num_shared(self) -> int:
        """Number of pages with more than one holder."""
        return int(np.count_nonzero(self._holders > 1))

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _extend(self, request: _Request, num_tokens: int) -> None:
        """Takes all the pages that a request needs, or raises OutOfPages. Only this method takes pages."""
        first, last = self._num_pages(request.length), self._num_pages(int(num_tokens))
        needed = last - first
        if needed > self._num_free:
            raise OutOfPages(needed, self._num_free, self.num_pages)
        if needed:
            # The lowest free pages are searched in ranges of growing length; the first range usually has enough.
            end = self._lowest + max(64, 2 * needed)
            while len(found := self._free_between(self._lowest, end)) < needed:
                end += end - self._lowest
            pages = found[:needed]
            request.row[first - request.first : last - request.first] = pages
            self._holders[pages] = 1
            self._num_free -= needed
            self._lowest = int(pages[-1]) + 1
        request.length = int(num_tokens)

    def _free_between(self, begin: int, end: int) -> np.ndarray:
        return begin + np.flatnonzero(self._holders[begin:end] == 0)

    def _release(self, request: _Request, keep: int) -> None:
        """Drops the pages of a request from page ``keep`` on."""
        pages = request.row[keep - request.first : self._num_pages(request.length) - request.first]
        self._drop_holder(pages)
        pages[:] = -1

    def _drop_holder(self, pages: np.ndarray) -> None:
        """Takes one holder from each of ``pages``; those without another become free."""
        self._holders[pages] -= 1  # ids are distinct: NumPy would subtract only once from a repeated index
        free = pages[self._holders[pages] == 0]
        self._num_free += len(free)
        self._lowest = min(self._lowest, int(free.min(initial=self.num_pages)))

    def _find(self, name: str, request: Hashable) -> _Request:
        if request not in self._requests:
            raise ValueError(f"{name}={request!r} must be one of the {len(self._requests)} live requests")
        return self._requests[request]

    def _check_held(self, page: int) -> None:
        check_integer("page", page, 0, self.num_pages - 1)
        if self._holders[page] == 0:
            raise ValueError(f"page={page} must be one that is held")

    def _held(self, pages: Pages) -> np.ndarray:
        """``pages`` as an array, after checking that all are held."""
        if not len(pages):
            return np.empty(0, np.int32)
        array = np.asarray(pages)
        right = array.dtype.kind in "iu" and array.min() >= 0 and array.max() < self.num_pages
        if not (right and self._holders[array].all()):
            for page in pages:
                self._check_held(page)
        return array.astype(np.int32)

    def _check_new(self, name: str, request: Hashable) -> None:
        if request in self._requests:
            raise ValueError(f"{name}={request!r} must not be one of the {len(self._requests)} live requests")

    def _check_tokens(self, num_tokens: int, *, least: int = 0, most: int | None = None, first: int = 0) -> None:
        most = (first + self.table_width) * self.page_size if most is None else most
        check_integer("num_tokens", num_tokens, least, most)
