"""Kernels for NVIDIA GPUs, in Pallas."""
