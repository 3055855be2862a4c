"""The judge of implementations: correctness first, then time against ceilings measured in the same run."""
