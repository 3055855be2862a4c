"""Adapters to the Hopper kernels, a file per op: what they support, which kernel and sizes, the arrays they take."""
