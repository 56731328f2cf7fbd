"""Quantised checkpoints: how their config says which layers are quantised, and what their tensors mean.

forms.py      what rows of a quantised weight are on the host, beside `models.quantised.Codes`
layers.py     the tensors of one layer, and their weight as a tensor of floats
integers.py   integers with scales: AWQ, GPTQ, compressed-tensors, bitsandbytes' int8, MLX
floats.py     floats of 8 and 4 bits: FP8, MXFP4, NVFP4, bitsandbytes' nf4 and fp4
config.py     `quantization_config` in all its spellings, as a reader for each layer
checkpoint.py the tensors of a checkpoint, where quantised weights read as floats
"""
