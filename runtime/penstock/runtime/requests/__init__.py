"""What a request asks of the engine and what it gets back: frozen, checked values. No jax."""
