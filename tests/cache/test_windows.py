"""Windowed pools on the host: pages released below a window, and prefixes found where those of a window are kept."""

import numpy as np
import pytest

from mla_attn.cache import PageAllocator, PrefixCache


def test_release_lets_go_of_whole_pages_below():
    pages = PageAllocator(9, 4, table_width=3)
    pages.create("a", 11)
    assert pages.release("a", -3) == pages.release("a", 3) == 0
    assert pages.release("a", 7) == 4 and pages.num_used == 2
    assert pages.table(["a"]).tolist() == [[1, 2, -1]]
    assert pages.release("a", 5) == pages.offset("a") == 4  # below the offset nothing is dropped
    pages.grow("a", 16)  # offset + W * P
    assert pages.table(["a"]).tolist() == [[1, 2, 0]]
    assert pages.offsets(["a"], batch=3).tolist() == [4, 0, 0]
    with pytest.raises(ValueError, match="num_tokens=17 must be an integer from 16 to 16"):
        pages.grow("a", 17)
    with pytest.raises(ValueError, match="num_tokens=3 must be an integer from 4 to 16"):
        pages.truncate("a", 3)
    with pytest.raises(ValueError, match="num_tokens=3 must be an integer from 4 to 16"):
        pages.fork("a", "b", 3)
    with pytest.raises(ValueError, match=r"num_tokens=17 must be an integer from -\d+ to 16"):
        pages.release("a", 17)
    assert pages.fork("a", "b", 13) == 12 and pages.offset("b") == 4
    assert pages.table(["b"]).tolist() == [[1, 2, -1]] and pages.num_shared == 2
    assert pages.release("a", 16) == 16 and pages.num_used == 2  # of the fork
    pages.grow("a", 20)
    assert pages.truncate("a", 16) == 16 and pages.num_used == 2
    assert pages.release("b", 12) == 12 and pages.num_used == 0
    pages.free("a")
    pages.free("b")
    assert pages.num_used == 0 and not pages.holders.any()


@pytest.mark.parametrize("window, size", [(1, 4), (4, 4), (5, 4), (9, 4), (20, 16), (3, 1)])
def test_prefixes_of_windowed_pools(window, size):
    """n tokens are found exactly where the pages of n - window + 1 .. n - 1 are kept; the request begins there."""
    rng = np.random.default_rng(window)
    for _ in range(20):
        pages = PageAllocator(64, size, table_width=16)
        cache, digests = PrefixCache(pages, window=window), []
        cache.extend_digests(digests, np.arange(12 * size))
        pages.create("a", 12 * size)
        table = pages.table(["a"])[0]
        kept = rng.random(12) < 0.7
        cache.keep("a", digests)
        cache._drop(table[:12][~kept])  # as if they had been evicted
        live = [all(kept[p // size] for p in range(max(n - window + 1, 0), n)) for n in range(0, 12 * size + 1, size)]
        want = max(n for n, alive in enumerate(live) if alive)
        found = cache.find(digests)
        assert len(found) == want
        first = max(want * size - window + 1, 0) // size
        assert found.tolist() == [-1] * first + table[first:want].tolist()
        assert cache.num_available(found) <= pages.num_pages
        assert cache.fork("b", digests) == want * size == pages.length("b")
        assert (
            pages.offset("b") == first * size
            and pages.table(["b"])[0][: want - first].tolist() == found[first:].tolist()
        )


def test_released_pages_are_kept_and_found():
    """A request runs on, its pages leave its window, and another of the same text begins where they end."""
    pages = PageAllocator(32, 4, table_width=4)
    cache, digests = PrefixCache(pages, window=6), []
    pages.create("a", 0)
    for length in range(4, 41, 4):
        pages.release("a", length - 4 - 6 + 1)
        pages.grow("a", length)
        cache.extend_digests(digests, np.arange(length))
        cache.keep("a", digests, begin=len(digests) - 1)
    cache.keep("a", digests)  # from the first on: those that are released are left out
    assert cache.num_pages == 10 and pages.offset("a") == 28
    pages.free("a")
    assert pages.num_used == 10 and cache.fork("b", digests[:7]) == 28
    assert pages.offset("b") == 20 and pages.table(["b"]).tolist() == [[5, 6, -1, -1]]
    assert cache.evict(30) and cache.num_pages == 2 and not cache.evict(31)
    assert cache.fork("c", digests[:7]) == 28
