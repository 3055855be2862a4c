"""The layouts of keys and values in NumPy, element by element as ``KVPool`` defines them.

Rows are [pages, P, K, width]: all elements of a head's row, those beside its channels too.
"""

import jax.numpy as jnp
import numpy as np

LAYOUTS = ("nhd", "hnd", "interleaved", "shuffled")


def group_size(dtype) -> int:
    """Elements X of a group of the shuffled layout: those of 16 bytes."""
    return 16 // jnp.dtype(dtype).itemsize


def rows_of(layout, arrays):
    """Rows of keys and of values, copied out of the one or two arrays of a pool."""
    arrays = [np.array(x) for x in arrays]
    if layout == "interleaved":
        k, v = arrays[0][:, :, :, 0], arrays[0][:, :, :, 1]
    elif layout == "shuffled":
        k, v = arrays
        (groups, tokens, size), width = k.shape[2:], v.shape[3]
        d, t = np.arange(groups * size), np.arange(tokens)
        k, v = np.moveaxis(k[:, :, d // size, :, d % size], (0, 3), (3, 1)), v[:, :, t // size, :, t % size]
        assert v.shape[0] == tokens and v.shape[-1] == width
        v = v.swapaxes(0, 1)
    else:
        k, v = (x.swapaxes(1, 2) if layout == "hnd" else x for x in arrays)
    return np.ascontiguousarray(k), np.ascontiguousarray(v)


def arrays_of(layout, k, v):
    """The one or two arrays of a pool, with these rows; in the interleaved layout both are equally wide."""
    if layout == "interleaved":
        return (np.stack([k, v], axis=3),)
    if layout == "shuffled":
        (pages, tokens, heads, width), size = k.shape, group_size(k.dtype)
        d, t = np.arange(width), np.arange(tokens)
        keys = np.empty((pages, heads, width // size, tokens, size), k.dtype)
        values = np.empty((pages, heads, tokens // size, v.shape[3], size), v.dtype)
        keys[:, :, d // size, :, d % size] = np.moveaxis(k, (3, 1), (0, 3))
        values[:, :, t // size, :, t % size] = v.swapaxes(0, 1)
        return keys, values
    return tuple(x.swapaxes(1, 2) if layout == "hnd" else x for x in (k, v))
