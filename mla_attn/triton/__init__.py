"""Adapters to the Triton kernels, one file per op: ``supports``, choice of sizes, work lists and kernel arguments."""
