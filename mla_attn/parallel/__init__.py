"""Steps and ops over several devices: heads, requests, contexts and experts over the axes of a caller's mesh."""

from mla_attn.parallel.calls import create_pool, plan, sharded
from mla_attn.parallel.context import merge_over
from mla_attn.parallel.layout import Layout, Parallelism
from mla_attn.parallel.local import in_shard

__all__ = ["Layout", "Parallelism", "create_pool", "in_shard", "merge_over", "plan", "sharded"]
