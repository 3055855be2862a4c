"""The check that a model and its cache fit in memory, before they are allocated."""

from collections.abc import Iterable, Mapping

import jax
from flax import nnx

from mla_attn.memory import check_fits, tree_bytes
from mla_attn.models.base import CacheGroup, CausalLM, create_pools
from mla_attn.text import gibibytes


def check_model_fits(
    *models: CausalLM,
    num_pages: int,
    page_size: int,
    windows: Mapping[int, int] | None = None,
    groups: Iterable[CacheGroup] | None = None,
) -> None:
    """Raises MemoryError, with figures, if the default device has no room for the weights and caches of models.

    Args:
        models: models without arrays, as ``Checkpoint.model`` or from ``nnx.eval_shape``: one, and a draft model.
        num_pages: pages of the cache groups without a window.
        page_size: tokens per page.
        windows: pages of the groups with each window; None for ``num_pages``.
        groups: cache groups of all models, as ``stored_as`` returns them; None for those that the models have.
    """
    weights = sum(tree_bytes(nnx.state(model)) for model in models)
    pages = {None: num_pages, **(windows or {})}
    groups = [group for model in models for group in model.cache_groups] if groups is None else groups
    cache = sum(pages.get(group.window, num_pages) * _page_bytes(group, page_size) for group in groups)
    counts = [f"{num_pages} pages of {page_size} tokens"] if num_pages else []
    counts += [f"{count} pages of {page_size} tokens for window {window}" for window, count in (windows or {}).items()]
    check_fits(f"{', '.join(counts)} ({gibibytes(cache)}) and the weights ({gibibytes(weights)})", cache + weights)


def _page_bytes(group: CacheGroup, page_size: int) -> int:
    return tree_bytes(jax.eval_shape(lambda: create_pools((group,), num_pages=1, page_size=page_size)))
