"""Embeddings of texts, beside other engines."""
