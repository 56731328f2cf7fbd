"""Images become patches by transformers' processor, and take the places of a prompt's image tokens."""

from __future__ import annotations

import dataclasses
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pil

from penstock.runtime.errors import ConfigError, InvalidRequest, PromptTooLong
from penstock.runtime.images import reader as reading
from penstock.runtime.images.decoding import decode
from penstock.runtime.images.image import Image, ImageLimits
from penstock.runtime.images.reader import ImageReader, Part, Patches, Processor
from penstock.runtime.images.vision import Vision
from penstock.runtime.loading.image_processors import find_processor
from penstock.runtime.models.configs.vision import QwenVisionConfig
from penstock.runtime.requests.images import RotaryPositions, media_problem
from tests.runtime.images.test_decoding import encoded, huge_png, stripes

PAD, VIDEO = 9, 8
VISION = Vision(
    image_token_id=PAD,
    refused_tokens=((VIDEO, "a video"),),
    patches_per_token=4,
    patch_values=96,
    inputs=lambda items, bucket: None,
    rotary_positions=lambda length, items: RotaryPositions(np.zeros((3, length), np.int32), -len(items)),
)
ENCODER = QwenVisionConfig(
    depth=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    out_size=8,
    patch_size=4,
    image_token_id=PAD,
    video_token_id=VIDEO,
)
"""A token stands for 8 x 8 pixels."""
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 6400},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
LIMITS = ImageLimits(max_images=2, max_bytes=10_000, max_pixels=10_000, max_tokens=32)


def processor(folder: Path, max_tokens: int = 32, **changes: Any) -> Processor:
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | changes))
    found = find_processor(folder, ENCODER, max_tokens)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ImageReader:
    return ImageReader(VISION, processor(tmp_path_factory.mktemp("model")), LIMITS)


def place(reader: ImageReader, token_ids: list[int], *images: bytes, room: int = 100) -> Any:
    fields = [f"media[{i}]" for i in range(len(images))]
    return reader.place(token_ids, [Image(data) for data in images], fields, "media", room=room)


def refused(reader: ImageReader, token_ids: list[int], *images: bytes) -> list[tuple[str, str]]:
    with pytest.raises(InvalidRequest) as raised:
        place(reader, token_ids, *images)
    return [(bad.field, bad.description) for bad in raised.value.violations]


def test_images_take_the_places_of_image_tokens(reader: ImageReader) -> None:
    wide, tall = encoded(stripes(40, 16)), encoded(stripes(16, 24))  # 5 x 2 and 2 x 3 tokens
    placed = place(reader, [1, PAD, 2, 3, PAD], wide, tall)
    assert placed.token_ids == (1, *[PAD] * 10, 2, 3, *[PAD] * 6)
    assert [(item.start, item.num_tokens, item.grid) for item in placed.media] == [
        (1, 10, (1, 4, 10)),
        (13, 6, (1, 6, 4)),
    ]
    assert placed.rotary.positions.shape == (3, 19)
    assert placed.rotary.delta == -2


def test_patches_are_pixels_in_the_order_of_tokens(reader: ImageReader) -> None:
    """Of an image that needs no other size: 4 x 4 pixels of 3 colours, twice, from -1 to 1; the four patches
    of a token come one after the other.
    """
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (16, 24, 3), np.uint8)
    (item,) = place(reader, [PAD], encoded(Pil.fromarray(pixels))).media
    assert item.patches.dtype == np.float32
    assert item.patches.shape == (24, 3 * 2 * 4 * 4)
    scaled = pixels.astype(np.float64) / 127.5 - 1
    number = 0
    for y in range(2):
        for x in range(3):
            for dy in range(2):
                for dx in range(2):
                    top, left = 8 * y + 4 * dy, 8 * x + 4 * dx
                    square = scaled[top : top + 4, left : left + 4].transpose(2, 0, 1)
                    expected = np.stack([square, square], axis=1).reshape(-1)
                    np.testing.assert_allclose(item.patches[number], expected, atol=1e-6)
                    number += 1


