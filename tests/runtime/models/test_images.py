"""Models that read images, compared with PyTorch's answers to prompts with images, without the engine.

tests/golden has the images, and what transformers 5.23 computed for them.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.runtime.loading.checkpoint import load_config, load_weights
from penstock.runtime.models import params
from penstock.runtime.models.configs.vision import QwenVisionConfig
from penstock.runtime.models.layers.images import MediaInputs
from penstock.runtime.models.vision.encoders import vision_of
from tests.support.goldens import (
    GOLDEN,
    QWEN_WITH_IMAGES,
    WITH_IMAGES,
    check_greedy,
    check_last_logits,
)
from tests.support.models.images import cases_of, images_of, num_patches
from tests.support.models.plain_encoder import PlainEncoder
from tests.support.models.sequence import SLOTS, Sequence
from tests.support.suite.drawing import few

pytestmark = pytest.mark.ci

BUCKET = 320
"""Patches: what the images of all cases together have, and more."""
POOL = 100
"""Rows of the embeddings, of which some are left for no image."""


class Reader:
    """A golden model, its encoder, and one sequence."""

    def __init__(self, name: str, root: Path = GOLDEN) -> None:
        self.directory = root / name
        config = load_config(self.directory)
        assert config.vision is not None
        self.config, self.vision, self.engines = config, config.vision, vision_of(config.vision)
        state = load_weights(self.directory, config, progress=False)
        self.sequence, self.cases = Sequence(config, state), cases_of(self.directory)

        def encode(leaves: Any, inputs: Any, num_patches: Any) -> Any:
            return params.bind(config, leaves).encode(inputs, num_patches)

        self.encode = functools.partial(jax.jit(encode), params.state_to_leaves(state))

    def embeddings(self, images: Any, bucket: int = BUCKET) -> list[np.ndarray]:
        """Return the embeddings of the images, for each depth [tokens, E]."""
        count = num_patches(images)
        found = self.encode(self.engines.inputs(images, bucket), np.int32(count))
        return [np.asarray(one)[: count // self.engines.patches_per_token] for one in found]

    def media(self, case: Any) -> Callable[[Any], MediaInputs]:
        """See `Sequence.feed`. Rows of the embeddings that belong to no image of the case are NaN."""
        images = images_of(self.directory, case, self.vision)
        length = len(case["prompt"])
        turns = np.tile(np.arange(SLOTS, dtype=np.int32), (3, 1))
        if self.engines.rotary_positions is not None:
            rotary = self.engines.rotary_positions(length, images)
            turns += rotary.delta
            turns[:, :length] = rotary.positions
        rows, at = np.full(SLOTS, POOL, np.int32), 7
        for item in images:
            image_token = self.vision.image_token_id
            places = [i for i in range(item.start, item.end) if case["prompt"][i] == image_token]
            rows[places] = np.arange(at, at + len(places))
            at += len(places)
        pool = []
        for values in self.embeddings(images):
            array = np.full((POOL, self.config.hidden_size), np.nan, np.float32)
            array[7:at] = values
            pool.append(jnp.asarray(array))
        return lambda where: MediaInputs(jnp.asarray(turns[:, where]), jnp.asarray(rows[where]), tuple(pool))


NAMES = tuple(name for name in WITH_IMAGES if not name.startswith("gemma"))
"""Those whose tokens of an image see no token behind them."""


@pytest.fixture(scope="module", params=few(NAMES, ("llama4_vl", "mistral3_vl", "qwen2_5_vl", "qwen3_vl")))
def reader(request: pytest.FixtureRequest) -> Reader:
    return Reader(request.param)


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("chunk", [8, 5])
def test_matches_pytorch(reader: Reader, case: int, chunk: int) -> None:
    """The goldens of Qwen's models say the grids of their images; those of others say which tokens each
    image becomes, which `images_of` compares. The first patch begins with the image's first pixels.
    """
    expected = reader.cases[case]
    images = images_of(reader.directory, expected, reader.vision)
    if "grid_thw" in expected:
        assert [list(item.grid) for item in images] == expected["grid_thw"]
    if images:
        found = images[0].patches.ravel()[:8]
        np.testing.assert_allclose(found, expected["pixel_values_head"], atol=2e-6)
    media, sequence = reader.media(expected), reader.sequence
    sequence.reset()
    logits = sequence.feed(expected["prompt"], chunk, media)
    check_last_logits(logits, expected)
    check_greedy(logits, lambda tokens: sequence.feed(tokens, media=media), expected)


def test_images_of_one_call_attend_to_themselves_only(reader: Reader) -> None:
    """Alone, all in one call in any order, and in a bucket without padding: the same, but for rounding."""
    images = [item for case in reader.cases for item in images_of(reader.directory, case, reader.vision)]
    images = images[:4]
    alone = [reader.embeddings([item]) for item in images]
    exact = reader.embeddings(images[2:3], num_patches(images[2:3]))
    for order in (range(4), (3, 1, 0, 2)):
        together = reader.embeddings([images[i] for i in order])
        for depth, found in enumerate(together):
            np.testing.assert_allclose(found, np.concatenate([alone[i][depth] for i in order]), atol=2e-5)
    for found, expected in zip(exact, alone[2], strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_an_image_that_is_not_finite_spoils_no_other(reader: Reader) -> None:
    one, other = (
        images_of(reader.directory, case, reader.vision)[-1] for case in (reader.cases[0], reader.cases[1])
    )
    expected = reader.embeddings([one])
    other.patches[...] = np.float32(3e38)
    for found, values in zip(reader.embeddings([one, other]), expected, strict=True):
        np.testing.assert_allclose(found[: len(values)], values, atol=2e-5)


@pytest.mark.parametrize("name", few(QWEN_WITH_IMAGES, ("qwen2_5_vl", "qwen3_vl")))
def test_encoders_agree_with_a_plain_one_where_attention_matters(name: str, tmp_path: Path) -> None:
    """The goldens' encoders have such small weights that attention hardly shows in the answers; larger ones
    compare what each patch attends to.
    """
    shutil.copytree(GOLDEN / name, tmp_path / name)
    tensors = load_file(tmp_path / name / "model.safetensors")
    beginning = "visual." if "visual.patch_embed.proj.weight" in tensors else "model.visual."
    for tensor, values in tensors.items():
        if ".blocks." in f".{tensor}" and values.ndim == 2:
            tensors[tensor] = values * np.float32(12)
    save_file(tensors, tmp_path / name / "model.safetensors")
    reader = Reader(name, tmp_path)
    assert isinstance(reader.vision, QwenVisionConfig)
    visual = {
        key.removeprefix(beginning): values for key, values in tensors.items() if key.startswith(beginning)
    }
    plain = PlainEncoder(reader.vision, visual)
    images = [item for case in reader.cases for item in images_of(reader.directory, case, reader.vision)]
    found = reader.embeddings(images)
    expected = [plain.encode(item.patches, *item.grid[1:]) for item in images]
    for depth, values in enumerate(found):
        np.testing.assert_allclose(values, np.concatenate([one[depth] for one in expected]), atol=5e-4)
