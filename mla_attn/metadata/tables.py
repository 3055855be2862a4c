"""Conversion of other systems' maps to page tables, page maps and tree masks."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt8

from mla_attn.checks import as_int32, check_array, check_integer


def page_table_from_tokens(
    req_to_token: Int[Array, "requests tokens"],
    request_ids: Int[Array, "B"],
    *,
    page_size: int,
    table_width: int | None = None,
) -> Int[Array, "B W"]:
    """Makes a page table from a token-granular map, on the device (sglang ``req_to_token``, ``req_pool_indices``).

    Entry j is the page of token ``j * P``: ``req_to_token[request_ids[b], j * P] // P``. Tokens ``j * P`` to
    ``j * P + P - 1`` must be in one page in order, as page-aligned allocators guarantee. Entries past a request's
    length are undefined.

    Args:
        req_to_token: slot (``page * P + offset``) of each token of each request.
        request_ids: rows of the map to take; an id outside it, which padding may have, takes the nearest row.
        page_size: tokens per page P.
        table_width: pages per request W; None for the whole map.
    """
    req_to_token, request_ids = as_int32("req_to_token", req_to_token), as_int32("request_ids", request_ids)
    if req_to_token.ndim != 2:
        raise ValueError(f"req_to_token has shape {req_to_token.shape}, must be [requests, tokens]")
    if request_ids.ndim != 1:
        raise ValueError(f"request_ids has shape {request_ids.shape}, must be [B]")
    page_size = check_integer("page_size", page_size, 1)
    if 0 in req_to_token.shape:
        raise ValueError(f"req_to_token has shape {req_to_token.shape}, must have a request and a token at least")
    most = -(-req_to_token.shape[1] // page_size)
    width = most if table_width is None else check_integer("table_width", table_width, 1, most)
    firsts = req_to_token[:, : width * page_size : page_size]
    return jnp.take(firsts, request_ids, axis=0, mode="clip") // page_size


def page_map_from_tokens(mapping: Int[Array, "slots"], page_size: int) -> Int[Array, "V"]:
    """Makes a ``page_map=`` from a token-granular map between the slots of two pools (as sglang has for windowed
    layers): ``mapping[p * P] // P``; -1 stays -1."""
    mapping = as_int32("mapping", mapping)
    if mapping.ndim != 1 or mapping.size == 0:
        raise ValueError(f"mapping has shape {mapping.shape}, must be [slots], 1 at least")
    page_size = check_integer("page_size", page_size, 1)
    return mapping[::page_size] // page_size


def page_table_from_packed(
    pages: Int[Array, "n"], cu_kv_lens: Int[Array, "ends"], *, page_size: int, table_width: int
) -> Int[Array, "B W"]:
    """Makes a page table from a packed list of pages (sglang-jax): request b begins at entry ``cu_kv_lens[b] / P``.

    Args:
        pages: page ids, one request after the other; more entries may follow.
        cu_kv_lens: [B + 1], cumulative lengths, each length rounded up to whole pages.
        page_size: tokens per page P.
        table_width: pages per request W; further pages are left out, missing ones are -1.
    """
    return _from_packed(pages, cu_kv_lens, ("pages", "cu_kv_lens"), page_size, table_width, step=page_size)[0]


def page_table_from_indices(
    kv_indptr: Int[Array, "ends"], kv_indices: Int[Array, "n"], *, page_size: int, table_width: int
) -> tuple[Int[Array, "B W"], Int[Array, "B"]]:
    """Makes a page table and lengths from a packed list of slots, one per token (FlashInfer's and sglang's
    ``kv_indptr`` and ``kv_indices``).

    Column j is ``kv_indices[kv_indptr[b] + j * P] // P`` while ``j * P < kv_len``, else -1.

    Args:
        kv_indptr: [B + 1], the first entry of each request, and the end of the last.
        kv_indices: slot (``page * P + offset``) of each token; more entries may follow.
        page_size: tokens per page P.
        table_width: pages per request W; a longer length is returned as it is, and ``check_metadata`` reports it.

    Returns:
        ``(page_table, kv_lens)``.
    """
    firsts, lens = _from_packed(kv_indices, kv_indptr, ("kv_indices", "kv_indptr"), page_size, table_width, step=1)
    return jnp.where(firsts < 0, -1, firsts // page_size), lens


def _from_packed(entries, indptr, names: tuple[str, str], page_size: int, table_width: int, *, step: int):
    """The entry of each page's first token, -1 past the end, and the number of tokens of each request.

    One entry of the list stands for ``step`` tokens.
    """
    entries, indptr = (as_int32(name, x) for name, x in zip(names, (entries, indptr), strict=True))
    if entries.ndim != 1:
        raise ValueError(f"{names[0]} has shape {entries.shape}, must be [n]")
    if indptr.ndim != 1 or indptr.size == 0:
        raise ValueError(f"{names[1]} has shape {indptr.shape}, must be [B + 1]")
    page_size = check_integer("page_size", page_size, 1)
    width = check_integer("table_width", table_width, 1)
    lens = indptr[1:] - indptr[:-1]
    tokens = jnp.arange(width, dtype=jnp.int32)[None] * page_size
    found = jnp.take(entries, (indptr[:-1, None] + tokens) // step, mode="fill", fill_value=-1)
    return jnp.where((tokens < lens[:, None]) & (indptr[:-1, None] >= 0), found, -1), lens


def tree_mask_from_flat(
    mask: Bool[Array, "n"] | UInt8[Array, "n"], prefix_lens: Int[Array, "B"], *, num_tokens: int
) -> Bool[Array, "B S S"]:
    """Makes a ``tree_mask=`` from a flat mask (sglang's ``custom_mask``), by taking the last S columns.

    The flat mask is [S, prefix_len + S], row-major, for one request after the other. Its prefix columns must be true.

    Args:
        mask: bool or uint8; more entries may follow.
        prefix_lens: committed tokens of each request; negative for padding, which has no rows in the mask.
        num_tokens: rows S of each request.
    """
    check_array("mask", mask)
    if mask.ndim != 1 or mask.dtype not in (jnp.bool_, jnp.uint8):
        raise ValueError(f"mask is {mask.dtype}{list(mask.shape)}, must be bool or uint8 [n]")
    prefix_lens = as_int32("prefix_lens", prefix_lens)
    if prefix_lens.ndim != 1:
        raise ValueError(f"prefix_lens has shape {prefix_lens.shape}, must be [B]")
    rows = check_integer("num_tokens", num_tokens, 1)
    widths = jnp.where(prefix_lens < 0, 0, prefix_lens + rows)
    starts = jnp.cumsum(widths * rows, dtype=jnp.int32) - widths * rows
    row = jnp.arange(rows, dtype=jnp.int32)
    index = (starts[:, None] + row[None] * widths[:, None] + prefix_lens[:, None])[:, :, None] + row[None, None]
    bits = jnp.take(jnp.asarray(mask, bool), index, mode="fill", fill_value=False)
    return bits & (widths > 0)[:, None, None]
