"""Attention and sampling in plain XLA, and the native CPU kernels that take their place."""
