"""Makes patches of images as the image processors of Gemma 4's checkpoints have it."""

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

_BUDGETS = (70, 140, 280, 560, 1120)
"""The most tokens of an image that transformers' processor can be told."""


class Gemma4Processor:
    """Resizes and cuts images. Any thread may use it."""

    def __init__(
        self,
        processor: Any,
        *,
        patch_size: int,
        merge_size: int,
        most_tokens: int,
        max_tokens: int,
        around: tuple[int, int],
    ) -> None:
        """`processor` is one of transformers'. It is told the largest of its budgets of tokens that is no
        more than its own and the model's `most_tokens`, and that leaves room for the two tokens around them
        in `max_tokens`. around: the tokens before an image and behind it. ConfigError if it does not make
        what the model takes.
        """
        for name, ours in {"patch_size": patch_size, "pooling_kernel_size": merge_size}.items():
            if (theirs := getattr(processor, name, None)) != ours:
                raise ConfigError(f"the image processor's {name} is {theirs}, and the model's {ours}")
        if not processor.do_resize:
            raise ConfigError("do_resize is false: images of any size are not taken; set it to true")
        own = int(processor.max_soft_tokens)
        fitting = [budget for budget in _BUDGETS if budget <= min(own, most_tokens, max_tokens - 2)]
        if not fitting:
            raise ConfigError(
                f"an image has up to {_BUDGETS[0]} tokens or more, and two around these: "
                f"max_image_tokens must be at least {_BUDGETS[0] + 2}, not {max_tokens}"
                if most_tokens >= _BUDGETS[0]
                else f"vision_soft_tokens_per_image must be at least {_BUDGETS[0]}, the fewest tokens that "
                f"the image processor can be told, not {most_tokens}"
            )
        self._budget = fitting[-1]
        if self._budget < own:
            log.info(
                "images are made smaller, so that they have at most %d tokens; the image processor's bound "
                "is %d (max_soft_tokens), the model's %d (vision_soft_tokens_per_image), and "
                "max_image_tokens is %d",
                self._budget,
                own,
                most_tokens,
                max_tokens,
            )
        self._processor = processor
        self._patch, self._merge = patch_size, merge_size
        self._before, self._behind = ((token,) for token in around)

    def num_tokens(self, width: int, height: int) -> int:
        """Tell how many tokens take the place of the token of an image of so many pixels. Raises BadImage
        for one that is too narrow.
        """
        # It takes long to import, and only this kind of model needs it.
        from transformers.models.gemma4 import image_processing_pil_gemma4 as gemma4  # noqa: PLC0415

        try:
            made = gemma4.get_aspect_ratio_preserving_size(
                height, width, self._patch, self._budget * self._merge**2, self._merge
            )
        except ValueError as error:
            raise BadImage(f"has {width} x {height} pixels, which cannot be resized: {error}") from error
        rows, columns = (int(side) // (self._patch * self._merge) for side in made)
        return rows * columns + 2

    def process(self, image: PilImage) -> list[Part]:
        """Make the patches of an image, square by square, and the tokens around it. Raises BadImage for
        colours that cannot be converted.
        """
        try:
            made = self._processor(
                images=[image], max_soft_tokens=self._budget, do_convert_rgb=True, return_tensors="np"
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BadImage(f"of mode {image.mode} cannot be processed: {error}") from error
        num_tokens, merge = int(made["num_soft_tokens_per_image"][0]), self._merge
        count = num_tokens * merge**2  # padding lies behind them
        patches = np.asarray(made["pixel_values"][0], np.float32)[:count]
        columns = int(np.asarray(made["image_position_ids"][0])[:count, 0].max()) + 1
        rows = count // columns
        squares = patches.reshape(rows // merge, merge, columns // merge, merge, -1).transpose(0, 2, 1, 3, 4)
        values = np.ascontiguousarray(squares).reshape(count, -1)
        return [self._before, Patches(values, (1, rows, columns), num_tokens), self._behind]
