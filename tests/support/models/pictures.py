"""The pictures of the golden checkpoints that have such, as MediaItems."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.runtime.models.configs.vision import QwenVisionConfig
from penstock.runtime.models.vision.qwen_inputs import tokens_of
from penstock.runtime.requests.images import MediaItem, digest_of


def cases_of(directory: Path) -> list[dict[str, Any]]:
    """The cases of expected.json."""
    found: list[dict[str, Any]] = json.loads((directory / "expected.json").read_text())["cases"]
    return found


def pictures_of(directory: Path, case: Mapping[str, Any], config: QwenVisionConfig) -> list[MediaItem]:
    """The pictures of a case, preprocessed by transformers, at their places in the expanded prompt."""
    processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    items, at = [], 0
    for file in case["images"]:
        made = processor(images=[Image.open(directory / file)], return_tensors="np")
        patches = np.asarray(made["pixel_values"], np.float32)
        frames, rows, columns = (int(size) for size in made["image_grid_thw"][0])
        grid = frames, rows, columns
        start = case["prompt"].index(config.image_token_id, at)
        item = MediaItem(patches, grid, digest_of(patches, grid), start, tokens_of(config, grid))
        items.append(item)
        at = item.end
    return items


def moved(item: MediaItem, start: int) -> MediaItem:
    """The same picture at another place of a prompt."""
    return MediaItem(item.patches, item.grid, item.digest, start, item.num_tokens)


def num_patches(pictures: Sequence[MediaItem]) -> int:
    """How many patches they have together."""
    return sum(len(item.patches) for item in pictures)
