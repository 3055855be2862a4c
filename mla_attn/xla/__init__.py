"""The portable implementation: blockwise online softmax in plain JAX, memory bounded, runs anywhere."""
