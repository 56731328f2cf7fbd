"""Cuts images into tiles as the image processors of InternVL's checkpoints have it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.runtime.errors import ConfigError
from penstock.runtime.images.cutting import cut_into_patches
from penstock.runtime.images.decoding import BadImage
from penstock.runtime.images.reader import Part, Patches

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

log = logging.getLogger(__name__)


class InternProcessor:
    """Resizes, cuts and normalises images. Any thread may use it."""

    def __init__(
        self,
        processor: Any,
        *,
        image_size: int,
        patch_size: int,
        merge_size: int,
        max_tokens: int,
        around: tuple[int, int],
    ) -> None:
        """`processor` is one of transformers'. It makes at most its own number of tiles, and fewer where
        these are more than `max_tokens` tokens. around: the tokens before an image and behind it.
        ConfigError if it does not make what the model takes.
        """
        self._processor = processor
        self._patch_size, self._merge_size = patch_size, merge_size
        self._side = image_size // patch_size
        self._per_tile = (self._side // merge_size) ** 2
        self._before, self._behind = ((token,) for token in around)
        size = dict(processor.size)
        if (size.get("height"), size.get("width")) != (image_size,) * 2:
            raise ConfigError(f"the image processor's size is {size}, and the model's {image_size}")
        room = (max_tokens - 2) // self._per_tile
        if room < 1:
            raise ConfigError(
                f"max_image_tokens: {max_tokens} is less than the {self._per_tile + 2} tokens of the "
                "least image"
            )
        most = int(processor.max_patches)
        fitting = max(room - 1, 1)  # several tiles have another one behind them, the whole image
        if fitting < most:
            log.info(
                "images are cut into at most %d tiles, so that they have at most %d tokens; the model's "
                "own bound is %d tiles",
                fitting,
                max_tokens,
                most,
            )
        self._options: dict[str, Any] = {
            "crop_to_patches": True,
            "max_patches": min(most, fitting),
            "min_patches": min(int(processor.min_patches), most, fitting),
        }

    def num_tokens(self, width: int, height: int) -> int:
        """Tell how many tokens take the place of the token of an image of so many pixels."""
        tiles = self._processor.get_number_of_image_patches(height, width, self._options)
        return int(tiles) * self._per_tile + 2

    def process(self, image: PilImage) -> list[Part]:
        """Make the tiles of an image, and the tokens around them. Raises BadImage for colours that cannot be
        converted.
        """
        try:
            made = self._processor(images=[image], do_convert_rgb=True, return_tensors="np", **self._options)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BadImage(f"of mode {image.mode} cannot be processed: {error}") from error
        grid = (1, self._side, self._side)
        tiles = [
            Patches(
                cut_into_patches(np.asarray(tile, np.float32), self._patch_size, self._merge_size),
                grid,
                self._per_tile,
            )
            for tile in made["pixel_values"]
        ]
        return [self._before, *tiles, self._behind]
