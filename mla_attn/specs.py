"""The static facts of an attention, hashable so that they can be static arguments of a jitted function."""

import dataclasses
from typing import Any

from mla_attn.checks import check_integer, check_scale, check_soft_cap, check_window

_DERIVED: Any = None  # default of fields that ``__post_init__`` derives from the others


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        num_heads: query heads H, any positive number.
        kv_lora_rank: latent rank R; the first R channels of a cached row are both key and value.
        qk_rope_head_dim: rope dimension E, 0 for none; the last E channels of a cached row are key only.
        scale: softmax scale, positive and finite in float32. For DeepSeek ``(nope + rope) ** -0.5 * mscale ** 2``, in
            the absorbed form too: the trained query width counts, not R + E.
        window: number of visible keys per row, its own included, up to 2**31 - 1; None for all.
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

    def shard(self, *, heads: int) -> "MLASpec":
        """The spec on one of ``heads`` devices that share the query heads; ValueError unless they divide H."""
        return dataclasses.replace(self, num_heads=_share(self, heads))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GQASpec:
    """Grouped-query attention (arXiv:2305.13245): query head h reads KV head ``h * K // H``. With one KV head it is
    multi-query attention, with K = H multi-head attention.

    Attributes:
        num_heads: query heads H, a positive multiple of K.
        num_kv_heads: KV heads K.
        head_dim: dimension D of queries and keys.
        v_head_dim: dimension V of values; D if None.
        scale: softmax scale, positive and finite in float32; usually ``D ** -0.5``.
        window: number of visible keys per row, its own included, up to 2**31 - 1; None for all. (It is 1 more than
            ``window_left`` of other libraries.)
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

    def shard(self, *, heads: int) -> "GQASpec":
        """The spec on one of ``heads`` devices that share the query heads, with K / heads KV heads each.

        More devices than KV heads each have one: device i has KV head ``i * K // heads``, as do its neighbours.

        Raises:
            ValueError: ``heads`` does not divide H, or is neither a divisor nor a multiple of K.
        """
        query_heads, kv_heads = _share(self, heads), self.num_kv_heads
        if kv_heads % heads and heads % kv_heads:
            raise ValueError(f"heads={heads} must be a divisor or a multiple of num_kv_heads={kv_heads}")
        return dataclasses.replace(self, num_heads=query_heads, num_kv_heads=max(1, kv_heads // heads))


def _share(spec: MLASpec | GQASpec, devices: int) -> int:
    """Query heads of each of these devices."""
    devices = check_integer("heads", devices, 1)
    if spec.num_heads % devices:
        raise ValueError(f"heads={devices} must be a divisor of num_heads={spec.num_heads}")
    return spec.num_heads // devices


def _settle(spec, fields: dict[str, Any]) -> None:
    """Sets fields to Python numbers, so that equal specs are equal keys; NumPy numbers would also promote dtypes."""
    for name, value in fields.items():
        object.__setattr__(spec, name, value)
