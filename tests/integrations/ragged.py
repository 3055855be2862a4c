"""Batches in the form of ragged paged attention, whose caches and padding hold NaN, and their results in float64."""

import dataclasses
from typing import Any

import numpy as np

import oracle

RANK, ROPE = 40, 24  # rows of 128 + 128, the rope part at 128
KV_HEADS, HEAD_DIM = 2, 24  # rows of 128
HEADS = 4


@dataclasses.dataclass(kw_only=True)
class Batch:
    """Arguments in NumPy; tokens [n, K, D] of each request, this call's included.

    Attributes:
        arrays: kv_lens, pages, cu_q_lens, distribution, by name; also cu_kv_lens if the list of pages is packed.
        queries, new: rows of this call: of MLA latent and rope part, of GQA heads.
        cache: pages with the prefixes.
        stored: the cache as it has to be afterwards; NaN where nothing is stored.
        keys: keys [n, 1 or K, D] of each request.
        values: values of each.
        rows: (row, request, position) of each query row that a request has.
    """

    arrays: dict[str, np.ndarray]
    queries: tuple[np.ndarray, ...]
    new: tuple[np.ndarray, ...]
    cache: np.ndarray
    stored: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    rows: list[tuple[int, int, int]]

    def expected(self, *, scale, window=None, soft_cap=None, sinks=None, mask=None):
        """``(out, largest |v| seen)`` in float64, both zero on padding; ``mask(request, position, key)`` hides keys."""
        queries = np.concatenate([np.asarray(q, np.float64) for q in self.queries], axis=-1)
        out, v_max = np.zeros((*queries.shape[:2], self.values[0].shape[-1])), np.zeros(queries.shape[:2])
        for row, b, at in self.rows:
            seen = range(0 if window is None else max(0, at - window + 1), at + 1)
            seen = [p for p in range(len(self.keys[b])) if (p in seen if mask is None else mask(b, at, p))]
            k, v = (np.repeat(x[b][seen], queries.shape[1] // x[b].shape[1], axis=1) for x in (self.keys, self.values))
            out[row], _ = oracle.attend(queries[row], k, v, scale=scale, soft_cap=soft_cap, sinks=sinks)
            v_max[row] = np.abs(v).max(axis=(0, 2))
        return out, v_max


def make(
    kind: str,
    requests: list[tuple[int, int]],
    *,
    page_size: int,
    pack: int,
    dtype: Any,
    packed: bool = False,
    page_rows: int | None = None,
    unused: int = 0,
    extra_rows: int = 3,
    widths: tuple[int, int] = (RANK, ROPE),
    seed: int = 0,
) -> Batch:
    """A batch of ``requests``, each (tokens, rows of this call); without tokens it is padding, whose rows are NaN.

    Args:
        kind: "mla" or "gqa".
        requests: lengths of each.
        page_size, pack, dtype: of the cache.
        packed: whether the list of pages is packed.
        page_rows: rows of a page of an MLA cache; None for ``page_size``.
        unused: requests past the last of ``distribution``, whose entries hold anything.
        extra_rows: rows that nobody has.
        widths: latent and rope channels.
        seed: of everything drawn.
    """
    rng = np.random.default_rng(seed)

    def draw(*shape):  # what is drawn is stored exactly
        return rng.standard_normal(shape).astype(dtype).astype(np.float64)

    kv_lens, q_lens = (np.array(x, np.int32) for x in zip(*requests, strict=True))
    held = -(-kv_lens // page_size)
    total, width = int(q_lens.sum()) + extra_rows, int(held.max()) + 2
    num_pages = int(held.sum()) + 3
    table = rng.integers(-5, num_pages + 5, (len(requests) + unused, width)).astype(np.int32)
    free = rng.permutation(num_pages)
    for b, pages in enumerate(np.split(free[: held.sum()], np.cumsum(held)[:-1])):
        table[b, : held[b]] = pages
    if kind == "mla":
        row_shape, parts = (
            (1, sum(-(-w // 128) * 128 for w in widths)),
            [(0, 0, widths[0]), (0, 128 * -(-widths[0] // 128), widths[1])],
        )
        new_shapes, query_shapes = [(w,) for w in widths], [(HEADS, w) for w in widths]
    else:
        row_shape, parts = (2 * KV_HEADS, 128), None
        new_shapes, query_shapes = [(KV_HEADS, HEAD_DIM)] * 2, [(HEADS, HEAD_DIM)]
    cache = np.full((num_pages, page_size if page_rows is None else page_rows, *row_shape), np.nan)
    stored = cache.copy()
    queries = tuple(np.full((total, *shape), np.nan) for shape in query_shapes)
    new = tuple(np.full((total, *shape), np.nan) for shape in new_shapes)
    keys, values, rows, first = [], [], [], 0
    for b, (kv_len, q_len) in enumerate(requests):
        tokens = [draw(kv_len, *shape) for shape in new_shapes]
        if kind == "mla":
            keys.append(np.concatenate(tokens, axis=-1)[:, None])
            values.append(tokens[0][:, None])
        else:
            keys.append(tokens[0])
            values.append(tokens[1])
        for p in range(kv_len):
            at = table[b, p // page_size], p % page_size
            for array in (cache, stored) if p < kv_len - q_len else (stored,):
                if parts is None:
                    array[at][0::2, :HEAD_DIM], array[at][1::2, :HEAD_DIM] = tokens[0][p], tokens[1][p]
                else:
                    for token, (head, begin, channels) in zip(tokens, parts, strict=True):
                        array[at][head, begin : begin + channels] = token[p]
        for j in range(q_len if kv_len else 0):
            rows.append((first + j, b, kv_len - q_len + j))
            for array, token in zip(new, tokens, strict=True):
                array[first + j] = token[kv_len - q_len + j]
            for array in queries:
                array[first + j] = draw(*array.shape[1:])
        first += q_len
    junk = rng.integers(-9, 99, (2, unused)).astype(np.int32)
    arrays = {
        "kv_lens": np.concatenate([kv_lens, junk[0]]),
        "pages": table.reshape(-1),
        "cu_q_lens": np.concatenate([[0], np.cumsum(q_lens), junk[1]]).astype(np.int32),
        "distribution": np.array([0, 0, len(requests)], np.int32),
    }
    if packed:
        arrays["pages"] = np.concatenate([*(table[b, :n] for b, n in enumerate(held)), [-3, num_pages, 0]]).astype(
            np.int32
        )
        arrays["cu_kv_lens"] = np.concatenate([[0], np.cumsum(held * page_size), junk[0]]).astype(np.int32)

    def packs(array):
        if kind == "mla":
            return array.reshape(num_pages, -1, pack, row_shape[1]).astype(dtype)
        return array.reshape(num_pages, page_size, -1, pack, row_shape[1]).astype(dtype)

    queries, new = (tuple(x.astype(dtype) for x in arrays) for arrays in (queries, new))
    return Batch(
        arrays=arrays, queries=queries, new=new, cache=packs(cache), stored=packs(stored), keys=keys, values=values,
        rows=rows,
    )  # fmt: skip


def check(out, expected, v_max, dtype) -> None:
    """Maxima of each row and head, as the tolerances of the ops; padding is exactly 0."""
    error = np.abs(np.asarray(out, np.float64) - expected).max(axis=-1)
    unit = 2**-8 if np.dtype(dtype).itemsize < 4 else 1e-5
    bound = unit * (v_max + np.abs(expected).max(axis=-1))
    assert (error <= bound).all(), f"error {error.max()} where {bound[error > bound].min()} is allowed"


def check_cache(cache, batch) -> None:
    """Exactly this call's rows are written."""
    np.testing.assert_array_equal(np.asarray(cache).astype(np.float64), batch.stored.astype(np.float64))
