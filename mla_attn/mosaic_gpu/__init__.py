"""Adapters to the Hopper kernels: what they support, which kernel and sizes, the arrays they take; a file per op."""
