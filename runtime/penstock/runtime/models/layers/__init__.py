"""The parts of a decoder's layers, as flax.nnx modules.

Shapes everywhere: T tokens of a ragged batch, E hidden_size, H query heads, K KV heads, D head_dim.
"""
