"""Benchmarks: of calls of the ops, of decode steps of whole models, of the engine under load."""
