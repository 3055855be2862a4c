"""The check that a model and its cache fit in memory, before they are allocated."""

import jax
from flax import nnx

from mla_attn.memory import check_fits, tree_bytes
from mla_attn.models.base import CausalLM, create_pools, stored_as
from mla_attn.text import gibibytes


def check_model_fits(model: CausalLM, *, num_pages: int, page_size: int, kv_dtype: str | None = None) -> None:
    """Raises MemoryError, with figures, if the default device has no room for the weights and the cache of a model.

    Args:
        model: a model without arrays, as ``Checkpoint.model`` or from ``nnx.eval_shape``.
        num_pages: pages of the cache.
        page_size: tokens per page.
        kv_dtype: format of the cache rows, as in ``stored_as``.
    """
    weights = tree_bytes(nnx.state(model))
    groups = stored_as(model.cache_groups, kv_dtype)
    page = tree_bytes(jax.eval_shape(lambda: create_pools(groups, num_pages=1, page_size=page_size)))
    check_fits(
        f"{num_pages} pages of {page_size} tokens ({gibibytes(num_pages * page)}) and the weights "
        f"({gibibytes(weights)})",
        num_pages * page + weights,
    )
