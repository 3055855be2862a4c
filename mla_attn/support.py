"""``supports`` and the support table, which ``mla-attn supports`` prints and README.md in this folder shows."""

import dataclasses
import re
from typing import Any

import jax

from mla_attn.cache import KVPool, LatentPool
from mla_attn.checks import check_dtype, check_integer, check_operand
from mla_attn.dispatch import Device, Implementation, current_device
from mla_attn.ops import gqa, grouped_matmul, mla, ragged
from mla_attn.specs import GQASpec, MLASpec
from mla_attn.triton.gpus import target

CPU, A100, H200 = Device("cpu"), Device("gpu", "8.0", 108), Device("gpu", "9.0", 132)
L40S, RTX_4090 = Device("gpu", "8.9", 142), Device("gpu", "8.9", 128)
MI300X = Device("gpu", cores=304, arch="gfx942")
# Architectures on which an op's Triton kernels have run; for the others they are compiled in tests.
_RUN = {"mla_attention": ("sm_90",), "gqa_attention": ("sm_90",)}
_DEEPSEEK = {"num_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "scale": 0.1}
_LLAMA = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "scale": 128**-0.5}


def _mla_call(
    *, page_size=64, dtype="bfloat16", row_format="plain", q_dtype="bfloat16", row_width=None, rope_offset=None,
    max_q_len=1, causal=True, tree=False, sinks=False, batch_invariant=False, skip=False, **spec,
):  # fmt: skip
    spec, dtype = MLASpec(**{**_DEEPSEEK, **spec}), check_dtype("dtype", dtype)
    sizes = {"num_layers": 1, "num_pages": 1, "page_size": page_size, "spec": spec}
    pool = jax.eval_shape(lambda: LatentPool.create(**sizes, dtype=dtype, row_format=row_format))
    if row_width is not None or rope_offset is not None:
        latent, rope = pool.format.widths(spec.kv_lora_rank, spec.qk_rope_head_dim)
        offset = check_integer("rope_offset", latent if rope_offset is None else rope_offset, latent)
        width = check_integer("row_width", offset + rope if row_width is None else row_width, offset + rope)
        data = jax.ShapeDtypeStruct((1, page_size, width), pool.data.dtype)
        pool = dataclasses.replace(pool, data=data, rope_offset=offset)
    flags = {"causal": causal, "tree": tree, "sinks": sinks, "batch_invariant": batch_invariant, "skip": skip}
    return mla.MLACall.of(pool, spec, max_q_len=max_q_len, q_dtype=_q_dtype(q_dtype), **flags)


def _gqa_call(
    *, page_size=16, dtype="bfloat16", q_dtype="bfloat16", layout="nhd", max_q_len=1, causal=True, tree=False,
    sinks=False, batch_invariant=False, skip=False, **spec,
):  # fmt: skip
    spec, dtype = GQASpec(**{**_LLAMA, **spec}), check_dtype("dtype", dtype)
    sizes = {"num_layers": 1, "num_pages": 1, "page_size": page_size, "spec": spec, "dtype": dtype, "layout": layout}
    pool = jax.eval_shape(lambda: KVPool.create(**sizes))
    flags = {"causal": causal, "tree": tree, "sinks": sinks, "batch_invariant": batch_invariant, "skip": skip}
    return gqa.GQACall.of(pool, spec, max_q_len=max_q_len, q_dtype=_q_dtype(q_dtype), **flags)


def _ragged_call(
    *, heads=128, kv_heads=128, qk_dim=192, v_dim=128, sinks=False, skip=False, dtype="bfloat16", q_dtype="bfloat16",
    batch_invariant=False,
):  # fmt: skip
    sizes = {"heads": heads, "kv_heads": kv_heads, "qk_dim": qk_dim, "v_dim": v_dim}
    for name, value in sizes.items():
        check_integer(name, value, 1)
    shapes = ((1, heads, qk_dim), (1, kv_heads, qk_dim), (1, kv_heads, v_dim))
    k, v = (_operand("dtype", dtype, shape) for shape in shapes[1:])
    flags = {"sinks": sinks, "skip": skip, "batch_invariant": batch_invariant}
    return ragged.RaggedCall.of(_operand("q_dtype", q_dtype, shapes[0]), k, v, **flags)


