"""Page tables made of the maps of other systems."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from mla_attn.checks import as_int32, check_integer


def page_table_from_tokens(
    req_to_token: Int[Array, "requests tokens"],
    request_ids: Int[Array, "B"],
    *,
    page_size: int,
    table_width: int | None = None,
) -> Int[Array, "B W"]:
    """Makes a page table of a token-granular map, on the device (sglang ``req_to_token``, ``req_pool_indices``).

    Entry j is the page of token ``j * P``: ``req_to_token[request_ids[b], j * P] // P``. Tokens of a page must lie in
    one page in order, as page-aligned allocators guarantee. Entries past a request's length are whatever the map holds.

    Args:
        req_to_token: slot (``page * P + offset``) of each token of each request.
        request_ids: rows of the map to take; for an id outside it, which a padding request may have, the nearest.
        page_size: tokens per page P.
        table_width: pages per request W; the whole map if None.
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
