"""Kernels for Hopper GPUs (sm_90a) in Pallas Mosaic GPU."""

from mla_attn.pallas_kernels.mosaic_gpu import jax_workarounds

jax_workarounds.install()
