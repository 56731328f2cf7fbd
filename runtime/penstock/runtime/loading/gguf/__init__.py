"""GGUF, llama.cpp's file format: one file that has weights, configuration, tokenizer and chat template."""
