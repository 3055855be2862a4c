"""The attention contract in float64 NumPy, one query row after the other: the oracle of the reference.

It is written from the rules alone and shares no code with the library; it reads no key that its row does not see, so
that what must not be read may hold NaN. ``metadata`` is any object with the fields of ``AttentionMetadata``.
"""

import numpy as np


def visible_slots(metadata, b, j, *, num_slots, window=None, causal=True, tree_mask=None):
    """Table slots that row j of request b sees, in order.

    Slot i holds the key at position ``p = kv_offset + i * kv_stride``; the row stands at ``a = kv_len - q_len + j``.
    """
    kv_len, q_len = int(metadata.kv_lens[b]), int(metadata.q_lens[b])
    a = kv_len - q_len + j
    seen = []
    for i in range(num_slots):
        p = int(metadata.kv_offsets[b]) + i * metadata.kv_stride
        if p >= kv_len:
            break
        if causal and p > a:
            continue
        if tree_mask is not None:
            _, width, columns = tree_mask.shape
            c = p - (kv_len - q_len) + columns - width
            if c >= 0 and not tree_mask[b, j, c]:
                continue
            at_row = int(metadata.q_starts[b]) + j
            if c < 0 and window is not None and p <= int(metadata.positions[at_row]) - window:
                continue
        elif window is not None and p <= a - window:
            continue
        seen.append(i)
    return seen


def attend(q, k, v, *, scale, soft_cap=None, sinks=None):
    """One row: q [H, D] over keys k [n, D] and values v [n, V], or k [n, H, D] and v [n, H, V].

    Returns ``(out [H, V], lse [H])`` in float64; without keys, 0 and -inf. Sinks [H] are no part of the lse.
    """
    heads = q.shape[0]
    out, lse = np.zeros((heads, v.shape[-1])), np.full(heads, -np.inf)
    for h in range(heads):
        keys, values = (k, v) if k.ndim == 2 else (k[:, h], v[:, h])
        if len(keys) == 0:
            continue
        scores = scale * (keys @ q[h])
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max())
        sink = 0.0 if sinks is None else np.exp(float(sinks[h]) - scores.max())
        out[h] = weights @ values / (weights.sum() + sink)
        lse[h] = scores.max() + np.log(weights.sum())
    return out, lse


def mla_oracle(q_latent, q_rope, rows, metadata, spec, *, causal=True, tree_mask=None, sinks=None):
    """Absorbed MLA over a paged cache.

    Args:
        q_latent: [T, H, R].
        q_rope: [T, H, E].
        rows: pages of one layer [N, P, C], each row ``[latent R | rope E]``.
        metadata: q_starts, q_lens, kv_lens, kv_offsets, page_table, kv_stride.
        spec: kv_lora_rank, scale, window, soft_cap.
        causal: whether a row sees no key after its own.
        tree_mask: bool [B, S, M].
        sinks: [H].

    Returns:
        ``(out [T, H, R], lse [T, H])`` in float64; 0 and -inf on rows that see no key or that nobody owns.
    """
    q = np.concatenate([_float64(q_latent), _float64(q_rope)], axis=-1)
    out, lse = np.zeros((*q.shape[:2], spec.kv_lora_rank)), np.full(q.shape[:2], -np.inf)
    for t, keys in _mla_rows(rows, metadata, spec, causal, tree_mask):
        values, rules = keys[:, : spec.kv_lora_rank], {"scale": spec.scale, "soft_cap": spec.soft_cap, "sinks": sinks}
        out[t], lse[t] = attend(q[t], keys, values, **rules)
    return out, lse


def gqa_oracle(q, k, v, metadata, spec, *, causal=True, tree_mask=None, sinks=None):
    """Grouped-query attention over a paged cache, head h served by ``h * K // H``.

    Args:
        q: [T, H, D].
        k, v: pages of one layer, [N, P, K, D] and [N, P, K, V].
        metadata, spec, causal, tree_mask, sinks: as of ``mla_oracle``.

    Returns:
        ``(out [T, H, V], lse [T, H], largest visible |v| [T, H])`` in float64.
    """
    q, k, v = _float64(q), _float64(k), _float64(v)
    group = q.shape[1] // k.shape[2]
    out, lse = np.zeros((*q.shape[:2], v.shape[-1])), np.full(q.shape[:2], -np.inf)
    v_max, rules = np.zeros(q.shape[:2]), {"scale": spec.scale, "soft_cap": spec.soft_cap, "sinks": sinks}
    for t, pages, offsets in _seen(k.shape[:2], metadata, spec, causal, tree_mask):
        keys, values = (np.repeat(x[pages, offsets], group, axis=1) for x in (k, v))
        out[t], lse[t] = attend(q[t], keys, values, **rules)
        v_max[t] = np.abs(values).max(axis=(0, 2), initial=0)
    return out, lse, v_max