def _grouped_call(*, depth=7168, width=2048, dtype="bfloat16"):
    for name, value in (("depth", depth), ("width", width)):
        check_integer(name, value, 1)
    return grouped_matmul.GroupedCall.of(_array("dtype", dtype, (1, depth, width)))


def _q_dtype(dtype):
    return _operand("q_dtype", dtype, ()).dtype


def _operand(name, dtype, shape):
    array = _array(name, dtype, shape)
    check_operand(name, array)
    return array


def _array(name, dtype, shape):
    return jax.ShapeDtypeStruct(shape, check_dtype(name, dtype))


_MAKE = {
    "mla_attention": _mla_call,
    "gqa_attention": _gqa_call,
    "ragged_attention": _ragged_call,
    "grouped_matmul": _grouped_call,
}

IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {
    "mla_attention": mla.IMPLEMENTATIONS,
    "gqa_attention": gqa.IMPLEMENTATIONS,
    "ragged_attention": ragged.IMPLEMENTATIONS,
    "grouped_matmul": grouped_matmul.IMPLEMENTATIONS,
}

# The calls of the table: their device, and their facts as arguments of ``supports``.
CALLS: dict[str, dict[str, tuple[Device, dict[str, Any]]]] = {
    "mla_attention": {
        "CPU: decode": (CPU, {}),
        "CPU: batch_invariant=True": (CPU, {"batch_invariant": True}),
        "A100: decode": (A100, {}),
        "A100: batch_invariant=True": (A100, {"batch_invariant": True}),
        "L40S: decode": (L40S, {}),
        "RTX 4090: decode": (RTX_4090, {}),
        "MI300X: decode": (MI300X, {}),
        "MI300X: decode, float8_e4m3fn": (MI300X, {"dtype": "float8_e4m3fn"}),
        "H200: decode": (H200, {}),
        "H200: decode, float32": (H200, {"dtype": "float32"}),
        "H200: decode, float8_e4m3fn": (H200, {"dtype": "float8_e4m3fn"}),
        "H200: decode, float8_e5m2": (H200, {"dtype": "float8_e5m2"}),
        "H200: decode, float8_e4m3fn in blocks": (H200, {"dtype": "float8_e4m3fn", "row_format": "blocks"}),
        "H200: float8_e4m3fn queries": (H200, {"q_dtype": "float8_e4m3fn"}),
        "H200: verify, draft-extend, absorbed extend, mixed": (H200, {"max_q_len": 4}),
        "H200: 16 heads": (H200, {"num_heads": 16}),
        "H200: 20 heads": (H200, {"num_heads": 20}),
        "H200: page size 1": (H200, {"page_size": 1}),
        "H200: page size 16": (H200, {"page_size": 16}),
        "H200: page size 544": (H200, {"page_size": 544}),
        "H200: rows of 640": (H200, {"row_width": 640}),
        "H200: latent 256 + 64": (H200, {"kv_lora_rank": 256}),
        "H200: latent 512 + 0": (H200, {"qk_rope_head_dim": 0}),
        "H200: latent 128 + 64": (H200, {"kv_lora_rank": 128}),
        "H200: causal=False": (H200, {"max_q_len": 4, "causal": False}),
        "H200: sliding window": (H200, {"window": 128}),
        "H200: soft cap": (H200, {"soft_cap": 30.0}),
        "H200: tree_mask": (H200, {"max_q_len": 4, "tree": True}),
        "H200: tree_mask with a window": (H200, {"max_q_len": 4, "tree": True, "window": 128}),
        "H200: sinks": (H200, {"sinks": True}),
        "H200: batch_invariant=True": (H200, {"batch_invariant": True}),
        "H200: skip_threshold": (H200, {"skip": True}),
    },
    "gqa_attention": {
        "CPU: batch_invariant=True": (CPU, {"batch_invariant": True}),
        "A100: decode, 32 heads over 8": (A100, {}),
        "L40S: decode, 32 heads over 8": (L40S, {}),
        "RTX 4090: decode, 32 heads over 8": (RTX_4090, {}),
        "MI300X: decode, 32 heads over 8": (MI300X, {}),
        "H200: decode, 32 heads over 8": (H200, {}),
        "H200: decode, float16": (H200, {"dtype": "float16"}),
        "H200: decode, float32": (H200, {"dtype": "float32"}),
        "H200: verify, draft-extend, prompt parts, mixed": (H200, {"max_q_len": 64}),
        "H200: 128 heads over 1": (H200, {"num_heads": 128, "num_kv_heads": 1}),
        "H200: head_dim 96": (H200, {"head_dim": 96}),
        "H200: hnd, page size 1": (H200, {"layout": "hnd", "page_size": 1}),
        "H200: shuffled": (H200, {"layout": "shuffled"}),
        "H200: cross attention": (H200, {"max_q_len": 64, "causal": False}),
        "H200: decode, float8_e4m3fn": (H200, {"dtype": "float8_e4m3fn"}),
        "H200: decode, float8_e5m2": (H200, {"dtype": "float8_e5m2"}),
        "H200: float8_e4m3fn queries": (H200, {"q_dtype": "float8_e4m3fn"}),
        "H200: sinks, sliding window": (H200, {"sinks": True, "window": 128}),
        "H200: soft cap": (H200, {"soft_cap": 30.0}),
        "H200: tree_mask": (H200, {"max_q_len": 4, "tree": True}),
        "H200: tree_mask with a window": (H200, {"max_q_len": 4, "tree": True, "window": 128}),
        "H200: batch_invariant=True": (H200, {"batch_invariant": True}),
        "H200: skip_threshold": (H200, {"skip": True}),
    },
    "ragged_attention": {
        "H200: 128 heads, 192/128": (H200, {}),
        "H200: 32 heads over 8, 128/128": (H200, {"heads": 32, "kv_heads": 8, "qk_dim": 128}),
        "H200: 64 heads over 8, 64/64, sinks": (
            H200,
            {"heads": 64, "kv_heads": 8, "qk_dim": 64, "v_dim": 64, "sinks": True},
        ),
        "H200: 32 heads over 8, 256/256": (H200, {"heads": 32, "kv_heads": 8, "qk_dim": 256, "v_dim": 256}),
        "H200: 128 heads, 192/128, float16": (H200, {"dtype": "float16", "q_dtype": "float16"}),
        "H200: 128 heads, 192/128, float32": (H200, {"dtype": "float32", "q_dtype": "float32"}),
        "H200: 128 heads, 192/128, float8_e4m3fn": (H200, {"dtype": "float8_e4m3fn", "q_dtype": "float8_e4m3fn"}),
        "H200: 128 heads, 192/128, batch_invariant=True": (H200, {"batch_invariant": True}),
    },
    "grouped_matmul": {
        "CPU: 7168 x 2048": (CPU, {}),
        "A100: 7168 x 2048": (A100, {}),
        "MI300X: 7168 x 2048": (MI300X, {}),
        "H200: 7168 x 2048": (H200, {}),
        "H200: 7168 x 2048, float32": (H200, {"dtype": "float32"}),
        "H200: 1000 x 2048": (H200, {"depth": 1000}),
    },
}


