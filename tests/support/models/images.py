"""The images of the golden checkpoints that have such, as MediaItems."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.runtime.images.image import Image, ImageLimits
from penstock.runtime.images.reader import ImageReader
from penstock.runtime.loading.image_processors import find_processor, find_written_token
from penstock.runtime.models.configs.vision import QwenVisionConfig, VisionConfig
from penstock.runtime.models.vision.encoders import vision_of
from penstock.runtime.models.vision.qwen_inputs import tokens_of
from penstock.runtime.requests.images import MediaItem, digest_of
from penstock.runtime.text.codec import TextCodec

LIMITS = ImageLimits(max_images=4, max_bytes=1 << 20, max_pixels=1 << 20, max_tokens=72)


def cases_of(directory: Path) -> list[dict[str, Any]]:
    """Return the cases of expected.json."""
    found: list[dict[str, Any]] = json.loads((directory / "expected.json").read_text())["cases"]
    return found


def images_of(directory: Path, case: Mapping[str, Any], config: VisionConfig) -> list[MediaItem]:
    """Return the images of a case at their places in the expanded prompt. Those of Qwen are preprocessed by
    transformers; others go the way of a request, and the prompt must become that of the case.
    """
    if not isinstance(config, QwenVisionConfig):
        processor = find_processor(directory, config, LIMITS.max_tokens)
        assert processor is not None
        codec = TextCodec.find(directory)
        assert codec is not None
        images = [Image(directory / file) for file in case["images"]]
        written = find_written_token(directory, config)
        vision = dataclasses.replace(vision_of(config), written_token_id=written)
        reader = ImageReader(vision, processor, LIMITS)
        placed = reader.place(
            codec.encode(case["text"]), images, ["image"] * len(images), "images", room=1 << 20
        )
        assert list(placed.token_ids) == case["prompt"]
        return list(placed.media)
    qwen = Qwen2VLImageProcessorPil.from_pretrained(directory)
    items, at = [], 0
    for file in case["images"]:
        made = qwen(images=[Pil.open(directory / file)], return_tensors="np")
        patches = np.asarray(made["pixel_values"], np.float32)
        frames, rows, columns = (int(size) for size in made["image_grid_thw"][0])
        grid = frames, rows, columns
        start = case["prompt"].index(config.image_token_id, at)
        item = MediaItem(patches, grid, digest_of(patches, grid), start, tokens_of(config, grid))
        items.append(item)
        at = item.end
    return items


def unexpanded(case: Mapping[str, Any], encode: Callable[[str], list[int]], run_of: int | None) -> list[int]:
    """Return the tokens of a case's text with one for each image, as a caller who sends tokens has them.
    run_of: for a model whose processor writes more into a text than its mark, the token of images, each run
    of which in the prompt becomes one.
    """
    if run_of is None:
        return encode(case["text"])
    ids: list[int] = case["prompt"]
    return [token for i, token in enumerate(ids) if token != run_of or ids[i - 1] != run_of]


def moved(item: MediaItem, start: int) -> MediaItem:
    """Return the same image at another place of a prompt."""
    return MediaItem(item.patches, item.grid, item.digest, start, item.num_tokens)


def num_patches(images: Sequence[MediaItem]) -> int:
    """How many patches they have together."""
    return sum(len(item.patches) for item in images)
