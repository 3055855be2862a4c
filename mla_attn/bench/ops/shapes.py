"""The shapes of calls: their notation, and their least operations and bytes."""

import dataclasses
import re
from typing import Any

from mla_attn.text import shown

# Limits far above sizes in use; memory is checked separately.
MOST_REQUESTS = 65536
MOST_HEADS = 1024
MOST_QUERIES = 4096  # tokens of a request
MOST_TOKENS = 2**31 - 1  # cached, of all requests; and entries of the page table

SETS = {
    "cpu": (
        "8x16x1x2048",
        "4x16x4x1024",
        "8x16x1xuniform:2048",
        "1x16x1x8192",
        "8x16x1x8192+7*16",
        "8x16x1x8192+7*16@512",
    ),
    "hopper": (
        "128x128x1x4096",
        "64x128x2x8192",
        "128x128x2x4096",
        "128x16x1x4096",
        "32x16x1x16384",
        "1x128x1x65536",
        "16x16x4x32768",
        "128x128x1xuniform:8192",
        "128x16x1xuniform:8192",
        "128x128x2xuniform:8192",
        "1x128x1x32768@512",
        "64x128x1x32768+63*16@512",
        "1x128x1x32768@2048",
        "64x128x1x32768+63*16@2048",
    ),
    # For --check: every size of row tile, with and without KV splits; little memory.
    "triton": (
        "4x128x1x2000+65+64+1",
        "3x128x4x300+4+130",
        "8x16x1xuniform:3000",
        "4x16x3x700+3+64+129",
        "5x20x1x500",
        "2x1x7x9000+7",
        "1x128x1x20000",
    ),
}

# Of grouped-query attention, by the same keys.
GQA_SETS = {
    "cpu": ("8x32/8x1x2048", "4x32/8x4x1024", "8x32/8x1xuniform:2048", "1x32/8x1x8192", "8x8/8x1x1024"),
    "hopper": (
        "128x32/8x1x4096",
        "64x64/8x1x8192",
        "64x64/8x4x8192",
        "128x8/1x1x8192",
        "1x64/8x1x65536",
        "16x32/8x4x32768",
        "128x32/8x1xuniform:8192",
        "64x32/8x1x32768+63*16@512",
    ),
    "triton": (
        "4x32/8x1x2000+65+64+1",
        "3x32/8x16x300+16+130",
        "8x8/8x1xuniform:3000",
        "4x64/8x3x700+3+64+129",
        "3x128/1x1x500",
        "1x32/8x1x20000",
    ),
}

GRAMMAR = """\
BATCHxHEADS[/KV]xQUERIESxLENGTHS[@WIDTH]: requests, query heads (with --op gqa also key and value heads, which divide
them), query tokens of each request, and cached tokens of each request, including the query tokens. LENGTHS is one
number for all requests, a sum of lengths with repeats (32768+63*16), or uniform:M, which is
numpy.random.default_rng(0).integers(1, M + 1, BATCH), but at least QUERIES. The page table has as many pages per
request as the longest request needs, or WIDTH if that is more."""


def widths(spec: Any) -> tuple[int, int]:
    """Channels of a key and of a value, as a query head sees them, of an ``MLASpec`` or a ``GQASpec``."""
    if hasattr(spec, "kv_lora_rank"):
        return spec.latent_dim, spec.kv_lora_rank
    return spec.head_dim, spec.v_head_dim


