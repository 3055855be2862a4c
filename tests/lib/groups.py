"""Rows of groups for tests of ``grouped_matmul``, and their products in float64."""

import numpy as np

KINDS = ("all", "one group", "few groups", "rows of no group")


def random_sizes(rng, num_rows: int, num_groups: int, kind: str) -> np.ndarray:
    """Rows of each group, at most ``num_rows`` of them together."""
    if kind == "one group":
        sizes = np.zeros(num_groups, int)
        sizes[rng.integers(num_groups)] = num_rows
    elif kind == "few groups":
        owner = rng.choice(rng.integers(num_groups, size=3), num_rows)
        sizes = np.bincount(owner, minlength=num_groups)
    else:
        sizes = np.bincount(rng.integers(num_groups, size=num_rows), minlength=num_groups)
    if kind == "rows of no group":
        sizes[rng.random(num_groups) < 0.5] = 0
    return sizes.astype(np.int32)


def product(rows, weights, sizes) -> np.ndarray:
    """By hand, in float64; rows of no group give 0."""
    out, start = np.zeros((rows.shape[0], weights.shape[2])), 0
    for matrix, size in zip(weights, sizes, strict=True):
        out[start : start + size] = np.float64(rows[start : start + size]) @ np.float64(matrix)
        start += size
    return out
