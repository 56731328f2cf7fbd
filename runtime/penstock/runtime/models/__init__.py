"""Model definitions as flax.nnx modules, configured by data from Hugging Face's config.json.

config.py              config.json -> frozen ModelConfig; refuses what it cannot honour
hf_fields.py           reads config.json field by field, so that no field goes unnoticed
hf_harmless_fields.py  fields that cannot change what the model computes
rope.py                rotary position embedding with all scaling types
layers.py              attention and MLP
linear.py              linear layers and norms, over any format of weights
pools.py               the small parameters of all layers in one or two arrays
decoder.py             CausalLM: the decoder of the whole Llama family
registry.py            architecture name -> how to parse, build and name its tensors
load_rules.py          how tensors of a checkpoint become leaves of the state
params.py              the state without its values, and its flat form for compiled programs
"""
