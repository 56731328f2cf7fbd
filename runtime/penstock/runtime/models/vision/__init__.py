"""The part of a model that makes embeddings of pictures."""
