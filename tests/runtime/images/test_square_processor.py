"""Images that are all brought to one size, as Gemma 3 reads them, and how texts have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pil

from penstock.runtime.errors import ConfigError
from penstock.runtime.images.image import ImageLimits
from penstock.runtime.images.reader import ImageReader, Patches
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.image_processors import find_processor
from penstock.runtime.models.vision.encoders import vision_of
from tests.support.goldens import GOLDEN

FOLDER = GOLDEN / "gemma3_vl"


def processor(folder: Path, max_tokens: int = 16, **changes: Any) -> Any:
    vision = load_config(FOLDER).vision
    assert vision is not None
    file = "preprocessor_config.json"
    (folder / file).write_text(json.dumps(json.loads((FOLDER / file).read_text()) | changes))
    return find_processor(folder, vision, max_tokens)


def test_patches_lie_square_by_square(tmp_path: Path) -> None:
    """Of an image of the model's size: 8 x 8 pixels of 3 colours, from -1 to 1, four for each token."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    made = processor(tmp_path)
    (part,) = made.process(Pil.fromarray(pixels))
    assert isinstance(part, Patches)
    assert (part.values.shape, part.grid, part.num_tokens) == ((64, 192), (1, 8, 8), 16)
    assert made.num_tokens(5, 5000) == 16
    scaled = pixels.astype(np.float64) / 127.5 - 1
    squares = [(2 * y + dy, 2 * x + dx) for y in range(4) for x in range(4) for dy in (0, 1) for dx in (0, 1)]
    for values, (row, column) in zip(part.values, squares, strict=True):
        square = scaled[8 * row : 8 * row + 8, 8 * column : 8 * column + 8].transpose(2, 0, 1)
        np.testing.assert_allclose(values, square.reshape(-1), atol=1e-6)


@pytest.mark.parametrize("file", json.loads((FOLDER / "expected.json").read_text())["cases"][1]["images"])
def test_pixels_are_those_that_pytorch_was_given(tmp_path: Path, file: str) -> None:
    """The first row of pixels of the first image is in the golden."""
    case = json.loads((FOLDER / "expected.json").read_text())["cases"][1]
    (part,) = processor(tmp_path).process(Pil.open(FOLDER / file))
    if file == case["images"][0]:
        np.testing.assert_allclose(part.values[0, :8], case["pixel_values_head"], atol=1e-6)
    assert np.abs(part.values).max() <= 1


@pytest.mark.parametrize(
    ("changes", "most", "message"),
    [
        ({"size": {"height": 64, "width": 32}}, 16, "the model's {'height': 64, 'width': 64}"),
        ({"do_pan_and_scan": True}, 16, "do_pan_and_scan: further crops of an image are not made"),
        ({}, 15, "max_image_tokens must be at least as many, not 15"),
        ({"do_resize": False}, 16, "cannot be loaded: ValueError"),
        ({"image_mean": [0.5]}, 16, "cannot be loaded: BadImage"),
        ({"image_std": [0, 0, 0]}, 16, "pixels that are no finite numbers"),
    ],
)
def test_what_the_model_does_not_take_is_refused(
    tmp_path: Path, changes: dict[str, Any], most: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json") as raised:
        processor(tmp_path, most, **changes)
    assert message in str(raised.value)


def test_a_place_for_an_image_is_written_out() -> None:
    """The first mark alone stands for all; what is written out already stays as it is."""
    vision = load_config(FOLDER).vision
    assert vision is not None
    limits = ImageLimits(max_images=2, max_bytes=1, max_pixels=1, max_tokens=16)
    reader = ImageReader(vision_of(vision), None, limits, ("<b>", "<i>", "<e>"))  # type: ignore[arg-type]  # no image is made
    assert (
        reader.written_out("a<b>c\n\n<b><i><e>d<b>") == "a\n\n<b><i><e>\n\nc\n\n<b><i><e>d\n\n<b><i><e>\n\n"
    )
    plain = ImageReader(vision_of(vision), None, limits)  # type: ignore[arg-type]  # no image is made
    assert plain.written_out("a<b>c") == "a<b>c"