def mla_v_max(num_rows, rows, metadata, spec, *, causal=True, tree_mask=None):
    """Largest \\|value\\| that each row of ``mla_oracle`` sees, [T, 1] (all heads see the same); 0 without keys."""
    v_max = np.zeros((num_rows, 1))
    for t, keys in _mla_rows(rows, metadata, spec, causal, tree_mask):
        v_max[t] = np.abs(keys[:, : spec.kv_lora_rank]).max(initial=0)
    return v_max


def _mla_rows(rows, metadata, spec, causal, tree_mask):
    """Each owned row t with the cached rows [n, C] it sees."""
    for t, pages, offsets in _seen(rows.shape[:2], metadata, spec, causal, tree_mask):
        yield t, _float64(rows[pages, offsets])


def _seen(pool, metadata, spec, causal, tree_mask):
    """Each owned row t with the pages and offsets of the keys it sees; ``pool`` is (N, P)."""
    (num_pages, page_size), table = pool, np.asarray(metadata.page_table)
    for b, q_len in enumerate(np.asarray(metadata.q_lens).tolist()):
        for j in range(q_len):
            slots = visible_slots(
                metadata,
                b,
                j,
                num_slots=table.shape[1] * page_size,
                window=spec.window,
                causal=causal,
                tree_mask=None if tree_mask is None else np.asarray(tree_mask),
            )
            slots = np.asarray(slots, int)
            pages = table[b, slots // page_size]
            assert ((pages >= 0) & (pages < num_pages)).all(), f"request {b} sees a page outside the pool"
            yield int(metadata.q_starts[b]) + j, pages, slots % page_size


def ragged_oracle(
    q, k, v, *, q_starts, q_lens, kv_starts, kv_lens, scale, causal=True, window=None, soft_cap=None, sinks=None
):
    """Attention over packed, unpaged keys: q [T, H, D], k [Tk, K, D], v [Tk, K, V], head h served by ``h * K // H``.

    Returns:
        ``(out [T, H, V], lse [T, H])`` in float64; 0 and -inf on rows that see no key or that nobody owns.
    """
    q, k, v = _float64(q), _float64(k), _float64(v)
    out, lse = np.zeros((*q.shape[:2], v.shape[-1])), np.full(q.shape[:2], -np.inf)
    group = q.shape[1] // k.shape[1]
    for t, first, last in _ragged_rows(q_starts, q_lens, kv_starts, kv_lens, causal, window):
        keys, values = np.repeat(k[first:last], group, axis=1), np.repeat(v[first:last], group, axis=1)
        out[t], lse[t] = attend(q[t], keys, values, scale=scale, soft_cap=soft_cap, sinks=sinks)
    return out, lse


def ragged_v_max(num_rows, v, *, q_starts, q_lens, kv_starts, kv_lens, num_heads, causal=True, window=None):
    """Largest \\|value\\| that each row and head of ``ragged_oracle`` sees, [T, H]; 0 without keys."""
    v = _float64(v)
    v_max = np.zeros((num_rows, num_heads))
    for t, first, last in _ragged_rows(q_starts, q_lens, kv_starts, kv_lens, causal, window):
        v_max[t] = np.repeat(np.abs(v[first:last]).max(axis=(0, 2), initial=0), num_heads // v.shape[1])
    return v_max


def _ragged_rows(q_starts, q_lens, kv_starts, kv_lens, causal, window):
    """Each owned row t with the range ``first:last`` of keys it sees."""
    for b in range(len(q_lens)):
        kv_start, kv_len, q_len = int(kv_starts[b]), int(kv_lens[b]), int(q_lens[b])
        for j in range(q_len):
            a = kv_len - q_len + j
            last = min(kv_len, a + 1) if causal else kv_len
            first = 0 if window is None else max(0, a - window + 1)
            yield int(q_starts[b]) + j, kv_start + min(first, max(last, 0)), kv_start + max(last, 0)


def merge_oracle(outs, lses, sinks=None):
    """Partials over disjoint keys, ``outs [n][T, H, V]`` and ``lses [n][T, H]``, as one; sinks [H] enter once.

    Returns:
        ``(out [T, H, V], lse [T, H])`` in float64; the lse leaves the sinks out. Payloads of empty partials (lse -inf)
        are not looked at.
    """
    outs, lses = [_float64(out) for out in outs], [_float64(lse) for lse in lses]
    out, lse = np.zeros(outs[0].shape), np.full(lses[0].shape, -np.inf)
    for t, h in np.ndindex(lse.shape):
        filled = [n for n in range(len(lses)) if lses[n][t, h] != -np.inf]
        if not filled:
            continue
        terms = [lses[n][t, h] for n in filled]
        lse[t, h] = np.logaddexp.reduce(terms)
        bottom = lse[t, h] if sinks is None else np.logaddexp(lse[t, h], float(sinks[h]))
        for n in filled:
            out[t, h] += np.exp(lses[n][t, h] - bottom) * outs[n][t, h]
    return out, lse


def _float64(array):
    return np.asarray(array, dtype=np.float64)
