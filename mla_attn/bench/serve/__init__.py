"""Replays of synthetic traces on the engine: throughput, latencies, and how long the device waits for the host."""
