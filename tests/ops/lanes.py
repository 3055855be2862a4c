"""The XLA implementations at small sizes, so that short requests have several tiles, blocks and lanes."""

import dataclasses
import functools

from mla_attn.xla.blockwise import Config


def shrink(monkeypatch, module, *, block_keys, max_lanes):
    """Blocks of ``block_keys`` keys, tiles of 4 rows and heads, and as many lanes as 20 rows make, up to ``max_lanes``.

    ``module`` is an op's, whose implementation ``xla`` is run with them, whatever the platform.
    """
    config = Config(tile_rows=4, block_keys=block_keys, lane_rows=20, max_lanes=max_lanes)
    small = tuple(
        dataclasses.replace(i, run=functools.partial(i.run, config=config)) if i.name == "xla" else i
        for i in module.IMPLEMENTATIONS
    )
    monkeypatch.setattr(module, "IMPLEMENTATIONS", small)
