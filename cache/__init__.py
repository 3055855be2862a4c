"""The paged cache: the pools (``latent``, ``kv``), their row formats (``formats``) and memory layout (``placement``),
the page allocator (``allocator``) and the prefix cache (``prefix``)."""

from mla_attn.cache.allocator import OutOfPages, PageAllocator
from mla_attn.cache.kv import KVPool, read_kv, write_kv
from mla_attn.cache.latent import LatentPool, read_latent, write_latent
from mla_attn.cache.placement import move_rows
from mla_attn.cache.prefix import PrefixCache

__all__ = [
    "KVPool",
    "LatentPool",
    "OutOfPages",
    "PageAllocator",
    "PrefixCache",
    "move_rows",
    "read_kv",
    "read_latent",
    "write_kv",
    "write_latent",
]
