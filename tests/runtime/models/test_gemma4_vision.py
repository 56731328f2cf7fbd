"""The encoder of Gemma 4's images and the projection behind it, compared with float64 numpy that is written
from the definition.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.models import params
from penstock.runtime.models.configs.vision import Gemma4VisionConfig
from penstock.runtime.models.linear import PLAIN, LinearFormat
from penstock.runtime.models.vision.gemma4_inputs import grid_problem, vision_inputs
from penstock.runtime.requests.images import MediaItem
from tests.support.goldens import GOLDEN

FOLDER = GOLDEN / "gemma4_vl"
GRIDS = ((6, 3), (3, 12))
"""Rows and columns of patches of two images."""
BUCKET = 72
Floats = NDArray[np.float64]


def encoded(images: list[Floats], dtype: str, linear: LinearFormat) -> Floats:
    """Return what the model makes of two images [rows, columns, 48] in one call with padding: [6, 48]."""
    config = load_config(FOLDER)
    vision = config.vision
    assert isinstance(vision, Gemma4VisionConfig)
    items = []
    for image in images:
        rows, columns, _ = image.shape
        squares = image.reshape(rows // 3, 3, columns // 3, 3, 48).transpose(0, 2, 1, 3, 4).reshape(-1, 48)
        items.append(MediaItem(squares.astype(np.float32), (1, rows, columns), b"", 0, len(squares) // 9))
    state = load_weights(FOLDER, config, dtype, linear=linear, progress=False)

    def run(leaves: Any, inputs: Any, count: Any) -> Any:
        return params.bind(config, leaves, dtype, linear).encode(inputs, count)

    count = np.int32(sum(len(item.patches) for item in items))
    (made,) = jax.jit(run)(params.state_to_leaves(state), vision_inputs(vision, items, BUCKET), count)
    return np.asarray(made, np.float64)[: count // 9]


def by_definition(image: Floats) -> Floats:
    """Compute the same of one image in float64."""
    tensors = {
        name.removeprefix("model."): values.astype(np.float64)
        for name, values in load_file(FOLDER / "model.safetensors").items()
    }
    rows, columns, _ = image.shape
    count = rows * columns
    row, column = (places.ravel() for places in np.indices((rows, columns)))

    def linear(name: str, x: Floats) -> Floats:
        least, most = tensors[f"{name}.input_min"], tensors[f"{name}.input_max"]
        y: Floats = np.clip(x, least, most) @ tensors[f"{name}.linear.weight"].T
        return np.clip(y, tensors[f"{name}.output_min"], tensors[f"{name}.output_max"])

    def unit(x: Floats) -> Floats:
        made: Floats = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)
        return made

    def turned(x: Floats) -> Floats:
        """x [N, 2, 16]: channels 0 to 7 turn by column, 8 to 15 by row; channel c turns with c + 4."""
        out = x.copy()
        for first, place in ((0, column), (8, row)):
            for pair in range(4):
                angle = place * 100.0 ** (-2 * pair / 8)
                cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
                one, other = x[:, :, first + pair], x[:, :, first + pair + 4]
                out[:, :, first + pair] = one * cos - other * sin
                out[:, :, first + pair + 4] = other * cos + one * sin
        return out

    tower = "vision_tower"
    x = (2 * image - 1).reshape(count, 48) @ tensors[f"{tower}.patch_embedder.input_proj.weight"].T
    tables = tensors[f"{tower}.patch_embedder.position_embedding_table"]
    x = x + tables[0][column] + tables[1][row]
    for layer in range(3):
        stem = f"{tower}.encoder.layers.{layer}"
        inner = unit(x) * tensors[f"{stem}.input_layernorm.weight"]
        q, k, v = (linear(f"{stem}.self_attn.{part}_proj", inner).reshape(count, 2, 16) for part in "qkv")
        q = turned(unit(q) * tensors[f"{stem}.self_attn.q_norm.weight"])
        k = turned(unit(k) * tensors[f"{stem}.self_attn.k_norm.weight"])
        scores = np.einsum("qhd,khd->hqk", q, k)
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
        shares /= shares.sum(axis=2, keepdims=True)
        seen = np.einsum("hqk,khd->qhd", shares, unit(v)).reshape(count, 32)
        seen = linear(f"{stem}.self_attn.o_proj", seen)
        x = x + unit(seen) * tensors[f"{stem}.post_attention_layernorm.weight"]
        inner = unit(x) * tensors[f"{stem}.pre_feedforward_layernorm.weight"]
        gate = linear(f"{stem}.mlp.gate_proj", inner)
        gate = gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2
        inner = linear(f"{stem}.mlp.down_proj", gate * linear(f"{stem}.mlp.up_proj", inner))
        x = x + unit(inner) * tensors[f"{stem}.post_feedforward_layernorm.weight"]
    pooled = x.reshape(rows // 3, 3, columns // 3, 3, 32).mean(axis=(1, 3)).reshape(-1, 32) * np.sqrt(32)
    pooled = (pooled - tensors[f"{tower}.std_bias"]) * tensors[f"{tower}.std_scale"]
    made: Floats = unit(pooled) @ tensors["embed_vision.embedding_projection.weight"].T
    return made


@pytest.mark.ci
def test_embeddings_are_those_of_the_definition() -> None:
    """In float32 closely, and with the kernels' weights in bfloat16 as well as that allows."""
    random = np.random.default_rng(3)
    images = [random.uniform(0, 1, (*grid, 48)) for grid in GRIDS]
    expected = np.concatenate([by_definition(image) for image in images])
    np.testing.assert_allclose(encoded(images, "float32", PLAIN), expected, rtol=1e-4, atol=1e-4)
    found = encoded(images, "bfloat16", LinearFormat(packed=True, int8=True))
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


def test_an_image_wider_than_the_tables_of_positions_is_refused() -> None:
    vision = load_config(FOLDER).vision
    assert isinstance(vision, Gemma4VisionConfig)
    assert grid_problem(vision, (1, 3, 255)) is None
    assert "256 positions" in str(grid_problem(vision, (1, 3, 258)))
    assert "multiples of 3" in str(grid_problem(vision, (1, 4, 6)))
