"""The metadata of a step of sglang-jax, with its work list, for all layers and on each of the mesh's data ranks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mla_attn.integrations.ragged_layout import kv_pool, latent_pool
from mla_attn.integrations.ragged_metadata import ragged_metadata
from mla_attn.metadata import AttentionMetadata
from mla_attn.ops import plan_gqa, plan_mla
from mla_attn.specs import GQASpec, MLASpec

_SPARE_TOKENS = 64  # of a request beyond the model's context, as drafts may be


def step_metadata(backend: Any, runner: Any, batch: Any, lists: Any, pages: Any) -> AttentionMetadata:
    """Metadata of a step, to take the place of a list of pages.

    Its arrays have the data ranks' parts one after the other, sharded over the mesh's axis "data". It is made on the
    device, by a program for each number of rows and requests. The work list is that of layers without a window; others
    make their own.

    Args:
        backend: the engine's attention backend.
        runner: the engine's runner of the model, whose cache exists.
        batch: the engine's batch; its ``input_ids`` have the rows of the step, padding included.
        lists: the engine's metadata of the step.
        pages: the list of pages of ``lists``, of full or of windowed layers.
    """
    mesh, pool = backend.mesh, runner.token_to_kv_pool
    cache = getattr(pool, "full_kv_pool", pool).kv_buffer[0]
    width = -(-(runner.model_config.context_len + _SPARE_TOKENS) // backend.page_size)
    sizes = (len(batch.input_ids) // batch.dp_size, backend.page_size, width)
    plan = _of_mla if cache.ndim == 4 else _of_gqa
    plan = plan(backend, cache.shape[1:], jnp.dtype(cache.dtype), mesh.shape["tensor"], jnp.dtype(runner.dtype))
    lists = (lists.seq_lens, pages, lists.cu_q_lens, lists.distribution, lists.cu_kv_lens)
    return _program(mesh, plan, sizes)(*lists)


def tree_mask(
    custom_mask: Int[Array, "n"],
    kv_lens: Int[Array, "B"],
    cu_q_lens: Int[Array, "ends"],
    widths: Int[Array, "B"],
    *,
    num_tokens: int,
) -> Bool[Array, "B S S"]:
    """The engine's mask for drafts as a ``tree_mask=``: the bits of the keys of the call's own rows.

    Args:
        custom_mask: for one request after the other, a row of ``widths[b]`` numbers for each of its rows, 0 for a key
            that it does not see. Keys before the call's rows must be visible.
        kv_lens: tokens of each request, the drafts included.
        cu_q_lens: first row of each request, and the end of the last.
        widths: numbers of a row, at least ``kv_lens``.
        num_tokens: most rows of a request, S.
    """
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    starts = jnp.cumsum(widths * q_lens) - widths * q_lens
    row = jnp.arange(num_tokens, dtype=jnp.int32)
    columns = (kv_lens - q_lens)[:, None, None] + row[None, None, :]
    index = starts[:, None, None] + row[None, :, None] * widths[:, None, None] + columns
    bits = jnp.take(custom_mask, index, mode="fill", fill_value=0) != 0
    inside = row[None] < q_lens[:, None]
    return bits & inside[:, :, None] & inside[:, None, :]


# Plans are partial functions of hashable arguments, by which programs are found; equal arguments give the same object.


def _of_mla(backend, shape, cache_dtype, ranks: int, dtype):
    dims = backend.kv_lora_rank, backend.qk_rope_head_dim, backend.page_size
    return _mla_plan(backend.num_heads // ranks, dims, shape, cache_dtype, dtype)


@functools.cache
def _mla_plan(heads: int, dims, shape, cache_dtype, dtype):
    rank, rope, page_size = dims
    spec = MLASpec(num_heads=heads, kv_lora_rank=rank, qk_rope_head_dim=rope, scale=1.0)
    options = {"kv_lora_rank": rank, "rope_dim": rope, "page_size": page_size}
    pool = jax.eval_shape(lambda: latent_pool(jnp.zeros((1, *shape), cache_dtype), **options))
    return functools.partial(plan_mla, pool=pool, spec=spec, out_dtype=dtype, q_dtype=dtype)


def _of_gqa(backend, shape, cache_dtype, ranks: int, dtype):
    page_size, rows, pack, width = shape
    shape = page_size, rows // ranks, pack, width
    return _gqa_plan(backend.num_heads // ranks, backend.head_dim, shape, cache_dtype, dtype)


@functools.cache
def _gqa_plan(heads: int, head_dim: int, shape, cache_dtype, dtype):
    kv_heads = shape[1] * shape[2] // 2
    spec = GQASpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=1.0)
    options = {"num_kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": head_dim}
    pool = jax.eval_shape(lambda: kv_pool(jnp.zeros((1, *shape), cache_dtype), **options))
    return functools.partial(plan_gqa, pool=pool, spec=spec, out_dtype=dtype, q_dtype=dtype)


@functools.cache
def _program(mesh, plan: Callable[..., Any], sizes: tuple[int, int, int]) -> Callable[..., Any]:
    """The program that makes the metadata on each data rank."""
    num_rows, page_size, table_width = sizes

    def local(kv_lens, pages, cu_q_lens, distribution, cu_kv_lens):
        options = {"num_rows": num_rows, "page_size": page_size, "table_width": table_width}
        return plan(ragged_metadata(kv_lens, pages, cu_q_lens, distribution, cu_kv_lens=cu_kv_lens, **options))

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"), check_vma=False))
