"""The journal: what the engine did, entry by entry, for those that measure and trace it. No jax."""
