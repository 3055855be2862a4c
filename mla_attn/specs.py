"""Static facts of one attention, hashable so that they can be static arguments of a jitted function."""

import dataclasses

from mla_attn.checks import check_integer, check_scale, check_soft_cap, check_window


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
        for name, value in fields.items():  # as Python's numbers: equal specs are one, and NumPy's would promote
            object.__setattr__(self, name, value)

    @property
    def latent_dim(self) -> int:
        """Channels C = R + E of a cached row and of an absorbed query."""
        return self.kv_lora_rank + self.qk_rope_head_dim
