"""The pages of the KV cache by group of layers, and the prefixes that are kept in them. No jax."""
