"""Whole-model passes, one a mode, over padded arrays, compiled ahead of time."""

from mla_attn.passes.passes import SAMPLING, Arrays, Pass, Passes, Shapes

__all__ = ["SAMPLING", "Arrays", "Pass", "Passes", "Shapes"]
