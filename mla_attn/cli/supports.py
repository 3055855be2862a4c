"""``mla-attn supports``."""

import argparse

from mla_attn.support import support_table


def main(options: argparse.Namespace) -> int:
    """Prints which implementation supports which call. Exit status 0."""
    print(support_table())
    return 0
