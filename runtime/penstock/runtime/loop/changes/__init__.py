"""What the engine's thread does between two steps: weight updates, pauses and resumes. No jax."""
