"""Times calls of the attention ops: correctness first, then time against ceilings measured in the same run."""
