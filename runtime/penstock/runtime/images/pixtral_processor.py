"""Makes patches of images as the image processors of Pixtral's checkpoints have it."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.runtime.errors import ConfigError
from penstock.runtime.images.cutting import cut_into_patches
from penstock.runtime.images.decoding import BadImage
from penstock.runtime.images.reader import Part, Patches

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

log = logging.getLogger(__name__)


class PixtralProcessor:
    """Resizes, normalises and cuts images. Any thread may use it."""

    def __init__(
        self, processor: Any, *, patch_size: int, merge_size: int, max_tokens: int, ends: tuple[int, int]
    ) -> None:
        """`processor` is one of transformers'. It makes larger images smaller than its own bound where that
        allows more than `max_tokens` tokens. ends: the token behind a row of an image's tokens, and that
        behind the last one. ConfigError if it does not make what the model takes.
        """
        self._processor = processor
        self._patch_size, self._merge_size = patch_size, merge_size
        self._ends = ends
        self._longest = processor.size.get("longest_edge")
        if self._longest is None:
            raise ConfigError(f"the image processor's size {dict(processor.size)} has no longest_edge")
        if self._longest < 1:
            raise ConfigError(f"the image processor's longest_edge is {self._longest}, not 1 pixel or more")
        most = _most_on_a_side(max_tokens) * self._token_side
        if most < self._longest:
            log.info(
                "images have at most %d pixels on a side, so that they have at most %d tokens; the model's "
                "own bound is %d pixels",
                most,
                max_tokens,
                self._longest,
            )
            self._longest = most
        if self._longest < 1:
            raise ConfigError(f"max_image_tokens: {max_tokens} is less than the 2 tokens of the least image")

    @property
    def _token_side(self) -> int:
        """Height and width of what a token stands for, in pixels."""
        return self._patch_size * self._merge_size

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Tell how many rows of how many tokens an image of so many pixels has."""
        ratio = max(1.0, height / self._longest, width / self._longest)
        rows, columns = (-(-math.floor(size / ratio) // self._token_side) for size in (height, width))
        return rows, columns

    def num_tokens(self, width: int, height: int) -> int:
        """Tell how many tokens take the place of the token of an image of so many pixels. Raises BadImage
        for one that is too narrow.
        """
        rows, columns = self._grid(width, height)
        if not rows or not columns:
            raise BadImage(f"has {width} x {height} pixels, of which no pixel is left on the shorter side")
        return rows * (columns + 1)

    def process(self, image: PilImage) -> list[Part]:
        """Return the patches of an image, and the tokens behind its rows. Raises BadImage for colours that
        cannot be converted.
        """
        side = {"height": self._token_side, "width": self._token_side}
        size = {"longest_edge": self._longest}
        try:
            made = self._processor(
                images=[image], patch_size=side, size=size, do_convert_rgb=True, return_tensors="np"
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BadImage(f"of mode {image.mode} cannot be processed: {error}") from error
        pixels = np.asarray(made["pixel_values"][0], np.float32)
        rows, columns = (size // self._token_side for size in pixels.shape[1:])
        row_end, last_end = self._ends
        grid = (1, rows * self._merge_size, columns * self._merge_size)
        patches = cut_into_patches(pixels, self._patch_size, self._merge_size)
        return [Patches(patches, grid, rows * columns, (*[row_end] * (rows - 1), last_end))]


def _most_on_a_side(max_tokens: int) -> int:
    """Tell how many tokens a square image may have on a side, whose rows have one token of text each."""
    return (math.isqrt(4 * max_tokens + 1) - 1) // 2
