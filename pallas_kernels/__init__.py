"""The kernels and the lists they follow: arrays in, arrays out; no specs, no cache objects, no policy."""
