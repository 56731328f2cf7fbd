"""Families of models: how config.json becomes a `ModelConfig`, and what a checkpoint calls each parameter.

family.py   what a family consists of, and names of tensors that most families share
reading.py  what most families' config.json have in common
gemma.py    Gemma 2 and 3
gemma4.py   Gemma 4
olmo.py     OLMo 2 and 3
variants.py Granite, Ministral 3, Phi-3, Seed-OSS and SmolLM 3
rotation.py LongRoPE's and M-RoPE's fields, and what must be so of any RoPE
llama.py    the pre-norm decoders that differ by a few switches
deepseek.py latent attention
*_hybrid.py, lfm2.py       recurrent layers in the place of most attention
*_mixtures.py, gpt_oss.py, llama4.py   mixtures of experts
*_vision.py  models that also read images, published as `...ForConditionalGeneration`
"""
