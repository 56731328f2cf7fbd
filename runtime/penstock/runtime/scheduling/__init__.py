"""Decides which requests run in the next step, and on which pages of the KV cache. No jax."""
