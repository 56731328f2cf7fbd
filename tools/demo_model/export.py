"""Writes and reads the checkpoint: a Hugging Face directory with bf16 safetensors under Qwen3's names."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from tools.demo_model.model import ModelConfig, Params
from tools.demo_model.tokenizer import END_OF_TEXT, IM_END, save_tokenizer

MAX_BYTES = 12_000_000
"""The most bytes that the checkpoint may take in the repository and the wheel."""


def write_checkpoint(params: Params, config: ModelConfig, tokenizer: Tokenizer, directory: Path) -> int:
    """Write config, generation config, tokenizer, template and weights; returns the total size in bytes."""
    save_tokenizer(tokenizer, directory, config.max_position_embeddings)
    ends = [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)]
    sizes = asdict(config)
    theta = sizes.pop("rope_theta")
    hf_config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **sizes,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": ends[0],
        "pad_token_id": ends[1],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "eos_token_id": ends,
        "pad_token_id": ends[1],
    }
    (directory / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = {name: np.asarray(jnp.asarray(value, jnp.bfloat16)) for name, value in params.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors makes files that only their owner may read
    total = sum(path.stat().st_size for path in directory.iterdir())
    if total > MAX_BYTES:
        raise ValueError(f"{directory} holds {total} bytes, more than {MAX_BYTES}")
    return total


def read_checkpoint(directory: Path) -> tuple[Params, ModelConfig]:
    """Read the weights as float32 arrays, and the sizes."""
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    tensors = load_file(directory / "model.safetensors")
    return {name: jnp.asarray(value).astype(jnp.float32) for name, value in tensors.items()}, config
