"""The portable implementation: blockwise online softmax in plain JAX; its memory is bounded, and it runs anywhere."""
