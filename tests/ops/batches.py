"""Other batches of a poisoned one: its pages elsewhere, its rows as decode calls, random trees for it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

INT32 = np.iinfo(np.int32)


def moved(batch, seed):
    """The same batch with its pages elsewhere in every layer, and other ids in the tails of its table."""
    if seed is None:
        return batch
    rng = np.random.default_rng(seed)
    pool, m = batch.pool, batch.metadata
    place = rng.permutation(pool.num_pages)

    def shuffled(array):
        if array.ndim < 3:  # a scale
            return array
        data = np.asarray(array).reshape(pool.num_layers, pool.num_pages, *array.shape[1:]).copy()
        data[:, place] = data.copy()
        return jnp.asarray(data.reshape(array.shape))

    table = np.asarray(m.page_table)
    held = np.arange(table.shape[1]) * pool.page_size < np.asarray(m.kv_lens)[:, None]
    tails = rng.integers(INT32.min, INT32.max, table.shape)
    table = np.where(held, place[np.where(held, table, 0)], tails)
    return dataclasses.replace(
        batch,
        pool=jax.tree.map(shuffled, pool),
        metadata=dataclasses.replace(m, page_table=jnp.asarray(table, jnp.int32)),
    )


def random_tree(rng, batch, earlier):
    """Bool [B, S, S + earlier], at random; every row sees itself."""
    rows = batch.metadata.max_q_len
    mask = rng.random((batch.metadata.q_lens.shape[0], rows, rows + earlier)) < 0.5
    mask[:, np.arange(rows), np.arange(rows) + earlier] = True
    return mask


def decode_rows(batch, j, requests, *, extra_columns=0):
    """Row j of each of ``requests``, as a decode call of its own."""
    requests = np.asarray(requests)
    m = batch.metadata
    rows = np.asarray(m.q_starts)[requests] + j
    table = np.pad(np.asarray(m.page_table)[requests], ((0, 0), (0, extra_columns)), constant_values=-1)
    count = len(requests)
    metadata = dataclasses.replace(
        m,
        q_starts=jnp.arange(count, dtype=jnp.int32),
        q_lens=jnp.ones(count, jnp.int32),
        kv_lens=(m.kv_lens - m.q_lens)[requests] + j + 1,
        page_table=jnp.asarray(table),
        kv_offsets=m.kv_offsets[requests],
        slots=m.slots[rows],
        positions=m.positions[rows],
        max_q_len=1,
    )
    scale = () if batch.q_scale is None else (batch.q_scale[rows],)
    return dataclasses.replace(batch, metadata=metadata).with_queries(*(q[rows] for q in batch.queries), *scale)
