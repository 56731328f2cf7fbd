"""The image processors of Mistral's, InternVL's and Gemma 4's checkpoints: what they count is what they make,
and their limits. What they make of pixels, and which tokens, is compared with transformers in `test_pictures`
and, of Gemma 4, in `test_golden_pictures`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pil

from penstock.runtime.errors import ConfigError
from penstock.runtime.images.decoding import BadImage
from penstock.runtime.images.reader import Patches, Processor
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.image_processors import find_processor
from penstock.runtime.models.configs.vision import Gemma4VisionConfig
from tests.support.goldens import GOLDEN
from tests.support.models.pictures import LIMITS

SIDES = st.integers(1, 300)


def processor(folder: Path, max_tokens: int = LIMITS.max_tokens) -> Processor:
    vision = load_config(folder).vision
    assert vision is not None
    found = find_processor(folder, vision, max_tokens)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "max_tokens"), [("mistral3_vl", 72), ("mistral3_vl", 31), ("internvl", 26), ("gemma4_vl", 72)]
)
def test_as_many_tokens_are_made_as_are_counted(name: str, max_tokens: int) -> None:
    """And not more than are allowed."""
    made = processor(GOLDEN / name, max_tokens)

    @given(width=SIDES, height=SIDES)
    @settings(deadline=None, max_examples=25)
    def check(width: int, height: int) -> None:
        try:
            counted = made.num_tokens(width, height)
        except BadImage:  # so narrow that no pixel is left on the shorter side
            assert max(width, height) > 8 * min(width, height)
            return
        assert counted <= max_tokens
        total = 0
        for part in made.process(Pil.new("RGB", (width, height), (9, 8, 7))):
            total += part.num_tokens + len(part.row_ends) if isinstance(part, Patches) else len(part)
        assert total == counted

    check()


@pytest.mark.parametrize(("name", "max_tokens"), [("mistral3_vl", 1), ("internvl", 5)])
def test_a_limit_below_the_least_picture_is_refused(name: str, max_tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"max_image_tokens: {max_tokens} is less"):
        processor(GOLDEN / name, max_tokens)


@pytest.mark.parametrize(("name", "token"), [("mistral3_vl", "[IMG_BREAK]"), ("internvl", "<img>")])
def test_a_tokenizer_without_the_tokens_of_pictures_is_refused(tmp_path: Path, name: str, token: str) -> None:
    for file in ("config.json", "preprocessor_config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name / file, tmp_path / file)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        processor(tmp_path)
    tokenizer = json.loads((GOLDEN / name / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [each for each in tokenizer["added_tokens"] if each["content"] != token]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError) as raised:
        processor(tmp_path)
    assert f"has no {token}, which prompts with pictures need" in str(raised.value)


def test_tiles_of_another_size_than_the_models_are_refused(tmp_path: Path) -> None:
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(GOLDEN / "internvl" / file, tmp_path / file)
    data = json.loads((GOLDEN / "internvl" / "preprocessor_config.json").read_text())
    data["size"] = {"height": 64, "width": 32}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"size is .*64.*, and the model's 32"):
        processor(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"longest_edge": 0}}, "longest_edge is 0, not 1 pixel or more"),
        ({"do_center_crop": True, "crop_size": {"height": 32, "width": 32}}, "tokens of a picture that has"),
    ],
)
def test_a_processor_that_makes_something_else_than_it_counts_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """When the model is loaded, and not by what callers send."""
    shutil.copytree(GOLDEN / "mistral3_vl", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError) as raised:
        processor(tmp_path)
    assert message in str(raised.value)


GEMMA4 = GOLDEN / "gemma4_vl"


def gemma4(folder: Path, max_tokens: int, model_most: int = 280, **changes: Any) -> Processor:
    """Return the processor of the golden's encoder, with changes of its file. model_most: the model's own."""
    vision = load_config(GEMMA4).vision
    assert isinstance(vision, Gemma4VisionConfig)
    file = "preprocessor_config.json"
    (folder / file).write_text(json.dumps(json.loads((GEMMA4 / file).read_text()) | changes))
    found = find_processor(folder, dataclasses.replace(vision, most_tokens=model_most), max_tokens)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("changes", "most", "message"),
    [
        ({}, 71, "max_image_tokens must be at least 72, not 71"),
        ({"patch_size": 8}, 72, "patch_size is 8, and the model's 4"),
        ({"pooling_kernel_size": 2}, 72, "pooling_kernel_size is 2, and the model's 3"),
        ({"do_resize": False}, 72, "do_resize is false"),
        ({"max_soft_tokens": 71}, 280, "cannot be loaded"),
    ],
)
def test_what_gemma_4_does_not_take_is_refused(
    tmp_path: Path, changes: dict[str, Any], most: int, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        gemma4(tmp_path, most, **changes)
    assert message in str(raised.value)


def test_gemma_4_has_the_largest_budget_of_tokens_that_fits(tmp_path: Path) -> None:
    """Of its own 280, between two tokens around them. A square of 4 x 4 pixels becomes so large that it has
    as many as a square can have.
    """
    for most, side in ((281, 11), (282, 16), (1024, 16)):
        assert gemma4(tmp_path, most, max_soft_tokens=280).num_tokens(4, 4) == side**2 + 2


def test_the_bound_of_gemma_4_s_config_holds_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the image processor has a larger one. No budget is so small as 64."""
    caplog.set_level("INFO")
    assert gemma4(tmp_path, 600, max_soft_tokens=560).num_tokens(4, 4) == 16**2 + 2
    assert "is 560 (max_soft_tokens), the model's 280" in caplog.text
    with pytest.raises(ConfigError, match="vision_soft_tokens_per_image must be at least 70"):
        gemma4(tmp_path, 600, model_most=64)


def test_patches_of_gemma_4_lie_square_by_square(tmp_path: Path) -> None:
    """Of a picture that keeps its size: 84 x 120 pixels are 7 x 10 tokens of 3 x 3 patches of 4 x 4 pixels,
    whose colours come pixel by pixel, from 0 to 1.
    """
    pixels = np.random.default_rng(0).integers(0, 256, (84, 120, 3), np.uint8)
    made = gemma4(tmp_path, 72)
    before, part, behind = made.process(Pil.fromarray(pixels))
    assert (before, behind) == ((3,), (4,))
    assert isinstance(part, Patches)
    assert (part.values.shape, part.grid, part.num_tokens) == ((630, 48), (1, 21, 30), 70)
    squares = [
        (3 * y + dy, 3 * x + dx) for y in range(7) for x in range(10) for dy in range(3) for dx in range(3)
    ]
    for values, (row, column) in zip(part.values, squares, strict=True):
        square = pixels[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        np.testing.assert_allclose(values, square.reshape(-1) / 255.0, atol=1e-6)
