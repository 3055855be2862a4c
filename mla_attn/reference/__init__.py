"""The reference implementation, which is the specification: float32, dense, no tricks. Others are tested against it."""
