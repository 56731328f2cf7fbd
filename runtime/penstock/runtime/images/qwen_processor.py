"""Makes patches of images as the image processors of Qwen's checkpoints have it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.runtime.errors import ConfigError
from penstock.runtime.images.decoding import BadImage
from penstock.runtime.images.reader import Part, Patches

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

log = logging.getLogger(__name__)


class QwenProcessor:
    """Resizes, normalises and cuts images. Any thread may use it."""

    def __init__(
        self,
        processor: Any,
        *,
        patch_size: int,
        merge_size: int,
        temporal_patch_size: int,
        max_tokens: int,
    ) -> None:
        """`processor` is one of transformers', and the sizes are those of `QwenVisionConfig`. Larger images
        are made smaller than its own bound where that allows more than `max_tokens` tokens. ConfigError if it
        does not make what the model takes.
        """
        self._processor = processor
        self._per_token = merge_size**2
        self._max_tokens = max_tokens
        sizes = {
            "patch_size": patch_size,
            "merge_size": merge_size,
            "temporal_patch_size": temporal_patch_size,
        }
        for name, ours in sizes.items():
            theirs = getattr(processor, name, None)
            if theirs != ours:
                raise ConfigError(f"the image processor's {name} is {theirs}, and the model's {ours}")
        least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
        largest = max_tokens * (patch_size * merge_size) ** 2
        if largest < most:
            log.info(
                "images are made smaller than %d pixels, so that they have at most %d tokens; the model's "
                "own bound is %d pixels",
                largest,
                max_tokens,
                most,
            )
        self._size = {"shortest_edge": min(least, largest), "longest_edge": min(most, largest)}

    def num_tokens(self, width: int, height: int) -> int:
        """Tell how many tokens an image of so many pixels has. Raises BadImage for one that is too
        narrow.
        """
        least, most = self._size["shortest_edge"], self._size["longest_edge"]
        try:
            patches = self._processor.get_number_of_image_patches(
                height, width, {"min_pixels": least, "max_pixels": most}
            )
        except ValueError as error:
            raise BadImage(f"has {width} x {height} pixels: {error}") from error
        tokens = int(patches) // self._per_token
        if tokens > self._max_tokens:
            raise BadImage(
                f"has {width} x {height} pixels, which makes {tokens} tokens; at most {self._max_tokens} are "
                "taken"
            )
        return tokens

    def process(self, image: PilImage) -> list[Part]:
        """Return the patches of the image, which take the place of its token. What is transparent becomes
        white. Raises BadImage for colours that cannot be converted.
        """
        try:
            made = self._processor(images=[image], size=self._size, do_convert_rgb=True, return_tensors="np")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BadImage(f"of mode {image.mode} cannot be processed: {error}") from error
        time, height, width = made["image_grid_thw"][0].tolist()
        values = np.ascontiguousarray(made["pixel_values"], np.float32)
        return [Patches(values, (time, height, width), len(values) // self._per_token)]
