"""The measurement of the scales of a float8 cache: what a model writes into its cache for some prompts."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from mla_attn.cache import LatentPool
from mla_attn.checks import check_integer, check_integers
from mla_attn.dispatch import Order
from mla_attn.metadata import for_extend
from mla_attn.models.base import CausalLM, Pool, Pools

Scales = dict[str, dict[str, list[float]]]

_LARGEST_STORED = 448.0  # of float8_e4m3fn


def measure_scales(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    page_size: int = 64,
    prefill_chunk: int = 512,
    implementation: Order = None,
    progress: bool = False,
) -> Scales:
    """Runs prompts through a model, draft layer included, and measures the scales that its rows need in a float8 cache.

    A layer's scale is the largest number of its cache rows divided by 448, the largest number of float8_e4m3fn, so that
    no number of these prompts is clipped; 1 if all are 0. The draft layer takes the likeliest token after a chunk.

    Args:
        model: a loaded checkpoint.
        prompts: token ids of each prompt, at least one each.
        page_size: tokens per page of the cache, which has room for the longest prompt, in the model's dtype.
        prefill_chunk: most prompt tokens per pass.
        implementation: attention implementation; None for the default choice.
        progress: whether to show a progress bar.

    Returns:
        The scales of each cache group, by name, one number a layer: "scale" of latent rows, or "k_scale" and "v_scale".
        This is what ``Engine`` takes as ``kv_scale``.

    Raises:
        ValueError: no prompts, a prompt that is empty, has an id outside the vocabulary or more tokens than the model's
            positions, a size below 1, or cache rows that are not finite.
    """
    prompts = _check(model, prompts)
    check_integer("page_size", page_size, 1)
    longest = max(map(len, prompts))
    rows = min(check_integer("prefill_chunk", prefill_chunk, 1), longest)
    pages = -(-longest // page_size)
    pools = model.create_pools(num_pages=pages, page_size=page_size)
    table = jnp.arange(pages, dtype=jnp.int32)[None]
    run = functools.partial(_run, *nnx.split(model), implementation=implementation)
    largest: dict[str, dict[str, np.ndarray]] = {}
    with tqdm(total=sum(map(len, prompts)), desc="calibrating", unit="token", disable=not progress, leave=False) as bar:
        for prompt in prompts:
            for begin in range(0, len(prompt), rows):
                chunk = _chunk(prompt, begin, rows)
                pools = run(pools, *map(jnp.asarray, chunk), table, jnp.asarray([min(begin + rows, len(prompt))]))
                bar.update(min(rows, len(prompt) - begin))
            # The rows of earlier prompts that are still there do no harm.
            for group, found in jax.device_get(_largest(pools)).items():
                before = largest.setdefault(group, found)
                largest[group] = {name: np.maximum(before[name], x) for name, x in found.items()}
    return {group: {name: _scales(group, name, x) for name, x in found.items()} for group, found in largest.items()}


def _check(model: CausalLM, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    if not len(prompts):
        raise ValueError("prompts is empty, must hold at least one prompt")
    checked = [check_integers(f"prompts[{i}]", prompt) for i, prompt in enumerate(prompts)]
    for i, prompt in enumerate(checked):
        if not 1 <= len(prompt) <= model.max_position_embeddings:
            most = model.max_position_embeddings
            raise ValueError(f"prompts[{i}] has {len(prompt)} tokens, must have 1 to max_position_embeddings={most}")
        if min(prompt) < 0 or max(prompt) >= model.vocab_size:
            raise ValueError(f"prompts[{i}] holds a token that is not 0 to {model.vocab_size - 1}")
    return [list(prompt) for prompt in checked]


def _chunk(prompt: list[int], begin: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of a prefill chunk, the token after each, -1 for unknown ones, both padded; and how many they are."""
    tokens, following = np.zeros(rows, np.int32), np.full(rows, -1, np.int32)
    part, after = prompt[begin : begin + rows], prompt[begin + 1 : begin + rows + 1]
    tokens[: len(part)], following[: len(after)] = part, after
    return tokens, following, np.asarray([len(part)], np.int32)


@functools.partial(jax.jit, static_argnames=("graphdef", "implementation"), donate_argnames="pools")
def _run(
    graphdef,
    state,
    pools: Pools,
    tokens: Int[Array, "T"],
    following: Int[Array, "T"],
    q_lens: Int[Array, "1"],
    table: Int[Array, "1 W"],
    seq_lens: Int[Array, "1"],
    *,
    implementation: Order,
) -> Pools:
    """Runs a chunk of one prompt, and writes its rows."""
    model, rows = nnx.merge(graphdef, state), tokens.shape[0]
    page_size = next(iter(pools.values())).page_size
    metadata = for_extend(table, seq_lens, q_lens, max_q_len=rows, num_rows=rows, page_size=page_size)
    by_group = dict.fromkeys(pools, metadata)
    hidden, pools = model(tokens, pools, by_group, mode="extend", implementation=implementation)
    if model.can_draft:
        likeliest = jnp.argmax(model.logits(hidden[q_lens - 1])[0]).astype(jnp.int32)
        following = jnp.where(following < 0, likeliest, following)
        _, pools = model.draft(hidden, following, pools, by_group, mode="draft_extend", implementation=implementation)
    return pools


@jax.jit
def _largest(pools: Pools) -> dict[str, dict[str, Float[Array, "L"]]]:
    """The largest absolute number of each layer's rows, by the names of scales."""
    return {name: _of_pool(pool) for name, pool in pools.items()}


def _of_pool(pool: Pool) -> dict[str, Float[Array, "L"]]:
    parts = {"scale": pool.data} if isinstance(pool, LatentPool) else {"k_scale": pool.k, "v_scale": pool.v}
    return {name: jnp.abs(x.reshape(pool.num_layers, -1)).max(axis=1).astype(jnp.float32) for name, x in parts.items()}


def _scales(group: str, name: str, largest: np.ndarray) -> list[float]:
    """Scales of numbers of up to ``largest`` [L]."""
    if not np.isfinite(largest).all():
        layer = int(np.argmin(np.isfinite(largest)))
        raise ValueError(f"layer {layer} of cache group {group!r} has rows that are not finite: no {name} fits them")
    least = np.finfo(np.float32).tiny  # devices flush smaller numbers to 0
    scales = np.where(largest == 0, np.float32(1), np.maximum(largest / np.float32(_LARGEST_STORED), least))
    return scales.astype(np.float32).tolist()
