"""Model definitions as flax.nnx modules, configured by data from Hugging Face's config.json.

config.py              what a model computes, layer by layer: frozen ModelConfig
families/              config.json -> ModelConfig, and the names of tensors, family by family
registry.py            architecture name -> its family
hf_fields.py           reads config.json field by field, so that no field goes unnoticed
hf_harmless_fields.py  fields that cannot change what the model computes
rope.py                rotary position embedding with all scaling types
layers/                attention and MLP
linear.py              linear layers, over any format of weights
norms.py               norms and other small parameters
pools.py               the small parameters of all layers in a few arrays
decoder.py             CausalLM: embedding, layers and head
load_rules.py          how tensors of a checkpoint become leaves of the state
rule_checks.py         proves that they fill every leaf and read every tensor
params.py              the state without its values, and its flat form for compiled programs
"""
