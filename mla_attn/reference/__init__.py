"""The specification: float32, dense, no tricks. Every implementation is tested against it."""
