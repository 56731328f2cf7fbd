"""What an encoder of tiles is given, made of tiles in numpy."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.images.vision import Grid
from penstock.runtime.models.configs.vision import TileConfig
from penstock.runtime.models.vision.grids import Floats, grids_of
from penstock.runtime.requests.images import MediaItem


def vision_inputs(config: TileConfig, tiles: Sequence[MediaItem], bucket: int) -> Floats:
    """Make the patches of these tiles, padded to `bucket` patches, [bucket, values of a patch]; for the
    ValueErrors see `grids_of`.
    """
    return grids_of(tiles, bucket, merge_size=config.merge_size, patch_values=config.patch_features).patches


def grid_problem(config: TileConfig, grid: Grid) -> str | None:
    """Say why the encoder cannot take a tile of this grid; None if it can."""
    expected = (1, config.side, config.side)
    return None if grid == expected else f"has the grid {grid}, and a tile has {expected}"
