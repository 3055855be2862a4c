"""Kernels: arrays in, arrays out; no specs, no cache objects, no policy."""
