"""Cuts images into tiles as the image processor of Llama 4's checkpoints has it, which needs torch in
transformers: the canvas of tiles that fits an image best, black where it is not filled, and behind its tiles
one of the whole image.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pil

from penstock.runtime.errors import ConfigError
from penstock.runtime.images.cutting import cut_into_patches
from penstock.runtime.images.decoding import BadImage
from penstock.runtime.images.reader import Part, Patches

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Settings:
    """What a checkpoint's file says of its images.

    max_tiles: the most of an image, without that of the whole. fills_canvas: an image is made as large as
    the largest canvas allows. rescale, mean, std: a value of a pixel is multiplied by `rescale`, and the
    `mean` of its channel taken away, before it is divided by `std`.
    """

    max_tiles: int
    fills_canvas: bool
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Tokens:
    """Tokens of text around the embeddings of an image's tiles. `begin` stands before the first tile, and
    `end` behind the last. behind_tile follows each tile but the last of a row, and behind_row that one.
    `whole` stands before the tile of the whole image.
    """

    begin: int
    end: int
    behind_tile: int
    behind_row: int
    whole: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """How an image is cut: the size that it is brought to, and how many rows and columns of tiles the canvas
    has.
    """

    height: int
    width: int
    rows: int
    columns: int


class Llama4Processor:
    """Resizes, cuts and normalises images. Any thread may use it."""

    def __init__(
        self,
        settings: Llama4Settings,
        tokens: Llama4Tokens,
        *,
        image_size: int,
        patch_size: int,
        merge_size: int,
        max_tokens: int,
    ) -> None:
        """Make at most as many tiles as the settings say, and fewer where these are more than `max_tokens`
        tokens. The sizes are those of `Llama4VisionConfig`. ConfigError if no image has so few tokens.
        """
        self._settings, self._tokens = settings, tokens
        self._size, self._patch_size, self._merge_size = image_size, patch_size, merge_size
        self._side = image_size // patch_size
        self._per_tile = (self._side // merge_size) ** 2
        least = self._per_tile + 3
        if max_tokens < least:
            raise ConfigError(
                f"max_image_tokens: {max_tokens} is less than the {least} tokens of the least image"
            )
        fitting = max((max_tokens - least) // (self._per_tile + 1), 1)
        if fitting < settings.max_tiles:
            log.info(
                "images are cut into at most %d tiles, so that they have at most %d tokens; the model's "
                "own bound is %d tiles",
                fitting,
                max_tokens,
                settings.max_tiles,
            )
        most = min(settings.max_tiles, fitting)
        self._grids = np.array(
            [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
        )
        self._values = _values_of_pixels(settings)

    def num_tokens(self, width: int, height: int) -> int:
        """Tell how many tokens take the place of the token of an image of so many pixels."""
        plan = self._plan(width, height)
        tiles = plan.rows * plan.columns
        return 3 + self._per_tile + (tiles * (self._per_tile + 1) if tiles > 1 else 0)

    def process(self, image: PilImage) -> list[Part]:
        """Make the tiles of an image, and the tokens around them. What is transparent becomes white. Raises
        BadImage for colours that cannot be converted.
        """
        # It takes long to import, and only models that read images need it.
        from transformers.image_transforms import convert_to_rgb  # noqa: PLC0415

        try:
            plain = Pil.fromarray(np.asarray(convert_to_rgb(image, return_numpy=True)))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BadImage(f"of mode {image.mode} cannot be processed: {error}") from error
        plan, tokens, size = self._plan(*plain.size), self._tokens, self._size
        canvas = np.zeros((plan.rows * size, plan.columns * size, 3), np.uint8)
        canvas[: plan.height, : plan.width] = _resized(plain, plan.width, plan.height)
        parts: list[Part] = [(tokens.begin,)]
        if plan.rows * plan.columns == 1:
            return [*parts, (tokens.whole,), self._patches(canvas), (tokens.end,)]
        for row in range(plan.rows):
            for column in range(plan.columns):
                tile = canvas[row * size : (row + 1) * size, column * size : (column + 1) * size]
                is_last = column == plan.columns - 1
                parts += [self._patches(tile), (tokens.behind_row if is_last else tokens.behind_tile,)]
        whole = self._patches(_resized(plain, size, size))
        return [*parts, (tokens.whole,), whole, (tokens.end,)]

    def _plan(self, width: int, height: int) -> _Plan:
        """Choose the canvas that needs the least enlargement or, if all make the image smaller, makes it
        smaller the least; of those that are alike, the one with the fewest tiles.

        It is computed in float32 where transformers does, because the next integer below may depend on it.
        """
        targets = self._grids * self._size  # heights and widths
        scales = (targets.astype(np.float32) / np.array([height, width], np.float32)).min(axis=1)
        enlarging = scales[scales >= 1]
        if not len(enlarging):
            chosen = scales.max()
        else:
            chosen = enlarging.max() if self._settings.fills_canvas else enlarging.min()
        alike = targets[scales == chosen]
        canvas_height, canvas_width = (int(side) for side in alike[alike.prod(axis=1).argmin()])
        high = self._bounded(height, canvas_height)
        wide = self._bounded(width, canvas_width)
        scale_y, scale_x = high / height, wide / width
        if scale_x < scale_y:
            made_width, made_height = int(wide), min(math.floor(height * scale_x), int(high))
        else:
            made_height, made_width = int(high), min(math.floor(width * scale_y), int(wide))
        tiles = canvas_height // self._size, canvas_width // self._size
        return _Plan(max(made_height, 1), max(made_width, 1), *tiles)

    def _bounded(self, side: int, canvas: int) -> float | np.float32:
        """Return the most pixels of a side: those of the canvas and, unless the canvas is to be filled, no
        more than the image has or, if it is smaller than a tile, than a tile has. It is float32 where the
        canvas decides.
        """
        own = max(side, self._size)
        return np.float32(canvas) if self._settings.fills_canvas or canvas < own else float(own)

    def _patches(self, pixels: NDArray[np.uint8]) -> Patches:
        """Normalise and cut a tile, [size, size, 3]."""
        values = np.stack([table[pixels[..., channel]] for channel, table in enumerate(self._values)])
        patches = cut_into_patches(values, self._patch_size, self._merge_size)
        return Patches(patches, (1, self._side, self._side), self._per_tile)


def _resized(image: PilImage, width: int, height: int) -> NDArray[np.uint8]:
    return np.asarray(image.resize((width, height), Pil.Resampling.BILINEAR))


def _values_of_pixels(settings: Llama4Settings) -> list[NDArray[np.float32]]:
    """Compute what each of the 256 values of a pixel becomes in each channel. Each operation is rounded to
    bfloat16, as when the model was trained.
    """

    def rounded(values: NDArray[np.float32] | np.float32) -> NDArray[np.float32]:
        return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)

    scaled = rounded(np.arange(256, dtype=np.float32) * np.float32(settings.rescale))
    return [
        rounded(rounded(scaled - rounded(np.float32(mean))) / rounded(np.float32(std)))
        for mean, std in zip(settings.mean, settings.std, strict=True)
    ]
