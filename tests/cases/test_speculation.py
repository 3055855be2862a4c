"""C16, placeholder drafts, and C17, drafts past the maximum length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases.paged import RANK, WIDTH, as_claimed, every_implementation, ints, make_pool, make_spec, random_rows, reason
from mla_attn import metadata as build
from mla_attn import steps
from mla_attn.cache import LatentPool
from mla_attn.speculative import accept_greedy, accept_sampled, accept_tree

VOCAB = 11
LAST = VOCAB - 1
TARGETS = [5, LAST, 4, 2]  # after the anchor, and after each draft


def outcomes16():
    """Of a request with drafts 5, -1, -1 and three padded rows, by path."""
    drafts = ints([[5, -1, -1], *[[-1] * 3] * 3])
    targets = ints([TARGETS] * 4)
    q_lens = ints([4, 0, 0, 0])
    sample = jax.jit(accept_sampled)
    yield "greedy", accept_greedy(drafts, targets, q_lens)
    tokens = jnp.concatenate([jnp.zeros((4, 1), jnp.int32), drafts], axis=1)
    chain = ints([[-1, 0, 1, 2]] * 4)
    yield "tree", accept_tree(tokens, chain, targets, q_lens, max_depth=3)[0]
    p = jax.nn.one_hot(targets, VOCAB)
    for seed in range(4):
        keys = jax.random.split(jax.random.key(seed), 4)
        yield "sampled, chosen drafts", sample(keys, drafts, None, p, q_lens)
        # What stands at placeholders is not looked at, be it NaN.
        q = jnp.where((drafts >= 0)[..., None], jnp.full((4, 3, VOCAB), 1 / VOCAB), jnp.nan)
        yield "sampled, drawn drafts", sample(keys, drafts, q, p, q_lens)


def test_c16_placeholders():
    """-1 is no draft: not the last word of the vocabulary, and nothing that is emitted."""
    for path, found in outcomes16():
        assert found.emitted[0].tolist() == [5, LAST, -1, -1], path
        assert (found.accepted_drafts[0], found.num_emitted[0], found.next_tokens[0]) == (1, 2, LAST), path
        assert found.accepted_drafts[1:].tolist() == found.num_emitted[1:].tolist() == [0] * 3, path
        assert (found.emitted[1:] == -1).all() and (found.next_tokens >= 0).all(), path


# C17: one request at 62 of 64 tokens, and its neighbour in the next table row.
PAGE, MAX_LEN, NUM_PAGES = 16, 64, 10
COMMITTED, TABLE17 = [62, 20], [[7, 2, 9, 4], [1, 6, 3, 8]]


def call17(mode, table, num_tokens):
    """Metadata of some draft tokens for both requests."""
    lens, sizes = ints(COMMITTED), {"page_size": PAGE, "max_len": MAX_LEN}
    if mode == "target_verify":
        return build.for_target_verify(table, lens, num_tokens=num_tokens, **sizes)
    new = jnp.full(2, num_tokens, jnp.int32)
    return build.for_draft_extend(table, lens + new, new, max_q_len=num_tokens, **sizes)


@every_implementation
@pytest.mark.parametrize(("mode", "wide"), [("target_verify", False), ("target_verify", True), ("draft_extend", False)])
def test_c17_past_the_end(implementation, mode, wide):
    """Positions 62 and 63 are written; nothing else of the request is, nor of its neighbour, nor page 0.

    The table is as wide as the maximum, or wider, with page ids past it that must not be used.
    """
    spec = make_spec(2)
    rows = [np.asarray(random_rows(b, n)) for b, n in enumerate(COMMITTED)]
    filler = np.asarray(random_rows(2, NUM_PAGES, PAGE, dtype="bfloat16"))
    pool = make_pool(rows, TABLE17, page_size=PAGE, num_pages=NUM_PAGES)
    before = np.where(np.isnan(np.asarray(pool.data).astype(float)), filler, np.asarray(pool.data))
    table = ints([[*pages, 0, 0] for pages in TABLE17] if wide else TABLE17)
    q, new = random_rows(3, 2, 4, 2, dtype="bfloat16"), random_rows(4, 2, 4, dtype="bfloat16")

    def run(num_tokens):
        metadata = call17(mode, table, num_tokens)
        pool = LatentPool(jnp.asarray(before), 1, NUM_PAGES, RANK, 1, NUM_PAGES)
        options = {"implementation": implementation, "batch_invariant": True}
        if reason(implementation, pool, metadata, spec, batch_invariant=True):
            del options["batch_invariant"]
        q_rows, new_rows = (x[:, :num_tokens].reshape(2 * num_tokens, *x.shape[2:]) for x in (q, new))
        with as_claimed(implementation, pool, metadata, spec):
            out, pool = getattr(steps, mode)(
                q_rows[..., :RANK], q_rows[..., RANK:], new_rows[:, :RANK], new_rows[:, RANK:], pool, metadata, spec,
                **options,
            )  # fmt: skip
        return metadata, np.asarray(out).reshape(2, num_tokens, 2, RANK), pool, "batch_invariant" in options

    metadata, out, pool, invariant = run(4)
    want = before.copy()
    want[4, [14, 15]] = np.asarray(new[0, :2])
    for j, position in enumerate(range(20, 24)):
        want[TABLE17[1][position // PAGE], position % PAGE] = np.asarray(new[1, j])
    assert np.asarray(pool.data).tobytes() == want.tobytes()
    assert metadata.q_lens.tolist() == [2, 4] and metadata.kv_lens.tolist() == [64, 24]
    assert metadata.slots.tolist()[:4] == [4 * PAGE + 14, 4 * PAGE + 15, -1, -1]

    # Rows 62 and 63 are those of a call without the other two, which give zeros.
    _, two, _, _ = run(2)
    assert (out[0, 2:] == 0).all()
    if invariant:
        assert out[:, :2].tobytes() == two.tobytes()
    np.testing.assert_allclose(out[:, :2].astype(float), two.astype(float), rtol=0, atol=2**-7)


@pytest.mark.parametrize("committed", [59, 60, 61, 62, 63, 64])
def test_c17_final_length(committed):
    """Whatever the target says, acceptance ends at the maximum: chain, tree and sampled."""
    metadata = build.for_target_verify(
        ints([[7, 2, 9, 4]]), ints([committed]), num_tokens=4, page_size=PAGE, max_len=MAX_LEN
    )
    drafts, targets = ints([[1, 2, 3]]), ints([[1, 2, 3, 4]])
    keys, p = jax.random.split(jax.random.key(0), 1), jax.nn.one_hot(targets, VOCAB)
    tree, path = accept_tree(ints([[0, 1, 2, 3]]), ints([[-1, 0, 1, 2]]), targets, metadata.q_lens, max_depth=3)
    room = min(MAX_LEN - committed, 4)
    for found in (
        accept_greedy(drafts, targets, metadata.q_lens),
        jax.jit(accept_sampled)(keys, drafts, None, p, metadata.q_lens),
        tree,
    ):
        assert found.num_emitted.tolist() == [room]
        assert found.emitted[0].tolist() == [1, 2, 3, 4][:room] + [-1] * (4 - room)
    assert path[0].tolist() == [0, 1, 2, 3][:room] + [-1] * (4 - room)


@every_implementation
def test_c17_drafting_past_the_end(implementation):
    """Draft steps at positions 62 to 65: the last two write nothing and give zeros."""
    pool = LatentPool(random_rows(5, NUM_PAGES, PAGE, dtype="bfloat16"), 1, NUM_PAGES, RANK, 1, NUM_PAGES)
    spec, rows = make_spec(2), random_rows(6, 2, dtype="bfloat16")
    q = jnp.zeros((2, 2, WIDTH), jnp.bfloat16)
    for step in range(4):
        before = np.array(pool.data)
        metadata = build.for_draft_decode(ints(TABLE17), ints(COMMITTED), ints(step), page_size=PAGE, max_len=MAX_LEN)
        with as_claimed(implementation, pool, metadata, spec):
            out, pool = steps.draft_decode(
                q[..., :RANK], q[..., RANK:], rows[:, :RANK], rows[:, RANK:], pool, metadata, spec,
                implementation=implementation,
            )  # fmt: skip
        changed = {tuple(at) for at in np.argwhere((np.asarray(pool.data) != before).any(axis=-1)).tolist()}
        neighbour = (TABLE17[1][1], 4 + step)
        assert changed == ({(4, 14 + step), neighbour} if step < 2 else {neighbour})
        assert out[1].any() and out[0].any() == (step < 2)
