"""Run by wheel-test in a clean environment: the packages are where they should be, and a decode step is right."""

import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np

import mla_attn
from mla_attn.cache import LatentPool, write_latent
from mla_attn.metadata import for_decode
from mla_attn.ops import mla_attention
from mla_attn.specs import MLASpec

for name in ("cache", "pallas_kernels", "tests"):
    assert importlib.util.find_spec(name) is None, f"the wheel installs a top-level {name}"

spec = MLASpec(num_heads=2, kv_lora_rank=16, qk_rope_head_dim=8, scale=0.2)
keys, queries = jax.random.split(jax.random.key(0))
rows = jax.random.normal(keys, (5, spec.latent_dim))
query = jax.random.normal(queries, (1, spec.num_heads, spec.latent_dim))

# Five tokens of one request on pages 3 and 1 of 4 tokens.
pool = LatentPool.create(num_layers=1, num_pages=4, page_size=4, spec=spec, dtype=jnp.float32)
pool = write_latent(pool, rows[:, :16], rows[:, 16:], jnp.array([12, 13, 14, 15, 4]))
metadata = for_decode(jnp.array([[3, 1]]), jnp.array([5]), page_size=4)
out = mla_attention(query[..., :16], query[..., 16:], pool, metadata, spec)

weights = np.exp(spec.scale * np.einsum("thc,mc->thm", query, rows, dtype=np.float64))
expected = np.einsum("thm,mr->thr", weights / weights.sum(-1, keepdims=True), rows[:, :16], dtype=np.float64)
np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
print(f"mla-attn {importlib.metadata.version('mla-attn')} from {mla_attn.__path__[0]}: decode agrees with NumPy")
