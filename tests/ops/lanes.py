"""The XLA implementations at small sizes, so that short requests have several tiles, blocks and lanes."""

import jax

import mla_attn.xla.blockwise


class OneBranch:
    """``jax.lax`` with the choice by platform made in advance."""

    def __init__(self, platform):
        self.platform = platform

    def __getattr__(self, name):
        return getattr(jax.lax, name)

    def platform_dependent(self, *args, **branches):
        return branches[self.platform](*args)


def shrink(monkeypatch, module, *, block_keys, platform):
    """Blocks of ``block_keys`` keys, tiles of 4 rows and heads, and as many as 5 lanes on a platform that has lanes."""
    monkeypatch.setattr(mla_attn.xla.blockwise, "_CPU_BLOCK_KEYS", block_keys)
    monkeypatch.setattr(mla_attn.xla.blockwise, "_GPU_BLOCK_KEYS", block_keys)
    monkeypatch.setattr(module, "lax", OneBranch(platform))
    monkeypatch.setattr(mla_attn.xla.blockwise, "_TILE_ROWS", 4)
    monkeypatch.setattr(mla_attn.xla.blockwise, "_LANE_ROWS", 20)
