"""The part of a model that makes embeddings of images.

The encoder is a module of the model (`CausalLM.visual`), so its weights are loaded, packed and updated as all
others. Whatever depends on an image's shape alone (places, spans of attention, corners of the table of
positions, the order by windows) is made by numpy beside the patches (`inputs`), and patches are padded to a
bucket: so programs have static sizes, and no shape depends on an image.

The decoder knows no image. It takes `MediaInputs`: the three positions by which tokens turn (M-RoPE), and
which rows of the pool of embeddings belong to them. It selects, and later adds, one row for each token.
"""
