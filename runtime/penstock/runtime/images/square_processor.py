"""Makes patches of images that are all brought to one size, as the image processor of Gemma 3 has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.runtime.errors import ConfigError
from penstock.runtime.images.cutting import cut_into_patches
from penstock.runtime.images.decoding import BadImage
from penstock.runtime.images.reader import Part, Patches

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage


class SquareProcessor:
    """Resizes, normalises and cuts images. Any thread may use it."""

    def __init__(
        self, processor: Any, *, image_size: int, patch_size: int, tokens_per_side: int, max_tokens: int
    ) -> None:
        """`processor` is one of transformers', and the sizes are those of `SiglipVisionConfig`. ConfigError
        if it does not make what the model takes, or if an image has more than `max_tokens` tokens: none can
        be made smaller.
        """
        size = {"height": image_size, "width": image_size}
        theirs = {name: processor.size[name] for name in size}
        if theirs != size:
            raise ConfigError(f"the image processor's size is {theirs}, and the model's {size}")
        if getattr(processor, "do_pan_and_scan", None):
            raise ConfigError("do_pan_and_scan: further crops of an image are not made; set it to false")
        self._num_tokens = tokens_per_side**2
        if self._num_tokens > max_tokens:
            raise ConfigError(
                f"an image of this model has {self._num_tokens} tokens, whatever its size: max_image_tokens "
                f"must be at least as many, not {max_tokens}"
            )
        self._processor = processor
        self._side, self._patch = image_size // patch_size, patch_size
        self._kernel = self._side // tokens_per_side

    def num_tokens(self, width: int, height: int) -> int:
        """Tell how many tokens an image has, whatever its size."""
        return self._num_tokens

    def process(self, image: PilImage) -> list[Part]:
        """Return the patches of the image, square by square. What is transparent becomes white. Raises
        BadImage for colours that cannot be converted.
        """
        try:
            made = self._processor(images=[image], do_convert_rgb=True, return_tensors="np")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BadImage(f"of mode {image.mode} cannot be processed: {error}") from error
        pixels = np.asarray(made["pixel_values"], np.float32)[0]  # [channels, height, width]
        patches = cut_into_patches(pixels, self._patch, self._kernel)
        return [Patches(patches, (1, self._side, self._side), self._num_tokens)]
