"""A model that is computed layer by layer: what PyTorch computed of a golden, and what products read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.safetensors_files import find_tensors
from penstock.runtime.quantising.layerwise import LayerByLayer
from tests.support.goldens import GOLDEN

pytestmark = pytest.mark.ci


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        *(pytest.param(other, marks=pytest.mark.sweep) for other in ("qwen3_5", "phi3", "granite_hybrid")),
    ],
)
def test_a_texts_perplexity_is_that_of_pytorch(name: str) -> None:
    """gemma3 has windows, norms before and after, and embeddings that are scaled."""
    folder = GOLDEN / name
    config, tensors = load_config(folder), find_tensors(folder)
    case = json.loads((folder / "expected.json").read_text())["cases"][0]
    texts = np.array([case["prompt"] + case["tokens"]], np.int32)
    model = LayerByLayer(config, texts.shape[1])
    hidden = model.embed(texts, tensors)
    for layer in range(config.num_layers):
        model.layer(layer, tensors).advance(hidden)
    first = len(case["prompt"]) - 1  # the position behind which the first generated token is
    score = model.score(texts[:, first:], hidden[:, first:], hidden[:, first:], tensors)
    np.testing.assert_allclose(np.log(score.perplexity), -np.mean(case["logprobs"]), rtol=1e-4)
    assert score == (score.perplexity, score.perplexity, 0.0, 1.0)


def test_the_watched_inputs_are_the_normalised_embeddings() -> None:
    """What q, k and v of the first layer multiply, in float64 from the definition of the norm."""
    folder: Path = GOLDEN / "llama"
    config, tensors = load_config(folder), find_tensors(folder)
    texts = np.random.default_rng(5).integers(0, config.vocab_size, (2, 24), np.int32)
    model = LayerByLayer(config, 24)
    hidden = model.embed(texts, tensors)
    grams = model.layer(0, tensors).grams(hidden)
    table = np.asarray(tensors["model.embed_tokens.weight"].map()).astype(np.float64)
    norm = np.asarray(tensors["model.layers.0.input_layernorm.weight"].map()).astype(np.float64)
    x = table[texts].reshape(-1, config.hidden_size)
    x = x / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + config.rms_norm_eps) * norm
    np.testing.assert_allclose(
        grams["layers", 0, "self_attn", "qkv_proj", "weight"], x.T @ x, rtol=1e-4, atol=1e-6
    )
    assert {path[2:4] for path in grams} == {
        ("self_attn", "qkv_proj"),
        ("self_attn", "o_proj"),
        ("mlp", "gate_up_proj"),
        ("mlp", "down_proj"),
    }
