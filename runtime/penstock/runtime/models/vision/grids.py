"""Grids of patches, made of images in numpy: where each patch is, and which others belong to its image.

The patches of one token, merge_size x merge_size of them, lie side by side, and tokens come row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.images.vision import Grid
from penstock.runtime.requests.images import MediaItem

Ints: TypeAlias = NDArray[np.int32]
Floats: TypeAlias = NDArray[np.float32]


class Grids(NamedTuple):
    """The patches of several images. N patches, padding included."""

    num_patches: int
    """How many patches are not padding."""
    patches: Floats
    """[N, values of a patch]."""
    places: Ints
    """Row and column of each patch in its image, [2, N]."""
    sizes: Ints
    """How many rows and columns its image has, [2, N]."""
    spans: Ints
    """begin and end of the patch's image (of its frame, if that has several), [2, N]. Padding has a span of
    its own."""


def grids_of(images: Sequence[MediaItem], bucket: int, *, merge_size: int, patch_values: int) -> Grids:
    """Make the grids of these images, padded to `bucket` patches. Raises ValueError if the images have
    more patches than the bucket, if the bucket is no multiple of merge_size^2, or if an image's patches do
    not fit its grid.
    """
    for image in images:
        _check(image, merge_size, patch_values)
    grids = [image.grid for image in images]
    count = sum(frames * rows * columns for frames, rows, columns in grids)
    if bucket % merge_size**2 or count > bucket:
        raise ValueError(f"{count} patches do not fit a bucket of {bucket}")
    patches = np.zeros((bucket, patch_values), np.float32)
    if images:
        patches[:count] = np.concatenate([image.patches for image in images])
    numbers = np.arange(bucket, dtype=np.int32)
    sizes, places = np.ones((2, bucket), np.int32), np.zeros((2, bucket), np.int32)
    spans = np.stack([numbers, numbers + 1])
    at = 0
    for frames, rows, columns in grids:
        for _ in range(frames):
            end = at + rows * columns
            places[:, at:end] = places_of(rows, columns, merge_size)
            sizes[:, at:end] = [[rows], [columns]]
            spans[:, at:end] = [[at], [end]]
            at = end
    return Grids(count, patches, places, sizes, spans)


def places_of(rows: int, columns: int, merge_size: int) -> Ints:
    """Return row and column of each patch of one frame, [2, rows * columns]."""
    squares = np.indices((rows, columns)).reshape(
        2, rows // merge_size, merge_size, columns // merge_size, merge_size
    )
    return squares.transpose(0, 1, 3, 2, 4).reshape(2, -1).astype(np.int32)


def grid_problem(merge_size: int, grid: Grid) -> str | None:
    """Say why no encoder that merges squares of merge_size^2 patches can take an image of this grid; None if
    it can.
    """
    if min(grid) < 1 or grid[1] % merge_size or grid[2] % merge_size:
        return f"has the grid {grid}; height and width must be multiples of {merge_size}"
    return None


def _check(image: MediaItem, merge_size: int, patch_values: int) -> None:
    frames, rows, columns = image.grid
    if min(image.grid) < 1 or rows % merge_size or columns % merge_size:
        raise ValueError(f"an image's grid must be whole squares of {merge_size}, not {image.grid}")
    expected = (frames * rows * columns, patch_values)
    if image.patches.shape != expected:
        raise ValueError(
            f"an image of grid {image.grid} must have patches {expected}, not {image.patches.shape}"
        )
