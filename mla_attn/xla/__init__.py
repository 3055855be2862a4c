"""The portable implementation: blockwise online softmax in plain JAX, with bounded memory, on any device."""
