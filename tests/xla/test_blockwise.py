"""Which blocks of keys the portable implementation looks at: those with a key that some row sees, and no others."""

import dataclasses
import functools
import types

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
import mla_attn.xla.paged
import oracle
from mla_attn.ops import mla_attention
from mla_attn.xla import blockwise

MAX_Q_LEN, SLOTS = 7, 48


@pytest.mark.parametrize(
    "causal, window, stride",
    [(True, None, 1), (True, 4, 1), (False, None, 1), (True, None, 3), (True, 10, 3)],
    ids=["causal", "window", "all keys", "stride", "window and stride"],
)
def test_blocks_are_those_with_visible_keys(causal, window, stride):
    """So that cost follows lengths and not the table's width, and nothing visible is left out."""
    rules = blockwise.Rules(1.0, causal, window)
    plan = blockwise.make_plan(blockwise.CPU, batch=4, max_q_len=MAX_Q_LEN, heads=2, keys=SLOTS, block=8, tile=3)
    assert (plan.tiles, plan.blocks, plan.lanes) == (3, 6, 1)

    @jax.jit
    def ranges(q_lens, kv_lens, kv_offsets):
        batch = blockwise.Batch(jnp.zeros_like(q_lens), q_lens, kv_lens, kv_offsets, stride)
        return blockwise._block_ranges(batch, plan, rules)

    lengths = st.tuples(st.integers(0, MAX_Q_LEN), st.integers(0, SLOTS), st.integers(0, 30))

    @hypothesis.settings(deadline=None, max_examples=60)
    @hypothesis.given(lengths=st.lists(lengths, min_size=4, max_size=4))
    def run(lengths):
        q_lens, kv_lens, offsets = (np.asarray(x, np.int32) for x in zip(*lengths, strict=True))
        first, count = (np.asarray(x).reshape(4, 3) for x in ranges(q_lens, kv_lens, offsets))
        fields = types.SimpleNamespace(q_lens=q_lens, kv_lens=kv_lens, kv_offsets=offsets, kv_stride=stride)
        for b in range(4):
            for tile in range(3):
                rows = range(tile * 3, min(tile * 3 + 3, q_lens[b]))
                seen = {
                    slot // 8
                    for j in rows
                    for slot in oracle.visible_slots(fields, b, j, num_slots=SLOTS, window=window, causal=causal)
                }
                got = set(range(first[b, tile], first[b, tile] + count[b, tile]))
                assert got >= seen
                # A block between two visible keys may hold none (rows that stand before the first key see nothing).
                assert len(got) <= (max(seen) - min(seen) + 1 if seen else 0)

    run()


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_invariant_cuts_follow_neither_mode_nor_batch(monkeypatch, batch_invariant):
    """Whether other tiles give other bits depends on a CPU's products; that there are no others does not."""
    made = set()

    def make_plan(*arguments, **options):
        plan = blockwise.make_plan(*arguments, **options)
        made.add((plan.tile, plan.block))
        return plan

    monkeypatch.setattr(mla_attn.xla.paged, "make_plan", make_plan)
    for requests, rows, width in ((1, 1, 3), (4, 1, 200), (2, 5, 200)):
        batch = helpers.poisoned_batch(0, kv_lens=[9] * requests, q_lens=[rows] * requests, table_width=width)
        options = {"spec": batch.spec, "batch_invariant": batch_invariant, "implementation": "xla"}
        attend = functools.partial(mla_attention, **options)
        jax.eval_shape(attend, batch.q_latent, batch.q_rope, batch.pool, batch.metadata)
    tiles, blocks = ({plan[i] for plan in made} for i in range(2))
    if batch_invariant:
        assert tiles == {1} and blocks == {blockwise.CPU.block_keys, blockwise.PARALLEL.block_keys}
    else:
        assert len(tiles) > 1 and len(blocks) > 2


def test_plans_follow_static_sizes_alone():
    cpu, parallel = (
        blockwise.make_plan(config, batch=8, max_q_len=4, heads=16, keys=4096, block=512)
        for config in (blockwise.CPU, blockwise.PARALLEL)
    )
    assert cpu.lanes == 1
    assert 1 < parallel.lanes <= 8 * 8  # several, but no more than items: 8 requests of 8 blocks of keys
    assert dataclasses.replace(parallel, lanes=1) == cpu
    for heads in (1, 3, 16, 20, 128, 1000):
        made = blockwise.make_plan(blockwise.PARALLEL, batch=2, max_q_len=40, heads=heads, keys=100, block=64)
        assert made.tile <= 40
        assert made.tile * made.tiles >= 40  # every query row has a tile,
        assert made.tile * (made.tiles - 1) < 40  # and no tile is empty
        assert made.blocks == 2 and made.lanes >= 1
