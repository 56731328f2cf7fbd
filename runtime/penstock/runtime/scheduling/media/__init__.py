"""The embeddings of pictures: where they lie, and which of them are kept. No jax."""
