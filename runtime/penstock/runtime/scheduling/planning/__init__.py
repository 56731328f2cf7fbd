"""Makes the plan of the next step: which rows run, and on which pages. No jax."""
