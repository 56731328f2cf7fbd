"""Model definitions as flax.nnx modules, configured by data parsed from Hugging Face's config.json.

config.py    config.json -> frozen ModelConfig; refuses what it cannot honour
rope.py      rotary position embedding, all scaling types
layers.py    linear, norm, attention and MLP modules
decoder.py   CausalLM: the decoder of the whole Llama family
registry.py  architecture name -> how to parse, build and name its tensors
params.py    abstract model, tensor names <-> state paths, flat leaves for the compiled program
"""
