"""Benchmarks of the attention ops, of decode steps of whole models, and of the engine under load."""
