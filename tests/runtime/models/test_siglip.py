"""SigLIP and the projection behind it, compared with float64 numpy that is written from the definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.models import params
from penstock.runtime.models.configs.vision import SiglipVisionConfig
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.vision.siglip_inputs import vision_inputs
from penstock.runtime.requests.images import MediaItem
from tests.support.goldens import GOLDEN

FOLDER = GOLDEN / "gemma3_vl"
Floats = NDArray[np.float64]


def encoded(pixels: Floats, dtype: str, linear: LinearFormat) -> Floats:
    """Return what the model makes of pixels [3, 64, 64], cut into patches of 8 x 8 in squares of 2 x 2."""
    config = load_config(FOLDER)
    vision = config.vision
    assert isinstance(vision, SiglipVisionConfig)
    rows = pixels.reshape(3, 4, 2, 8, 4, 2, 8).transpose(1, 4, 2, 5, 0, 3, 6).reshape(64, 192)
    item = MediaItem(rows.astype(np.float32), (1, 8, 8), b"", 0, 16)
    state = load_weights(FOLDER, config, dtype, linear=linear, progress=False)

    def run(leaves: Any, inputs: Any, count: Any) -> Any:
        return params.bind(config, leaves, dtype, linear).encode(inputs, count)

    inputs = vision_inputs(vision, [item], 64)
    (made,) = jax.jit(run)(params.state_to_leaves(state), inputs, np.int32(64))
    return np.asarray(made, np.float64)


def by_definition(pixels: Floats, folder: Path) -> Floats:
    """Compute the same in float64, patch by patch row by row, [16, 48]."""
    tensors = {
        name: values.astype(np.float64) for name, values in load_file(folder / "model.safetensors").items()
    }

    def linear(name: str, x: Floats) -> Floats:
        made: Floats = x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]
        return made

    def norm(name: str, x: Floats) -> Floats:
        centred = x - x.mean(axis=1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-6)
        made: Floats = scaled * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]
        return made

    embed = "vision_tower.embeddings"
    kernels = tensors[f"{embed}.patch_embedding.weight"]
    patches = pixels.reshape(3, 8, 8, 8, 8).transpose(1, 3, 0, 2, 4).reshape(64, -1)
    x = (
        patches @ kernels.reshape(len(kernels), -1).T
        + tensors["vision_tower.embeddings.patch_embedding.bias"]
    )
    x = x + tensors["vision_tower.embeddings.position_embedding.weight"]
    for layer in range(3):
        stem = f"vision_tower.encoder.layers.{layer}"
        inner = norm(f"{stem}.layer_norm1", x)
        heads = [
            linear(f"{stem}.self_attn.{part}_proj", inner).reshape(64, 2, 16).transpose(1, 0, 2)
            for part in ("q", "k", "v")
        ]
        scores = heads[0] @ heads[1].transpose(0, 2, 1) / 4
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
        shares /= shares.sum(axis=2, keepdims=True)
        x = x + linear(f"{stem}.self_attn.out_proj", (shares @ heads[2]).transpose(1, 0, 2).reshape(64, 32))
        inner = linear(f"{stem}.mlp.fc1", norm(f"{stem}.layer_norm2", x))
        inner = inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3))) / 2
        x = x + linear(f"{stem}.mlp.fc2", inner)
    x = norm("vision_tower.post_layernorm", x)
    pooled = x.reshape(4, 2, 4, 2, 32).mean(axis=(1, 3)).reshape(16, 32)
    pooled /= np.sqrt((pooled**2).mean(axis=1, keepdims=True) + 1e-6)
    pooled *= 1 + tensors["multi_modal_projector.mm_soft_emb_norm.weight"]
    made: Floats = pooled @ tensors["multi_modal_projector.mm_input_projection_weight"]
    return made


@pytest.mark.ci
def test_embeddings_are_those_of_the_definition() -> None:
    """In float32 closely, and with the kernels' weights in bfloat16 as well as that allows."""
    pixels = np.random.default_rng(3).uniform(-1, 1, (3, 64, 64))
    expected = by_definition(pixels, FOLDER)
    np.testing.assert_allclose(encoded(pixels, "float32", PLAIN), expected, rtol=1e-4, atol=1e-4)
    for linear in (LinearFormat(packed=True), LinearFormat(packed=True, int8=True)):
        found = encoded(pixels, "bfloat16", linear)
        assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
