"""Static facts of one attention, hashable so that they can be static arguments of a jitted function."""

import dataclasses
import math
import numbers
from typing import Any


def check_integer(name: str, value: Any, least: int) -> None:
    """ValueError unless a static ``value`` is an integer of at least ``least``."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value} must be an integer of at least {least}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        num_heads: query heads H, any positive number.
        kv_lora_rank: latent rank R; the first R channels of a cached row are both key and value.
        qk_rope_head_dim: rope dimension E, 0 for none; the last E channels of a cached row are key only.
        scale: softmax scale. For DeepSeek ``(nope + rope) ** -0.5 * mscale ** 2``, in the absorbed form too: the
            trained query width counts, not R + E.
        window: keys a row may see, itself included; None for all.
        soft_cap: scores become ``cap * tanh(score / cap)``; None for no cap.
    """

    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self):
        for name, least in (("num_heads", 1), ("kv_lora_rank", 1), ("qk_rope_head_dim", 0)):
            check_integer(name, getattr(self, name), least)
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale={self.scale} must be a positive finite number")
        if self.window is not None:  # it counts the row's own key
            check_integer("window", self.window, 1)
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap={self.soft_cap} must be None or positive")

    @property
    def latent_dim(self) -> int:
        """Channels C = R + E of a cached row and of an absorbed query."""
        return self.kv_lora_rank + self.qk_rope_head_dim
