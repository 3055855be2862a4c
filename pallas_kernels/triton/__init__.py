"""Kernels in Triton, for NVIDIA GPUs from Ampere on and for AMD GPUs.

``limits`` and ``configs`` need no Triton; the other modules import it, and are imported when a kernel is first needed.
"""
