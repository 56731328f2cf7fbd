"""A GGUF file becomes the config and the tensors of the same model in safetensors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from penstock.runtime.loading.checkpoint import read_config as read_directory
from penstock.runtime.loading.gguf.architectures import find_tensors, read_config
from penstock.runtime.loading.gguf.file import read_gguf
from penstock.runtime.loading.safetensors_files import find_tensors as find_in_directory
from penstock.runtime.models.config import AttentionConfig, LatentConfig, ModelConfig
from penstock.runtime.models.configs.recurrent import RecurrentConfig
from penstock.runtime.models.registry import parse_config
from penstock.runtime.models.rope import RopeConfig, inverse_frequencies
from tests.support.gguf_models import write_gguf
from tests.support.goldens import GOLDEN

_NAMES = (
    "llama",
    "llama_linear_rope",
    "mistral_swa",
    "mixtral",
    "qwen2",
    "qwen2_yarn",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt_oss",
    "granite",
    "glm4_moe",
    "deepseek_v3",
    "qwen3_5",
    "qwen3_5_moe",
)
_NO_ROPE = RopeConfig()


def _without_frequencies(config: ModelConfig) -> ModelConfig:
    """Return what is compared exactly. Numbers of a GGUF file are rounded to float32, and RoPE is compared by
    its frequencies, because Llama 3.1's is written otherwise.
    """
    layers = []
    for layer in config.layers:
        if isinstance(layer.attention, RecurrentConfig):
            layers.append(layer)
            continue
        scale = float(np.float32(layer.attention.scale))
        layers.append(
            dataclasses.replace(
                layer, attention=dataclasses.replace(layer.attention, rope=_NO_ROPE, scale=scale)
            )
        )
    return dataclasses.replace(
        config,
        layers=tuple(layers),
        rms_norm_eps=float(np.float32(config.rms_norm_eps)),
    )


def _frequencies(config: ModelConfig, layer: int) -> tuple[np.ndarray, float]:
    attention = config.layers[layer].attention
    if isinstance(attention, RecurrentConfig):
        return np.zeros(0), 1.0
    assert isinstance(attention, AttentionConfig | LatentConfig)
    assert attention.rope is not None
    rotated = attention.rope_dim if isinstance(attention, LatentConfig) else attention.rotary_dim
    return inverse_frequencies(attention.rope, rotated), attention.rope.attention_factor


@pytest.mark.parametrize("name", _NAMES)
def test_config_and_tensors_are_those_of_the_safetensors_checkpoint(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(GOLDEN / name, path)
    file = read_gguf(path)
    fields = read_config(file)
    config = parse_config(fields)
    expected = dataclasses.replace(read_directory(GOLDEN / name), predictor=None)  # GGUF files have no heads
    assert _without_frequencies(config) == _without_frequencies(expected)
    for layer in range(config.num_layers):
        (found, factor), (wanted, wanted_factor) = (_frequencies(c, layer) for c in (config, expected))
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        assert factor == pytest.approx(wanted_factor)
    tensors, theirs = find_tensors(file, fields), find_in_directory(GOLDEN / name)
    assert set(tensors) == set(theirs)
    for tensor, entry in theirs.items():
        mine = tensors[tensor]
        assert (mine.shape, mine.dtype) == (entry.shape, entry.dtype), tensor
        np.testing.assert_allclose(mine[0 : mine.shape[0]], entry[0 : entry.shape[0]], rtol=0, atol=1e-6)
        if "norm" not in tensor and "A_log" not in tensor:  # these are stored with something computed
            np.testing.assert_array_equal(mine[1:2], entry[1:2], tensor)
    json.dumps(fields)
