"""Static facts of one attention, hashable so that they can be static arguments of a jitted function."""

import dataclasses
from typing import Any

from mla_attn.checks import check_integer, check_scale, check_soft_cap, check_window

_DERIVED: Any = None  # from other fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        num_heads: query heads H, any positive number.
        kv_lora_rank: latent rank R; the first R channels of a cached row are both key and value.
        qk_rope_head_dim: rope dimension E, 0 for none; the last E channels of a cached row are key only.
        scale: softmax scale, positive and finite in float32. For DeepSeek ``(nope + rope) ** -0.5 * mscale ** 2``, in
            the absorbed form too: the trained query width counts, not R + E.
        window: keys a row may see, itself included, up to 2**31 - 1; None for all.
        soft_cap: scores become ``cap * tanh(score / cap)``, up to 1e30; None or infinity for no cap.
    """

    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self):
        fields = {
            "num_heads": check_integer("num_heads", self.num_heads, 1),
            "kv_lora_rank": check_integer("kv_lora_rank", self.kv_lora_rank, 1),
            "qk_rope_head_dim": check_integer("qk_rope_head_dim", self.qk_rope_head_dim, 0),
            "scale": check_scale(self.scale),
            "window": check_window(self.window),
            "soft_cap": check_soft_cap(self.soft_cap),
        }
        _settle(self, fields)

    @property
    def latent_dim(self) -> int:
        """Channels C = R + E of a cached row and of an absorbed query."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class GQASpec:
    """Grouped-query attention (arXiv:2305.13245): query head h reads KV head ``h * K // H``. One KV head is multi-query
    attention, as many as query heads multi-head attention.

    Attributes:
        num_heads: query heads H, any positive number that K divides.
        num_kv_heads: KV heads K.
        head_dim: dimension D of queries and keys.
        v_head_dim: dimension V of values; D if None.
        scale: softmax scale, positive and finite in float32; usually ``D ** -0.5``.
        window: keys a row may see, itself included, up to 2**31 - 1; None for all. (``window_left`` of other libraries
            is less by one.)
        soft_cap: scores become ``cap * tanh(score / cap)``, up to 1e30; None or infinity for no cap.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int = _DERIVED
    scale: float
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self):
        head_dim = check_integer("head_dim", self.head_dim, 1)
        fields = {
            "num_heads": check_integer("num_heads", self.num_heads, 1),
            "num_kv_heads": check_integer("num_kv_heads", self.num_kv_heads, 1),
            "head_dim": head_dim,
            "v_head_dim": head_dim if self.v_head_dim is None else check_integer("v_head_dim", self.v_head_dim, 1),
            "scale": check_scale(self.scale),
            "window": check_window(self.window),
            "soft_cap": check_soft_cap(self.soft_cap),
        }
        _settle(self, fields)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")


def _settle(spec, fields: dict[str, Any]) -> None:
    """Fields as Python's numbers: equal specs are one, and NumPy's would promote."""
    for name, value in fields.items():
        object.__setattr__(spec, name, value)
