"""The calls of case C15, each made twice in a row. Run as a program, the first is the first of its process."""

import sys

if __name__ == "__main__":
    import source_tree

    source_tree.install()

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.paged import WIDTH, attend, attend_unpaged, by_hand, make_pool, make_spec, random_rows
from mla_attn.ops import mla, ragged

LENS, PAGE = [1, 63, 64, 65, 255, 257], 16
Q_LEN, KV_LEN, HEADS = 100, 2048, 2


def ones(implementation, causal):
    """Queries of 0 over keys and values of 1, one request of each length; what is past them holds NaN."""
    table = np.arange(6 * 17).reshape(6, 17)[:, ::-1]
    pool = make_pool([np.ones((n, WIDTH)) for n in LENS], table, page_size=PAGE, num_pages=6 * 17)
    metadata = by_hand(LENS, [1] * 6, table)
    q = jnp.zeros((6, HEADS, WIDTH), jnp.bfloat16)
    return attend(implementation, q, pool, metadata, make_spec(HEADS), causal=causal)[0]


def long():
    """A request of 100 queries over 2048 keys."""
    table = np.random.default_rng(0).permutation(KV_LEN // PAGE)[None]
    pool = make_pool([np.asarray(random_rows(1, KV_LEN))], table, page_size=PAGE, num_pages=KV_LEN // PAGE)
    return random_rows(2, Q_LEN, HEADS, dtype="bfloat16"), pool, by_hand([KV_LEN], [Q_LEN], table), make_spec(HEADS)


def random(implementation, causal):
    return attend(implementation, *long(), causal=causal, out_dtype=jnp.float32)[0]


def unpaged_ones(implementation, causal):
    """The same over keys that lie side by side, the last ones at the end of the array."""
    keys, values = (jnp.ones((sum(LENS), HEADS, n), jnp.bfloat16) for n in (192, 128))
    q = jnp.zeros((6, HEADS, 192), jnp.bfloat16)
    return attend_unpaged(implementation, q, keys, values, q_lens=[1] * 6, kv_lens=LENS, causal=causal)[0]


CALLS = {
    f"{call.__name__} {i.name} {'causal' if causal else 'not causal'}": (call, i.name, causal)
    for call, implementations in (
        (ones, mla.IMPLEMENTATIONS), (random, mla.IMPLEMENTATIONS), (unpaged_ones, ragged.IMPLEMENTATIONS)
    )
    for i in implementations
    for causal in (True, False)
}  # fmt: skip


def main(path):
    """Writes both results of each call that is served."""
    results = {}
    for name, (call, implementation, causal) in CALLS.items():
        try:
            results[name] = np.stack([np.asarray(call(implementation, causal)).astype(np.float32) for _ in range(2)])
        except (NotImplementedError, pytest.skip.Exception):  # how ``attend`` ends where a call is not served
            print(f"not served: {name}")
    np.savez(path, **results)


if __name__ == "__main__":
    jax.config.update("jax_numpy_rank_promotion", "raise")
    main(sys.argv[1])
