"""Defines the models as flax.nnx modules, configured by data from Hugging Face's config.json."""
