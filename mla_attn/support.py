"""What each implementation says of a call, and of a list of them: the table in README and ``mla-attn supports``."""

import jax.numpy as jnp

from mla_attn.ops import mla, ragged
from mla_attn.specs import MLASpec

_SPEC = {"num_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "scale": 0.1}


def _mla_call(
    *,
    page_size=64,
    dtype=jnp.bfloat16,
    max_q_len=1,
    causal=True,
    tree=False,
    batch_invariant=False,
    platform="cpu",
    **spec,
):
    return mla.MLACall(
        spec=MLASpec(**{**_SPEC, **spec}),
        page_size=page_size,
        dtype=jnp.dtype(dtype),
        max_q_len=max_q_len,
        causal=causal,
        tree=tree,
        batch_invariant=batch_invariant,
        platform=platform,
    )


def _ragged_call(*, heads=128, kv_heads=128, qk_dim=192, v_dim=128):
    return ragged.RaggedCall(heads=heads, kv_heads=kv_heads, qk_dim=qk_dim, v_dim=v_dim)


CALLS = {
    "mla_attention": {
        "decode, bf16": _mla_call(),
        "decode, float32": _mla_call(dtype=jnp.float32),
        "verify, draft-extend, absorbed extend, mixed": _mla_call(max_q_len=4),
        "16 heads": _mla_call(num_heads=16),
        "20 heads": _mla_call(num_heads=20),
        "page size 1": _mla_call(page_size=1),
        "page size 544": _mla_call(page_size=544),
        "latent 256 + 64": _mla_call(kv_lora_rank=256),
        "latent 512 + 0": _mla_call(qk_rope_head_dim=0),
        "causal=False": _mla_call(max_q_len=4, causal=False),
        "sliding window": _mla_call(window=128),
        "soft cap": _mla_call(soft_cap=30.0),
        "tree_mask": _mla_call(max_q_len=4, tree=True),
        "tree_mask with a window": _mla_call(max_q_len=4, tree=True, window=128),
        "batch_invariant=True on a CPU": _mla_call(batch_invariant=True),
        "batch_invariant=True on a GPU": _mla_call(batch_invariant=True, platform="gpu"),
    },
    "ragged_attention": {
        "128 heads, 192/128": _ragged_call(),
        "32 heads over 8, 128/128": _ragged_call(heads=32, kv_heads=8, qk_dim=128),
    },
}

IMPLEMENTATIONS = {"mla_attention": mla.IMPLEMENTATIONS, "ragged_attention": ragged.IMPLEMENTATIONS}


def supports(op: str, **facts) -> dict[str, str | None]:
    """Which implementations serve a call, by name: None, or the reason for a refusal, which the op would raise.

    Args:
        op: "mla_attention" or "ragged_attention".
        facts: what differs from an ordinary call. For ``mla_attention`` (a bfloat16 decode call of DeepSeek's sizes):
            ``page_size``, ``dtype`` of the pool, ``max_q_len``, ``causal``, ``tree`` (whether there is a
            ``tree_mask``), ``batch_invariant``, ``platform``, and the fields of ``MLASpec``. For ``ragged_attention``
            (DeepSeek's prompts): ``heads``, ``kv_heads``, ``qk_dim``, ``v_dim``.

    Raises:
        ValueError: an op or a fact that does not exist, or a value that no call may have.
    """
    make = {"mla_attention": _mla_call, "ragged_attention": _ragged_call}.get(op)
    if make is None:
        raise ValueError(f"op={op!r} must be one of {', '.join(IMPLEMENTATIONS)}")
    try:
        call = make(**facts)
    except TypeError as error:
        raise ValueError(f"facts of {op}: {error}") from None
    return {i.name: i.supports(call) for i in IMPLEMENTATIONS[op]}


def support_table() -> str:
    """Markdown table, a row a call: "yes", or the reason an implementation refuses it."""
    names = list(dict.fromkeys(i.name for group in IMPLEMENTATIONS.values() for i in group))
    rows = [["op", "call", *names], ["---"] * (2 + len(names))]
    for op, calls in CALLS.items():
        found = {i.name: i for i in IMPLEMENTATIONS[op]}
        for label, call in calls.items():
            cells = [(found[n].supports(call) or "yes") if n in found else "-" for n in names]
            rows.append([f"`{op}`", label, *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