def supports(
    op: str,
    *,
    platform: str | None = None,
    compute_capability: str | None = None,
    arch: str | None = None,
    **facts,
) -> dict[str, str | None]:
    """Says which implementations support a call: None, or the reason for the refusal, for each implementation.

    Args:
        op: "mla_attention", "gqa_attention", "ragged_attention" or "grouped_matmul".
        platform: "cpu", "gpu" or "tpu"; if neither this, ``compute_capability`` nor ``arch`` is given, the current
            device.
        compute_capability: compute capability of an NVIDIA GPU, a string such as "9.0" for Hopper.
        arch: architecture of an AMD GPU, a string such as "gfx942" for an MI300X.
        facts: differences from an ordinary call. For ``mla_attention`` (a bfloat16 decode call with DeepSeek's sizes):
            ``page_size``, ``dtype``, ``row_format``, ``row_width`` and ``rope_offset`` of the pool, ``q_dtype``,
            ``max_q_len``, ``causal``, ``tree`` (whether it has a ``tree_mask``), ``sinks`` (whether it has any),
            ``skip`` (whether it has a ``skip_threshold``), ``batch_invariant``, and the fields of ``MLASpec``. For
            ``gqa_attention`` (Llama's sizes) the same, with ``layout`` of the pool, no ``row_format``, and the fields
            of ``GQASpec``. For ``ragged_attention`` (DeepSeek's prompts): ``heads``, ``kv_heads``, ``qk_dim``,
            ``v_dim``, ``sinks``, ``skip``, ``dtype``, ``q_dtype``, ``batch_invariant``. For ``grouped_matmul``
            (DeepSeek's experts): ``depth``, ``width``, ``dtype``.

    Raises:
        ValueError: an unknown op, platform or fact, or an invalid value.
    """
    if op not in _MAKE:
        raise ValueError(f"op={op!r} must be one of {', '.join(_MAKE)}")
    return _answers(op, _device(platform, compute_capability, arch), facts)


