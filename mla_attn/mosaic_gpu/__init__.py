"""Adapters to the Hopper kernels, one file per op: ``supports``, choice of kernel and sizes, and kernel arguments."""
