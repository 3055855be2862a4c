"""State: what is stored (pools), where it goes (write), who owns it (pages), and what is found again (prefix)."""

from mla_attn.cache.latent import LatentPool
from mla_attn.cache.placement import move_rows, read_latent, write_latent

__all__ = ["LatentPool", "move_rows", "read_latent", "write_latent"]
