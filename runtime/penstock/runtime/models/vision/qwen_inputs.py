"""What Qwen's encoder of images is given, made in numpy, and where the images' tokens stand for M-RoPE.

An image is a grid of patches. They come in the order of the checkpoints' processors: the patches of one
token, merge_size x merge_size of them, lie side by side, and tokens come row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.models.configs.vision import QwenVisionConfig
from penstock.runtime.models.vision.grids import Floats, Ints, grids_of
from penstock.runtime.requests.images import MediaItem, RotaryPositions


class QwenInputs(NamedTuple):
    """The inputs of one call of the encoder, for several images. N patches, padding included.

    A patch attends to patches from `begin` to `end`. Padding attends to itself.
    """

    patches: Floats
    """[N, values of a patch]. Where blocks have windows, patches come window by window in each image."""
    places: Ints
    """Row and column of each patch in its image, [2, N]."""
    frames: Ints
    """begin and end of the patch's image (of its frame, if that had several), [2, N]."""
    windows: Ints | None
    """begin and end of the patch's window, [2, N]; None: the model has no windows."""
    corners: Ints | None
    """The four positions of the learned table that lie around the patch, [N, 4]; None: the model has none."""
    weights: Floats | None
    """How much each of them counts, [N, 4]."""
    order: Ints | None
    """For each token in the prompt's order, which one of the encoder's it is, [N / merge_size^2]; None: the
    same order."""


def tokens_of(config: QwenVisionConfig, grid: tuple[int, int, int]) -> int:
    """Tell how many tokens of the prompt an image of this grid has."""
    frames, rows, columns = grid
    return frames * (rows // config.merge_size) * (columns // config.merge_size)


def vision_inputs(config: QwenVisionConfig, images: Sequence[MediaItem], bucket: int) -> QwenInputs:
    """Make the inputs for these images, padded to `bucket` patches. Their shapes depend on config and
    bucket only.

    Raises ValueError if the images have more patches than the bucket, if the bucket is no multiple of
    merge_size^2, or if an image's patches do not fit its grid.
    """
    grids = grids_of(images, bucket, merge_size=config.merge_size, patch_values=config.patch_features)
    count, patches, places, sizes, spans = grids
    corners, weights = None, None
    if config.position_side is not None:
        corners, weights = _interpolation(places, sizes, config.position_side)
    if config.window is None:
        return QwenInputs(patches, places, spans, None, corners, weights, None)
    per_token = config.merge_size**2
    by_window, windows = _by_windows(places, spans, count, config.window, per_token)
    return QwenInputs(
        patches=patches[by_window],
        places=places[:, by_window],
        frames=spans,  # the order within a frame alone changes
        windows=windows,
        corners=None if corners is None else corners[by_window],
        weights=None if weights is None else weights[by_window],
        order=np.argsort(by_window[::per_token]).astype(np.int32),
    )


def rotary_positions(
    config: QwenVisionConfig, prompt_len: int, images: Sequence[MediaItem]
) -> RotaryPositions:
    """Tell where the tokens of a prompt stand for M-RoPE. `images`: in the order of the prompt.

    The tokens of an image have one time; what follows stands behind its longer side. Raises ValueError if an
    image is not where the prompt can have it, or has not as many tokens as its grid.
    """
    positions = np.zeros((3, prompt_len), np.int32)
    at, position = 0, 0
    for image in images:
        begin, end = image.start, image.end
        if begin < at or end > prompt_len or image.num_tokens != tokens_of(config, image.grid):
            raise ValueError(f"an image of grid {image.grid} cannot be tokens {begin} to {end} of the prompt")
        positions[:, at:begin] = np.arange(position, position + begin - at)
        position += begin - at
        grid = (image.grid[0], *(size // config.merge_size for size in image.grid[1:]))
        positions[:, begin:end] = position + np.indices(grid).reshape(3, -1)
        position += max(grid[1:])
        at = end
    positions[:, at:] = np.arange(position, position + prompt_len - at)
    return RotaryPositions(positions, int(positions.max(initial=-1)) + 1 - prompt_len)


def _interpolation(places: Ints, sizes: Ints, side: int) -> tuple[Ints, Floats]:
    """Return corners and weights of bilinear interpolation; the table's corners are those of the image."""
    where = places.astype(np.float32) * np.float32(side - 1) / np.maximum(sizes - 1, 1).astype(np.float32)
    low = np.floor(where)
    near = np.minimum(low[:, None] + [[[0], [1]]], side - 1).astype(np.int32)  # [2, low or high, N]
    share = np.maximum(1 - np.abs(where[:, None] - low[:, None] - [[[0], [1]]]), 0).astype(np.float32)
    corners = near[0][:, None] * side + near[1][None]
    weights = share[0][:, None] * share[1][None]
    return corners.reshape(4, -1).T.copy(), weights.reshape(4, -1).T.copy()


def _by_windows(
    places: Ints, spans: Ints, count: int, window: int, per_token: int
) -> tuple[NDArray[np.intp], Ints]:
    """Return (the patches in the order of their windows [N], begin and end of each one's window [2, N])."""
    tall, wide = places[:, :count] // window
    begin = spans[0, :count]
    tokens = np.arange(count) // per_token
    ordered = np.arange(spans.shape[1])
    ordered[:count] = np.lexsort((np.arange(count), tokens, wide, tall, begin))
    keys = np.stack([begin, tall, wide])[:, ordered[:count]]
    changes = np.flatnonzero(np.any(keys[:, 1:] != keys[:, :-1], axis=0)) + 1
    edges = np.concatenate([[0], changes, [count]]).astype(np.int32)
    windows = spans.copy()
    windows[:, :count] = np.repeat(np.stack([edges[:-1], edges[1:]]), np.diff(edges), axis=1)
    return ordered, windows
