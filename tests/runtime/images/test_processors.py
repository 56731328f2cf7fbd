"""The image processors of Mistral's, InternVL's, Llama 4's and Gemma 4's checkpoints: what they count is what
they make, and their limits. What they make of pixels, and which tokens, is compared with transformers in
`test_images` and, of Gemma 4, in `test_golden_images`.
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
from penstock.runtime.images.llama4_processor import Llama4Processor, Llama4Settings, Llama4Tokens
from penstock.runtime.images.reader import Patches, Processor
from penstock.runtime.loading.checkpoint import load_config
from penstock.runtime.loading.image_processors import find_processor
from penstock.runtime.models.configs.vision import Gemma4VisionConfig
from tests.support.goldens import GOLDEN
from tests.support.models.images import LIMITS

SIDES = st.integers(1, 300)


def processor(folder: Path, max_tokens: int = LIMITS.max_tokens) -> Processor:
    vision = load_config(folder).vision
    assert vision is not None
    found = find_processor(folder, vision, max_tokens)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "max_tokens"),
    [
        ("mistral3_vl", 72),
        ("mistral3_vl", 31),
        ("internvl", 26),
        ("llama4_vl", 72),
        ("llama4_vl", 31),
        ("gemma4_vl", 72),
    ],
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


@pytest.mark.parametrize(("name", "max_tokens"), [("mistral3_vl", 1), ("internvl", 5), ("llama4_vl", 6)])
def test_a_limit_below_the_least_image_is_refused(name: str, max_tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"max_image_tokens: {max_tokens} is less"):
        processor(GOLDEN / name, max_tokens)


@pytest.mark.parametrize(
    ("name", "token"),
    [("mistral3_vl", "[IMG_BREAK]"), ("internvl", "<img>"), ("llama4_vl", "<|tile_y_separator|>")],
)
def test_a_tokenizer_without_the_tokens_of_images_is_refused(tmp_path: Path, name: str, token: str) -> None:
    for file in ("config.json", "preprocessor_config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name / file, tmp_path / file)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        processor(tmp_path)
    tokenizer = json.loads((GOLDEN / name / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [each for each in tokenizer["added_tokens"] if each["content"] != token]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError) as raised:
        processor(tmp_path)
    assert f"has no {token}, which prompts with images need" in str(raised.value)


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
        ({"do_center_crop": True, "crop_size": {"height": 32, "width": 32}}, "tokens of an image that has"),
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


LLAMA4 = GOLDEN / "llama4_vl"


def llama4(folder: Path, max_tokens: int = 1024, **changes: Any) -> Processor:
    """Return the processor of Llama 4's golden, with changes of its file."""
    file = "preprocessor_config.json"
    for other in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(LLAMA4 / other, folder / other)
    (folder / file).write_text(json.dumps(json.loads((LLAMA4 / file).read_text()) | changes))
    return processor(folder, max_tokens)


@pytest.mark.parametrize(
    ("height", "width", "side", "most", "fills", "made", "tiles"),
    [
        (2122, 207, 336, 9, False, (2122, 207), (7, 1)),
        (564, 33, 336, 8, False, (564, 33), (2, 1)),
        (473, 342, 336, 14, False, (473, 342), (2, 2)),
        (137, 28, 32, 2, False, (64, 13), (2, 1)),
        (43, 83, 32, 11, False, (43, 83), (2, 3)),
        (24, 43, 32, 2, False, (24, 43), (1, 2)),
        (211, 40, 32, 8, True, (168, 32), (6, 1)),
        (657, 1206, 336, 12, True, (732, 1344), (3, 4)),
        (36, 2427, 336, 6, True, (29, 2016), (1, 6)),
        (9, 27, 336, 6, True, (336, 1007), (1, 3)),
        (104, 26, 336, 12, True, (2016, 504), (6, 2)),
        (10, 25, 336, 13, True, (672, 1679), (2, 5)),
    ],
)
def test_canvases_of_llama_4_are_those_of_transformers(
    height: int,
    width: int,
    side: int,
    most: int,
    fills: bool,
    made: tuple[int, int],
    tiles: tuple[int, int],
) -> None:
    """Computed by transformers 5.23, like 3,000 others when this was written. Of the last three, one side is
    a pixel less than exact division gives, because it is computed in float32.

    The image is white and has no other mark, so in the tiles it ends where it is black.
    """
    settings = Llama4Settings(
        max_tiles=most, fills_canvas=fills, rescale=1 / 255, mean=(0.5,) * 3, std=(0.5,) * 3
    )
    tokens = Llama4Tokens(begin=1, end=2, behind_tile=3, behind_row=4, whole=5)
    cut = Llama4Processor(
        settings, tokens, image_size=side, patch_size=side // 2, merge_size=2, max_tokens=1 << 20
    )
    parts = cut.process(Pil.new("RGB", (width, height), (255, 255, 255)))
    rows, columns = tiles
    row = [0, 3] * (columns - 1) + [0, 4]  # 0 stands for a tile
    assert [0 if isinstance(part, Patches) else part[0] for part in parts] == [1, *row * rows, 5, 0, 2]
    values = np.stack([part.values for part in parts if isinstance(part, Patches)][:-1])
    squares = values.reshape(rows, columns, 2, 2, 3, side // 2, side // 2)
    canvas = squares.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * side, columns * side)
    expected = np.full(canvas.shape, -1, np.float32)
    expected[:, : made[0], : made[1]] = 1
    np.testing.assert_array_equal(canvas, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_resize": False}, "do_resize: False is not supported"),
        ({"do_rescale": False}, "do_rescale: False is not supported"),
        ({"do_normalize": False}, "do_normalize: False is not supported"),
        ({"do_center_crop": True}, "do_center_crop: True is not supported"),
        ({"resample": 3}, "resample: 3 is not supported"),
        ({"size": {"height": 32, "width": 64}}, "size.width: must be 32, the model's image_size"),
        ({"max_patches": 0}, "max_patches: must be an integer of at least 1"),
        ({"image_mean": [0.5, 0.5]}, "image_mean: must have 3 numbers, not 2"),
        ({"image_std": [0.5, 0.5, 0.0]}, "image_std.2: must be a number above 0"),
    ],
)
def test_what_llama_4_does_not_take_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        llama4(tmp_path, **changes)
    assert message in str(raised.value)


def test_what_is_said_of_the_whole_processor_counts_before_the_other_file(tmp_path: Path) -> None:
    """As in transformers, whose later versions write both into one file."""
    llama4(tmp_path)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    whole = {"image_processor": {**settings, "max_patches": 1}, "processor_class": "Llama4Processor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    assert processor(tmp_path, 1024).num_tokens(64, 64) == 7


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
    """Of an image that keeps its size: 84 x 120 pixels are 7 x 10 tokens of 3 x 3 patches of 4 x 4 pixels,
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
