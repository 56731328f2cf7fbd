"""Changes to a `ModelConfig` that all or some of its layers share, views of them, and published ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from penstock.runtime.models.config import AttentionConfig, LayerConfig, ModelConfig
from penstock.runtime.models.rope import RopeConfig

PUBLISHED = Path(__file__).parent / "published"
"""What the config.json of published checkpoints say, under their names. They were written down from memory,
but for Gemma's, so a field may differ from the file of that name on the hub."""

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
"""The config.json of one layer that is small enough to count by hand."""


def published(name: str) -> dict[str, Any]:
    """Return the config.json of a checkpoint."""
    data: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text())
    return data


def with_attention(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Return the model with these values in the attention of every layer."""
    return _replaced(config, lambda layer: {"attention": dataclasses.replace(layer.attention, **changes)})


def with_mlp(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Return the model with these values in the MLP of every layer."""
    return _replaced(config, lambda layer: {"mlp": dataclasses.replace(layer.mlp, **changes)})


def _replaced(config: ModelConfig, changes: Any) -> ModelConfig:
    layers = tuple(dataclasses.replace(layer, **changes(layer)) for layer in config.layers)
    return dataclasses.replace(config, layers=layers)


def attentions(config: ModelConfig) -> list[AttentionConfig]:
    """Return the attention of each layer that has grouped-query attention."""
    return [layer.attention for layer in config.layers if isinstance(layer.attention, AttentionConfig)]


def one_layer(config: ModelConfig) -> Any:
    """Return the layer that all are equal to, but for the window: a `LayerConfig`."""
    layers = {dataclasses.replace(layer, attention=_without_window(layer)) for layer in config.layers}
    assert len(layers) == 1
    return config.layers[0]


def _without_window(layer: LayerConfig) -> AttentionConfig:
    assert isinstance(layer.attention, AttentionConfig)
    return dataclasses.replace(layer.attention, window=None)


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Return the sliding window of each layer."""
    return tuple(attention.window for attention in attentions(config))


def rope_of(config: ModelConfig) -> RopeConfig:
    """Return the RoPE of all layers."""
    rope = one_layer(config).attention.rope
    assert isinstance(rope, RopeConfig)
    return rope