def support_table() -> str:
    """The support table in Markdown: one row per call, with "yes" or the reason of a refusal per implementation."""
    names = list(dict.fromkeys(i.name for group in IMPLEMENTATIONS.values() for i in group))
    rows = [["op", "call", *names], ["---"] * (2 + len(names))]
    for op, calls in CALLS.items():
        for label, (device, facts) in calls.items():
            answers = _answers(op, device, facts)
            cells = [_cell(op, name, answers[name], device) if name in answers else "-" for name in names]
            rows.append([f"`{op}`", label, *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(op: str, name: str, reason: str | None, device: Device) -> str:
    if reason is None and name == "triton" and target(device) not in _RUN.get(op, ()):
        return "compiles, not run"
    return reason or "yes"


def _device(platform: str | None, compute_capability: str | None, arch: str | None) -> Device:
    if platform is None and compute_capability is None and arch is None:
        return current_device()
    platform = "gpu" if platform is None else platform
    if platform not in ("cpu", "gpu", "tpu"):
        raise ValueError(f"platform={platform!r} must be cpu, gpu or tpu")
    if compute_capability is not None:
        if not isinstance(compute_capability, str) or not re.fullmatch(r"\d+\.\d+", compute_capability):
            raise ValueError(f"compute_capability={compute_capability!r} must be a string such as '9.0'")
        if platform != "gpu":
            raise ValueError(f"compute_capability={compute_capability!r} with platform={platform!r}: must be of a gpu")
    if arch is not None:
        if not isinstance(arch, str) or not re.fullmatch(r"gfx[0-9a-f]+", arch):
            raise ValueError(f"arch={arch!r} must be a string such as 'gfx942'")
        if platform != "gpu" or compute_capability is not None:
            raise ValueError(
                f"arch={arch!r} with platform={platform!r}, compute_capability={compute_capability!r}: must be of an "
                "AMD gpu"
            )
    return Device(platform, compute_capability, arch=arch)


def _answers(op: str, device: Device, facts: dict[str, Any]) -> dict[str, str | None]:
    try:
        call = _MAKE[op](**facts)
    except TypeError as error:
        raise ValueError(f"facts of {op}: {error}") from None
    return {i.name: i.supports(call, device) for i in IMPLEMENTATIONS[op]}