@dataclasses.dataclass(frozen=True)
class Shape:
    """A call of an attention op; each request's ``q_len`` query tokens are the last of its ``kv_lens[b]`` tokens.

    ``kv_heads`` is None for MLA.
    """

    name: str
    heads: int
    q_len: int
    kv_lens: tuple[int, ...]
    least_width: int = 1
    kv_heads: int | None = None

    def table_width(self, page_size: int) -> int:
        """Pages per request, W."""
        return max(self.least_width, -(-max(self.kv_lens) // page_size))

    def flops(self, spec: Any) -> int:
        """Operations of both products: ``2 (C + R)``, or ``2 (D + V)``, per head, query row and visible key."""
        pairs = sum(kv * self.q_len - self.q_len * (self.q_len - 1) // 2 for kv in self.kv_lens)
        return 2 * sum(widths(spec)) * self.heads * pairs

    def bytes(self, spec: Any, *, row_bytes: int, itemsize: int) -> int:
        """Least memory traffic: each cached row once per request, queries in, output out.

        Args:
            spec: channels of queries and outputs.
            row_bytes: bytes of a cached row.
            itemsize: bytes of a channel of queries and outputs.
        """
        rows = len(self.kv_lens) * self.q_len * self.heads
        return row_bytes * sum(self.kv_lens) + itemsize * rows * sum(widths(spec))


def parse_shape(text: str) -> Shape:
    """Parses a shape in the notation of ``GRAMMAR``; raises ValueError if it is invalid."""
    number = r"([0-9]{1,10})"
    match = re.fullmatch(rf"{number}x{number}(?:/{number})?x{number}x([^@]+)(?:@{number})?", text)
    if not match:
        raise ValueError(
            f"shape {shown(text)} must be BATCHxHEADS[/KV]xQUERIESxLENGTHS[@WIDTH], as 64x128x1x4096 or 64x32/8x1x4096"
        )
    batch, heads, q_len, kv_heads = (int(match[i]) for i in (1, 2, 4, 3 if match[3] else 2))
    for name, value, most in (
        ("requests", batch, MOST_REQUESTS),
        ("heads", heads, MOST_HEADS),
        ("query tokens", q_len, MOST_QUERIES),
    ):
        if not 1 <= value <= most:
            raise ValueError(f"shape {shown(text)}: {name} must be 1 to {most}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"shape {shown(text)}: key and value heads must divide the query heads")
    kv_lens = _kv_lens(text, match[5], batch, q_len)
    if len(kv_lens) != batch:
        raise ValueError(f"shape {shown(text)} has {len(kv_lens)} lengths for {batch} requests")
    if min(kv_lens) < q_len:
        raise ValueError(f"shape {shown(text)}: lengths count the {q_len} query tokens, so none may be less")
    width = int(match[6] or 1)
    if sum(kv_lens) > MOST_TOKENS or batch * width > MOST_TOKENS:
        raise ValueError(
            f"shape {shown(text)}: cached tokens of all requests, and requests x WIDTH, must be at most {MOST_TOKENS}"
        )
    return Shape(text, heads, q_len, tuple(kv_lens), width, kv_heads if match[3] else None)


def _kv_lens(text: str, lengths: str, batch: int, q_len: int) -> list[int]:
    if uniform := re.fullmatch(r"uniform:([0-9]{1,10})", lengths):
        import numpy as np

        most = int(uniform[1])
        if not 1 <= most <= MOST_TOKENS:
            raise ValueError(f"shape {shown(text)}: M of uniform:M must be 1 to {MOST_TOKENS}")
        drawn = np.random.default_rng(0).integers(1, most + 1, batch)
        return [max(int(length), q_len) for length in drawn]
    kv_lens = parse_lengths(lengths)
    return kv_lens * batch if lengths.isdigit() else kv_lens


def parse_lengths(text: str) -> list[int]:
    """Parses ``32768+63*16``, or ``32768,63*16``: one 32768, then 63 times 16; at most ``MOST_REQUESTS`` in total."""
    lengths = []
    for item in re.split(r"[+,]", text):
        match = re.fullmatch(r"(?:([0-9]{1,10})\*)?([0-9]{1,10})", item.strip())
        if not match:
            raise ValueError(f"lengths {shown(text)} must be numbers with repeats, as 32768+63*16 or 32768,63*16")
        repeats = int(match[1] or 1)
        if len(lengths) + repeats > MOST_REQUESTS:
            raise ValueError(f"lengths {shown(text)} must be at most {MOST_REQUESTS}")
        lengths += [int(match[2])] * repeats
    return lengths
