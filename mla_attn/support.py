"""What each implementation says of a call, and of a list of them: the table in README and ``mla-attn supports``."""

import jax.numpy as jnp

from mla_attn.dispatch import H200
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
    compute_capability=None,
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
        compute_capability=compute_capability,
    )


def _on_h200(**facts):
    return _mla_call(**H200.facts, **facts)


def _ragged_call(*, heads=128, kv_heads=128, qk_dim=192, v_dim=128):
    return ragged.RaggedCall(heads=heads, kv_heads=kv_heads, qk_dim=qk_dim, v_dim=v_dim)


CALLS = {
    "mla_attention": {
        "CPU: decode": _mla_call(),
        "CPU: batch_invariant=True": _mla_call(batch_invariant=True),
        "A100: decode": _mla_call(platform="gpu", compute_capability="8.0"),
        "A100: batch_invariant=True": _mla_call(platform="gpu", compute_capability="8.0", batch_invariant=True),
        "H200: decode": _on_h200(),
        "H200: decode, float32": _on_h200(dtype=jnp.float32),
        "H200: verify, draft-extend, absorbed extend, mixed": _on_h200(max_q_len=4),
        "H200: 16 heads": _on_h200(num_heads=16),
        "H200: 20 heads": _on_h200(num_heads=20),
        "H200: page size 1": _on_h200(page_size=1),
        "H200: page size 16": _on_h200(page_size=16),
        "H200: page size 544": _on_h200(page_size=544),
        "H200: latent 256 + 64": _on_h200(kv_lora_rank=256),
        "H200: latent 512 + 0": _on_h200(qk_rope_head_dim=0),
        "H200: latent 128 + 64": _on_h200(kv_lora_rank=128),
        "H200: causal=False": _on_h200(max_q_len=4, causal=False),
        "H200: sliding window": _on_h200(window=128),
        "H200: soft cap": _on_h200(soft_cap=30.0),
        "H200: tree_mask": _on_h200(max_q_len=4, tree=True),
        "H200: tree_mask with a window": _on_h200(max_q_len=4, tree=True, window=128),
        "H200: batch_invariant=True": _on_h200(batch_invariant=True),
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
        facts: what differs from an ordinary call. For ``mla_attention`` (a bfloat16 decode call of DeepSeek's sizes on
            a CPU): ``page_size``, ``dtype`` of the pool, ``max_q_len``, ``causal``, ``tree`` (whether there is a
            ``tree_mask``), ``batch_invariant``, ``platform``, ``compute_capability`` of a GPU ("9.0" for Hopper), and
            the fields of ``MLASpec``. For ``ragged_attention`` (DeepSeek's prompts): ``heads``, ``kv_heads``,
            ``qk_dim``, ``v_dim``.

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
