"""What Pixtral's encoder of images is given, made of images in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.runtime.models.configs.vision import PixtralConfig
from penstock.runtime.models.vision.grids import Floats, Ints, grids_of
from penstock.runtime.requests.images import MediaItem


class PixtralInputs(NamedTuple):
    """The inputs of one call of the encoder, for several images. N patches, padding included."""

    patches: Floats
    """[N, values of a patch]."""
    places: Ints
    """Row and column of each patch in its image, [2, N]."""
    spans: Ints
    """A patch attends to those from `begin` to `end`, which are those of its image, [2, N]. Padding attends
    to itself."""


def vision_inputs(config: PixtralConfig, images: Sequence[MediaItem], bucket: int) -> PixtralInputs:
    """Make the inputs for these images, padded to `bucket` patches; for the ValueErrors see `grids_of`."""
    grids = grids_of(images, bucket, merge_size=config.merge_size, patch_values=config.patch_features)
    return PixtralInputs(grids.patches, grids.places, grids.spans)
