"""The work list of prompts against a plain statement of what it must hold."""

import jax.numpy as jnp
import numpy as np
import pytest

from mla_attn.pallas_kernels.prompt_list import HEADER, ITEM, KEYS, ROWS, PromptPlan, prompt_list

# Requests as (query tokens, keys), and rows without owner before each.
REQUESTS = ((300, 300), (0, 50), (128, 1000), (1, 0), (5, 3), (129, 128), (640, 700))
GAPS = (0, 3, 0, 130, 0, 0, 1)


def make(requests, gaps, *, num_tokens, **rules):
    """``(items as dicts, first token of each request, first key of each)``."""
    q_lens, kv_lens = (np.asarray(x, np.int32) for x in zip(*requests, strict=True))
    q_starts = np.cumsum([gap + q for gap, q in zip(gaps, (0, *q_lens[:-1]), strict=True)])
    kv_starts = np.cumsum(kv_lens) - kv_lens + 5
    sizes = {"num_tokens": num_tokens, "num_keys": int(kv_lens.sum()) + 9, "max_q_len": 640, "max_kv_len": 1000}
    plan = PromptPlan(num_requests=len(requests), **sizes, **rules)
    arrays = (jnp.asarray(x, jnp.int32) for x in (q_starts, q_lens, kv_starts, kv_lens))
    work = np.asarray(prompt_list(*arrays, plan=plan))
    assert work.shape == (plan.size,)
    records = work[HEADER:].reshape(-1, len(ITEM))
    assert (records[work[0] :, ITEM.index("tiles")] < 0).all()
    items = [dict(zip(ITEM, record.tolist(), strict=True)) for record in records[: work[0]]]
    return items, q_starts.tolist(), kv_starts.tolist()


@pytest.mark.parametrize("rules", [{}, {"causal": False}, {"window": 1}, {"window": 200}])
def test_every_row_once_and_all_of_its_keys(rules):
    """Tiles without a visible key are in no item, and the longest items come first."""
    num_tokens = sum(q for q, _ in REQUESTS) + sum(GAPS) + 140
    items, q_starts, kv_starts = make(REQUESTS, GAPS, num_tokens=num_tokens, **rules)
    lengths = [item["tiles"] for item in items]
    assert lengths == sorted(lengths, reverse=True)
    owner = np.full(num_tokens, -1)
    for n, (start, (q_len, _)) in enumerate(zip(q_starts, REQUESTS, strict=True)):
        owner[start : start + q_len] = n
    seen = np.zeros(num_tokens, int)
    for item in items:
        rows = np.arange(item["row"], item["row"] + item["rows"])
        seen[rows] += 1
        assert 0 < item["rows"] <= ROWS and len(set(owner[rows])) == 1
        if (n := owner[rows[0]]) < 0:
            assert item["tiles"] == 0
            continue
        q_len, kv_len = REQUESTS[n]
        position = kv_len - q_len + rows[:, None] - q_starts[n]
        assert item["position"] == position[0, 0] and item["keys"] == kv_len and item["key_row"] == kv_starts[n]
        key = np.arange(kv_len)[None]
        visible = np.ones((len(rows), kv_len), bool)
        if rules.get("causal", True):
            visible &= key <= position
        if "window" in rules:
            visible &= key > position - rules["window"]
        tiles = np.unique(np.nonzero(visible.any(axis=0))[0] // KEYS)
        assert list(range(item["tile"], item["tile"] + item["tiles"])) == tiles.tolist()
    assert (seen == 1).all()


def test_an_unsound_request_owns_no_row():
    items, *_ = make(((8, 8), (641, 8), (8, 8)), (0, 0, 0), num_tokens=20)
    assert sorted((item["row"], item["rows"], item["tiles"]) for item in items) == [(0, 8, 1), (8, 12, 0)]
