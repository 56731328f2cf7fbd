"""An engine whose model reads images, and images for it.

A token stands for 8 x 8 pixels. The token `<|image|>` is IMAGE, and the template writes it for each image.
The image processor does what a checkpoint's does, without one: it cuts the image into patches of 4 x 4 grey
pixels, after it was made smaller to whole tokens.
"""

from __future__ import annotations

import dataclasses
import io
import threading
from typing import Any

import numpy as np
from PIL import Image as Pil

from penstock.runtime.images.image import ImageLimits
from penstock.runtime.images.qwen_processor import QwenProcessor
from penstock.runtime.images.reader import ImageReader
from penstock.runtime.images.vision import Vision
from penstock.runtime.requests.images import RotaryPositions
from tests.service.codecs import byte_codec
from tests.service.fake import FakeEngine
from tests.service.rig import fake

IMAGE = 257
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '<|image|>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}|"
    "{% endfor %}"
)
CODEC = byte_codec(TEMPLATE, ("<|image|>",))
LIMITS = ImageLimits(max_images=3, max_bytes=5000, max_pixels=4096, max_tokens=16)
VISION = Vision(
    image_token_id=IMAGE,
    patches_per_token=4,
    patch_values=48,
    inputs=lambda items, bucket: None,
    rotary_positions=lambda length, items: RotaryPositions(np.zeros((3, length), np.int32), 0),
)


class Processor:
    """Stands in for transformers' image processor."""

    patch_size, merge_size, temporal_patch_size = 4, 2, 1
    size = {"shortest_edge": 64, "longest_edge": 1024}  # noqa: RUF012 -- as transformers' has it

    def __init__(self) -> None:
        self.gate = threading.Event()
        """While it is not set, images wait to be processed."""
        self.gate.set()
        self.num_begun = 0
        self.threads: set[str] = set()
        """The names of the threads that processed."""

    def get_number_of_image_patches(self, height: int, width: int, sizes: Any) -> int:
        return 4 * (height // 8) * (width // 8)

    def __call__(self, images: list[Pil.Image], **options: Any) -> dict[str, Any]:
        self.num_begun += 1
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(60)
        (image,) = images
        rows, columns = image.height // 8 * 2, image.width // 8 * 2
        pixels = np.asarray(image.convert("L"), np.float32)[: rows * 4, : columns * 4]
        patches = pixels.reshape(rows, 4, columns, 4).transpose(0, 2, 1, 3).reshape(rows * columns, 16)
        return {"pixel_values": patches, "image_grid_thw": np.array([[1, rows, columns]])}


def image_engine(processor: Processor | None = None, **options: Any) -> FakeEngine:
    """Make a fake engine that takes images within LIMITS."""
    engine = fake(**{"codec": CODEC, "max_model_len": 64} | options)
    made = QwenProcessor(
        processor or Processor(),
        patch_size=4,
        merge_size=2,
        temporal_patch_size=1,
        max_tokens=LIMITS.max_tokens,
    )
    engine.images = ImageReader(VISION, made, LIMITS)
    engine.info = dataclasses.replace(engine.info, images=LIMITS)
    return engine


def image_file(width: int = 16, height: int = 8, form: str = "PNG") -> bytes:
    """Make a grey image, by default of two tokens."""
    buffer = io.BytesIO()
    Pil.new("L", (width, height), 100).save(buffer, form)
    return buffer.getvalue()
