"""What SigLIP is given: the patches of an image, square by square. All images are of one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.models.configs.vision import SiglipVisionConfig
from penstock.runtime.requests.images import MediaItem


class SiglipInputs(NamedTuple):
    """The inputs of one call of the encoder, which takes one image."""

    patches: NDArray[np.float32]
    """[N, values of a patch]. The patches of one token lie side by side, and tokens come row by row."""


def vision_inputs(config: SiglipVisionConfig, images: Sequence[MediaItem], bucket: int) -> SiglipInputs:
    """Make the inputs for an image, or of zeros for none. Raises ValueError for another number of patches
    than an image has.
    """
    shape = (config.num_patches, config.patch_features)
    if bucket != config.num_patches or any(image.patches.shape != shape for image in images):
        raise ValueError(f"an image must have patches {shape} in a bucket of {shape[0]}, not of {bucket}")
    if len(images) > 1:
        raise ValueError(f"one image is encoded at a time, not {len(images)}")
    return SiglipInputs(images[0].patches if images else np.zeros(shape, np.float32))


def places(config: SiglipVisionConfig) -> NDArray[np.int32]:
    """Return the position of each patch in the table of positions, which counts row by row, int32 [N]."""
    tokens, kernel = config.tokens_per_side, config.side // config.tokens_per_side
    numbers = np.arange(config.num_patches, dtype=np.int32).reshape(tokens, kernel, tokens, kernel)
    return numbers.transpose(0, 2, 1, 3).reshape(-1)


def grid_problem(config: SiglipVisionConfig, grid: tuple[int, int, int]) -> str | None:
    """Say why the encoder cannot take an image of this grid; None if it can."""
    expected = (1, config.side, config.side)
    return None if grid == expected else f"has the grid {grid}, not {expected}"
