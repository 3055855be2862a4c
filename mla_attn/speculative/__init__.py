"""Speculative decoding: which drafts are accepted."""

from mla_attn.speculative.acceptance import Acceptance, accept_greedy

__all__ = ["Acceptance", "accept_greedy"]
