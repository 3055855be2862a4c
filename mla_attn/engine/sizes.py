"""How large an engine's cache is where nobody says so: what there is room for."""

import logging
import math

import jax

from mla_attn.memory import free_bytes, tree_bytes
from mla_attn.models.base import CausalLM
from mla_attn.text import gibibytes

logger = logging.getLogger(__name__)

GPU_FRACTION, CPU_FRACTION = 0.9, 0.25  # the rest is for what passes need; a CPU's memory is everybody's


def choose_sizes(
    model: CausalLM,
    *,
    num_pages: int | None,
    max_len: int | None,
    page_size: int,
    max_batch: int,
    memory_fraction: float | None,
) -> tuple[int, int]:
    """Pages of the cache and most tokens of a request, those that are None by the memory that is free.

    Raises:
        ValueError: there is no room for one request of ``max_len``, or for a page, or nobody tells how much.
    """
    positions = model.max_position_embeddings
    if num_pages is None:
        num_pages = _choose_pages(model, max_len, page_size, max_batch, memory_fraction)
    if max_len is None:
        max_len = min(positions, num_pages * page_size)
        logger.info("max_len=%d, of max_position_embeddings=%d", max_len, positions)
    return num_pages, max_len


def _choose_pages(model: CausalLM, max_len: int | None, page_size: int, max_batch: int, fraction: float | None) -> int:
    on_cpu, free = jax.default_backend() == "cpu", free_bytes()
    if free is None:
        raise ValueError("num_pages=None must be given: the device does not tell how much memory is free")
    if fraction is None:
        fraction = CPU_FRACTION if on_cpu else GPU_FRACTION
    each, room = page_bytes(model, page_size), int(fraction * free)
    most = max_batch * math.ceil((max_len or model.max_position_embeddings) / page_size)
    # On a CPU no more than requests can ask for; on a GPU the rest is for prefixes.
    num_pages = min(room // each, most) if on_cpu else room // each
    least = math.ceil((max_len or 1) / page_size)
    if num_pages < least:
        raise ValueError(
            f"max_len={max_len} needs {least} pages of {page_size} tokens, {gibibytes(least * each)}: there is room "
            f"for {gibibytes(room)} (memory_fraction={fraction:g} of what is free)"
        )
    logger.info(
        "num_pages=%d of %d tokens: %s of %s", num_pages, page_size, gibibytes(num_pages * each), gibibytes(room)
    )
    return num_pages


def page_bytes(model: CausalLM, page_size: int) -> int:
    """Bytes of a page, in the pools of all cache groups."""
    return tree_bytes(jax.eval_shape(lambda: model.create_pools(num_pages=1, page_size=page_size)))