def test_the_pixels_of_all_images_together_are_bounded(
    reader: ImageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is small enough; the heads of their files tell that together they are not."""
    monkeypatch.setattr(reader, "limits", dataclasses.replace(LIMITS, max_images=5))
    images = [huge_png(100, 100)] * 4 + [huge_png(1, 8)]
    assert refused(reader, [PAD] * 5, *images) == [
        ("media", "the images have 40008 pixels together; at most 40000 are taken")
    ]


def test_only_one_image_at_a_time_has_pixels_in_memory(
    reader: ImageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When an image is decoded, those before it are gone."""
    decoded: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched(opened: Any) -> Any:
        alive.append(sum(each() is not None for each in decoded))
        decoded.append(weakref.ref(opened))
        return decode(opened)

    monkeypatch.setattr(reading, "decode", watched)
    place(reader, [PAD, PAD], encoded(stripes()), encoded(stripes(16, 24), "image/webp"))
    assert alive == [0, 0]


def test_equal_images_have_equal_digests(reader: ImageReader) -> None:
    one, other = encoded(stripes()), encoded(stripes().transpose(Pil.Transpose.FLIP_LEFT_RIGHT))
    digests = [
        place(reader, [PAD], data).media[0].digest
        for data in (one, encoded(stripes(), "image/webp", lossless=True), other)
    ]
    assert digests[0] == digests[1] != digests[2]


def test_what_is_transparent_becomes_white_and_palettes_become_colours(reader: ImageReader) -> None:
    clear = Pil.new("RGBA", (16, 16), (255, 0, 0, 0))
    assert np.all(place(reader, [PAD], encoded(clear)).media[0].patches == 1.0)
    palette = stripes(16, 16).convert("P", palette=Pil.Palette.ADAPTIVE)
    grey = Pil.new("L", (16, 16), 255)
    one = Pil.new("1", (16, 16), 1)
    for image in (grey, one):
        assert np.all(place(reader, [PAD], encoded(image)).media[0].patches == 1.0)
    np.testing.assert_array_equal(
        place(reader, [PAD], encoded(palette)).media[0].patches,
        place(reader, [PAD], encoded(stripes(16, 16))).media[0].patches,
    )
    palette.info["transparency"] = bytes([0, 255])
    assert place(reader, [PAD], encoded(palette, transparency=bytes([0, 255]))).media[0].num_tokens == 4


def test_a_large_image_is_made_smaller(reader: ImageReader) -> None:
    (item,) = place(reader, [PAD], encoded(stripes(100, 100))).media
    assert item.num_tokens == 25  # of at most 32


def test_images_and_places_must_be_as_many(reader: ImageReader) -> None:
    image = encoded(stripes())
    assert refused(reader, [1, 2], image) == [
        ("media", "1 images, and the prompt has 0 places for them (token 9)")
    ]
    assert refused(reader, [PAD, PAD], image)[0][0] == "media"
    assert refused(reader, [PAD])[0][0] == "media"
    assert refused(reader, [PAD] * 3, *[image] * 3) == [("media", "3 images; at most 2 are taken")]
    assert place(reader, [1, 2]).media == ()


def test_a_prompt_may_have_another_token_for_an_image_than_its_embeddings(reader: ImageReader) -> None:
    """As Llama 4's, of which neither is the other, and the token of embeddings is no place."""
    written = 7
    vision = dataclasses.replace(VISION, written_token_id=written)
    other = ImageReader(vision, reader._processor, LIMITS)
    assert (reader.image_token_id, other.image_token_id) == (PAD, written)
    wide = encoded(stripes(40, 16))
    placed = place(other, [1, written, 2], wide)
    assert placed.token_ids == (1, *[PAD] * 10, 2)
    assert [(item.start, item.num_tokens) for item in placed.media] == [(1, 10)]
    assert refused(other, [1, written, written], wide) == [
        ("media", "1 images, and the prompt has 2 places for them (token 7)")
    ]
    of_a_part = (
        "the prompt has token 9, which stands for a part of an image: "
        "write token 7 in the place of a whole one"
    )
    for token_ids, images in (([1, PAD], [wide]), ([written, PAD], [wide]), ([PAD], [])):
        assert refused(other, token_ids, *images) == [("media", of_a_part)]


def test_a_place_for_a_video_is_refused(reader: ImageReader) -> None:
    ((field, described),) = refused(reader, [1, VIDEO, PAD], encoded(stripes()))
    assert field == "media"
    assert "a place for a video (token 8), which is not taken" in described


def test_every_bad_image_is_named(reader: ImageReader) -> None:
    bad = refused(reader, [PAD, PAD], b"nothing", huge_png(101, 100))
    assert [field for field, _ in bad] == ["media[0].data", "media[1].data"]
    (narrow,) = refused(reader, [PAD], encoded(stripes(2, 900)))
    assert narrow[0] == "media[0].data"
    assert "aspect ratio" in narrow[1]


def test_a_prompt_that_grows_too_long_is_refused_before_decoding(reader: ImageReader) -> None:
    """The image's header is right and its pixels are not there."""
    with pytest.raises(PromptTooLong) as raised:
        place(reader, [1, PAD], huge_png(64, 64), room=20)
    assert (raised.value.num_prompt_tokens, raised.value.max_prompt_tokens) == (26, 19)


def test_a_processor_must_fit_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find_processor(tmp_path, ENCODER, 32) is None
    assert "prompts can have no images" in caplog.text
    with pytest.raises(ConfigError, match="patch_size is 8, and the model's 4"):
        processor(tmp_path, patch_size=8)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json cannot be read as JSON"):
        find_processor(tmp_path, ENCODER, 32)
    with caplog.at_level(logging.INFO):
        bounded = processor(tmp_path, max_tokens=4)
    assert "at most 4 tokens" in caplog.text
    assert bounded.num_tokens(100, 100) == 4


class Tiles:
    """Cuts each image into its halves, of two tokens each, with texts around and between them."""

    def num_tokens(self, width: int, height: int) -> int:
        return 7

    def process(self, image: Pil.Image) -> list[Part]:
        left, right = (Patches(np.full((8, 96), half, np.float32), (1, 2, 4), 2) for half in (1, 2))
        return [(1, 2), left, (3,), right]


def test_an_image_may_become_several_with_texts_between() -> None:
    """Each part is encoded on its own, and those that are equal have one digest."""
    vision = dataclasses.replace(VISION, rotary_positions=None)
    placed = place(ImageReader(vision, Tiles(), LIMITS), [5, PAD, 6, PAD], *[encoded(stripes())] * 2)
    one = (1, 2, PAD, PAD, 3, PAD, PAD)
    assert placed.token_ids == (5, *one, 6, *one)
    assert [(item.start, item.num_tokens) for item in placed.media] == [(3, 2), (6, 2), (11, 2), (14, 2)]
    assert placed.rotary is None
    first, second, third, fourth = (item.digest for item in placed.media)
    assert (first, second) == (third, fourth)
    assert first != second
    with pytest.raises(PromptTooLong) as raised:
        place(ImageReader(vision, Tiles(), LIMITS), [5, PAD], encoded(stripes()), room=8)
    assert raised.value.num_prompt_tokens == 8


class Rows:
    """Makes each image two rows of three tokens, which end with 50 and 51, behind the token 7."""

    def num_tokens(self, width: int, height: int) -> int:
        return 9

    def process(self, image: Pil.Image) -> list[Part]:
        return [(7,), Patches(np.zeros((24, 96), np.float32), (1, 4, 6), 6, (50, 51))]


def test_rows_of_an_image_end_with_tokens_of_text() -> None:
    vision = dataclasses.replace(VISION, rotary_positions=None)
    placed = place(ImageReader(vision, Rows(), LIMITS), [1, PAD, 2], encoded(stripes()))
    assert placed.token_ids == (1, 7, PAD, PAD, PAD, 50, PAD, PAD, PAD, 51, 2)
    (item,) = placed.media
    assert (item.start, item.num_tokens, item.row_tokens, item.num_embeddings) == (2, 8, 3, 6)
    assert item.are_embedded(2, 5).tolist() == [True, False, True, True, True]
    assert vision.problem(item, 8) is None
    assert vision.problem(item, 7) == "has 8 tokens; at most 7 are encoded"
    assert media_problem([item], None, 11) is None
    uneven = dataclasses.replace(item, row_tokens=2)
    assert media_problem([uneven], None, 11) == "image 0 has 8 tokens, which are no rows of 2 and one"
