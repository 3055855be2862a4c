"""The oracle and the helpers against results worked out by hand."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helpers
import oracle
from mla_attn.metadata import check_metadata
from mla_attn.specs import MLASpec


def counting_batch(kv_lens, q_lens, *, page_size, spec, kv_offsets=None, kv_stride=1):
    """Queries of zero and ``v[p] = p``: attention is uniform and its output the mean position of the visible keys."""
    batch, pages = len(kv_lens), -(-max(kv_lens) // page_size)
    offsets = [0] * batch if kv_offsets is None else kv_offsets
    table = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages)
    rows = np.full((batch * pages, page_size, spec.latent_dim), np.nan)
    for b in range(batch):
        for i, p in enumerate(range(offsets[b], kv_lens[b], kv_stride)):
            rows[table[b, i // page_size], i % page_size] = p
    metadata = types.SimpleNamespace(
        q_starts=np.cumsum(q_lens) - q_lens,
        q_lens=np.asarray(q_lens),
        kv_lens=np.asarray(kv_lens),
        page_table=table,
        kv_offsets=np.asarray(offsets),
        kv_stride=kv_stride,
    )
    q = np.zeros((sum(q_lens), spec.num_heads, spec.latent_dim))
    return (q[..., : spec.kv_lora_rank], q[..., spec.kv_lora_rank :], rows, metadata, spec)


def uniform(**kwargs):
    return MLASpec(num_heads=2, kv_lora_rank=3, qk_rope_head_dim=2, scale=0.7, **kwargs)


def test_verify_sees_the_prefix_and_the_drafts_up_to_its_own():
    out, lse = oracle.mla_oracle(*counting_batch([9, 68], [4, 4], page_size=64, spec=uniform()))
    np.testing.assert_allclose(out[:, 1, 2], [2.5, 3, 3.5, 4, 32, 32.5, 33, 33.5], rtol=1e-14)
    np.testing.assert_allclose(lse[:, 0], np.log([6, 7, 8, 9, 65, 66, 67, 68]), rtol=1e-14)


def test_without_causal_all_rows_see_all_keys():
    out, lse = oracle.mla_oracle(*counting_batch([9, 3], [4, 2], page_size=4, spec=uniform()), causal=False)
    np.testing.assert_allclose(out[:, 0, 0], [4] * 4 + [1] * 2, rtol=1e-14)
    np.testing.assert_allclose(lse[:, 0], np.log([9] * 4 + [3] * 2), rtol=1e-14)


@pytest.mark.parametrize("kv_len, mean, keys", [(300, 235.5, 128), (127, 63, 127), (128, 63.5, 128), (129, 64.5, 128)])
def test_window_counts_the_row_itself(kv_len, mean, keys):
    out, lse = oracle.mla_oracle(*counting_batch([kv_len], [1], page_size=16, spec=uniform(window=128)))
    np.testing.assert_allclose(out, mean, rtol=1e-14)
    np.testing.assert_allclose(lse, np.log(keys), rtol=1e-14)


def test_sink_halves_a_mean_over_as_many_keys():
    partial = oracle.mla_oracle(*counting_batch([300], [1], page_size=16, spec=uniform(window=128)))
    out, lse = oracle.merge_oracle([partial[0]], [partial[1]], sinks=[np.log(128), -np.inf])
    np.testing.assert_allclose(out[0, :, 0], [117.75, 235.5], rtol=1e-13)
    np.testing.assert_allclose(lse, np.log(128), rtol=1e-14)


def test_offset_and_stride_move_positions():
    # Slots hold positions 1, 4, 7; rows stand at 6 and 7.
    batch = counting_batch([8], [2], page_size=2, spec=uniform(), kv_offsets=[1], kv_stride=3)
    out, _ = oracle.mla_oracle(*batch)
    np.testing.assert_allclose(out[:, 0, 0], [2.5, 4], rtol=1e-14)


def test_tree_mask_covers_the_last_keys():
    # Five cached keys, then a root (5) with children 6 and 7; 8 is a child of 7.
    tree = np.array([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], bool)
    batch = counting_batch([9], [4], page_size=4, spec=uniform())
    out, _ = oracle.mla_oracle(*batch, tree_mask=tree)
    want = [sum(p) / len(p) for p in ([*range(6)], [*range(7)], [*range(6), 7], [*range(6), 7, 8])]
    np.testing.assert_allclose(out[:, 0, 0], want, rtol=1e-14)
    # The last two rows alone, the first two cached by an earlier step: M = 4 columns, S = 2 rows.
    batch = counting_batch([9], [2], page_size=4, spec=uniform())
    out, _ = oracle.mla_oracle(*batch, tree_mask=tree[:, 2:])
    np.testing.assert_allclose(out[:, 0, 0], want[2:], rtol=1e-14)


def test_rows_without_keys():
    out, lse = oracle.mla_oracle(*counting_batch([0, 1, 2], [1, 0, 4], page_size=4, spec=uniform()))
    assert (out[:3] == 0).all() and (lse[:3] == -np.inf).all()
    np.testing.assert_allclose(out[3:, 0, 0], [0, 0.5])


def test_scale_and_soft_cap():
    # Raw products 0 and 13.8564 at scale 192 ** -0.5 are scores 0 and 1.
    metadata = types.SimpleNamespace(
        q_starts=[0], q_lens=[1], kv_lens=[2], page_table=np.array([[1]]), kv_offsets=[0], kv_stride=1
    )
    rows = np.full((2, 2, 3), np.nan)
    rows[1] = [[1, 0, 0], [0, 1, 192**0.5]]
    q_latent, q_rope = np.zeros((1, 1, 2)), np.ones((1, 1, 1))
    spec = MLASpec(num_heads=1, kv_lora_rank=2, qk_rope_head_dim=1, scale=192**-0.5)
    out, lse = oracle.mla_oracle(q_latent, q_rope, rows, metadata, spec)
    np.testing.assert_allclose(out[0, 0], [0.26894, 0.73106], atol=5e-6)
    np.testing.assert_allclose(lse, 1.313262, atol=5e-7)
    spec = MLASpec(num_heads=1, kv_lora_rank=2, qk_rope_head_dim=1, scale=192**-0.5, soft_cap=0.5)
    out, _ = oracle.mla_oracle(q_latent, q_rope, rows, metadata, spec)
    capped = 0.5 * np.tanh(2)
    np.testing.assert_allclose(out[0, 0, 1], 1 / (1 + np.exp(-capped)), rtol=1e-14)


def test_ragged_heads_lengths_and_window():
    # Two requests of 3 and 2 keys; 4 query heads over 2 key heads whose values differ in sign.
    positions = np.array([0, 1, 2, 0, 1.0])
    v = np.stack([positions, -positions], axis=1)[..., None]
    args = {"q_starts": [0, 3], "q_lens": [2, 3], "kv_starts": [0, 3], "kv_lens": [3, 2]}
    q, k = np.zeros((7, 4, 5)), np.zeros((5, 2, 5))
    out, lse = oracle.ragged_oracle(q, k, v, **args, scale=1.0)
    np.testing.assert_allclose(out[..., 0], np.outer([0.5, 1, 0, 0, 0, 0.5, 0], [1, 1, -1, -1]))
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[:, 3], np.log([2, 3, 0, 0, 1, 2, 0]))
    out, _ = oracle.ragged_oracle(q, k, v, **args, scale=1.0, window=2)
    np.testing.assert_allclose(out[:, 0, 0], [0.5, 1.5, 0, 0, 0, 0.5, 0])
    out, _ = oracle.ragged_oracle(q, k, v, **args, scale=1.0, causal=False)
    np.testing.assert_allclose(out[:, 0, 0], [1, 1, 0, 0.5, 0.5, 0.5, 0])
    v_max = oracle.ragged_v_max(7, v, **args, num_heads=4)
    assert v_max[:, 0].tolist() == [1, 2, 0, 0, 0, 1, 0]


def test_merge_of_two_states_and_of_empty_ones():
    outs, lses = [np.zeros((1, 1, 1)), np.ones((1, 1, 1))], [np.zeros((1, 1)), np.full((1, 1), 2.0)]
    out, lse = oracle.merge_oracle(outs, lses)
    np.testing.assert_allclose([out.item(), lse.item()], [0.880797, 2.126928], atol=5e-7)
    nothing = np.full((1, 1, 1), np.nan), np.full((1, 1), -np.inf)
    again = oracle.merge_oracle([*outs, nothing[0]], [*lses, nothing[1]])
    assert again[0] == out and again[1] == lse
    assert [x.item() for x in oracle.merge_oracle([nothing[0]] * 2, [nothing[1]] * 2)] == [0, -np.inf]


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_poisoned_batch_is_legal_and_only_poison_depends_on_poison(layout):
    sizes = {"kv_lens": [0, 1, 3, 4, 5, 13], "q_lens": [0, 1, 2, 1, 4, 3], "num_layers": 3, "layer": 1}
    batch = helpers.poisoned_batch(7, **sizes, layout=layout)
    metadata = jax.tree.map(np.asarray, batch.metadata)
    check_metadata(metadata, num_pages=batch.pool.num_pages, page_size=batch.pool.page_size)
    poisoned = np.isnan(batch.pool.data)
    assert poisoned.any() and not poisoned.all()
    assert (poisoned == poisoned[..., :1]).all()
    assert (~poisoned[..., 0]).sum() == 3 * sum(sizes["kv_lens"])
    clean = helpers.poisoned_batch(7, **sizes, layout=layout, poison=0.0)
    assert (np.asarray(clean.pool.data)[~poisoned] == np.asarray(batch.pool.data)[~poisoned]).all()
    for field in ("page_table", "slots", "positions", "q_starts"):
        assert (getattr(batch.metadata, field) == getattr(clean.metadata, field)).all()
    out, lse, v_max = batch.expected()
    assert np.isfinite(out).all() and (np.isneginf(lse) == np.isnan(batch.q_latent[..., 0])).all()
    for got, want in zip(clean.expected(), (out, lse, v_max), strict=True):
        assert (got == want).all()
    assert not np.allclose(batch.expected(layer=0)[0], out)


def test_poisoned_batch_places_pages_by_its_strides():
    sizes = {"kv_lens": [5, 9], "q_lens": [1, 2], "num_layers": 2, "num_pages": 8}
    apart = helpers.poisoned_batch(3, **sizes)
    mixed = helpers.poisoned_batch(3, **sizes, page_stride=2, layer_stride=1)
    assert (mixed.pool.data.shape, apart.pool.data.shape) == ((16, 4, 48), (16, 4, 48))
    for layer in (0, 1):
        for a, b in zip(apart.expected(layer=layer), mixed.expected(layer=layer), strict=True):
            assert (a == b).all()


def test_poisoned_batch_poisons_keys_no_row_sees():
    batch = helpers.poisoned_batch(3, kv_lens=[9, 6], q_lens=[2, 0], window=3, table_width=5, num_pages=12)
    assert (~np.isnan(batch.pool.data[..., 0])).sum() == 4  # rows at 7 and 8 see keys 5 to 8
    assert np.isfinite(batch.expected()[0]).all()


def nudged(dtype, factor, *, what):
    """A result that errs in one row and head by ``factor`` times what is allowed."""
    wide = {"kv_lora_rank": helpers.WIDE}
    out, lse, v_max = helpers.poisoned_batch(1, kv_lens=[5, 0], q_lens=[2, 1], **wide).expected()
    got, got_lse = out.copy(), lse.astype(np.float32)
    unit = {"bfloat16": 2**-8, "float32": 1e-5}[dtype]
    if what == "largest":
        # With a visible value as large as the L2 bound is loose, one channel can reach the first bound alone.
        v_max = np.full_like(v_max, np.linalg.norm(out[1, 0]) / 16)
        got[1, 0, 3] += factor * unit * (v_max[1, 0] + np.abs(out[1, 0]).max())
    elif what == "L2":
        got[1, 0] *= 1 + factor * 4e-3 * unit * 2**8
    elif what == "cosine":
        side = np.random.default_rng(0).standard_normal(out.shape[-1])
        side -= side @ out[1, 0] / (out[1, 0] @ out[1, 0]) * out[1, 0]  # across the output, in all channels
        side /= np.linalg.norm(side)
        got[1, 0] += side * np.linalg.norm(out[1, 0]) * np.tan(np.arccos(1 - factor * 5e-6 * (unit * 2**8) ** 2))
    elif what == "lse":
        slope = {"bfloat16": 1e-5, "float32": 1e-6}[dtype]
        got_lse[1, 0] = lse[1, 0] + factor * (1e-5 + slope * abs(lse[1, 0]))
    return got, got_lse, out, lse, v_max


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("what", ["largest", "L2", "cosine", "lse"])
def test_tolerances_are_exact(dtype, what):
    for factor, fails in ((0.9, False), (1.1, True)):
        got, got_lse, out, lse, v_max = nudged(dtype, factor, what=what)
        if not fails:
            helpers.assert_attention_close(got, got_lse, out, lse, visible_v_max=v_max, dtype=dtype)
            continue
        with pytest.raises(AssertionError, match=f"{what}.* at row 1, head 0"):
            helpers.assert_attention_close(got, got_lse, out, lse, visible_v_max=v_max, dtype=dtype)


@pytest.mark.parametrize(("channels", "rows"), [(64, 8000), (helpers.WIDE, 2000)])
def test_exact_products_keep_the_tolerances(channels, rows):
    """Of weights and results rounded to bfloat16, and nothing else: of narrow rows not the cosine of wide ones."""
    rng = np.random.default_rng(0)
    scores, values = (rng.standard_normal((rows, 40, n), np.float32) for n in (1, channels))
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))[..., 0]

    def rounded(x):
        return x.astype(jnp.bfloat16).astype(np.float32)

    total = weights.sum(axis=1, dtype=np.float64)[:, None]
    want = np.einsum("tn,tnc->tc", weights, values, dtype=np.float64) / total
    got = rounded(np.einsum("tn,tnc->tc", rounded(weights), values, dtype=np.float64) / total)
    arrays = got[:, None], np.zeros((rows, 1), np.float32), want[:, None], np.zeros((rows, 1))
    helpers.assert_attention_close(*arrays, visible_v_max=np.abs(values).max((1, 2))[:, None], dtype=jnp.bfloat16)
    cosine = (got * want).sum(axis=1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
    assert (1 - cosine > 5e-6).any() == (channels < helpers.WIDE)


@pytest.mark.parametrize(
    "row, value, lse_value, message",
    [
        (2, 1e-30, None, "rows that see no key"),
        (2, np.nan, None, "rows that see no key"),
        (2, None, -1e30, "lse is -inf at"),
        (1, np.nan, None, "at row 1, head 0"),
        (1, None, -np.inf, "lse is -inf at"),
        (1, None, np.nan, "error. of lse"),
    ],
)
def test_empty_rows_and_nan(row, value, lse_value, message):
    out, lse, v_max = helpers.poisoned_batch(1, kv_lens=[5, 0], q_lens=[2, 1]).expected()
    got, got_lse = out.copy(), lse.astype(np.float32)
    if value is not None:
        got[row, 0, 0] = value
    if lse_value is not None:
        got_lse[row, 0] = lse_value
    with pytest.raises(AssertionError, match=message):
        helpers.assert_attention_close(got, got_lse, out, lse, visible_v_max=v_max, dtype=jnp.float32)
