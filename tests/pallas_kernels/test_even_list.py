"""The work list of even shares against a plain statement of what it must hold."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.pallas_kernels.even_list import HEADER, ITEM, EvenPlan, even_list
from mla_attn.pallas_kernels.work_list import COMBINED, INVARIANT_TILES, TILE

# Requests as (query tokens, tokens in all), rows without owner before each, and the last.
MIXED = (
    ((1, 4096), (6, 6), (0, 900), (1, 0), (4, 700), (6, 2049), (1, 1), (3, 64), (2, 65)),
    (0, 2, 0, 1, 0, 0, 3, 0, 0, 1),
)
EVEN = ((1, 4096),) * 32, (0,) * 33
LONG = ((4, 8192),), (0, 0)


def plan_of(requests, gaps, *, kv_heads=8, heads=4, teams=33, **options) -> EvenPlan:
    return EvenPlan(
        num_requests=len(requests),
        num_tokens=sum(q for q, _ in requests) + sum(gaps),
        kv_heads=kv_heads,
        heads=heads,
        tile_tokens=min(max(q for q, _ in requests), 64 // heads),
        block_heads=2 if kv_heads % 2 == 0 else 1,
        lanes=4 if kv_heads == 8 else 1,
        teams=teams,
        max_tiles=max(-(-kv // TILE) for _, kv in requests) + 1,
        **options,
    )


def make(requests, gaps, plan, *, causal=True, kv_stride=1):
    """``(items, combined, first item of each team, first token of each request)``, records as dicts."""
    q_lens, kv_lens = (np.asarray(x, np.int32) for x in zip(*requests, strict=True))
    q_starts = np.cumsum([gap + q for gap, q in zip(gaps, (0, *q_lens[:-1]), strict=False)])
    arrays = [jnp.asarray(x, jnp.int32) for x in (q_starts, q_lens, kv_lens, 0 * q_lens)]
    if plan.tree:  # all rows at the position of the first
        arrays.append(jnp.asarray(kv_lens - q_lens - plan.window + 1, jnp.int32))
    options = {"max_q_len": int(q_lens.max()), "causal": causal, "kv_stride": kv_stride}
    work = np.asarray(even_list(*arrays, plan=plan, **options))
    assert work.shape == (plan.size,)
    items = work[plan.items_at : plan.combined_at].reshape(-1, len(ITEM))
    combined = work[plan.combined_at :].reshape(-1, len(COMBINED))
    count, count_combined = work[:HEADER]
    assert not items[count:, ITEM.index("tiles")].any()
    assert not combined[count_combined:, COMBINED.index("rows")].any()
    as_dicts = [dict(zip(ITEM, record.tolist(), strict=True)) for record in items[:count]]
    combined = [dict(zip(COMBINED, record.tolist(), strict=True)) for record in combined[:count_combined]]
    return as_dicts, combined, work[HEADER : plan.items_at].tolist(), q_starts.tolist()


def units_of(items, plan):
    """The items of each unit, by its first token and its set of KV heads."""
    units = {}
    for item in items:
        units.setdefault((item["token"], item["set"]), []).append(item)
    return units


CASES = {
    "mixed": (MIXED, {}, {}),
    "few teams": (MIXED, {"teams": 4}, {}),
    "odd heads": (MIXED, {"kv_heads": 7, "heads": 3, "teams": 132}, {}),
    "window": (MIXED, {"window": 100}, {}),
    "window of one": (MIXED, {"window": 1}, {}),
    "tree": (MIXED, {"window": 100, "tree": True}, {}),
    "invariant tree": (MIXED, {"invariant": True, "window": 100, "tree": True}, {}),
    "invariant": (MIXED, {"invariant": True}, {}),
    "invariant window": (MIXED, {"invariant": True, "window": 100}, {}),
    "not causal": (MIXED, {}, {"causal": False}),
    "strided": (MIXED, {"window": 100}, {"kv_stride": 3}),
    "even": (EVEN, {}, {}),
    "long": (LONG, {}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_row_sees_its_keys_once(name):
    (requests, gaps), sizes, options = CASES[name]
    plan = plan_of(requests, gaps, **sizes)
    items, combined, firsts, q_starts = make(requests, gaps, plan, **options)
    stride, causal = options.get("kv_stride", 1), options.get("causal", True)
    assert firsts[0] == 0 and firsts[-1] == len(items) and firsts == sorted(firsts)
    owners = {start + j: (b, j) for b, start in enumerate(q_starts) for j in range(requests[b][0])}
    units, covered, parts = units_of(items, plan), [], {}
    for (token, kv_set), of_unit in units.items():
        tiles = [t for item in of_unit for t in range(item["tile"], item["tile"] + item["tiles"])]
        assert tiles == sorted(set(tiles))
        assert [item["begins"] for item in of_unit] == [1] + [0] * (len(of_unit) - 1)
        for row in range(of_unit[0]["rows"] // plan.heads):
            covered.append((token + row, kv_set))
            b, j = owners.get(token + row, (None, 0))
            if b is None:
                assert not tiles
                continue
            assert all((item["request"], item["nth"]) == (b, token - q_starts[b]) for item in of_unit)
            q_len, kv_len = requests[b]
            at = np.arange(0, kv_len, stride)
            seen = at[(at <= kv_len - q_len + j) | (not causal)]
            seen = seen if plan.window is None else seen[seen > kv_len - q_len + j - plan.window]
            assert set(seen // stride // TILE) <= set(tiles)
        if plan.window is not None:  # and no more than the windows of the unit's rows reach
            assert len(tiles) <= (plan.window + plan.tile_tokens) // (stride * TILE) + 2
        partials = [item["partial"] for item in of_unit]
        if partials == [-1]:
            continue
        assert partials == list(range(partials[0], partials[0] + len(partials)))
        row = (token * plan.kv_heads + kv_set * plan.set_heads) * plan.heads
        parts[row] = (partials[0], len(partials), of_unit[0]["rows"])
    assert sorted(covered) == [(t, s) for t in range(plan.num_tokens) for s in range(plan.sets)]
    assert {c["row"]: (c["partial"], c["splits"], c["rows"]) for c in combined} == parts
    taken = sorted(n for first, count, _ in parts.values() for n in range(first, first + count))
    assert len(set(taken)) == len(taken) and (not taken or taken[-1] < plan.num_partials)


@pytest.mark.parametrize("batch, kv_heads, teams", [(EVEN, 8, 33), (EVEN, 7, 132), (LONG, 8, 33), (MIXED, 8, 33)])
def test_shares_are_even(batch, kv_heads, teams):
    plan = plan_of(*batch, kv_heads=kv_heads, teams=teams)
    items, _, firsts, _ = make(*batch, plan)
    loads = [sum(item["tiles"] + 1 for item in items[a:b]) for a, b in itertools.pairwise(firsts)]
    assert max(loads) <= sum(loads) / teams + 4


def test_splits_of_a_request_do_not_depend_on_others():
    """With ``invariant``; and where no unit can be divided there is nothing to combine."""
    plan = plan_of(*MIXED, invariant=True)
    items, *_ = make(*MIXED, plan)
    for of_unit in units_of(items, plan).values():
        for n, item in enumerate(of_unit):
            assert item["tiles"] == 0 or item["tile"] == n * INVARIANT_TILES
    assert plan_of(*EVEN, window=100).num_combined == 0 < plan_of(*EVEN, window=1000).num_combined
