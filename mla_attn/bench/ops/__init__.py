"""Benchmark of the attention ops: it checks results, then compares times with ceilings measured in the same run."""
