"""What the engine needs of the operating system: processors, memory and child processes. No jax."""
