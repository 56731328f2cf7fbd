"""What the encoder of Gemma 4's images is given, made of images in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.runtime.images.vision import Grid
from penstock.runtime.models.configs.vision import Gemma4VisionConfig
from penstock.runtime.models.vision import grids
from penstock.runtime.models.vision.grids import Floats, Ints, grids_of
from penstock.runtime.requests.images import MediaItem


class Gemma4Inputs(NamedTuple):
    """The inputs of one call of the encoder, for several images. N patches, padding included."""

    patches: Floats
    """[N, values of a patch], each from 0 to 1."""
    places: Ints
    """Row and column of each patch in its image, [2, N]."""
    spans: Ints
    """A patch attends to those from `begin` to `end`, which are those of its image, [2, N]. Padding attends
    to itself."""


def vision_inputs(config: Gemma4VisionConfig, images: Sequence[MediaItem], bucket: int) -> Gemma4Inputs:
    """Make the inputs for these images, padded to `bucket` patches; for the ValueErrors see `grids_of`."""
    made = grids_of(images, bucket, merge_size=config.merge_size, patch_values=config.patch_features)
    return Gemma4Inputs(made.patches, made.places, made.spans)


def grid_problem(config: Gemma4VisionConfig, grid: Grid) -> str | None:
    """Say why the encoder cannot take an image of this grid; None if it can."""
    if max(grid[1:]) > config.num_positions:
        return f"has the grid {grid}, and there are {config.num_positions} positions on a side"
    return grids.grid_problem(config.merge_size, grid)
